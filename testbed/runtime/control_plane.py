"""The control plane between the controller and a stage host: messages, and the controller's end (`Host`). No torch.

One JSON message is one packet of a Unix SOCK_SEQPACKET pair, so a process killed while writing leaves no partial
message; the sockets of a job travel with its message (SCM_RIGHTS).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from testbed.closing import Closing
from testbed.errors import StageError
from testbed.frozen import Frozen
from testbed.jobs.pipeline import Ended as Ended
from testbed.message_key import Phase
from testbed.process import start_program
from testbed.runtime.pacing import set_priority
from testbed.runtime.place_job import PlaceJob

LARGEST_BYTES = 64 * 1024
_MOST_SOCKETS = 64
_KILL_AFTER_S = 2.0


# ------------------------------------------------------------------ controller -> host
class Start(Frozen):
    """Run a job; the sockets of its `Gather` accompany the message."""

    kind: Literal["start"] = "start"
    job: PlaceJob


class Finish(Frozen):
    """End the running job, if any, after its current step or evaluation; the host then sends `JobDone`.

    Telling one stage is enough: all stages end after the same step. Nodes of data parallel training do not meet at each
    step and end some steps later (`runtime.ending`).
    """

    kind: Literal["finish"] = "finish"


# ------------------------------------------------------------------ host -> controller
class Ready(Frozen):
    """The host has loaded the modules that every job needs."""

    kind: Literal["ready"] = "ready"


class StepDone(Frozen):
    """A training step is done; sent by the last stage only."""

    kind: Literal["step"] = "step"
    step: int
    loss: float
    seconds: float
    tokens: int


class EvaluationDone(Frozen):
    """An evaluation is done; sent by the last stage only."""

    kind: Literal["evaluated"] = "evaluated"
    phase: Phase = "evaluation"
    step: int
    """Number of optimiser steps before the evaluation."""
    loss: float
    accuracy: float | None = None
    """Only for images."""
    seconds: float


class JobDone(Frozen):
    """The job succeeded."""

    kind: Literal["done"] = "done"
    ended: Ended = "steps"


class JobFailed(Frozen):
    """The job failed; the host is ready for the next."""

    kind: Literal["failed"] = "failed"
    error: str
    """Class name. TransportError means a lost neighbour: the cause is then another stage's failure."""
    message: str
    traceback: str
    """Empty when the process was killed."""


Order = Annotated[Start | Finish, Field(discriminator="kind")]
Message = Annotated[Ready | StepDone | EvaluationDone | JobDone | JobFailed, Field(discriminator="kind")]
_ORDER: TypeAdapter[Start | Finish] = TypeAdapter(Order)
_MESSAGE: TypeAdapter[Ready | StepDone | EvaluationDone | JobDone | JobFailed] = TypeAdapter(Message)


def send(channel: socket.socket, message: Frozen, sockets: Sequence[socket.socket] = ()) -> None:
    """Send one message with sockets. OSError when the other end is gone."""
    socket.send_fds(channel, [message.model_dump_json().encode()], [sock.fileno() for sock in sockets])


def receive_order(channel: socket.socket) -> tuple[Start | Finish, list[socket.socket]] | None:
    """Receive one order and its sockets, at the host's end; None when the controller is gone."""
    data, fds, _, _ = socket.recv_fds(channel, LARGEST_BYTES, _MOST_SOCKETS)
    return (_ORDER.validate_json(data), [socket.socket(fileno=fd) for fd in fds]) if data else None


# ------------------------------------------------------------------ the controller's end
class Host(Closing):
    """The controller's handle of a stage host: starts it, exchanges messages with it, and as a context manager ends
    it.
    """

    def __init__(self, popen: Callable[..., subprocess.Popen[bytes]], name: str) -> None:
        """Start the program; `popen`, with the signature of subprocess.Popen, decides namespace and user. `name`
        appears in error messages.

        For a lab: `functools.partial(forks.popen, namespaces=[node.namespace.fd])`.
        """
        self.name = name
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        number = str(theirs.fileno())
        try:
            self.process = start_program(
                "testbed.runtime.host",
                *("--control-fd", number),
                attempt=f"start the host of {name}",
                popen=popen,
                pass_fds=(theirs.fileno(),),
                env=host_environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        except BaseException:
            self._channel.close()
            self._log.close()
            raise
        finally:
            theirs.close()

    def fileno(self) -> int:
        """Return the descriptor for select: readable when `messages` has something."""
        return self._channel.fileno()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the host has loaded everything. StageError with its last output when it cannot."""
        message = self._next(timeout_s)
        if not isinstance(message, Ready):
            raise StageError(f"{self.name}: not ready within {timeout_s:g} s: the host sent {message}; {self._words()}")

    def start(self, job: PlaceJob, sockets: Sequence[socket.socket]) -> None:
        """Start a job; its sockets from `gather.make_sockets` are passed on and closed here. StageError when the host
        is gone.
        """
        set_priority(self.process.pid, job.prompt)
        try:
            send(self._channel, Start(job=job), sockets)
        except OSError as error:
            raise StageError(f"{self.name}: cannot start a job: {error.strerror}; {self._words()}") from None
        finally:
            for sock in sockets:
                sock.close()

    def messages(self) -> Iterator[Ready | StepDone | EvaluationDone | JobDone | JobFailed]:
        """Yield received messages, without waiting. StageError when the host is gone."""
        while (message := self._next(0)) is not None:
            yield message

    def finish(self) -> None:
        """Ask the running job, if any, to end after its current step; its last message is then `JobDone`. See
        `Finish`.
        """
        with contextlib.suppress(OSError):  # readers of its messages notice a host that is gone
            send(self._channel, Finish())

    def close(self) -> None:
        """End the host, and with it its job. Safe to call twice."""
        self._channel.close()
        try:
            self.process.wait(_KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def _next(self, timeout_s: float) -> Ready | StepDone | EvaluationDone | JobDone | JobFailed | None:
        if not select.select([self._channel], [], [], timeout_s)[0]:
            return None
        try:
            data = self._channel.recv(LARGEST_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise StageError(f"{self.name}: the stage host is gone; {self._words()}")
        try:
            return _MESSAGE.validate_json(data)
        except ValidationError as error:
            raise StageError(f"{self.name}: cannot parse a message of the stage host: {error}") from None

    def _words(self) -> str:
        """Describe how the host ended and its last output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(0.2)
        status = self.process.returncode
        ended = "it is still running" if status is None else f"it ended with status {status}"
        text = os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace").strip()
        return f"{ended}; its output: {text[-2000:] or 'nothing'}"


def host_environment() -> dict[str, str]:
    """Return the controller's environment, limited to one thread per process: two on two cores are many times slower,
    and sums would differ.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # otherwise glibc returns each tensor's memory and gets it zeroed again: thousands of page faults per micro-batch
    memory = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
    memory["MALLOC_ARENA_MAX"] = "1"  # threads take turns, and can reuse each other's memory
    return {**os.environ, **threads, **memory, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

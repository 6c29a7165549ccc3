"""Connect a stage: Unix sockets to the other stages, links to its neighbours, and its devices' counters. No torch.

Of two neighbours the later stage listens, and the earlier one connects.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from testbed.counters import DeviceCounters
from testbed.errors import StageError, TransportError
from testbed.message_key import Side
from testbed.pipeline.gather import Gather
from testbed.pipeline.job import Endpoint, StageJob
from testbed.pipeline.pacing import be_prompt, step_back
from testbed.pipeline.transport import Connection
from testbed.workloads import models as workloads

SWITCH_INTERVAL_S = 0.0005
"""How long the maths may keep the interpreter lock from a transport thread: Python's 5 ms would show in every message.
"""
_FRAMES = 2
"""Steps' worth of frames that may wait unsent or untaken."""
_RETRY_S = 0.02


def largest_payload(tokens: int, width: int) -> int:
    """Return the most bytes that a payload of `tokens` tokens may have, so that a hostile length cannot take all
    memory.

    Four times the tensor in fp32 for the values, and a matrix in fp32 of the hidden size squared for what a codec
    carries along: a basis, or its gradient, is never larger. Headers, and examples' visits, are within the last MiB.
    """
    return 4 * 4 * tokens * width + 4 * width**2 + (1 << 20)


class Wiring:
    """A stage's connections, while they last; a context manager. It listens from the start, so that others can connect
    while this stage still builds its model.
    """

    def __init__(self, job: StageJob, sockets: Sequence[socket.socket]) -> None:
        """`sockets` are those of the job's `Gather`; both they and what is opened here are closed at the end."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._job, self._name = job, f"stage {job.stage}"
        self.upstream: Connection | None = None
        self.downstream: Connection | None = None
        self.counters: DeviceCounters | None = None
        with ExitStack() as stack:
            self.gather = Gather(job.stage, sockets, job.limits.message_s)
            stack.callback(self.gather.close)
            if job.devices:
                self.counters = stack.enter_context(DeviceCounters(job.devices, job.overhead_bytes))
            self._listener = stack.enter_context(listen(job.listen, self._name)) if job.listen is not None else None
            self._stack = stack.pop_all()

    def connect(self) -> None:
        """Reach both neighbours, and wait until every stage has reached its own. TransportError where one cannot be.

        Where the job is prompt, its connections' threads go before what the calling thread does; the stage's log says
        how.
        """
        job = self._job
        if job.prompt:
            be_prompt()
        if job.downstream is not None:
            peer = f"{self._name} <-> stage {job.stage + 1} ({job.downstream})"
            self.downstream = self._connection(
                "downstream", connect_to_later(job.downstream, peer, job.limits.connect_s), peer
            )
        if self._listener is not None:
            peer = f"{self._name} <-> stage {job.stage - 1}"
            self.upstream = self._connection(
                "upstream", accept_earlier(self._listener, peer, job.limits.connect_s), peer
            )
        if job.prompt:
            sys.stdout.write(f"{self._name} works with {step_back()}\n")
        self.gather.exchange([])  # the first step starts when every stage is there

    @property
    def connections(self) -> list[Connection]:
        """The connections to the neighbours that there are, upstream first."""
        return [connection for connection in (self.upstream, self.downstream) if connection is not None]

    def leave(self) -> None:
        """Say the end to both neighbours and wait for theirs."""
        for connection in self.connections:
            connection.close(self._job.limits.message_s)

    def _connection(self, side: Side, sock: socket.socket, name: str) -> Connection:
        workload, frames = self._job.workload, self._job.microbatches
        tokens = workload.batch_size // frames * workload.sequence_length
        connection = Connection(
            sock,
            name=name,
            token=bytes.fromhex(self._job.token),
            side=side,
            max_payload_bytes=largest_payload(tokens, workloads.hidden_width(workload)),
            max_frames=_FRAMES * frames,
        )
        return self._stack.enter_context(connection)

    def __enter__(self) -> Wiring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def listen(endpoint: Endpoint, name: str, backlog: int = 1) -> socket.socket:
    """Listen for the earlier stage, or for so many nodes. StageError names the address when that is not possible."""
    try:
        # reuse_address: connections of the job before this one may still be in TIME_WAIT
        return socket.create_server((endpoint.address, endpoint.port), backlog=backlog)
    except OSError as error:
        raise StageError(f"{name} cannot listen on {endpoint}: {error.strerror}") from None


def accept_earlier(listener: socket.socket, name: str, timeout_s: float) -> socket.socket:
    """Accept the earlier stage's connection and close the listener. TransportError when none comes in time."""
    with listener:
        listener.settimeout(timeout_s)
        try:
            return listener.accept()[0]
        except TimeoutError:
            raise TransportError(f"{name}: the earlier stage did not connect within {timeout_s:g} s") from None


def connect_to_later(endpoint: Endpoint, name: str, timeout_s: float) -> socket.socket:
    """Connect to the later stage, trying again while it does not listen yet. TransportError when it cannot be reached
    in time.
    """
    deadline = time.monotonic() + timeout_s
    reason = "no time was given"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return socket.create_connection((endpoint.address, endpoint.port), timeout=left)
        except ConnectionRefusedError as error:
            reason = str(error.strerror)
            time.sleep(min(_RETRY_S, left))
        except OSError as error:
            raise TransportError(
                f"{name}: cannot reach the later stage at {endpoint}: {error.strerror or error}"
            ) from None
    raise TransportError(f"{name}: the later stage did not listen on {endpoint} within {timeout_s:g} s ({reason})")

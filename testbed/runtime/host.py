"""The stage host, `python -m testbed.runtime.host`: it runs unprivileged in a stage's namespace, with torch loaded. It
forks one child per job, so that a job starts in milliseconds and a crash affects that job only.

The controller starts one per stage and controls it through `control_plane.Host`; when the controller exits, so do host
and child.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from testbed import forks
from testbed.codecs.catalogue import table
from testbed.errors import StageError
from testbed.process import die_with_parent, drop_capabilities
from testbed.runtime import failures
from testbed.runtime.control_plane import JobDone, JobFailed, Ready, Start, receive_order, send
from testbed.runtime.place_job import PlaceJob
from testbed.workloads import models

PRELOADED = (
    "testbed.training.place",
    "testbed.training.stages",
    "testbed.training.workers",
    "testbed.nodes.coded",
    *models.family_modules(),
    *table.codec_modules(),
)
_LONGEST_TEXT = 8_000


class _Child:
    """A forked job. It reports its outcome over a pipe to the host; a flag from the host asks it to finish."""

    def __init__(self, job: PlaceJob, sockets: list[socket.socket], channel: socket.socket) -> None:
        host = os.getpid()
        self._job = job
        self._kills = failures.oom_kills()
        self._asked = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._signals = sorted(_signals(job))
        self._stated = ""
        self.pipe, theirs = os.pipe()
        self._text = b""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _work(job, sockets, channel, theirs, self._asked, host)
        os.close(theirs)

    def read(self) -> JobDone | JobFailed | None:
        """Read the pipe. Returns the outcome once the child is gone, None before."""
        if part := os.read(self.pipe, 1 << 16):
            self._text += part
            return None
        status = self._reap()
        if status == 0:
            return JobDone.model_validate_json(self._text)
        if self._text:
            return JobFailed.model_validate_json(self._text)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        by_kernel = status == -signal.SIGKILL and failures.oom_kills() > self._kills
        where = f"after {self._recorded()} recorded steps{self._stated}"
        error = failures.killed(self._job.name, how, where, by_kernel=by_kernel)
        return JobFailed(error=type(error).__name__, message=str(error), traceback="")

    @property
    def next_fault_s(self) -> float | None:
        """Time until its next fault begins or ends; None without any."""
        return max(0, self._signals[0][0] - time.monotonic_ns()) / 1e9 if self._signals else None

    def fail(self) -> None:
        """Send the signals of its faults that are due."""
        while self._signals and self._signals[0][0] <= time.monotonic_ns():
            _, number, words = self._signals.pop(0)
            self._stated = f", as stated: {words}" if number == signal.SIGKILL else ""
            os.kill(self.pid, number)

    def finish(self) -> None:
        """Ask it to end after its current step."""
        os.eventfd_write(self._asked, 1)

    def kill(self) -> None:
        """Kill it."""
        os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def _recorded(self) -> int:
        """Count the steps and evaluations that it has recorded."""
        try:
            return (Path(self._job.folder) / f"steps-{self._job.place}.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def _reap(self) -> int:
        os.close(self.pipe)
        os.close(self._asked)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _signals(job: PlaceJob) -> Iterator[tuple[int, signal.Signals, str]]:
    """Yield the signals that a place's faults are, each with its time and the fault in words."""
    for fault in job.faults:
        at_ns, end_ns = job.played_at_ns + fault.at_ns, job.played_at_ns + fault.end_ns
        if fault.kill:
            yield at_ns, signal.SIGKILL, fault.words
        elif fault.stops:
            yield from ((at_ns, signal.SIGSTOP, fault.words), (end_ns, signal.SIGCONT, fault.words))


def _work(
    job: PlaceJob, sockets: list[socket.socket], channel: socket.socket, pipe: int, asked: int, host: int
) -> NoReturn:
    """Run the job in the child, write its outcome to the pipe, and never return into the host's code."""
    status = 1
    try:
        die_with_parent(host)
        log = os.open(Path(job.folder) / f"stage-{job.place}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        ended = importlib.import_module("testbed.training.place").run_place(
            job, sockets, lambda message: send(channel, message), lambda: bool(select.select([asked], [], [], 0)[0])
        )
        os.write(pipe, JobDone(ended=ended).model_dump_json().encode())
        status = 0
    except BaseException as error:
        traceback.print_exc()
        text = "".join(traceback.format_exception(error))[-_LONGEST_TEXT:]
        failed = JobFailed(error=type(error).__name__, message=str(error)[:_LONGEST_TEXT], traceback=text)
        os.write(pipe, failed.model_dump_json().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(channel: socket.socket) -> None:
    """Execute orders until the controller is gone."""
    child: _Child | None = None
    while True:
        watched = [channel.fileno(), *([child.pipe] if child is not None else [])]
        ready, _, _ = select.select(watched, [], [], child.next_fault_s if child is not None else None)
        if child is not None:
            child.fail()
        if child is not None and child.pipe in ready and (outcome := child.read()) is not None:
            child = None
            send(channel, outcome)
        if channel.fileno() not in ready:
            continue
        received = receive_order(channel)
        if received is None:
            if child is not None:
                child.kill()
            return
        order, sockets = received
        if isinstance(order, Start):
            if child is not None:
                raise StageError(f"{order.job.name}: cannot start a job while another one runs")
            child = _Child(order.job, sockets, channel)
            for sock in sockets:
                sock.close()
        elif child is not None:
            child.finish()


def main() -> None:
    """Load modules, report that, and serve."""
    parser = argparse.ArgumentParser(description="A stage host; started by the controller, not by hand.")
    parser.add_argument("--control-fd", type=int, required=True)
    arguments = parser.parse_args()
    drop_capabilities()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller handles Ctrl-C
    channel = socket.socket(fileno=arguments.control_fd)
    channel.set_inheritable(False)
    forks.preload(PRELOADED)
    send(channel, Ready())
    with contextlib.suppress(ConnectionError):  # the controller exited during a send
        serve(channel)
    os._exit(0)  # at once: shutting down an interpreter with torch takes half a second


if __name__ == "__main__":
    main()

"""The stage host, `python -m testbed.pipeline.host`: it lives in a stage's namespace without privileges and with torch
loaded. It forks one child per job, so that a job starts in milliseconds and takes nothing but itself along when it
crashes.

The controller starts one per stage and speaks to it through `control.Host`; when the controller goes, so do host and
child.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from testbed.codecs.catalogue import table
from testbed.errors import StageError
from testbed.pipeline import faults
from testbed.pipeline.control import JobDone, JobFailed, Ready, Start, receive_order, send
from testbed.pipeline.job import PlaceJob
from testbed.process import die_with_parent, drop_capabilities
from testbed.workloads import models

_PRELOADED = (
    "testbed.pipeline.place",
    "testbed.pipeline.stages",
    "testbed.replicas.training",
    "testbed.kinds.coded",
    *models.family_modules(),
    *table.codec_modules(),
)
_LONGEST_TEXT = 8_000


class _Child:
    """A forked job. A pipe to the host says how it ended, and a flag from the host asks it to finish."""

    def __init__(self, job: PlaceJob, sockets: list[socket.socket], channel: socket.socket) -> None:
        host = os.getpid()
        self._job = job
        self._kills = faults.oom_kills()
        self._asked = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.pipe, theirs = os.pipe()
        self._text = b""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _work(job, sockets, channel, theirs, self._asked, host)
        os.close(theirs)

    def read(self) -> JobDone | JobFailed | None:
        """Read what the pipe has. Returns the outcome once the child is gone, None before."""
        if part := os.read(self.pipe, 1 << 16):
            self._text += part
            return None
        status = self._reap()
        if status == 0:
            return JobDone.model_validate_json(self._text)
        if self._text:
            return JobFailed.model_validate_json(self._text)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        by_kernel = status == -signal.SIGKILL and faults.oom_kills() > self._kills
        error = faults.killed(self._job.name, how, f"after {self._recorded()} recorded steps", by_kernel=by_kernel)
        return JobFailed(error=type(error).__name__, message=str(error), traceback="")

    def finish(self) -> None:
        """Ask it to end after its running step."""
        os.eventfd_write(self._asked, 1)

    def kill(self) -> None:
        """End it now."""
        os.kill(self.pid, signal.SIGKILL)
        self._reap()

    def _recorded(self) -> int:
        """Count the steps and evaluations that it has written down."""
        try:
            return (Path(self._job.folder) / f"steps-{self._job.place}.jsonl").read_bytes().count(b"\n")
        except OSError:
            return 0

    def _reap(self) -> int:
        os.close(self.pipe)
        os.close(self._asked)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _work(
    job: PlaceJob, sockets: list[socket.socket], channel: socket.socket, pipe: int, asked: int, host: int
) -> NoReturn:
    """Do the job in the child, say on the pipe how it ended, and never return into the host's code."""
    status = 1
    try:
        die_with_parent(host)
        log = os.open(Path(job.folder) / f"stage-{job.place}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        ended = importlib.import_module("testbed.pipeline.place").run_place(
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
    """Obey orders until the controller is gone."""
    child: _Child | None = None
    while True:
        ready, _, _ = select.select([channel.fileno(), *([child.pipe] if child is not None else [])], [], [])
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
                raise StageError(f"{order.job.name}: asked to start a job while another one runs")
            child = _Child(order.job, sockets, channel)
            for sock in sockets:
                sock.close()
        elif child is not None:
            child.finish()


def preload() -> None:
    """Load what every job needs, so that it stays shared with the children."""
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def main() -> None:
    """Load, say so, and serve."""
    parser = argparse.ArgumentParser(description="A stage host; started by the controller, not by hand.")
    parser.add_argument("--control-fd", type=int, required=True)
    arguments = parser.parse_args()
    drop_capabilities()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides what a Ctrl-C ends
    channel = socket.socket(fileno=arguments.control_fd)
    channel.set_inheritable(False)
    preload()
    send(channel, Ready())
    with contextlib.suppress(ConnectionError):  # the controller left while it was being told something
        serve(channel)
    os._exit(0)  # at once: taking an interpreter with torch apart needs half a second


if __name__ == "__main__":
    main()

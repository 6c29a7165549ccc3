"""Record all counters of a lab's links, ten times a second during a run (counters.jsonl).

A thread of the controller, which is otherwise idle, reads existing counters of kernel and relay, and touches no packet.
The lateness of its wake-ups shows the accuracy of the machine's timers: it waits at a real-time priority, if permitted,
and works without one.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from testbed import paths
from testbed.net.kernel.sock_diag import SocketDiagnosis
from testbed.net.lab import Lab
from testbed.records import DuringRecord, Sample, SocketSample

_CHECK_EVERY = 5
"""Samples between checks that the lab is still running."""
_PRIORITY = 1
"""SCHED_FIFO priority while it waits: above programs, below packet processing."""
_BUCKETS = 64


class Sampler:
    """A context manager that samples while it is entered. Each line is flushed before the next starts.

    While entered, it is the only user of the lab, and also checks that the lab is running: see `check`.
    """

    samples: int
    """Number of samples so far."""
    latest: Sample | None
    """The latest sample."""
    during: DuringRecord | None
    """Lateness of lab and machine, after exit."""

    def __init__(self, lab: Lab, path: Path, period_s: float = 0.1) -> None:
        """Create the file `path` for the invoking user. CapabilityError where this kernel cannot list TCP
        connections.
        """
        self._lab, self._period_s = lab, period_s
        self.samples, self.latest, self.during = 0, None, None
        self._lateness, self._real_time = [0] * _BUCKETS, True
        self._fault: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        with ExitStack() as stack:
            self._diagnoses = [(node.name, stack.enter_context(SocketDiagnosis(node.namespace))) for node in lab.nodes]
            self._sockets()  # fails before the run starts
            self._file: IO[str] = stack.enter_context(path.open("x", encoding="utf8"))
            paths.give_to_user(path)
            self._stack = stack.pop_all()

    def _sockets(self) -> tuple[SocketSample, ...]:
        return tuple(
            SocketSample(
                node=node,
                local=connection.local,
                remote=connection.remote,
                congestion_control=connection.congestion_control,
                **connection.info.fields_of(SocketSample),
            )
            for node, diagnosis in self._diagnoses
            for connection in diagnosis.connections()
        )

    def _take(self) -> None:
        if self.samples % _CHECK_EVERY == 0:
            self._lab.check()
        sample = Sample(at_ns=time.monotonic_ns(), links=self._lab.counters(), sockets=self._sockets())
        self._file.write(sample.model_dump_json() + "\n")
        self._file.flush()
        self.samples += 1
        self.latest = sample

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while True:
                last = self._stop.is_set()  # one more after the end, to count the last traffic
                self._take()
                if last:
                    break
                due = max(due + self._period_s, time.monotonic())
                self._wait(due)
        except BaseException as error:
            self._fault = error

    def _wait(self, due: float) -> None:
        """Wait until `due`, or until stopped, and count the lateness."""
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))  # 0: this thread
        except PermissionError:
            self._real_time = False
        stopped = self._stop.wait(due - time.monotonic())
        late_us = int((time.monotonic() - due) * 1e6)
        if self._real_time:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        if not stopped:
            self._lateness[max(0, late_us).bit_length()] += 1

    def check(self) -> None:
        """Check that it is still sampling and the lab is still running: LabError otherwise."""
        if self._fault is not None:
            raise self._fault

    def __enter__(self) -> Sampler:
        self._watch = self._lab.watch()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        self._thread.join()
        self._stack.close()
        if error is None:
            self.check()
            self.during = self._watch.during(self._lateness, real_time=self._real_time)

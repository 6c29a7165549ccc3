"""The probe program: it receives jobs and returns readings, from one forked process per link.

Started by `testbed.net.certificate.certify`. It imports little, because every certificate waits for its start.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from testbed.net.probe.job import ProbeJob
from testbed.net.probe.readings import Readings
from testbed.net.probe.session import measure_link
from testbed.process import Parent, die_with_parent

_FAST_BPS = 150_000_000


class Turns:
    """Tokens in a pipe, shared by forks: a process holds one while it transfers bulk."""

    def __init__(self, count: int) -> None:
        self._taken_from, self._given_to = os.pipe()
        os.write(self._given_to, b"." * count)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a token, and return it afterwards."""
        token = os.read(self._taken_from, 1)
        try:
            yield
        finally:
            os.write(self._given_to, token)


def _at_once(jobs: Sequence[ProbeJob], cpus: int) -> int:
    """Return the number of links that may transfer bulk at a time: one per CPU, but only one if a link could use all
    CPUs.
    """
    shaped = [shape.rate_bps for job in jobs for shape in (job.up, job.down) if shape]
    unshaped = any(job.up is None or job.down is None for job in jobs)
    return 1 if shaped and (unshaped or max(shaped) > _FAST_BPS) else cpus


def _start(job: ProbeJob, turns: Turns) -> tuple[int, int]:
    """Measure one link in a separate process; returns its pid and the descriptor with its readings."""
    parent = os.getpid()
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        return pid, reader
    status = 1
    try:
        die_with_parent(parent)
        os.close(reader)
        with os.fdopen(writer, "w", encoding="utf8") as answer:
            json.dump(asdict(measure_link(job, turns.turn)), answer)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)  # never return into the parent's code


def _finish(job: ProbeJob, pid: int, reader: int) -> Readings:
    with os.fdopen(reader, encoding="utf8") as answer:
        text = answer.read()
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"the probe of {job.link} ended with status {os.waitstatus_to_exitcode(status)}")
    return Readings.from_dict(json.loads(text))


def main() -> None:
    """Measure all links at once, taking turns where CPUs are few."""
    parent = Parent()
    jobs = [ProbeJob.from_dict(job) for job in parent.request["jobs"]]
    turns = Turns(_at_once(jobs, len(os.sched_getaffinity(0))))
    started = [_start(job, turns) for job in jobs]
    readings = [_finish(job, *child) for job, child in zip(jobs, started, strict=True)]
    parent.answer([asdict(reading) for reading in readings])


if __name__ == "__main__":
    main()

"""Certify a lab: measure all of its links at once and compare what they show with what was asked for.

A program of its own measures (`testbed.net.probe`) and judge.py compares; this starts the one and asks the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from testbed import process
from testbed.errors import LabError
from testbed.net.capture.capture import Capture, CapturePoint
from testbed.net.certificate.effort import Form, follow_s, limit_s, plan
from testbed.net.certificate.judge import judge_still, judge_varying
from testbed.net.certificate.verdict import Fitness, Lateness
from testbed.net.kernel.namespace import Namespace
from testbed.net.plan import Link
from testbed.net.probe.job import ProbeJob
from testbed.net.probe.readings import Readings
from testbed.net.relay.client import Relay, lateness_mean, lateness_percentile
from testbed.processors import read_processors
from testbed.records import DuringRecord, Measurement
from testbed.spec import Engine


def _probe(jobs: Sequence[ProbeJob], patience_s: float) -> list[Readings]:
    answers = process.ask(
        "testbed.net.probe",
        {"jobs": [asdict(job) for job in jobs]},
        attempt=f"certify {len(jobs)} links",
        failure=LabError,
        timeout_s=patience_s,
        fds=[fd for job in jobs for fd in (job.near_fd, job.far_fd)],
    )
    return [Readings.from_dict(answer) for answer in answers]


class Watch:
    """The host's counters, from now on."""

    def __init__(self, relay: Relay | None) -> None:
        self._relay = relay
        self._processors = read_processors()["cpu"]
        self._early = self._relay_lateness()

    def _relay_lateness(self) -> Sequence[int]:
        return self._relay.counters()["process"]["lateness"] if self._relay else []

    def _since(self) -> tuple[float, float, Lateness | None]:
        """Return the shares of processor time that were stolen and that were used, and how late the relay was."""
        now, before = read_processors()["cpu"], self._processors
        total = max(1, now.total - before.total)
        idle = now.idle + now.waiting - before.idle - before.waiting
        relay = _lateness([late - early for early, late in zip(self._early, self._relay_lateness(), strict=True)])
        return (now.stolen - before.stolen) / total, 1 - idle / total, relay

    def fitness(self, readings: Sequence[Readings]) -> Fitness:
        """Tell what the host did while the links were measured."""
        stolen, busy, relay = self._since()
        probe = _lateness([sum(counts) for counts in zip(*(r.timer for r in readings if r.timer), strict=True)])
        return Fitness(relay=relay, probe=probe, stolen=stolen, busy=busy)

    def during(self, sampler: Sequence[int], *, real_time: bool) -> DuringRecord:
        """Tell what the host did while a run lasted. `sampler`: its sleeps by how late they ended, as the relay counts
        packets; they stand for the kernel's timers where no relay carries the links.
        """
        stolen, busy, late = self._since()
        if self._relay is None:
            late = _lateness(sampler)
        late = late or Lateness(0.0, 0.0, 0)
        return DuringRecord(
            source="relay" if self._relay else "sampler",
            **late._asdict(),
            real_time=real_time,
            stolen=stolen,
            busy=busy,
        )


def _lateness(counts: Sequence[int]) -> Lateness | None:
    """Read a histogram by powers of two of microseconds; None where nothing was counted."""
    p99_us, worst_us = lateness_percentile(counts, 0.99), lateness_percentile(counts, 1.0)
    if p99_us is None or worst_us is None:
        return None
    return Lateness(p99_us / 1000, worst_us / 1000, sum(counts), lateness_mean(counts) / 1000)


def certify(
    links: Sequence[Link],
    namespaces: Mapping[str, Namespace],
    *,
    form: Form,
    message_bytes: Sequence[int],
    relay: Relay | None = None,
    play: Callable[[], int] | None = None,
    hold: Callable[[], None] | None = None,
    capture: Path | None = None,
) -> tuple[Measurement, ...]:
    """Measure all links at the same time, from the main thread. LabError when the probe itself cannot be run.

    `message_bytes` are the sizes that the run will send. `relay`, where one carries the links, is asked how late it
    was. The links hold still; in the full form those that vary are then measured once more while they do, from
    `play()`, which returns its CLOCK_MONOTONIC ns, to `hold()`. `capture` is a file for the packets at both ends of
    every link. A quantity that could not be measured is a failed Measurement, not an error.
    """
    engine: Engine = "relay" if relay else "netem"
    jobs = [plan(link, namespaces, form, message_bytes, engine) for link in links]
    watched = Watch(relay)
    with contextlib.ExitStack() as stack:
        recorder = stack.enter_context(Capture(capture, _ends(links, namespaces))) if capture else None
        readings = _probe(jobs, limit_s(jobs, form))
        followed: dict[str, tuple[int, Readings]] = {}
        varying = [
            replace(job, follow_s=follow_s(link.profile))
            for link, job in zip(links, jobs, strict=True)
            if link.profile.varies
        ]
        if form == "full" and varying and play and hold:
            started_ns = play()
            try:
                followed = {r.link: (started_ns, r) for r in _probe(varying, limit_s(varying, form))}
            finally:
                hold()
    fitness = watched.fitness([*readings, *(reading for _, reading in followed.values())])
    measurements: list[Measurement] = []
    for link, reading in zip(links, readings, strict=True):
        measurements.extend(judge_still(link.profile, reading, fitness))
        if link.name in followed:
            started_ns, outflows = followed[link.name]
            measurements.extend(judge_varying(link.profile, outflows, fitness, started_ns))
    measurements.extend(fitness.measurements(recorder.story if recorder else ""))
    return tuple(measurements)


def _ends(links: Sequence[Link], namespaces: Mapping[str, Namespace]) -> list[CapturePoint]:
    """Name the places to capture at, each once: links may share an end."""
    points: dict[tuple[int, str], CapturePoint] = {}
    for link in links:
        for side, end in (("near", link.near), ("far", link.far)):
            fd = namespaces[end.namespace].fd
            points.setdefault((fd, end.device), CapturePoint(f"{link.name} {side} {end.device}", fd, end.device))
    return list(points.values())

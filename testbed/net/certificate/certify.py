"""Certify a lab: measure all of its links concurrently and compare the readings with their profiles.

A separate program measures (`testbed.net.probe`) and judge.py compares; this module runs both.
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
from testbed.net.lab_plan import Link
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
    """Reads the host's load and lateness since its creation."""

    def __init__(self, relay: Relay | None) -> None:
        self._relay = relay
        self._processors = read_processors()["cpu"]
        self._early = self._relay_lateness()

    def _relay_lateness(self) -> Sequence[int]:
        return self._relay.counters()["process"]["lateness"] if self._relay else []

    def _since(self) -> tuple[float, float, Lateness | None]:
        """Return the shares of stolen and of used processor time, and the relay's lateness."""
        now, before = read_processors()["cpu"], self._processors
        total = max(1, now.total - before.total)
        idle = now.idle + now.waiting - before.idle - before.waiting
        relay = _lateness([late - early for early, late in zip(self._early, self._relay_lateness(), strict=True)])
        return (now.stolen - before.stolen) / total, 1 - idle / total, relay

    def fitness(self, readings: Sequence[Readings]) -> Fitness:
        """Return the host's behaviour during the measurement."""
        stolen, busy, relay = self._since()
        probe = _lateness([sum(counts) for counts in zip(*(r.timer for r in readings if r.timer), strict=True)])
        return Fitness(relay=relay, probe=probe, stolen=stolen, busy=busy)

    def during(self, sampler: Sequence[int], *, real_time: bool) -> DuringRecord:
        """Return the host's behaviour during a run. `sampler`: histogram of the lateness of its sleeps, in the relay's
        buckets; it represents the kernel's timers where no relay carries the links.
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
    """Summarise a histogram by powers of two of microseconds; None if it is empty."""
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
    """Measure all links concurrently, from the main thread. LabError when the probe cannot run.

    `message_bytes` are the sizes that the run will send. `relay`, if one carries the links, reports its lateness. Links
    are constant; in the full form varying ones are then measured again while they vary, from `play()`, which returns
    its CLOCK_MONOTONIC ns, to `hold()`. `capture` is a file for the packets at both ends of every link. A quantity that
    could not be measured becomes a failed Measurement, not an error.
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
            if any(pipe.scheduled for pipe in link.profile.pipes)
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
    """Return the capture points without duplicates, since links may share an end."""
    points: dict[tuple[int, str], CapturePoint] = {}
    for link in links:
        for side, end in (("near", link.near), ("far", link.far)):
            fd = namespaces[end.namespace].fd
            points.setdefault((fd, end.device), CapturePoint(f"{link.name} {side} {end.device}", fd, end.device))
    return list(points.values())

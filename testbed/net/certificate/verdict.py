"""Turn a value and its ideal into a measurement with reasons; for a deviation, state whether the host kept up.

The verdict here ignores steps: whether the link is exact within the probe's accuracy. `metrics.bound` judges a
deviation by its effect on a step. A host that does not keep up shows late packets, late sleeps and stolen CPU time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from testbed.directions import EitherOrBoth
from testbed.net.probe.readings import Readings
from testbed.records import Measurement, Quantity

CONTENTION = "CPU contention, not the network"
LATENESS_TOLERANCE_MS = 1.0
_STOLEN_TOLERANCE = 0.01


Phase = Literal["echo", "stream", "datagrams"]
"""A part of the probe."""
_MEASURED_AS: Mapping[Quantity, tuple[str, Phase]] = {
    "rtt": ("ms", "echo"),
    "message": ("ms", "stream"),
    "goodput": ("bit/s", "stream"),
    "delay": ("ms", "datagrams"),
    "jitter": ("ms", "datagrams"),
    "loss": ("share", "datagrams"),
    "burst": ("packets", "datagrams"),
    "reordered": ("share", "datagrams"),
    "duplicated": ("share", "datagrams"),
    "rate": ("bit/s", "datagrams"),
    "queue": ("ms", "datagrams"),
    "schedule": ("bytes", "datagrams"),
}
"""The unit of a quantity, and the phase that measures it, whose fault explains a missing value."""


class Lateness(NamedTuple):
    """Lateness of timed events."""

    p99_ms: float
    worst_ms: float
    """Rounded up to a power of two of microseconds."""
    samples: int
    mean_ms: float = 0.0
    """Mean, each value rounded up in the same way."""


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """The host's behaviour during the measurement."""

    relay: Lateness | None
    """Lateness of packets leaving the relay; None without a relay."""
    probe: Lateness | None
    """Lateness of the probe's own sleeps."""
    stolen: float
    """Share of all CPU time that the hypervisor took."""
    busy: float
    """Share of all CPU time in use, by the testbed or others."""

    def explanations(self) -> tuple[str, ...]:
        """Return effects of the host that may explain a deviation; empty when it kept up."""
        reasons = []
        for who, lateness in (("relay", self.relay), ("probe", self.probe)):
            if lateness is None:
                continue
            if lateness.p99_ms > LATENESS_TOLERANCE_MS:
                reasons.append(f"{CONTENTION}: the {who} was {lateness.p99_ms:.2f} ms late (p99)")
            elif lateness.worst_ms > LATENESS_TOLERANCE_MS:
                reasons.append(f"perhaps {CONTENTION}: the {who} was rarely up to {lateness.worst_ms:.1f} ms late")
        if self.stolen > _STOLEN_TOLERANCE:
            reasons.append(f"perhaps {CONTENTION}: the hypervisor took {self.stolen:.1%} of the CPU time")
        return tuple(reasons)

    def measurements(self, story: str = "") -> Iterator[Measurement]:
        """Report on the host itself. A late relay fails, because it is the link; the probe's own lateness is
        information, reported with `story`.
        """
        if self.relay:
            late = self.relay.p99_ms > LATENESS_TOLERANCE_MS
            worst = f"99th percentile {self.relay.p99_ms:.2f} ms, at worst {self.relay.worst_ms:.1f} ms"
            yield Measurement(
                link="relay",
                direction="both",
                quantity="lateness",
                detail="of packets, mean",
                unit="ms",
                expected=0.0,
                measured=self.relay.mean_ms,
                tolerance=LATENESS_TOLERANCE_MS,
                samples=self.relay.samples,
                verdict="FAIL" if late else "PASS",
                note=f"{CONTENTION}; {worst}" if late else worst,
            )
        if self.probe:
            told = f"CPU {self.busy:.0%} busy, {self.stolen:.1%} stolen; at worst {self.probe.worst_ms:.1f} ms"
            yield Measurement(
                link="host",
                direction="both",
                quantity="lateness",
                detail="the probe's timer, 99th percentile",
                unit="ms",
                expected=None,
                measured=self.probe.p99_ms,
                tolerance=None,
                samples=self.probe.samples,
                verdict="PASS",
                note="; ".join(part for part in (told, story) if part),
            )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The reading of one quantity and the ideal of an exact link, without a verdict yet."""

    quantity: Quantity
    direction: EitherOrBoth
    detail: str = ""
    expected: float | None = None
    measured: float | None = None
    tolerance: float | None = None
    chance: float = 0.0
    """The part of the tolerance due to chance, see `Measurement.chance`."""
    samples: int = 0
    faults: tuple[str, ...] = ()
    """Reasons to fail regardless of the value."""
    remark: str = ""
    """Reported in either case."""
    excuses: tuple[str, ...] = ()
    """Possible explanations for a value out of tolerance."""

    def judged(self, readings: Readings, fitness: Fitness) -> Measurement:
        """Pass or fail it. `readings` are its source; `fitness` attributes a slow link to the host or the link."""
        unit, phase = _MEASURED_AS[self.quantity]
        faults = self.faults
        broken = bool(faults) or self.measured is None
        if self.measured is None:
            faults = (*faults, readings.faults.get(phase, "nothing arrived"))
        elif (
            self.expected is not None
            and self.tolerance is not None
            and abs(self.measured - self.expected) > self.tolerance
        ):
            faults = (*faults, *self.excuses, *fitness.explanations(), *_handicaps(readings)) or ("out of tolerance",)
        same = {name: value for name, value in vars(self).items() if name in Measurement.model_fields}
        return Measurement(
            link=readings.link,
            **same,
            unit=unit,
            fault=broken,
            verdict="FAIL" if faults else "PASS",
            note="; ".join(filter(None, (*faults, self.remark))),
        )


def _handicaps(readings: Readings) -> Iterator[str]:
    if readings.scheduling != "SCHED_FIFO":
        yield "the probe had no real-time priority"
    if readings.small_buffers:
        yield "the kernel refused large socket buffers"

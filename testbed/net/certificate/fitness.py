"""Whether the host could keep up while the links were measured: late packets, late sleeps, stolen CPU time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from testbed.records import Measurement

CONTENTION = "CPU contention, not the network"
LATENESS_TOLERANCE_MS = 1.0
_STOLEN_TOLERANCE = 0.01


class Lateness(NamedTuple):
    """How late something was that had a time to keep."""

    p99_ms: float
    worst_ms: float
    """Rounded up to a power of two of microseconds."""
    samples: int


@dataclass(frozen=True, kw_only=True)
class Fitness:
    """What the host did while the links were measured."""

    relay: Lateness | None
    """How late packets left the relay; None where none carries the links."""
    probe: Lateness | None
    """How late the probe's own sleeps ended."""
    stolen: float
    """Share of all CPU time that the hypervisor took."""
    busy: float
    """Share of all CPU time that something used, we or others."""

    def explanations(self) -> tuple[str, ...]:
        """What it may have done to a number out of tolerance; empty: nothing."""
        found = []
        for who, lateness in (("relay", self.relay), ("probe", self.probe)):
            if lateness is None:
                continue
            if lateness.p99_ms > LATENESS_TOLERANCE_MS:
                found.append(f"{CONTENTION}: the {who} was {lateness.p99_ms:.2f} ms late (p99)")
            elif lateness.worst_ms > LATENESS_TOLERANCE_MS:
                found.append(f"perhaps {CONTENTION}: the {who} was up to {lateness.worst_ms:.1f} ms late, if seldom")
        if self.stolen > _STOLEN_TOLERANCE:
            found.append(f"perhaps {CONTENTION}: the hypervisor took {self.stolen:.1%} of the CPU time")
        return tuple(found)

    def measurements(self, story: str = "") -> Iterator[Measurement]:
        """A late relay fails: it is the link. The probe's own lateness is information. `story` is told beside it."""
        if self.relay:
            late = self.relay.p99_ms > LATENESS_TOLERANCE_MS
            worst = f"at worst {self.relay.worst_ms:.1f} ms"
            yield Measurement(
                link="relay",
                direction="both",
                quantity="lateness",
                detail="99th percentile",
                unit="ms",
                expected=0.0,
                measured=self.relay.p99_ms,
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

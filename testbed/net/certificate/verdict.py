"""One quantity, asked against found, as a verdict with its reasons."""

from __future__ import annotations

from typing import Literal

from testbed.net.certificate.fitness import Fitness
from testbed.net.probe import Readings
from testbed.profiles import LinkProfile
from testbed.records import Measurement

Direction = Literal["up", "down", "both"]
Quantity = Literal[
    "rtt",
    "delay",
    "rate",
    "message",
    "goodput",
    "queue",
    "loss",
    "burst",
    "jitter",
    "reordered",
    "duplicated",
    "schedule",
]


class Verdicts:
    """What the judges share: one link's profile and readings, and how a measurement is made of a number."""

    def __init__(self, profile: LinkProfile, readings: Readings, fitness: Fitness) -> None:
        """`fitness` tells whose fault a slow link is."""
        self._profile, self._readings, self._fitness = profile, readings, fitness

    def _make(
        self,
        quantity: Quantity,
        direction: Direction,
        unit: str,
        *,
        detail: str = "",
        expected: float | None,
        measured: float | None,
        tolerance: float | None,
        samples: int,
        phase: str,
        faults: tuple[str, ...] = (),
        remarks: tuple[str, ...] = (),
        why: tuple[str, ...] = (),
    ) -> Measurement:
        """`faults` fail it; `remarks` are told either way; `why` may explain a number out of tolerance."""
        if measured is None:
            faults = (*faults, self._readings.faults.get(phase, "nothing arrived"))
        elif expected is not None and tolerance is not None and abs(measured - expected) > tolerance:
            why = (*why, *self._fitness.explanations())
            if self._readings.scheduling != "SCHED_FIFO":
                why = (*why, "the probe had no real-time priority")
            if self._readings.small_buffers:
                why = (*why, "the kernel refused large socket buffers")
            faults = (*faults, *why) or ("out of tolerance",)
        return Measurement(
            link=self._readings.link,
            direction=direction,
            quantity=quantity,
            detail=detail,
            unit=unit,
            expected=expected,
            measured=measured,
            tolerance=tolerance,
            samples=samples,
            verdict="FAIL" if faults else "PASS",
            note="; ".join((*faults, *remarks)),
        )

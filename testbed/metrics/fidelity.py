"""Whether a played run stands for the live one: bit for bit the same losses, in the same time, with as many bytes on
the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from testbed.metrics.steps import align
from testbed.records import StepRecord, Summary

STEP_TIME = 0.03
"""The largest relative difference between a played step time and the live one."""
WIRE = 0.01
"""The same for bytes on the wire: acknowledgements and retransmissions vary from run to run."""


class Fidelity(NamedTuple):
    """A played run against the live one of the same cell."""

    live_s: float | None
    """Median step; None where there is no measured step."""
    played_s: float | None
    step_time: float | None
    """(played - live) / live."""
    wire: float | None
    """The same for wire bytes per step; None where nothing counted them, or there are none."""
    same_losses: bool
    """Whether the losses of every step and evaluation are the same, in order."""
    certified: bool
    """Whether the links of both runs were certified."""

    @property
    def holds(self) -> bool:
        """Whether the played run stands for the live one.

        Links that failed their certificate may differ, so they prove nothing.
        """
        close = self.step_time is not None and abs(self.step_time) <= STEP_TIME
        return close and (self.wire is None or abs(self.wire) <= WIRE) and self.same_losses and self.certified


def compare_timings(
    live: Summary,
    live_stages: Sequence[Sequence[StepRecord]],
    played: Summary,
    played_stages: Sequence[Sequence[StepRecord]],
) -> Fidelity:
    """Compare two runs that ended well by their summaries and records; records are as for `summarise`.

    Losses are compared over the steps that both have: the live run of a check is a short one.
    """
    steps = min(live.steps, played.steps)
    return Fidelity(
        live_s=live.step_s,
        played_s=played.step_s,
        step_time=_difference(live.step_s, played.step_s),
        wire=_difference(live.wire_bytes_per_step, played.wire_bytes_per_step),
        same_losses=_losses(live_stages, steps) == _losses(played_stages, steps),
        certified=live.certificate == played.certificate == "PASS",
    )


def _difference(live: float | None, played: float | None) -> float | None:
    return played / live - 1 if live and played is not None else None


def _losses(stages: Sequence[Sequence[StepRecord]], steps: int) -> list[tuple[int, float | None]]:
    return [(step.number, step.loss) for step in align(stages) if step.phase == "train" and step.number < steps]

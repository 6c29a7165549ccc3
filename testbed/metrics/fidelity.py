"""Whether a played run matches the live one: bit-identical losses, the same time, the same bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from testbed.metrics.steps import align
from testbed.records import StepRecord, Summary

STEP_TIME = 0.03
"""Maximum relative difference between played and live step times."""
WIRE = 0.01
"""The same for bytes on the wire, since acknowledgements and retransmissions vary from run to run."""


class Fidelity(NamedTuple):
    """A played run compared with the live run of the same cell."""

    live_s: float | None
    """Median step time; None without measured steps."""
    played_s: float | None
    step_time: float | None
    """(played - live) / live."""
    wire: float | None
    """The same for wire bytes per step; None if they were not counted, or are 0."""
    same_losses: bool
    """Whether the losses of every step and evaluation are the same, in order."""
    certified: bool
    """Whether the links of both runs were certified."""

    @property
    def holds(self) -> bool:
        """Whether the played run matches the live one.

        Runs over links without a valid certificate may differ, so they prove nothing.
        """
        close = self.step_time is not None and abs(self.step_time) <= STEP_TIME
        return close and (self.wire is None or abs(self.wire) <= WIRE) and self.same_losses and self.certified


def compare_timings(
    live: Summary,
    live_stages: Sequence[Sequence[StepRecord]],
    played: Summary,
    played_stages: Sequence[Sequence[StepRecord]],
) -> Fidelity:
    """Compare two successful runs by their summaries and records; records as for `summarise`.

    Losses are compared over common steps, because the live run of a check is short.
    """
    steps = min(live.steps, played.steps)
    return Fidelity(
        live_s=live.step_s,
        played_s=played.step_s,
        step_time=_difference(live.step_s, played.step_s),
        wire=_difference(live.wire_bytes_per_step, played.wire_bytes_per_step),
        same_losses=same_losses(live_stages, played_stages, steps),
        certified=live.certificate == played.certificate == "PASS",
    )


def same_losses(some: Sequence[Sequence[StepRecord]], others: Sequence[Sequence[StepRecord]], steps: int) -> bool:
    """Return whether two runs' losses of the first `steps` steps are the same, bit for bit."""
    return _losses(some, steps) == _losses(others, steps)


def _difference(live: float | None, played: float | None) -> float | None:
    return played / live - 1 if live and played is not None else None


def _losses(stages: Sequence[Sequence[StepRecord]], steps: int) -> list[tuple[int, float | None]]:
    return [(step.number, step.loss) for step in align(stages) if step.phase == "train" and step.number < steps]

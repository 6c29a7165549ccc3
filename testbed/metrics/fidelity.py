"""Whether a replay stands for the full run: the same losses, bit for bit, in the same time, with as many bytes on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from testbed.metrics.steps import align
from testbed.records import StepRecord, Summary

STEP_TIME = 0.03
"""By so much of the full run's may a replay's step time be another."""
WIRE = 0.01
"""The same for bytes on the wire: acknowledgements and retransmissions are never twice the same."""


class Fidelity(NamedTuple):
    """A replay against the full run of the same cell."""

    full_s: float | None
    """Median step; None where there is no measured step."""
    replay_s: float | None
    step_time: float | None
    """(replay - full) / full."""
    wire: float | None
    """The same of the bytes on the wire a step; None where nothing counted them, or there are none."""
    same_losses: bool
    """Of every step and evaluation, in order."""
    certified: bool
    """Whether the links of both runs were certified."""

    @property
    def holds(self) -> bool:
        """Links that failed their certificate may differ, so they prove nothing."""
        close = self.step_time is not None and abs(self.step_time) <= STEP_TIME
        return close and (self.wire is None or abs(self.wire) <= WIRE) and self.same_losses and self.certified


def fidelity(
    full: Summary,
    full_stages: Sequence[Sequence[StepRecord]],
    replay: Summary,
    replay_stages: Sequence[Sequence[StepRecord]],
) -> Fidelity:
    """From the summaries and records of two runs that ended well; records as for `summarise`."""
    return Fidelity(
        full_s=full.step_s,
        replay_s=replay.step_s,
        step_time=_difference(full.step_s, replay.step_s),
        wire=_difference(full.wire_bytes_per_step, replay.wire_bytes_per_step),
        same_losses=_losses(full_stages) == _losses(replay_stages),
        certified=full.certificate == replay.certificate == "PASS",
    )


def _difference(full: float | None, replay: float | None) -> float | None:
    return replay / full - 1 if full and replay is not None else None


def _losses(stages: Sequence[Sequence[StepRecord]]) -> list[tuple[str, int, float | None]]:
    return [(step.phase, step.number, step.loss) for step in align(stages)]

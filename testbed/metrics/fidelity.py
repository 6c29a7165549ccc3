"""Whether a replay stands for the full run: bit for bit the same losses, in the same time, with as many bytes on the
wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from testbed.metrics.steps import align
from testbed.records import StepRecord, Summary

STEP_TIME = 0.03
"""The largest relative difference between a replay's step time and the full run's."""
WIRE = 0.01
"""The same for bytes on the wire: acknowledgements and retransmissions vary from run to run."""


class Fidelity(NamedTuple):
    """A replay against the full run of the same cell."""

    full_s: float | None
    """Median step; None where there is no measured step."""
    replay_s: float | None
    step_time: float | None
    """(replay - full) / full."""
    wire: float | None
    """The same for wire bytes per step; None where nothing counted them, or there are none."""
    same_losses: bool
    """Whether the losses of every step and evaluation are the same, in order."""
    certified: bool
    """Whether the links of both runs were certified."""

    @property
    def holds(self) -> bool:
        """Whether the replay stands for the full run.

        Links that failed their certificate may differ, so they prove nothing.
        """
        close = self.step_time is not None and abs(self.step_time) <= STEP_TIME
        return close and (self.wire is None or abs(self.wire) <= WIRE) and self.same_losses and self.certified


def compare_replay(
    full: Summary,
    full_stages: Sequence[Sequence[StepRecord]],
    replay: Summary,
    replay_stages: Sequence[Sequence[StepRecord]],
) -> Fidelity:
    """Compare two runs that ended well by their summaries and records; records are as for `summarise`."""
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

"""A director that a job can name: each message is as many bytes larger than the one before as it was told."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.player.lanes import LaneState
from testbed.trace.format import SEND


class Growing:
    """What the first lane sends grows from step to step."""

    def __init__(self, more_bytes: int) -> None:
        self._more_bytes = more_bytes

    def step_ended(self, lane: LaneState, lanes: Sequence[LaneState]) -> None:
        sends = [at for at, kind in enumerate(lanes[0].kind) if kind == SEND]
        if lane is lanes[0] and lane.step < len(sends):
            lane.value[sends[lane.step]] = lane.value[sends[lane.step - 1]] + self._more_bytes

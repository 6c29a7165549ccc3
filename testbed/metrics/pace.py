"""Whether stages kept the pace of the emulated device: actions that took longer, and how busy the maths kept the cores."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.metrics.steps import Step
from testbed.records import ActionRecord


def overran(action: ActionRecord) -> bool | None:
    """Whether its maths was done after it was to end; None where it is not paced."""
    return None if action.maths_ns is None or action.due_ns is None else action.maths_ns > action.due_ns


def overrun_share(steps: Sequence[Step]) -> float | None:
    """Share of the actions in `steps` that overran. None where no action is paced."""
    late = [found for action in _actions(steps) if (found := overran(action)) is not None]
    return sum(late) / len(late) if late else None


def duty(steps: Sequence[Step]) -> float | None:
    """Cores that the maths of all stages' actions kept busy, on average over `steps`: the sum of its wall-clock times, by the
    time of the steps. Decoding, encoding and the optimiser are not in it. None where no action is paced.
    """
    busy_ns = [
        action.maths_ns - action.began_ns
        for action in _actions(steps)
        if action.maths_ns is not None and action.began_ns is not None
    ]
    whole_ns = sum(step.end_ns - step.begin_ns for step in steps)
    return sum(busy_ns) / whole_ns if busy_ns and whole_ns > 0 else None


def _actions(steps: Sequence[Step]) -> list[ActionRecord]:
    return [action for step in steps for record in step.records for action in record.actions]

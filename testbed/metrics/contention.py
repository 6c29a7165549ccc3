"""Checks that a run computed as fast as its calibration; otherwise other load makes its times unreliable.

The comparison uses the busy time of stages: maths, encoding and decoding of a step, in the median over the steps that
count. It excludes waiting, and the update, which ends with a meeting of all stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from testbed.message_key import Direction
from testbed.metrics.steps import PipelineStep
from testbed.records import StageCosts, StepRecord
from testbed.spec import Cell, Measured
from testbed.waking import waking_ns


def stray_share(cell: Cell, chosen: Sequence[PipelineStep], costs: Sequence[StageCosts] | None) -> float | None:
    """Return the largest relative deviation of a stage's busy time from its calibration.

    `chosen` are the steps that count, `costs` those of the cell's recipe, by stage. None without either, for runs
    without measured durations (paced or played), and where the calibrated time is 0.
    """
    if costs is None or not chosen or not isinstance(cell.compute, Measured):
        return None
    shares = []
    for stage, cost in enumerate(costs):
        records = [step.records[stage] for step in chosen]
        stated_ns = median(_stated_ns(record, cost) for record in records)
        if stated_ns:
            shares.append(median(_busy_ns(record) for record in records) / stated_ns - 1)
    return max(shares, key=abs, default=None)


def _busy_ns(record: StepRecord) -> int:
    return sum(action.encoded_ns - action.input_ns for action in record.actions)


def _stated_ns(record: StepRecord, cost: StageCosts) -> int:
    """Return the calibrated duration of a step's actions."""
    stated_ns = 0
    for action in record.actions:
        # A forward pass decodes its input and encodes its output; the first stage decodes nothing.
        way: Direction = "forward" if action.kind == "F" else "backward"
        parts = [cost.forward if way == "forward" else cost.backward, cost.decode.get(way), cost.encode.get(way)]
        stated_ns += sum(part.ns for part in parts if part is not None)
        stated_ns += waking_ns(cost.waking_ns(way), action.input_ns - action.asked_ns)
    return stated_ns

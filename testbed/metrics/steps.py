"""The stages' records side by side, and where one step ends and the next begins.

A step ends when its slowest stage ends; it begins where the step or evaluation before it ended. So the times of successive steps
add up to the wall-clock time without gaps or overlaps, though a fast stage may already be in the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from testbed.errors import ResultsError
from testbed.message_key import Phase
from testbed.records import StepRecord


class Step(NamedTuple):
    """One step, or one evaluation, of the whole pipeline."""

    records: tuple[StepRecord, ...]
    """One of each stage, in the order of the stages."""
    before: tuple[StepRecord, ...] | None
    """What the stages did just before; None at the first."""

    @property
    def number(self) -> int:
        """Optimiser steps done before this one."""
        return self.records[0].step

    @property
    def phase(self) -> Phase:
        return self.records[0].phase

    @property
    def warmup(self) -> bool:
        return self.records[0].warmup

    @property
    def begin_ns(self) -> int:
        """The latest end of what came before, or the earliest start of the first."""
        if self.before is None:
            return min(record.start_ns for record in self.records)
        return max(record.end_ns for record in self.before)

    @property
    def end_ns(self) -> int:
        """The latest end over the stages."""
        return max(record.end_ns for record in self.records)

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def free_ns(self) -> tuple[int, ...]:
        """When each stage could begin: the end of what it did before; at the first, the earliest start for all."""
        if self.before is None:
            return (self.begin_ns,) * len(self.records)
        return tuple(record.end_ns for record in self.before)

    @property
    def loss(self) -> float | None:
        """Of the last stage."""
        return self.records[-1].loss

    @property
    def tokens(self) -> int:
        return self.records[-1].tokens


def align(stages: Sequence[Sequence[StepRecord]]) -> list[Step]:
    """Steps and evaluations that every stage has finished, in order. `stages`: the records of each stage, first stage first.

    What only some stages finished (a run that was cut off) is left out. ResultsError when the stages disagree about the order.
    """
    steps: list[Step] = []
    for records in zip(*stages, strict=False):
        keys = {(record.phase, record.step) for record in records}
        if len(keys) > 1:
            found = ", ".join(f"{phase} {step}" for phase, step in sorted(keys))
            raise ResultsError(
                f"the stages' records do not belong together: at position {len(steps)} they hold {found}"
            )
        steps.append(Step(records, steps[-1].records if steps else None))
    return steps


def measured(steps: Iterable[Step]) -> list[Step]:
    """The training steps that count: warm-up and evaluations left out."""
    return [step for step in steps if step.phase == "train" and not step.warmup]

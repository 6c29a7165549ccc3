"""Align the stages' records into steps of the whole pipeline, and choose the steps that count.

A step ends when its slowest stage ends; it begins where the step or evaluation before it ended. So the times of
successive steps add up to the wall-clock time without gaps or overlaps, though a fast stage may already be in the next
step.

The steady state begins where a change-point test says so. The cell's warm-up steps never count. Of the others the first
d are left out when they differ from those after them: d is the cut at which the ranks of the steps before and after
differ most (a maximally selected rank statistic, Miller and Siegmund 1982), and they differ if a Mann-Whitney test says
so with p < 0.01, divided by the number of possible cuts (Bonferroni). The rule is applied again to what remains. Ranks
do not see how extreme an outlier is, so no single step is ever left out. A cut behind the middle is not made: a run
that changes so late never reached a steady state, and all its steps count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from testbed.errors import ResultsError
from testbed.message_key import Phase
from testbed.records import StepRecord

SIGNIFICANCE = 0.01
"""Of the change-point test."""


class PipelineStep(NamedTuple):
    """One step, or one evaluation, of the whole pipeline."""

    records: tuple[StepRecord, ...]
    """One record per stage, in the order of the stages."""
    before: tuple[StepRecord, ...] | None
    """The records of the step or evaluation before; None at the first."""

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
        """The last stage's loss, or the mean over nodes that know one each; None where nobody does."""
        known = [record.loss for record in self.records if record.loss is not None]
        return math.fsum(known) / len(known) if known else None

    @property
    def accuracy(self) -> float | None:
        """What the node found that evaluated; None where nobody did, or a text was learned."""
        return next((record.accuracy for record in self.records if record.accuracy is not None), None)

    @property
    def tokens(self) -> int:
        return self.records[-1].tokens


def align(stages: Sequence[Sequence[StepRecord]]) -> list[PipelineStep]:
    """Return the steps and evaluations that every stage has finished, in order.

    `stages` holds the records of each stage, first stage first. What only some stages finished, in a run that was cut
    off, is left out. ResultsError when the stages disagree about the order.
    """
    steps: list[PipelineStep] = []
    for records in zip(*stages, strict=False):
        keys = {(record.phase, record.step) for record in records}
        if len(keys) > 1:
            names = ", ".join(f"{phase} {step}" for phase, step in sorted(keys))
            raise ResultsError(
                f"the stages' records do not belong together: at position {len(steps)} they hold {names}"
            )
        steps.append(PipelineStep(records, steps[-1].records if steps else None))
    return steps


def measured(steps: Iterable[PipelineStep]) -> list[PipelineStep]:
    """Return the training steps without warm-up; evaluations are left out."""
    return [step for step in steps if step.phase == "train" and not step.warmup]


def _cut(seconds: Sequence[float]) -> int:
    """Return the step before which they change most, and not by chance; 0: they do not change."""
    from scipy.stats import mannwhitneyu, rankdata

    count = len(seconds)
    if count < 2:
        return 0
    before = np.arange(1, count)
    excess = np.cumsum(rankdata(seconds))[:-1] - before * (count + 1) / 2
    cut = int(np.argmax(np.abs(excess) / np.sqrt(before * (count - before)))) + 1
    chance = float(mannwhitneyu(seconds[:cut], seconds[cut:]).pvalue)
    # NaN where all values are equal, because the test has nothing to rank.
    return cut if math.isfinite(chance) and chance * (count - 1) < SIGNIFICANCE else 0


def first_steady(seconds: Sequence[float]) -> int:
    """Return how many of these measured steps lie before the steady state; never more than half of them."""
    begin = 0
    while (cut := _cut(seconds[begin:])) and begin + cut <= len(seconds) / 2:
        begin += cut
    return begin


def steady(steps: Iterable[PipelineStep]) -> list[PipelineStep]:
    """Return the steps of a run that count for its times."""
    chosen = measured(steps)
    return chosen[first_steady([step.seconds for step in chosen]) :]


def over_cycles(values: Sequence[float], cycle: int) -> list[float]:
    """Return each value's mean over its cycle of so many steps; what is left of a last cycle counts with the one
    before it.

    Where workers are ahead of what they wait for they may wait once in a cycle, so no single step is typical.
    """
    if cycle == 1:
        return list(values)
    begins = list(range(0, max(1, len(values) - cycle + 1), cycle))
    parts = [values[begin:end] for begin, end in zip(begins, [*begins[1:], len(values)], strict=True)]
    return [math.fsum(part) / len(part) for part in parts for _ in part]


def durations_s(steps: Iterable[PipelineStep], cycle: int) -> list[float]:
    """Return the duration of each step in seconds of the lab, where they come in cycles its mean over the cycle."""
    return over_cycles([step.seconds for step in steps], cycle)


def counted(steps: Sequence[PipelineStep], steady_from: int | None) -> list[PipelineStep]:
    """Return the steps of a run that count for its times; `steady_from` is the step from which a player has proved that
    all repeat, so that nothing has to be estimated.
    """
    if steady_from is not None and (chosen := [step for step in measured(steps) if step.number >= steady_from]):
        return chosen
    return steady(steps)

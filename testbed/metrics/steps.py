"""Align the stages' records into steps of the whole pipeline, and choose the steps that count.

A step ends when its slowest stage ends, and begins where the previous step or evaluation ended. Successive steps
therefore add up to the wall-clock time without gaps or overlaps, although a fast stage may already be in the next step.

A change-point test determines the start of the steady state. The cell's warm-up steps never count. Of the others the
first d are dropped if they differ from the rest: d is the cut at which the ranks of the steps before and after differ
most (a maximally selected rank statistic, Miller and Siegmund 1982), provided that a Mann-Whitney test gives p < 0.01,
divided by the number of possible cuts (Bonferroni). The rule is applied repeatedly. Ranks ignore how extreme an outlier
is, so no single step is ever dropped. Cuts beyond the middle are not made: a run that changes so late never reached a
steady state, and all its steps count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from testbed.errors import ResultsError
from testbed.message_key import Phase
from testbed.records import StepRecord

SIGNIFICANCE = 0.01
"""Significance level of the change-point test."""
_FEW = 8
"""Up to so many values on one side, the test is exact."""


class PipelineStep(NamedTuple):
    """One step, or one evaluation, of the whole pipeline."""

    records: tuple[StepRecord, ...]
    """One record per stage, in the order of the stages."""
    before: tuple[StepRecord, ...] | None
    """The records of the previous step or evaluation; None at the first."""

    @property
    def number(self) -> int:
        """Number of optimiser steps before this one."""
        return self.records[0].step

    @property
    def phase(self) -> Phase:
        return self.records[0].phase

    @property
    def warmup(self) -> bool:
        return self.records[0].warmup

    @property
    def resumed(self) -> bool:
        """Whether it is the first of a run that resumed a checkpoint, so that earlier steps have no records here."""
        return self.before is None and self.number > 0

    @property
    def begin_ns(self) -> int:
        """The latest end of the previous step or evaluation; at the first, the earliest start."""
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
        """The earliest start of each stage: the end of its previous work; at the first, the earliest start of all."""
        if self.before is None:
            return (self.begin_ns,) * len(self.records)
        return tuple(record.end_ns for record in self.before)

    @property
    def loss(self) -> float | None:
        """The last stage's loss, or the mean over nodes that each report one; None without a loss."""
        known = [record.loss for record in self.records if record.loss is not None]
        return math.fsum(known) / len(known) if known else None

    @property
    def accuracy(self) -> float | None:
        """The accuracy reported by the evaluating node; None without an evaluation, or for text."""
        return next((record.accuracy for record in self.records if record.accuracy is not None), None)

    @property
    def tokens(self) -> int:
        return self.records[-1].tokens


def align(stages: Sequence[Sequence[StepRecord]]) -> list[PipelineStep]:
    """Return the steps and evaluations that every stage has finished, in order.

    `stages` holds the records of each stage, first stage first. Steps that only some stages finished, in an interrupted
    run, are omitted. ResultsError when the stages disagree about the order.
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
    """Return the training steps without warm-up and evaluations."""
    return [step for step in steps if step.phase == "train" and not step.warmup]


def _cut(seconds: Sequence[float]) -> int:
    """Return the most significant change point; 0: no significant change."""
    count = len(seconds)
    if count < 2:
        return 0
    _, place, times = np.unique(seconds, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times - 1) / 2)[place]  # equal values share the mean of their ranks
    before = np.arange(1, count)
    excess = np.cumsum(ranks)[:-1] - before * (count + 1) / 2
    cut = int(np.argmax(np.abs(excess) / np.sqrt(before * (count - before)))) + 1
    chance = _chance(abs(float(excess[cut - 1])), cut, times)
    return cut if chance * (count - 1) < SIGNIFICANCE else 0


def _chance(excess: float, first: int, times: Any) -> float:
    """Return the two-sided p-value of Mann and Whitney's test, as scipy.stats does, which takes two seconds to import.

    `excess`: by how much the ranks of the `first` values exceed their expected sum; `times`: how often each value
    occurs. Few values without ties have an exact distribution, others a normal one with a continuity correction. 1
    where all values are equal.
    """
    count = int(times.sum())
    few, many = sorted((first, count - first))
    if few > _FEW or len(times) < count:
        ties = float((times.astype(float) ** 3 - times).sum()) / (count * (count - 1))
        variance = few * many / 12 * (count + 1 - ties)
        return min(1.0, math.erfc((excess - 0.5) / math.sqrt(2 * variance))) if len(times) > 1 else 1.0
    ways = [1] + [0] * (few * many)  # by the number of pairs in which the larger value is among the few
    for size in range(1, few + 1):
        for pairs in range(few * many, many + size - 1, -1):
            ways[pairs] -= ways[pairs - many - size]
        for pairs in range(size, len(ways)):
            ways[pairs] += ways[pairs - size]
    return min(1.0, 2 * sum(ways[math.ceil(few * many / 2 + excess) :]) / math.comb(count, few))


def first_steady(seconds: Sequence[float]) -> int:
    """Return the number of measured steps before the steady state, at most half of them."""
    begin = 0
    while (cut := _cut(seconds[begin:])) and begin + cut <= len(seconds) / 2:
        begin += cut
    return begin


def steady(steps: Iterable[PipelineStep]) -> list[PipelineStep]:
    """Return the steps of a run that count for its times."""
    chosen = measured(steps)
    return chosen[first_steady([step.seconds for step in chosen]) :]


def over_cycles(values: Sequence[float], cycle: int) -> list[float]:
    """Return each value's mean over its cycle of `cycle` steps; an incomplete last cycle counts with the previous one.

    Workers that run ahead may wait only once per cycle, so no single step is typical.
    """
    if cycle == 1:
        return list(values)
    begins = list(range(0, max(1, len(values) - cycle + 1), cycle))
    parts = [values[begin:end] for begin, end in zip(begins, [*begins[1:], len(values)], strict=True)]
    return [math.fsum(part) / len(part) for part in parts for _ in part]


def durations_s(steps: Iterable[PipelineStep], cycle: int) -> list[float]:
    """Return the duration of each step in seconds of the lab, averaged over its cycle."""
    return over_cycles([step.seconds for step in steps], cycle)


def counted(steps: Sequence[PipelineStep], steady_from: int | None) -> list[PipelineStep]:
    """Return the steps of a run that count for its times; `steady_from` is the step from which a player has proved
    exact repetition, so that no estimate is needed.
    """
    if steady_from is not None and (chosen := [step for step in measured(steps) if step.number >= steady_from]):
        return chosen
    return steady(steps)

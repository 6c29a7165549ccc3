"""Time of training to a target loss.

Based on evaluations, not on training losses, whose batches differ. A validation curve may rise again, so the best loss
so far counts. The loss is interpolated linearly between the last evaluation above the target and the first at or below
it; if the first evaluation already meets the target, its time is an upper bound. Time counts training steps without
evaluations, in seconds of the emulated world. A run that never reaches the target has no time, only a duration of
training.

Over several runs (seeds and repeats) the interval is Student's t of the logarithms; for one run it is a bootstrap of
its steps up to the crossing, which covers the uncertainty of step times, not of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from testbed.metrics import statistics
from testbed.metrics.compare import RunSteps
from testbed.metrics.curves import LossPoint
from testbed.metrics.statistics import Interval, IntervalEstimate


class TargetCrossing(NamedTuple):
    """The point at which a curve reaches a target."""

    seconds: float
    steps: float


class TimeToLoss(NamedTuple):
    """The time to the target loss of one cell, over all its runs."""

    target: float
    """Nats per token."""
    seconds: IntervalEstimate | None
    """None unless every run reached the target, because the mean of the others would be biased."""
    steps: float | None
    """Optimiser steps up to the crossing, mean of the runs; None as above."""
    runs: int
    reached: int
    at_latest: bool
    """Whether a run met the target at its first evaluation, so that the time is an upper bound."""
    tried_s: float
    """Longest training of a run that did not reach the target; 0 if all did."""

    @property
    def words(self) -> str:
        """'not reached in 81.2 s', or '2 of 3 runs, the others not in 81.2 s'; empty where all did."""
        if self.reached == self.runs:
            return ""
        if self.reached == 0:
            return f"not reached in {self.tried_s:.4g} s"
        return f"{self.reached} of {self.runs} runs, the others not in {self.tried_s:.4g} s"


def crossing(points: Sequence[LossPoint], target: float) -> TargetCrossing | None:
    """Find where the best loss so far first reaches the target; None: nowhere.

    `points` are in the order of steps.
    """
    lowest = accumulate((point.loss for point in points), min)
    best = [point._replace(loss=loss) for point, loss in zip(points, lowest, strict=True)]
    if best and best[0].loss <= target:
        return TargetCrossing(best[0].seconds, best[0].step)
    for before, after in pairwise(best):
        if after.loss <= target:
            share = (before.loss - target) / (before.loss - after.loss)
            return TargetCrossing(
                before.seconds + share * (after.seconds - before.seconds),
                before.step + share * (after.step - before.step),
            )
    return None


def default_target(baseline: Sequence[RunSteps]) -> float | None:
    """Return the worst of the baseline's final validation losses, which all its runs reach; None without an
    evaluation.
    """
    return max((run.validation[-1].loss for run in baseline if run.validation), default=None)


def time_to_loss(runs: Sequence[RunSteps], target: float) -> TimeToLoss:
    """Return the time to a target loss of the runs of one cell (seeds and repeats), without resumed ones, which lack
    the times of their first steps.
    """
    runs = [run for run in runs if not run.resumed]
    crossings = [crossing(run.validation, target) for run in runs]
    there = [reached for reached in crossings if reached is not None]
    tried = max((_trained_s(run) for run, reached in zip(runs, crossings, strict=True) if reached is None), default=0.0)
    if not runs or len(there) < len(runs):
        return TimeToLoss(target, None, None, len(runs), len(there), False, tried)
    seconds = (
        _of_one(runs[0], there[0])
        if len(runs) == 1
        else statistics.of_ratios([reached.seconds for reached in there], "run")
    )
    steps = sum(reached.steps for reached in there) / len(there)
    at_latest = any(run.validation[0].loss <= target for run in runs)
    return TimeToLoss(target, seconds, steps, len(runs), len(there), at_latest, tried)


def _trained_s(run: RunSteps) -> float:
    return max((curve[-1].seconds for curve in (run.train, run.validation) if curve), default=0.0)


def _of_one(run: RunSteps, there: TargetCrossing) -> IntervalEstimate:
    """Resample the steps up to the crossing; their mean, times their number, is the time."""
    ends = [0.0, *(point.seconds for point in run.train)]
    spent = [after - before for before, after in pairwise(ends)][: math.ceil(there.steps)]
    if len(spent) < 2:
        return IntervalEstimate(there.seconds, None, 1, "1 run")
    mean = statistics.of_steps(spent, statistics.mean)
    interval = None if mean.interval is None else Interval(*(there.seconds * end / mean.value for end in mean.interval))
    return IntervalEstimate(there.seconds, interval, 1, f"1 run, {statistics.bootstrap_rule(spent)}")

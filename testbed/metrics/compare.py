"""Compare a codec with a baseline over the same network: its speed-up and its cost in loss.

Runs of the same seed are paired: the first run with the first, the second with the second. An interleaved sweep runs
these close together, so that a slowdown of the machine affects both. Runs without a partner are omitted. Steps are not
paired, because step 7 of two runs happened at different times.

Speed-up: the baseline's median step over the codec's. For one pair the steps of both runs are resampled independently;
for several pairs the interval is Student's t over the logarithms of the pairs' ratios. Loss: the difference in
validation loss vs the baseline, at the last step at which both were evaluated, one pair per seed (another run of a seed
has the same losses). One seed has no interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from testbed.metrics import statistics
from testbed.metrics.curves import LossPoint, loss_curve, validation_curve
from testbed.metrics.statistics import IntervalEstimate
from testbed.metrics.steps import align, counted, durations_s
from testbed.records import StepRecord
from testbed.spec import Cell

RUN_TO_RUN = 0.05
"""Run-to-run variation of a cell, which a single run's interval does not cover: 12 cells of the default sweep, run
twice in a row on a quiet machine with 2 cores, differed by 1.8 % in the median and by at most 4.1 %."""


class RunSteps(NamedTuple):
    """The data of a run used in a comparison. All times are seconds of the emulated world."""

    seed: int
    number: int
    """The k of the folder run-k."""
    seconds: tuple[float, ...]
    """The duration of each measured step in the steady state, in order."""
    train: tuple[LossPoint, ...]
    validation: tuple[LossPoint, ...]
    exact: bool = False
    """Whether another run would have the same times, as on the virtual clock."""

    @property
    def resumed(self) -> bool:
        """Whether its first steps have no records, because it resumed a checkpoint."""
        return bool(self.train) and self.train[0].step > 0


def run_steps(
    cell: Cell, number: int, stages: Sequence[Sequence[StepRecord]], steady_from: int | None = None
) -> RunSteps:
    """Extract the data for a comparison from the records of a successful run. `stages` and `steady_from` as for
    `summarise`.
    """
    chosen = counted(align(stages), steady_from)
    seconds = tuple(seconds / cell.compute.dilation for seconds in durations_s(chosen, cell.cycle))
    train, validation = tuple(loss_curve(cell, stages)), tuple(validation_curve(cell, stages))
    return RunSteps(
        cell.training.seed, number, seconds, train, validation, exact=cell.clock == "virtual" and not cell.by_chance
    )


class CodecComparison(NamedTuple):
    """A codec against a baseline."""

    speed_up: IntervalEstimate | None
    """Speed-up over the baseline; None without a pair of runs with measured steps."""
    separable: bool
    """Whether the interval of the speed-up excludes 1. A single pair must also differ by more than `RUN_TO_RUN`, except
    on the virtual clock, where runs are identical."""
    loss_difference: IntervalEstimate | None
    """Difference vs the baseline in nats per token; None without a seed that both evaluated at the same step."""
    loss_separable: bool
    """Whether its interval excludes 0; False for a single seed."""
    pairs: int


def paired(ours: Sequence[RunSteps], baseline: Sequence[RunSteps]) -> list[tuple[RunSteps, RunSteps]]:
    """Pair the k-th run of a seed with the k-th of the same seed, by seed."""
    by_seed: tuple[dict[int, list[RunSteps]], ...] = ({}, {})
    for side, runs in zip(by_seed, (ours, baseline), strict=True):
        for run in sorted(runs, key=lambda run: run.number):
            side.setdefault(run.seed, []).append(run)
    first, second = by_seed
    return [pair for seed in sorted(first) for pair in zip(first[seed], second.get(seed, ()), strict=False)]


def compare(ours: Sequence[RunSteps], baseline: Sequence[RunSteps]) -> CodecComparison:
    """Compare the runs of two codecs over the same network; their cells differ only in codec and seed."""
    pairs = paired(ours, baseline)
    speed_up, loss = _speed_up(pairs), _loss_difference(pairs)
    separable = speed_up is not None and speed_up.interval is not None and not speed_up.interval.holds(1.0)
    if speed_up is not None and speed_up.n == 1 and not all(run.exact for pair in pairs for run in pair):
        separable = separable and abs(speed_up.value - 1) > RUN_TO_RUN
    return CodecComparison(
        speed_up=speed_up,
        separable=separable,
        loss_difference=loss,
        loss_separable=loss is not None and loss.interval is not None and not loss.interval.holds(0.0),
        pairs=len(pairs),
    )


def _speed_up(pairs: Sequence[tuple[RunSteps, RunSteps]]) -> IntervalEstimate | None:
    timed = [(ours.seconds, base.seconds) for ours, base in pairs if ours.seconds and base.seconds]
    ratios = [float(np.median(base) / np.median(ours)) for ours, base in timed]
    if len(timed) != 1:
        return statistics.of_ratios(ratios, "pair") if timed else None
    [(ours, base)] = timed
    if min(len(ours), len(base)) < 2:
        return IntervalEstimate(ratios[0], None, 1, "1 pair of runs")
    interval = statistics.percentiles(statistics.resampled(base) / statistics.resampled(ours))
    return IntervalEstimate(ratios[0], interval, 1, "1 pair of runs, bootstrap of the steps of each")


def _loss_difference(pairs: Sequence[tuple[RunSteps, RunSteps]]) -> IntervalEstimate | None:
    differences: dict[int, float] = {}
    for ours, base in pairs:
        theirs = {point.step: point.loss for point in base.validation}
        common = [point for point in ours.validation if point.step in theirs]
        if common:
            differences.setdefault(ours.seed, common[-1].loss - theirs[common[-1].step])
    return statistics.of_differences(list(differences.values()), "seed") if differences else None

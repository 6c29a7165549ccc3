"""How sure a number is: medians, ratios and means with 95 % intervals.

The same records give the same interval, bit for bit.

For one run the interval is a percentile bootstrap of its steps (Efron 1979). Where successive steps resemble each
other, blocks of steps are drawn from the run laid in a circle (Politis and Romano 1992) instead of single steps. Such
an interval covers the spread within a run, not what another run of the same cell would measure.

For several runs each run is one observation, and the interval is Student's t over them. Runs are too few to be
bootstrapped: from three, a bootstrap cannot learn more than the smallest and the largest, which enclose the median
three times in four. For times and their ratios the observations are logarithms, so the value is a geometric mean.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_RESAMPLES = 4999
_AT_ONCE = 4_000_000
"""How many numbers a bootstrap holds in memory at a time."""
_NOT_BY_CHANCE = 1.645
"""One-sided 5 % point of the normal distribution."""

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Maps each row of a matrix to one number."""


class Interval(NamedTuple):
    """An interval that encloses the true value 95 times in 100."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class IntervalEstimate(NamedTuple):
    """A number and how sure it is."""

    value: float
    interval: Interval | None
    """None for a single step or a single observation, which tell too little."""
    n: int
    """The number of observations: steps of one run, or runs, pairs or seeds."""
    rule: str
    """What the observations are and how the interval was computed, for a caption."""


def middle(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each row."""
    return np.asarray(np.median(rows, axis=-1))


def mean(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each row."""
    return np.asarray(np.mean(rows, axis=-1))


def autocorrelation(values: Sequence[float]) -> float:
    """Return how much successive values resemble each other, from -1 to 1; 0 where all are equal.

    It is the correlation of their ranks (of von Neumann's ratio test, after Bartels 1982), so that single outliers do
    not hide it.
    """
    from scipy.stats import rankdata  # takes half a second, which only commands that compute should wait

    ranks = rankdata(values)
    ranks -= ranks.mean()
    total = float(ranks @ ranks)
    return float(ranks[1:] @ ranks[:-1]) / total if total else 0.0


def block_length(values: Sequence[float]) -> int:
    """Return how many steps a bootstrap of these values must draw together.

    That is n^(1/3) (Hall, Horowitz and Jing 1995) where their autocorrelation exceeds what chance gives one series in
    twenty, otherwise 1.
    """
    count = len(values)
    return math.ceil(count ** (1 / 3)) if autocorrelation(values) > _NOT_BY_CHANCE / math.sqrt(count) else 1


def resampled(values: Sequence[float], statistic: Statistic = middle) -> NDArray[np.float64]:
    """Return the statistic of 4999 series that the same source could have given as well. Needs at least one value."""
    series = np.asarray(values, dtype=np.float64)
    length = block_length(values)
    # The seed follows from the content, so that the same records give the same interval.
    seed = int.from_bytes(hashlib.blake2b(series.tobytes(), digest_size=8).digest(), "big")
    begins = np.random.default_rng(seed).integers(len(series), size=(_RESAMPLES, -(-len(series) // length)))
    statistics = []
    for part in np.array_split(begins, -(-begins.size * length // _AT_ONCE)):
        drawn = (part[..., None] + np.arange(length)).reshape(len(part), -1) % len(series)
        statistics.append(statistic(series[drawn[:, : len(series)]]))
    return np.concatenate(statistics)


def percentiles(values: NDArray[np.float64]) -> Interval:
    """Return the interval of the middle 95 % of the values."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(float(low), float(high))


def of_steps(values: Sequence[float], statistic: Statistic = middle) -> IntervalEstimate:
    """Estimate a statistic, by default the median, of one run's steps. Needs at least one value."""
    value, count = float(statistic(np.asarray(values, dtype=np.float64)[None])[0]), len(values)
    if count == 1:
        return IntervalEstimate(value, None, 1, "1 step of one run")
    interval = percentiles(resampled(values, statistic))
    return IntervalEstimate(value, interval, count, f"{count} steps of one run, {bootstrap_rule(values)}")


def bootstrap_rule(values: Sequence[float]) -> str:
    """Say how `resampled` treats these values."""
    length = block_length(values)
    return "bootstrap of steps" if length == 1 else f"bootstrap of blocks of {length} steps"


def of_differences(values: Sequence[float], what: str) -> IntervalEstimate:
    """Estimate the mean of independent observations, such as differences between paired seeds.

    Needs at least one value.
    """
    centre, count = float(np.mean(values)), len(values)
    if count == 1:
        return IntervalEstimate(centre, None, 1, f"1 {what}")
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return IntervalEstimate(centre, Interval(centre - half, centre + half), count, f"{count} {what}s, Student's t")


def of_ratios(values: Sequence[float], what: str) -> IntervalEstimate:
    """Estimate the geometric mean of independent positive observations, such as durations of runs or ratios."""
    logs = of_differences([math.log(value) for value in values], what)
    interval = None if logs.interval is None else Interval(*(math.exp(end) for end in logs.interval))
    rule = logs.rule if logs.interval is None else f"geometric mean of {logs.rule} of the logarithms"
    return IntervalEstimate(math.exp(logs.value), interval, logs.n, rule)


def combined_step_time(runs: Sequence[Sequence[float]]) -> IntervalEstimate | None:
    """Estimate a cell's step in seconds: its one run's median, or the geometric mean of its runs' medians.

    None without steps.
    """
    timed = [run for run in runs if len(run)]
    if len(timed) < 2:
        return of_steps(timed[0]) if timed else None
    return of_ratios([float(np.median(run)) for run in timed], "run")

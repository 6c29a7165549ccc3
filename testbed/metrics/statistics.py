"""How sure a number is: medians, ratios and means with 95 % intervals. The same records give the same interval, to the last bit.

One run: a percentile bootstrap of its steps (Efron 1979). Where successive steps resemble each other, blocks of steps are drawn
from the run laid in a circle (Politis and Romano 1992) instead of single steps. Such an interval knows the spread inside a run,
not what another run of the same cell would find.

Several runs: each run is one observation, and the interval is Student's t over them. Runs are too few to be bootstrapped: of
three, a bootstrap cannot know more than the smallest and the largest, which hold the median three times in four. For times and
their ratios the observations are logarithms, so the value is a geometric mean.
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
"""Numbers that a bootstrap has in memory at a time."""
_NOT_BY_CHANCE = 1.645
"""One-sided 5 % point of the normal distribution."""

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Of each row of a matrix, one number."""


class Interval(NamedTuple):
    """Holds the true value 95 times in 100."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class Estimate(NamedTuple):
    """A number and how sure it is."""

    value: float
    interval: Interval | None
    """None where there is too little to tell: a single step, or a single observation."""
    n: int
    """Observations: steps of one run, or runs, pairs or seeds."""
    rule: str
    """What the observations are and how the interval was had, for a caption."""


def middle(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of each row."""
    return np.asarray(np.median(rows, axis=-1))


def mean(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of each row."""
    return np.asarray(np.mean(rows, axis=-1))


def autocorrelation(values: Sequence[float]) -> float:
    """How much successive values resemble each other, -1..1: the correlation of their ranks (von Neumann's ratio test's, after
    Bartels 1982), so that single outliers do not hide it. 0 where all are equal.
    """
    from scipy.stats import rankdata  # half a second, which commands that compute nothing need not wait

    ranks = rankdata(values)
    ranks -= ranks.mean()
    total = float(ranks @ ranks)
    return float(ranks[1:] @ ranks[:-1]) / total if total else 0.0


def block_length(values: Sequence[float]) -> int:
    """Steps that a bootstrap of these must draw together: n^(1/3) (Hall, Horowitz and Jing 1995) where their autocorrelation is
    more than chance gives one series in twenty, else 1.
    """
    count = len(values)
    return math.ceil(count ** (1 / 3)) if autocorrelation(values) > _NOT_BY_CHANCE / math.sqrt(count) else 1


def resampled(values: Sequence[float], statistic: Statistic = middle) -> NDArray[np.float64]:
    """The statistic of 4999 series that the same source could have given as well. At least one value."""
    series = np.asarray(values, dtype=np.float64)
    length = block_length(values)
    # Of the content: what is compared with itself later must find the same numbers.
    seed = int.from_bytes(hashlib.blake2b(series.tobytes(), digest_size=8).digest(), "big")
    begins = np.random.default_rng(seed).integers(len(series), size=(_RESAMPLES, -(-len(series) // length)))
    found = []
    for part in np.array_split(begins, -(-begins.size * length // _AT_ONCE)):
        drawn = (part[..., None] + np.arange(length)).reshape(len(part), -1) % len(series)
        found.append(statistic(series[drawn[:, : len(series)]]))
    return np.concatenate(found)


def percentiles(values: NDArray[np.float64]) -> Interval:
    """What holds the middle 95 % of them."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(float(low), float(high))


def of_steps(values: Sequence[float], statistic: Statistic = middle) -> Estimate:
    """A statistic, else the median, of one run's steps. At least one value."""
    value, count = float(statistic(np.asarray(values, dtype=np.float64)[None])[0]), len(values)
    if count == 1:
        return Estimate(value, None, 1, "1 step of one run")
    interval = percentiles(resampled(values, statistic))
    return Estimate(value, interval, count, f"{count} steps of one run, {bootstrap_rule(values)}")


def bootstrap_rule(values: Sequence[float]) -> str:
    """How `resampled` treats these, in words."""
    length = block_length(values)
    return "bootstrap of steps" if length == 1 else f"bootstrap of blocks of {length} steps"


def of_differences(values: Sequence[float], what: str) -> Estimate:
    """The mean of independent observations, for example differences between paired seeds. At least one value."""
    centre, count = float(np.mean(values)), len(values)
    if count == 1:
        return Estimate(centre, None, 1, f"1 {what}")
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(centre, Interval(centre - half, centre + half), count, f"{count} {what}s, Student's t")


def of_ratios(values: Sequence[float], what: str) -> Estimate:
    """The geometric mean of independent positive observations: durations of runs, or ratios of pairs of runs."""
    logs = of_differences([math.log(value) for value in values], what)
    interval = None if logs.interval is None else Interval(*(math.exp(end) for end in logs.interval))
    rule = logs.rule if logs.interval is None else f"geometric mean of {logs.rule} of the logarithms"
    return Estimate(math.exp(logs.value), interval, logs.n, rule)


def step_time(runs: Sequence[Sequence[float]]) -> Estimate | None:
    """The median step of a cell in seconds: of its one run, or the geometric mean of its runs' medians. None without any step."""
    found = [run for run in runs if len(run)]
    if len(found) < 2:
        return of_steps(found[0]) if found else None
    return of_ratios([float(np.median(run)) for run in found], "run")

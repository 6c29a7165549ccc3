"""Medians, ratios and means with 95 % confidence intervals.

The same records give the same interval, bit for bit.

For one run the interval is a percentile bootstrap of its steps (Efron 1979). Where successive steps are correlated,
blocks of steps are drawn from the run, treated as circular (Politis and Romano 1992), instead of single steps. Such an
interval covers the spread within a run, not the difference to another run of the same cell.

For several runs each run is one observation, and the interval is Student's t over them. Runs are too few to bootstrap:
with three, a bootstrap yields no more than the smallest and the largest, which enclose the median three times in four.
For times and their ratios the observations are logarithms, so the value is a geometric mean.

Two arms that share seeds are compared by the differences of each seed's pair (Student's t, n - 1 degrees of freedom),
whatever their correlation; arms without a common seed as two samples whose variances may differ (Welch 1947). Choosing
the narrower of both, as before November 2026, made 7 errors in 100 instead of 5 (tests/metrics/error_rates.py).

If seeds are added where a first look left a claim open, each look is another chance of an error: two looks at 5 % make
up to 11 errors in 100. So `looks` share the 5 %: with two, every interval has 97.5 % (Bonferroni).

The minimum detectable effect of a comparison is the true difference that a two-sided t-test at that error detects in
four of five repetitions (`detectable`).
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_RESAMPLES = 4999
_AT_ONCE = 4_000_000
"""Numbers that a bootstrap holds in memory at a time."""
POWER = 0.8
"""Probability of detecting a minimum detectable effect."""
_PARTS = 500
"""Number of equally likely parts into which a distribution is divided to average over it."""
_NOT_BY_CHANCE = 1.645
"""One-sided 5 % point of the normal distribution."""

Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Maps each row of a matrix to one number."""


class Interval(NamedTuple):
    """An interval that contains the true value 95 times in 100."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


class IntervalEstimate(NamedTuple):
    """A number with its confidence interval."""

    value: float
    interval: Interval | None
    """None for a single step or a single observation."""
    n: int
    """The number of observations: steps of one run, or runs, pairs or seeds."""
    rule: str
    """Kind of observations and method of the interval, for a caption."""


def middle(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median of each row."""
    return np.asarray(np.median(rows, axis=-1))


def mean(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of each row."""
    return np.asarray(np.mean(rows, axis=-1))


def autocorrelation(values: Sequence[float]) -> float:
    """Return the correlation of successive values, from -1 to 1; 0 where all are equal.

    It is a rank correlation (von Neumann's ratio test, after Bartels 1982), so that single outliers do not hide it.
    """
    _, places, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]  # equal values have the mean of their ranks
    ranks -= ranks.mean()
    total = float(ranks @ ranks)
    return float(ranks[1:] @ ranks[:-1]) / total if total else 0.0


def block_length(values: Sequence[float]) -> int:
    """Return the block length for a bootstrap of these values.

    It is n^(1/3) (Hall, Horowitz and Jing 1995) where their autocorrelation exceeds the one-sided 5 % point, otherwise
    1; but at least the length of each run of equal values, as of steps that have their cycle's mean
    (`steps.over_cycles`), because only the runs are independent.
    """
    count, least = len(values), min(len(list(run)) for _, run in itertools.groupby(values))
    if least == count:  # a constant
        return 1
    by_chance = autocorrelation(values) <= _NOT_BY_CHANCE / math.sqrt(count)
    return max(least, 1 if by_chance else math.ceil(count ** (1 / 3)))


def resampled(values: Sequence[float], statistic: Statistic = middle) -> NDArray[np.float64]:
    """Return the statistic of 4999 resampled series. Needs at least one value."""
    series = np.asarray(values, dtype=np.float64)
    length = block_length(values)
    # Seeded by the content, so that the same records give the same interval.
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
    """Describe how `resampled` treats these values."""
    length = block_length(values)
    return "bootstrap of steps" if length == 1 else f"bootstrap of blocks of {length} steps"


def of_differences(values: Sequence[float], what: str, looks: int = 1) -> IntervalEstimate:
    """Estimate the mean of independent observations, such as differences between paired seeds.

    Needs at least one value.
    """
    centre, count = float(np.mean(values)), len(values)
    if count == 1:
        return IntervalEstimate(centre, None, 1, f"1 {what}")
    half = quantile_of_t(count - 1, looks) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return IntervalEstimate(centre, Interval(centre - half, centre + half), count, f"{count} {what}s, Student's t")


class Difference(NamedTuple):
    """The difference between the means of two arms, and the resolution of the comparison."""

    estimate: IntervalEstimate
    paired: bool
    """Whether it is based on paired differences, not on two samples."""
    error: float | None
    """Standard error of the difference; None where there is no interval."""
    freedom: float
    """Degrees of freedom of the interval."""
    looks: int = 1
    """Number of looks at growing data that share the 5 % of the interval."""

    @property
    def detectable(self) -> float | None:
        """The smallest true difference detected with 80 % power; None without an interval."""
        return None if self.error is None else detectable(self.error, self.freedom, self.looks)


def difference(ours: Mapping[Any, float], base: Mapping[Any, float], what: str = "seed", looks: int = 1) -> Difference:
    """Estimate the difference of two arms' means, ours minus the baseline's; observations are keyed by seed, or by
    another pairing.

    The module's docstring explains pairing and looks. ValueError without a common seed or two observations of each arm.
    """
    common = sorted(ours.keys() & base.keys())
    if not common:
        return _of_samples(list(ours.values()), list(base.values()), what, looks)
    differences = [ours[seed] - base[seed] for seed in common]
    estimate = of_differences(differences, what, looks)
    error = None if len(common) < 2 else float(np.std(differences, ddof=1)) / math.sqrt(len(common))
    rule = f"{estimate.rule} of paired differences" if error is not None else estimate.rule
    rule += f", one of {looks} looks" * (looks > 1)
    return Difference(estimate._replace(rule=rule), True, error, len(common) - 1, looks)


def _of_samples(ours: Sequence[float], base: Sequence[float], what: str, looks: int) -> Difference:
    """Compare two samples with Welch's interval (Biometrika 34, 1947)."""
    if min(len(ours), len(base)) < 2:
        raise ValueError(f"cannot compare: no common {what}, and too few of one arm: {len(ours)}, {len(base)}")
    parts = [float(np.var(sample, ddof=1)) / len(sample) for sample in (ours, base)]
    error = math.sqrt(sum(parts))
    weights = [part**2 / (len(sample) - 1) for part, sample in zip(parts, (ours, base), strict=True)]
    freedom = sum(parts) ** 2 / sum(weights) if sum(weights) else float(len(ours) + len(base) - 2)
    centre, half = float(np.mean(ours) - np.mean(base)), quantile_of_t(freedom, looks) * error
    estimate = IntervalEstimate(
        centre,
        Interval(centre - half, centre + half),
        min(len(ours), len(base)),
        f"{len(ours)} and {len(base)} {what}s, Welch's t, not paired",
    )
    return Difference(estimate, False, error, freedom, looks)


@functools.lru_cache(maxsize=1024)
def quantile_of_t(freedom: float, looks: int = 1) -> float:
    """Return the half-width of a 95 % interval, or of one of several looks' intervals, in standard errors."""
    from scipy.special import stdtrit  # scipy.stats takes a second to import

    return float(stdtrit(freedom, 1 - (1 - CONFIDENCE) / looks / 2))


def detectable(error: float, freedom: float, looks: int = 1) -> float:
    """Return the minimum detectable effect of a comparison, in the unit of its standard error.

    It is d with P(|T| > t_crit) = 0.8, where T has the noncentral t distribution with `freedom` degrees of freedom and
    noncentrality d / error, and t_crit is that of the interval: the usual power of a t-test (O'Brien and Lohr 1984, as
    SAS computes it), about (t_crit + t_0.8) x error. Assumes that the observed error is the true one.
    """
    return error * _shift(round(freedom, 3), looks)


@functools.lru_cache(maxsize=4096)
def _shift(freedom: float, looks: int) -> float:
    from scipy.special import gammaincinv, ndtr

    # The noncentral t is (Z + shift) / S, S the root of chi2 / freedom: the mean over S of a normal's two tails.
    # scipy's nct is NaN where few degrees of freedom lead to extreme quantiles.
    middles = (np.arange(_PARTS) + 0.5) / _PARTS
    limits = quantile_of_t(freedom, looks) * np.sqrt(2 * gammaincinv(freedom / 2, middles) / freedom)
    low, high = 0.0, 4 * quantile_of_t(freedom, looks)
    while high - low > 1e-6 * high:
        shift = (low + high) / 2
        power = float(np.mean(ndtr(shift - limits) + ndtr(-shift - limits)))
        low, high = (shift, high) if power < POWER else (low, shift)
    return high


def seeds_needed(error: float, pairs: int, distance: float, most: int = 10_000, looks: int = 1) -> int | None:
    """Return the number of pairs of seeds that detect a true difference of `distance` with 80 % power, given that
    `pairs` of them had this standard error; None beyond `most`.
    """
    if distance == 0 or pairs < 2:
        return None
    counts, spread = range(2, most + 1), error * math.sqrt(pairs)
    at = bisect.bisect(counts, False, key=lambda n: detectable(spread / math.sqrt(n), n - 1, looks) <= abs(distance))
    return counts[at] if at < len(counts) else None


def of_ratios(values: Sequence[float], what: str, looks: int = 1) -> IntervalEstimate:
    """Estimate the geometric mean of independent positive observations, such as durations of runs or ratios."""
    logs = of_differences([math.log(value) for value in values], what, looks)
    interval = None if logs.interval is None else Interval(*(math.exp(end) for end in logs.interval))
    rule = logs.rule if logs.interval is None else f"geometric mean of {logs.rule} of the logarithms"
    return IntervalEstimate(math.exp(logs.value), interval, logs.n, rule)


def combined_step_time(runs: Sequence[Sequence[float]]) -> IntervalEstimate | None:
    """Estimate a cell's step in seconds: the median of its single run, or the geometric mean of its runs' medians.

    None without steps.
    """
    timed = [run for run in runs if len(run)]
    if len(timed) < 2:
        return of_steps(timed[0]) if timed else None
    return of_ratios([float(np.median(run)) for run in timed], "run")

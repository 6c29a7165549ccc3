"""What a comparison shows: its number, its interval, what it could have shown, and a verdict against a stated effect.

Three measures: the validation loss after equal tokens (a difference in nats, ours less the baseline's), the step time
and the time to a loss (ratios, the baseline's over ours, by their logarithms). A claim is a bound on one of them: the
loss at most so many nats above the baseline's, the step at least so many times as fast.

holds           the whole 95 % interval is on the claim's side of the effect
fails           the whole interval is on the other side
not resolved    it is on both; `detectable` says how far from the effect the truth would have had to be, to be found
                4 times in 5 (`statistics.detectable`)

Step times on the virtual clock over links without chance are exact: their interval is the number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from testbed.metrics import statistics
from testbed.metrics.statistics import Interval, IntervalEstimate

Measure = Literal["loss", "speed_up", "time_to_loss"]
Verdict = Literal["holds", "fails", "not resolved"]
MEASURES: tuple[Measure, ...] = ("loss", "speed_up", "time_to_loss")
Observations = Mapping[Any, float]
"""One number for each seed, or for each run, by what pairs it with the other arm's."""
_EXACT = 1e-9
"""Relative; what ratios of equal times differ by is the last bit of a float."""


class Judgement(NamedTuple):
    """One comparison. Ratios and their ends are factors, `detectable` of a ratio too."""

    measure: Measure
    value: float
    interval: Interval | None
    """None: a single seed, whose spread is not known."""
    exact: bool
    paired: bool
    n: int
    rule: str
    """How the interval was computed."""
    detectable: float | None
    """How far from the effect the truth would have had to be to be found 4 times in 5; None where not known."""
    effect: float | None
    """What the claim says; None: no claim."""
    verdict: Verdict | None
    seeds: int | None
    """Where not resolved: how many pairs of seeds would resolve it, were the truth what was seen."""
    error: float | None = None
    """Standard error of the difference, or of the ratio's logarithm; None where there is no interval, or no chance."""

    def seeds_for(self, size: float) -> int | None:
        """Return how many pairs of seeds would find a true effect of `size` (nats, or a factor) 4 times in 5; None
        where the spread is not known, or they are too many to count.
        """
        if self.error is None:
            return None
        return statistics.seeds_needed(self.error, self.n, abs(size) if self.measure == "loss" else math.log(size))

    @property
    def words(self) -> str:
        """'holds', 'fails', 'not resolved (would have shown 0.12)', or, without a claim, what would have shown."""
        unit = "" if self.measure == "loss" else "x"
        shown = "" if self.detectable is None else f"would have shown {self.detectable:.3g}{unit}"
        if self.verdict is None:
            return shown
        if self.verdict != "not resolved":
            return self.verdict
        return f"not resolved ({shown or 'one seed'})"

    @property
    def interval_words(self) -> str:
        """'exact', 'a to b', or 'one seed'."""
        if self.exact:
            return "exact"
        if self.interval is None:
            return "one seed"
        form = "{:+.4f} to {:+.4f}" if self.measure == "loss" else "{:.3f} to {:.3f}"
        return form.format(*self.interval)


def judge(
    measure: Measure, ours: Observations, base: Observations, effect: float | None = None, *, exact: bool = False
) -> Judgement:
    """Compare two arms: losses in nats, or seconds. `exact`: another run would have the same times.

    ValueError where they have nothing in common and too few observations to be two samples.
    """
    if measure == "loss":
        found = statistics.difference(ours, base)
        value, interval, detectable = found.estimate.value, found.estimate.interval, found.detectable
    else:
        slower, faster = ({key: math.log(seconds) for key, seconds in side.items()} for side in (base, ours))
        found = statistics.difference(slower, faster)
        value, ends = math.exp(found.estimate.value), found.estimate.interval
        interval = None if ends is None else Interval(math.exp(ends.low), math.exp(ends.high))
        detectable = None if found.detectable is None else math.exp(found.detectable)
    if exact and measure == "speed_up" and (interval is None or interval.high - interval.low <= _EXACT * value):
        rule = "exact: the virtual clock gives every run the same times"
        verdict = None if effect is None else _verdict(measure, Interval(value, value), effect)
        at = Interval(value, value)
        return Judgement(measure, value, at, True, True, found.estimate.n, rule, None, effect, verdict, None)
    return _judgement(measure, found._replace(estimate=found.estimate._replace(value=value, interval=interval)),
                      detectable, effect)  # fmt: skip


def judge_ratio(of: IntervalEstimate, effect: float) -> Judgement:
    """Judge that a factor is at least `effect`; `of` is one number per seed, by `statistics.of_ratios`."""
    error = None
    if of.interval is not None:
        error = math.log(of.interval.high / of.interval.low) / 2 / statistics.quantile_of_t(of.n - 1)
    found = statistics.Difference(of, True, error, of.n - 1)
    return _judgement("speed_up", found, None if found.detectable is None else math.exp(found.detectable), effect)


def _judgement(
    measure: Measure, found: statistics.Difference, detectable: float | None, effect: float | None
) -> Judgement:
    """Judge a difference whose estimate is already a factor, where the measure is one."""
    value, interval, n, rule = found.estimate
    verdict, seeds = None if effect is None else _verdict(measure, interval, effect), None
    if verdict == "not resolved" and effect is not None and found.error is not None:
        distance = value - effect if measure == "loss" else math.log(value / effect)
        seeds = statistics.seeds_needed(found.error, n, distance)
    return Judgement(
        measure, value, interval, False, found.paired, n, rule, detectable, effect, verdict, seeds, found.error
    )


def _verdict(measure: Measure, interval: Interval | None, effect: float) -> Verdict:
    if interval is None:
        return "not resolved"
    low, high = interval
    holds, fails = (high <= effect, low > effect) if measure == "loss" else (low >= effect, high < effect)
    return "holds" if holds else "fails" if fails else "not resolved"

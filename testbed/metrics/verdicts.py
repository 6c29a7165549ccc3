"""The result of a comparison: its value, interval and resolution, and a verdict on a claimed effect.

Three measures: the validation loss after equal tokens (a difference in nats, ours less the baseline's), the step time
and the time to a loss (ratios, the baseline's over ours, by their logarithms). A claim is a bound on one of them: the
loss at most x nats above the baseline's, the step at least x times as fast.

holds           the whole 95 % interval is on the claim's side of the effect
fails           the whole interval is on the other side
not resolved    it is on both; `detectable` is the distance from the effect that is detected with 80 % power
                (`statistics.detectable`)

If seeds were added after a first look, the interval is that of one of several `looks`, which share the 5 %.

Step times on the virtual clock over deterministic links are exact: their interval is the value itself.
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
"""One number per seed or run, keyed by its pairing with the other arm."""
_EXACT = 1e-9
"""Relative tolerance for ratios of equal times, which differ only in the last bits of a float."""


class Judgement(NamedTuple):
    """One comparison. For ratios, value, interval and `detectable` are factors."""

    measure: Measure
    value: float
    interval: Interval | None
    """None for a single seed, whose spread is unknown."""
    exact: bool
    paired: bool
    n: int
    rule: str
    """Method of the interval."""
    detectable: float | None
    """Distance from the effect that is detected with 80 % power; None if unknown."""
    effect: float | None
    """The claimed effect; None without a claim."""
    verdict: Verdict | None
    seeds: int | None
    """If not resolved: number of pairs of seeds that would resolve it, were the observed value the true one."""
    error: float | None = None
    """Standard error of the difference, or of the ratio's logarithm; None without an interval, or if exact."""
    looks: int = 1
    """Number of looks at growing data that share the 5 % of the interval."""

    def seeds_for(self, size: float) -> int | None:
        """Return the number of pairs of seeds that detect a true effect of `size` (nats, or a factor) with 80 % power;
        None if the spread is unknown, or beyond the limit of counting.
        """
        if self.error is None:
            return None
        distance = abs(size) if self.measure == "loss" else math.log(size)
        return statistics.seeds_needed(self.error, self.n, distance, looks=self.looks)

    @property
    def confidence_words(self) -> str:
        """The interval's confidence: '95 %', or '97.5 %, 2 looks'."""
        text = f"{100 - 100 * (1 - statistics.CONFIDENCE) / self.looks:.3g} %"
        return text if self.looks == 1 else f"{text}, {self.looks} looks"

    @property
    def words(self) -> str:
        """'holds', 'fails', 'not resolved (can detect 0.12)', or, without a claim, the detectable effect."""
        unit = "" if self.measure == "loss" else "x"
        shown = "" if self.detectable is None else f"can detect {self.detectable:.3g}{unit}"
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
    measure: Measure,
    ours: Observations,
    base: Observations,
    effect: float | None = None,
    *,
    exact: bool = False,
    looks: int = 1,
) -> Judgement:
    """Compare two arms: losses in nats, or seconds. `exact`: times repeat exactly from run to run. `looks`: how often
    the verdict was sought at growing data, this time included.

    ValueError without common keys, and with too few observations for two samples.
    """
    if measure == "loss":
        gap = statistics.difference(ours, base, looks=looks)
        value, interval, detectable = gap.estimate.value, gap.estimate.interval, gap.detectable
    else:
        slower, faster = ({key: math.log(seconds) for key, seconds in side.items()} for side in (base, ours))
        gap = statistics.difference(slower, faster, looks=looks)
        value, ends = math.exp(gap.estimate.value), gap.estimate.interval
        interval = None if ends is None else Interval(math.exp(ends.low), math.exp(ends.high))
        detectable = None if gap.detectable is None else math.exp(gap.detectable)
    if exact and measure == "speed_up" and (interval is None or interval.high - interval.low <= _EXACT * value):
        rule = "exact: every run on the virtual clock has the same times"
        verdict = None if effect is None else _verdict(measure, Interval(value, value), effect)
        at = Interval(value, value)
        return Judgement(measure, value, at, True, True, gap.estimate.n, rule, None, effect, verdict, None)
    return _judgement(measure, gap._replace(estimate=gap.estimate._replace(value=value, interval=interval)),
                      detectable, effect)  # fmt: skip


def judge_ratio(of: IntervalEstimate, effect: float) -> Judgement:
    """Judge whether a factor is at least `effect`; `of` has one number per seed, for `statistics.of_ratios`."""
    error = None
    if of.interval is not None:
        error = math.log(of.interval.high / of.interval.low) / 2 / statistics.quantile_of_t(of.n - 1)
    gap = statistics.Difference(of, True, error, of.n - 1)
    return _judgement("speed_up", gap, None if gap.detectable is None else math.exp(gap.detectable), effect)


def _judgement(
    measure: Measure, gap: statistics.Difference, detectable: float | None, effect: float | None
) -> Judgement:
    """Judge a difference; for a ratio its estimate is already a factor."""
    value, interval, n, rule = gap.estimate
    verdict, seeds = None if effect is None else _verdict(measure, interval, effect), None
    if verdict == "not resolved" and effect is not None and gap.error is not None:
        distance = value - effect if measure == "loss" else math.log(value / effect)
        seeds = statistics.seeds_needed(gap.error, n, distance, looks=gap.looks)
    return Judgement(
        measure, value, interval, False, gap.paired, n, rule, detectable, effect, verdict, seeds, gap.error, gap.looks
    )


def _verdict(measure: Measure, interval: Interval | None, effect: float) -> Verdict:
    if interval is None:
        return "not resolved"
    low, high = interval
    holds, fails = (high <= effect, low > effect) if measure == "loss" else (low >= effect, high < effect)
    return "holds" if holds else "fails" if fails else "not resolved"

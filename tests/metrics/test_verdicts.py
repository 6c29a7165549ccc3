"""Verdicts: what an interval, an effect and the number of seeds make of a claim."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from testbed.metrics import statistics
from testbed.metrics.verdicts import Measure, judge, judge_ratio
from testbed.results import ClaimSpec, CompareSpec

losses = st.dictionaries(st.integers(0, 9), st.floats(1, 9), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(losses, losses, st.floats(-3, 3), st.sampled_from(["loss", "speed_up", "time_to_loss"]))
def test_a_verdict_follows_from_the_interval_and_the_effect(
    ours: dict[int, float], base: dict[int, float], effect: float, measure: Measure
) -> None:
    effect = effect if measure == "loss" else math.exp(effect)
    if not ours.keys() & base.keys() and min(len(ours), len(base)) < 2:
        with pytest.raises(ValueError, match="no common"):
            judge(measure, ours, base, effect)
        return
    found = judge(measure, ours, base, effect)
    if found.interval is None:
        assert (found.verdict, found.detectable) == ("not resolved", None)
        assert found.words == "not resolved (one seed)"
        return
    low, high = found.interval
    assert low <= found.value <= high
    beyond = high <= effect if measure == "loss" else low >= effect
    against = low > effect if measure == "loss" else high < effect
    assert found.verdict == ("holds" if beyond else "fails" if against else "not resolved")
    assert found.detectable is not None
    if found.verdict == "not resolved":
        assert f"can detect {found.detectable:.3g}" in found.words
    assert judge(measure, ours, base).verdict is None


def test_a_claim_against_its_own_opposite_is_never_upheld_twice() -> None:
    """'At most 0.1 worse' and 'at most 0.1 better' are both upheld only where the interval lies between."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        ours, base = (dict(enumerate(rng.normal(5, 0.2, 5))) for _ in range(2))
        one, other = judge("loss", ours, base, 0.1), judge("loss", base, ours, 0.1)
        assert one.value == pytest.approx(-other.value)
        if one.verdict == other.verdict == "holds":
            assert -0.1 <= one.interval.low <= one.interval.high <= 0.1
        assert {one.verdict, other.verdict} != {"fails"}


@pytest.mark.slow
def test_a_wrong_claim_is_upheld_no_more_often_than_the_interval_says() -> None:
    """The truth lies just beyond the effect: one interval in 40 may say otherwise."""
    rng = np.random.default_rng(1)
    upheld = [
        judge("loss", dict(enumerate(rng.normal(0.1001, 0.3, 5))), dict(enumerate(rng.normal(0, 0.3, 5))), 0.1).verdict
        for _ in range(2000)
    ]
    assert upheld.count("holds") / len(upheld) < 0.036


def test_what_the_clock_makes_exact_has_no_doubt_and_what_differs_by_seed_keeps_it() -> None:
    same = judge("speed_up", {0: 0.5, 1: 0.5, 2: 0.5}, {0: 1.0, 1: 1.0, 2: 1.0}, 1.9, exact=True)
    assert (same.value, same.exact, same.verdict, same.interval_words) == (2.0, True, "holds", "exact")
    assert judge("speed_up", {0: 0.5}, {0: 1.0}, 2.1, exact=True).verdict == "fails"
    drawn = judge("speed_up", {0: 0.5, 1: 0.6, 2: 0.5}, {0: 1.0, 1: 1.0, 2: 1.1}, 1.1, exact=True)
    assert not drawn.exact
    assert drawn.interval.low < drawn.interval.high
    assert not judge("loss", {0: 4.0}, {0: 4.1}, 0.1, exact=True).exact  # a seed's loss is a draw on any clock


def test_so_many_seeds_would_resolve_what_was_seen() -> None:
    ours, base = dict(enumerate([5.1, 4.9, 5.0, 5.2])), dict(enumerate([5.0, 5.0, 4.95, 5.05]))
    found = judge("loss", ours, base, 0.2)
    assert found.verdict == "not resolved"
    assert found.seeds > 4
    assert judge("loss", ours, base, 5.0).seeds is None  # resolved


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"loss": 0.1, "speed_up": 2.0}, "states loss and speed_up; state exactly one of"),
        ({}, "states no effect; state exactly one of"),
        ({"speed_up": -1.0}, "greater than 0"),
    ],
)
def test_a_claim_has_one_effect(table: dict[str, float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ClaimSpec(name="it is so", ours={"codec": "int8"}, baseline={"codec": "fp32"}, **table)  # type: ignore[arg-type]


def test_a_time_to_a_loss_needs_the_loss_to_be_stated() -> None:
    claim = ClaimSpec(name="x", ours={"codec": "int8"}, baseline={"codec": "fp32"}, time_to_loss=1.1)
    for table in ({"time_to_loss": 1.1}, {"claims": (claim,)}):
        with pytest.raises(ValidationError, match="without target_loss"):
            CompareSpec(**table)  # type: ignore[arg-type]
        assert CompareSpec(**table, target_loss=5.0)  # type: ignore[arg-type]


def test_the_seeds_of_a_comparison_find_what_it_would_have_shown() -> None:
    ours, base = dict(enumerate([1.2, 1.5, 1.1, 1.4, 1.3])), dict.fromkeys(range(5), 1.0)
    for measure, exact in (("loss", False), ("speed_up", False), ("speed_up", True)):
        found = judge(measure, ours, base, 1.3, exact=exact)  # type: ignore[arg-type]
        assert found.seeds_for(found.detectable * 1.0001) == found.n
        wanted = (found.seeds_for(size) for size in (1.05, 1.1, 1.2))
        assert sorted(wanted, reverse=True) == [found.seeds_for(size) for size in (1.05, 1.1, 1.2)]
    assert judge("loss", {0: 1.0}, {0: 1.1}, 0.0).seeds_for(0.1) is None


def test_ratios_are_judged_as_the_pairs_that_they_come_from() -> None:
    ours, base = dict(enumerate([1.0, 1.3, 0.9])), dict(enumerate([1.2, 1.4, 1.3]))
    ratios = statistics.of_ratios([base[seed] / ours[seed] for seed in ours], "seed")
    for effect in (1.0, 1.5, 9.0):
        found, pairs = judge_ratio(ratios, effect), judge("speed_up", ours, base, effect)
        assert pairs.paired
        assert (found.verdict, found.seeds, found.n) == (pairs.verdict, pairs.seeds, pairs.n)
        assert (found.value, found.error, found.detectable) == pytest.approx(
            (pairs.value, pairs.error, pairs.detectable)
        )
    assert judge_ratio(statistics.of_ratios([2.0], "seed"), 1.0).verdict == "not resolved"

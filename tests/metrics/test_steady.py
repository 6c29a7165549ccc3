from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, rankdata

from testbed.metrics import align, measured, steady
from testbed.metrics.steps import _chance, first_steady
from tests.synthetic import Pipeline, cell, profile, summed


def noise(count: int, seed: int, outliers: float = 0.05) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.exp(0.03 * rng.normal(size=count)) + 0.5 * (rng.random(count) < outliers)


@given(st.lists(st.integers(0, 40), min_size=2, max_size=40), st.data())
def test_the_test_is_that_of_scipy(values: list[int], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(values) - 1))
    excess = rankdata(values)[:first].sum() - first * (len(values) + 1) / 2
    expected = mannwhitneyu(values[:first], values[first:]).pvalue
    found = _chance(abs(excess), first, np.unique(values, return_counts=True)[1])
    assert found == pytest.approx(1.0 if len(set(values)) == 1 else expected, rel=1e-12)


def test_a_steady_run_is_nearly_never_cut() -> None:
    for count in (10, 36, 100):
        assert sum(first_steady(noise(count, seed).tolist()) > 0 for seed in range(100)) <= 3


@pytest.mark.parametrize("by", [0.2, -0.2])
@pytest.mark.parametrize(("count", "slow"), [(36, 6), (100, 10), (100, 40), (36, 18)])
def test_a_slow_or_fast_beginning_is_cut_where_it_ends(count: int, slow: int, by: float) -> None:
    """A link's bucket may be full at first, or the processor still cool."""
    cuts = []
    for seed in range(50):
        seconds = noise(count, seed)
        seconds[:slow] += by
        cuts.append(first_steady(seconds.tolist()))
    assert abs(np.median(cuts) - slow) <= 1
    assert max(cuts) <= count / 2


def test_a_beginning_that_settles_in_two_steps_is_cut_twice() -> None:
    seconds = noise(120, 2, outliers=0)
    seconds[:10] += 1.0
    seconds[10:30] += 0.3
    assert first_steady(seconds.tolist()) == 30


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), max_size=60))
def test_never_more_than_half_and_always_the_same(seconds: list[float]) -> None:
    cut = first_steady(seconds)
    assert 0 <= cut <= len(seconds) / 2
    assert first_steady(list(seconds)) == cut


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 59), st.floats(1, 1000), st.integers(0, 20))
def test_no_outlier_is_taken_out(where: int, factor: float, seed: int) -> None:
    """No single step is left out, however long it took, not even the first."""
    seconds = noise(60, seed, outliers=0)
    clean = first_steady(seconds.tolist())
    seconds[where] *= factor
    assert first_steady(seconds.tolist()) == clean


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.integers(0, 30))
def test_only_the_order_of_the_durations_matters(seed: int, slow: int) -> None:
    seconds = noise(60, seed)
    seconds[:slow] += 0.3
    assert first_steady(seconds.tolist()) == first_steady((seconds**3).tolist())


def test_a_change_behind_the_middle_is_part_of_the_run() -> None:
    seconds = noise(60, 4)
    seconds[45:] += 0.5
    assert first_steady(seconds.tolist()) == 0


def test_the_summary_says_where_it_begins_and_counts_from_there() -> None:
    """The first six measured steps take twice as long."""
    pipeline, what = Pipeline(profile("unshaped"), jitter=0.05), cell(steps=40)
    for step in range(40):
        pipeline.dilation = 2 if step < 8 else 1
        pipeline.run(step, warmup=step < 2)
    summary = summed(what, pipeline.records)
    assert (summary.steps, summary.first_measured_step, summary.measured_steps) == (40, 8, 32)
    steps = align(pipeline.records)
    assert [step.number for step in steady(steps)] == list(range(8, 40))
    assert summary.step_s == np.median([step.seconds for step in steps[8:]])
    assert len(measured(steps)) == 38

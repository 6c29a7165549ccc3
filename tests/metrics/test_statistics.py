from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from testbed.metrics import statistics
from testbed.metrics.statistics import IntervalEstimate
from testbed.metrics.steps import over_cycles
from tests.metrics import error_rates

durations = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=60)


def noise(count: int, seed: int, resemblance: float = 0.0) -> list[float]:
    """Draw step times that vary by 3 %, each resembling the one before."""
    rng = np.random.default_rng(seed)
    values = [rng.normal()]
    for shock in rng.normal(size=count - 1):
        values.append(resemblance * values[-1] + math.sqrt(1 - resemblance**2) * shock)
    return [math.exp(0.03 * value) for value in values]


def coverage(estimates: list[IntervalEstimate], truth: float) -> float:
    return sum(one.interval is not None and one.interval.holds(truth) for one in estimates) / len(estimates)


@settings(max_examples=40, deadline=None)
@given(durations)
@example([0.25] * 20)
def test_an_interval_holds_the_median_and_lies_within_the_values(values: list[float]) -> None:
    found = statistics.of_steps(values)
    assert min(values) <= found.interval.low <= found.value <= found.interval.high <= max(values)
    assert found.value == pytest.approx(np.median(values))


@pytest.mark.slow
def test_intervals_hold_the_true_median_about_as_often_as_they_say() -> None:
    assert coverage([statistics.of_steps(noise(60, seed)) for seed in range(150)], 1.0) > 0.9
    assert coverage([statistics.of_steps(noise(120, seed, 0.5)) for seed in range(100)], 1.0) > 0.8


def test_steps_that_resemble_each_other_are_drawn_in_blocks_and_are_less_sure() -> None:
    assert statistics.block_length(noise(200, 1)) == 1
    alike = noise(200, 1, 0.6)
    assert statistics.block_length(alike) == 6
    shuffled = np.random.default_rng(0).permutation(alike).tolist()
    assert statistics.block_length(shuffled) == 1
    together, alone = statistics.of_steps(alike).interval, statistics.of_steps(shuffled).interval
    assert together.high - together.low > 1.2 * (alone.high - alone.low)
    assert "blocks of 6" in statistics.of_steps(alike).rule


def test_steps_that_have_the_mean_of_their_cycle_are_drawn_by_cycles() -> None:
    steps = noise(24, 5)
    cycles = over_cycles(steps, 8)
    assert statistics.block_length(cycles) == 8
    assert statistics.block_length(over_cycles(steps, 1)) == 1
    assert "blocks of 8" in statistics.of_steps(cycles).rule


def test_an_outlier_hides_no_resemblance() -> None:
    alike = noise(100, 3, 0.7)
    assert statistics.block_length([*alike[:50], 1000.0, *alike[50:]]) > 1


def test_a_single_step_has_no_interval() -> None:
    assert statistics.of_steps([2.0]) == IntervalEstimate(2.0, None, 1, "1 step of one run")
    assert statistics.combined_step_time([[], []]) is None


def test_long_runs_are_resampled_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws are the same in parts and all at once."""
    for values in (noise(100, 5), noise(100, 5, 0.8)):
        whole = statistics.resampled(values)
        monkeypatch.setattr(statistics, "_AT_ONCE", 1000)
        assert statistics.resampled(values).tolist() == whole.tolist()
        monkeypatch.undo()


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_runs_are_the_observations_where_there_are_several(runs: int) -> None:
    """Runs of one cell differ by 2 %, which no single run's steps can know; the interval over runs does."""
    found, blind = [], []
    for trial in range(300):
        rng = np.random.default_rng(trial)
        cell = [[float(rng.normal(1, 0.001)) * level for _ in range(10)] for level in np.exp(rng.normal(0, 0.02, runs))]
        one = statistics.combined_step_time(cell)
        found.append(one)
        blind.append(statistics.of_ratios([float(np.median(cell[0]))] * 2, "run"))
    assert {one.n for one in found} == {runs}
    assert 0.91 < coverage(found, 1.0) < 0.99
    assert coverage(blind, 1.0) < 0.1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=8))
def test_faster_and_slower_are_treated_alike(ratios: list[float]) -> None:
    there, back = statistics.of_ratios(ratios, "pair"), statistics.of_ratios([1 / ratio for ratio in ratios], "pair")
    assert there.value * back.value == pytest.approx(1)
    assert there.interval.low * back.interval.high == pytest.approx(1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(-5, 5))
def test_differences_move_with_their_values(values: list[float], by: float) -> None:
    here, moved = statistics.of_differences(values, "seed"), statistics.of_differences([v + by for v in values], "seed")
    assert moved.value == pytest.approx(here.value + by, abs=1e-9)
    assert moved.interval == pytest.approx([end + by for end in here.interval], abs=1e-6)


# ---------------------------------------------------------------------- two arms
def arms(n: int, alike: float, seed: int, apart: float = 0.0) -> tuple[dict[int, float], dict[int, float]]:
    """Draw the losses of two arms whose seeds go together with this correlation; SD 1 each."""
    rng = np.random.default_rng((n, seed))
    shared, own = rng.normal(size=n), rng.normal(size=(2, n))
    ours, base = (math.sqrt(alike) * shared + math.sqrt(1 - alike) * noise for noise in own)
    return dict(enumerate(ours + apart)), dict(enumerate(base))


@pytest.mark.parametrize(("n", "alike"), [(3, 0.0), (5, 0.0), (5, 0.5), (5, 0.95), (8, 0.3)])
def test_an_interval_of_two_arms_holds_the_truth_about_as_often_as_it_says(n: int, alike: float) -> None:
    found = [statistics.difference(*arms(n, alike, trial, apart=0.7)) for trial in range(800)]
    assert 0.927 < coverage([one.estimate for one in found], 0.7) < 0.973  # 3 standard errors of 800 trials: 0.023
    assert coverage([one.estimate for one in found], 0.7 + 3) < (0.6 if n == 3 else 0.3)


def test_arms_with_common_seeds_are_pairs_whatever_their_correlation() -> None:
    for alike in (0.0, 0.95):
        for trial in range(20):
            ours, base = arms(5, alike, trial)
            found = statistics.difference(ours, base)
            paired = statistics.of_differences([ours[seed] - base[seed] for seed in ours], "seed")
            assert found.paired
            assert found.estimate.interval == paired.interval


@pytest.mark.parametrize("looks", error_rates.LOOKS)
def test_looks_together_err_no_more_often_than_one(looks: tuple[int, ...]) -> None:
    """Nominal 5 %: at most 5.5 % over all looks. The rule before made up to 15 errors in 100."""
    shared = [error_rates.NOMINAL / len(looks)] * len(looks)
    assert error_rates.worst(error_rates.paired, looks, shared, 20_000) < 0.055
    if len(looks) > 1:
        each = [error_rates.NOMINAL] * len(looks)
        assert error_rates.worst(error_rates.narrower, looks, each, 5_000) > 0.09


def test_the_simulated_rule_is_that_of_verdicts() -> None:
    rng = np.random.default_rng(0)
    for looks in (1, 2, 3):
        ours, base = rng.normal(size=(2, 200, 4))
        simulated = error_rates.paired(ours, base, error_rates.NOMINAL / looks)
        found = [
            statistics.difference(dict(enumerate(a)), dict(enumerate(b)), looks=looks)
            for a, b in zip(ours, base, strict=True)
        ]
        assert simulated.tolist() == [not one.estimate.interval.holds(0) for one in found]


def test_few_pairs_are_pairs_and_strangers_are_samples() -> None:
    two = statistics.difference({0: 1.0, 1: 2.0}, {0: 1.1, 1: 2.1})
    assert (two.paired, two.estimate.n) == (True, 2)
    apart = statistics.difference({0: 1.0, 1: 2.0}, {2: 1.1, 3: 2.1})
    assert not apart.paired
    assert apart.estimate.value == pytest.approx(-0.1)
    one = statistics.difference({0: 1.0}, {0: 1.5})
    assert (one.estimate.interval, one.detectable) == (None, None)
    with pytest.raises(ValueError, match="no common seed"):
        statistics.difference({0: 1.0}, {1: 1.0})


@pytest.mark.parametrize(("n", "looks"), [(2, 1), (3, 1), (5, 1), (5, 2), (12, 1), (12, 3)])
def test_a_minimum_detectable_effect_is_detected_four_times_in_five(n: int, looks: int) -> None:
    """Against simulation: the truth is as far from 0 as is said, and the spread is the true one."""
    rng, trials = np.random.default_rng(n), 20_000
    effect = statistics.detectable(1 / math.sqrt(n), n - 1, looks)
    values = rng.normal(effect, 1, (trials, n))
    half = statistics.quantile_of_t(n - 1, looks) * values.std(axis=1, ddof=1) / math.sqrt(n)
    assert np.mean(abs(values.mean(axis=1)) > half) == pytest.approx(0.8, abs=0.012)  # 4 standard errors


@settings(max_examples=40, deadline=None)
@given(st.floats(0.001, 100), st.integers(2, 30), st.floats(0.001, 10))
def test_so_many_seeds_are_needed_and_one_fewer_would_not_do(error: float, pairs: int, distance: float) -> None:
    found = statistics.seeds_needed(error, pairs, distance, most=3000)
    spread = error * math.sqrt(pairs)

    def enough(n: int) -> bool:
        return statistics.detectable(spread / math.sqrt(n), n - 1) <= distance

    if found is None:
        assert not enough(3000)
    else:
        assert enough(found)
        assert found == 2 or not enough(found - 1)

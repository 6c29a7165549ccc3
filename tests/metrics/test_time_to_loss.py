from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.metrics import LossPoint, RunSteps, default_target, time_to_loss
from testbed.metrics.time_to_loss import crossing

losses = st.lists(st.floats(0.5, 10), min_size=1, max_size=12)


def curve(*values: float, step_s: float = 0.5, every: int = 10) -> tuple[LossPoint, ...]:
    return tuple(LossPoint(every * k, every * k * step_s, value) for k, value in enumerate(values, 1))


def run(*values: float, step_s: float = 0.5, seed: int = 0) -> RunSteps:
    validation = curve(*values, step_s=step_s)
    train = tuple(LossPoint(k, step_s * (k + 1 + 0.1 * (k % 2)), 5.0) for k in range(10 * len(values)))
    return RunSteps(seed, 1, (step_s,) * 10, train, validation)


def test_between_two_evaluations_the_loss_falls_in_a_line() -> None:
    assert crossing(curve(5.0, 4.0, 3.0), 3.75) == (11.25, 22.5)


@given(losses, st.floats(0.1, 11))
def test_a_target_is_reached_if_and_only_if_an_evaluation_meets_it(values: list[float], target: float) -> None:
    points = curve(*values)
    found = crossing(points, target)
    assert (found is not None) == (min(values) <= target)
    if found is not None:
        first = next(point for point in points if point.loss <= target)
        before = [point for point in points if point.step < first.step]
        assert (before[-1].seconds if before else first.seconds) <= found.seconds <= first.seconds


@given(losses, st.floats(0.1, 11), st.floats(0, 5))
def test_a_harder_target_is_never_reached_earlier(values: list[float], target: float, harder: float) -> None:
    easy, hard = crossing(curve(*values), target), crossing(curve(*values), target - harder)
    if hard is not None:
        assert easy.seconds <= hard.seconds


@given(losses)
def test_each_new_best_is_reached_when_it_was_measured(values: list[float]) -> None:
    points = curve(*values)
    for index, point in enumerate(points):
        if all(point.loss < earlier.loss for earlier in points[:index]):
            found = crossing(points, point.loss)
            assert found.seconds == pytest.approx(point.seconds)


def test_a_target_below_which_training_already_was_has_an_upper_bound() -> None:
    soon, later = time_to_loss([run(5.0, 4.0)], 6.0), time_to_loss([run(5.0, 4.0)], 4.5)
    assert (soon.at_latest, later.at_latest) == (True, False)
    assert soon.seconds.value == 5.0


def test_a_run_that_never_gets_there_has_no_time() -> None:
    found = time_to_loss([run(5.0, 4.0)], 3.0)
    assert (found.seconds, found.steps, found.reached) == (None, None, 0)
    assert found.words == "not reached in 10.05 s"
    some = time_to_loss([run(5.0, 4.0), run(5.0, 2.0, seed=1)], 3.0)
    assert some.seconds is None
    assert some.words == "1 of 2 runs, the others not in 10.05 s"
    assert time_to_loss([], 3.0).seconds is None


@settings(deadline=None, max_examples=20)
@given(st.floats(2.0, 4.9), st.floats(0.01, 10))
def test_the_time_of_one_run_is_as_sure_as_its_steps(target: float, step_s: float) -> None:
    found = time_to_loss([run(5.0, 4.0, 2.0, step_s=step_s)], target)
    assert found.seconds.interval.low <= found.seconds.value <= found.seconds.interval.high
    assert found.seconds.interval.high < 1.2 * found.seconds.interval.low
    assert found.words == ""


def test_runs_that_all_reach_it_are_the_observations() -> None:
    found = time_to_loss([run(5.0, 4.0, 3.0, step_s=step_s, seed=k) for k, step_s in enumerate((0.5, 0.55, 0.6))], 3.5)
    assert found.seconds.n == found.runs == found.reached == 3
    assert found.seconds.interval.holds(25 * 0.55)
    assert found.steps == 25


def test_every_run_of_the_baseline_reaches_the_default_target() -> None:
    baseline = [run(5.0, 4.0, 3.0 + seed / 10, seed=seed) for seed in range(3)]
    target = default_target(baseline)
    assert target == 3.2
    assert time_to_loss(baseline, target).reached == 3
    assert default_target([run()]) is None

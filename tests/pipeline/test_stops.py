"""Why training ends, decided from what all stages know: the budget counts steps with their updates, and no evaluations."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from testbed.pipeline.gather import Met
from testbed.pipeline.stops import Stops
from testbed.spec import TrainingSpec

durations = st.integers(1, 1000)
steps = st.lists(st.tuples(durations, durations, st.lists(durations, max_size=2)), min_size=1, max_size=12)


def a_spec(count: int, **changes: float | None) -> TrainingSpec:
    return TrainingSpec.model_validate({"steps": count, "warmup_steps": 0, "seed": 0, "evaluate_every": 1, **changes})


def met(line_ns: int, *, left_ns: int = 0, asked: bool = False, loss: float = math.nan) -> Met:
    return Met(line_ns=line_ns, left_ns=left_ns, asked=asked, loss=loss, norm=1.0)


@given(steps, st.integers(1, 20_000), st.integers(1, 4))
def test_the_budget_counts_steps_and_updates_and_no_evaluations(
    work: list[tuple[int, int, list[int]]], budget_ns: int, dilation: int
) -> None:
    """`work` holds each step's time up to the gradients, its update's, and those of the evaluations after it."""
    stops = Stops(a_spec(len(work), budget_s=budget_ns / 1e9), dilation=dilation, start_ns=500)
    now, spent, left = 500, 0, 500
    for number, (passes, update, evaluations) in enumerate(work, 1):
        now, spent = now + passes, spent + passes
        expected = "steps" if number == len(work) else "budget" if spent >= budget_ns / 1e9 * 1e9 * dilation else None
        assert stops.after_step(number, met(now, left_ns=left)) == expected
        if expected:
            return
        now, spent, left = now + update, spent + update, now + update
        for evaluation in evaluations:
            now += evaluation
            assert stops.after_evaluation(met(now, left_ns=left)) is None
            left = now


@given(st.booleans(), st.floats(0.1, 9), st.floats(0.1, 9))
def test_a_target_is_reached_from_above_and_asking_ends_what_runs(asked: bool, target: float, loss: float) -> None:
    stops = Stops(a_spec(5, target_loss=target), dilation=1, start_ns=0)
    assert stops.after_step(1, met(1, asked=asked)) == ("asked" if asked else None)
    expected = "target" if loss <= target else "asked" if asked else None
    assert stops.after_evaluation(met(2, asked=asked, loss=loss)) == expected
    assert stops.after_evaluation(met(3)) is None, "an evaluation without the codec has no say"
    assert stops.after_step(5, met(4, asked=asked)) == ("asked" if asked else "steps")


@given(st.integers(0, 5), st.integers(1, 30))
def test_evaluations_are_due_as_often_as_asked(every: int, done: int) -> None:
    stops = Stops(a_spec(50, evaluate_every=every), dilation=1, start_ns=0)
    assert stops.evaluation_due(done) == (every > 0 and done % every == 0)

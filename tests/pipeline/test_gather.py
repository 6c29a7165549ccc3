"""Everybody gets everything, in one order; a lost or late stage is an error; all decide alike when training ends."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import TransportError
from testbed.pipeline.gather import Gather, Met, Stops, global_norm, make_sockets
from testbed.spec import TrainingSpec


def together(stages: int, work: Callable[[Gather, int], None]) -> None:
    """Let every stage do it, in a thread of its own."""
    ends = [Gather(stage, sockets, 10) for stage, sockets in enumerate(make_sockets(stages))]
    threads = [threading.Thread(target=work, args=(end, stage)) for stage, end in enumerate(ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()


def exchange_all(parts: list[list[float]]) -> list[list[float]]:
    results: list[list[float]] = [[] for _ in parts]

    def work(end: Gather, stage: int) -> None:
        results[stage] = end.exchange(parts[stage])

    together(len(parts), work)
    return results


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_every_stage_gets_all_values_in_order(stages: int) -> None:
    parts = [[stage + 0.5] * stage for stage in range(stages)]
    everything = list(itertools.chain(*parts))
    assert exchange_all(parts) == [everything] * stages


def test_empty_exchange_is_a_barrier() -> None:
    assert exchange_all([[], [], []]) == [[], [], []]


@pytest.mark.parametrize("asked", [None, 0, 2])
def test_all_stages_know_the_same_when_they_have_met(asked: int | None) -> None:
    found: list[Met] = []

    def tell(end: Gather, stage: int) -> None:
        found.append(
            end.meet(
                100 + stage,
                left_ns=90 - stage,
                asked=stage == asked,
                loss=2.5 if stage == 2 else None,
                squares=[float(stage)] * stage,
            )
        )

    together(3, tell)
    assert found == [Met(line_ns=102, left_ns=90, asked=asked is not None, loss=2.5, squares=(1.0, 2.0, 2.0))] * 3


@given(st.lists(st.floats(0, 1e12), max_size=20), st.randoms(use_true_random=False))
def test_the_norm_does_not_depend_on_the_order(squares: list[float], random: object) -> None:
    shuffled = list(squares)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert global_norm(shuffled) == global_norm(squares) == pytest.approx(math.sqrt(sum(squares)))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_stage_is_named(lost: int) -> None:
    ends = [Gather(stage, sockets, 10) for stage, sockets in enumerate(make_sockets(2))]
    ends[lost].close()
    with pytest.raises(TransportError, match=f"stage {1 - lost}: stage {lost} "):
        ends[1 - lost].exchange([1.0])
    ends[1 - lost].close()


def test_a_late_stage_is_named() -> None:
    ends = [Gather(stage, sockets, 0.05) for stage, sockets in enumerate(make_sockets(2))]
    with pytest.raises(TransportError, match=r"stage 0: stage 1 did not end the step within 0.05 s"):
        ends[0].exchange([1.0])
    for end in ends:
        end.close()


# ------------------------------------------------------------------ when training ends
durations = st.integers(1, 1000)
steps = st.lists(st.tuples(durations, durations, st.lists(durations, max_size=2)), min_size=1, max_size=12)


def a_spec(count: int, **changes: float | None) -> TrainingSpec:
    return TrainingSpec.model_validate({"steps": count, "warmup_steps": 0, "seed": 0, "evaluate_every": 1, **changes})


def met(line_ns: int, *, left_ns: int = 0, asked: bool = False, loss: float = math.nan) -> Met:
    return Met(line_ns=line_ns, left_ns=left_ns, asked=asked, loss=loss, squares=(1.0,))


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

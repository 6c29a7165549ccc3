"""Everybody gets everything, in one order; a lost or late stage is an error; all decide alike when training ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import TransportError
from testbed.message_key import Phase
from testbed.runtime.ending import Stops
from testbed.runtime.gather import Gather, global_norm, make_sockets
from tests.over_loopback import in_threads


def together(stages: int, work: Callable[[Gather, int], None]) -> None:
    """Let every stage do it, in a thread of its own."""
    ends = [Gather(stage, sockets, 10) for stage, sockets in enumerate(make_sockets(stages))]
    in_threads(lambda stage: work(ends[stage], stage), range(stages))
    for end in ends:
        end.close()


numbers = st.floats() | st.integers(0, 2**63) | st.none()


@given(st.lists(numbers | st.lists(numbers), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_every_place_gets_all_values_in_order_to_the_last_bit(values: list[Any]) -> None:
    results: dict[int, list[Any]] = {}

    def work(end: Gather, stage: int) -> None:
        results[stage] = end.exchange(values[stage])

    together(len(values), work)
    assert [repr(results[stage]) for stage in range(len(values))] == [repr(values)] * len(values)


def test_what_was_announced_is_found_when_somebody_looks_whatever_was_exchanged_since() -> None:
    found: list[int | None] = []

    def work(end: Gather, stage: int) -> None:
        if stage == 0:
            end.announce(7)
        assert end.exchange([stage]) == [[0], [1]]
        found.append(end.announced())

    together(2, work)
    assert sorted(found, key=str) == [7, None]  # the hub itself has nothing to find


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


@given(steps, st.integers(1, 20_000), st.integers(1, 4))
def test_the_budget_counts_steps_and_updates_and_no_evaluations(
    work: list[tuple[int, int, list[int]]], budget_ns: int, dilation: int
) -> None:
    """`work` holds each step's time up to the gradients, its update's, and those of the evaluations after it."""
    stops = Stops(lambda: False, budget_ns / 1e9, dilation)
    stops.met(500, [stops.tell()])
    now, spent = 500, 0
    for number, (passes, update, evaluations) in enumerate(work):
        now, spent = now + passes, spent + passes
        stops.met(now, [stops.tell()])
        goes_on = None if spent >= budget_ns / 1e9 * 1e9 * dilation else True
        now, spent = now + update, spent + update
        assert stops.goes_on(number, "train", now) is goes_on
        if goes_on is None:
            return
        for evaluation in evaluations:
            now += evaluation
            stops.met(now, [stops.tell()])
            assert stops.goes_on(number + 1, "evaluation", now) is True


@pytest.mark.parametrize("phase", ["train", "evaluation"])
def test_one_place_that_is_asked_is_enough(phase: Phase) -> None:
    ends = [Stops(lambda: False), Stops(lambda: True)]
    for line_ns in (1, 2):
        told = [each.tell() for each in ends]
        for each in ends:
            each.met(line_ns, told)
    assert [each.goes_on(0, phase, 2) for each in ends] == [False, False]

"""Laws of schedules: completeness, order, depth, no deadlock, and the step time that the literature gives."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.jobs import actions as jobs
from testbed.jobs.loop import Loop
from testbed.jobs.pipeline import PipelineJob, orders_of
from testbed.jobs.schedule import Action, depth
from testbed.spec import PipelineSpec, ScheduleName
from tests.jobs.recording import DelayedLinks

names = st.sampled_from(get_args(ScheduleName))
small = st.integers(1, 9)


def all_stages(name: ScheduleName, stages: int, microbatches: int, in_flight: int) -> list[tuple[Action, ...]]:
    return orders_of(PipelineSpec(stages=stages, microbatches=microbatches, schedule=name, in_flight=in_flight))


def simulate(orders: list[tuple[Action, ...]], forward: int = 1, backward: int = 1, latency: int = 0) -> int:
    """Time of one step where sends never block. StuckError when nobody can go on."""
    job, times = PipelineJob(orders, 1), {"forward": forward, "backward": backward}

    def cost(node: int, action: jobs.Action) -> int | None:
        return times.get(action.what) if isinstance(action, jobs.Work) else None

    programs, nodes = [job.program(stage) for stage in range(len(orders))], [jobs.Sizes(lambda key: 0)] * len(orders)
    loop = Loop(programs, nodes, cost=cost, links=DelayedLinks(latency))
    loop.run()
    return loop.now_ns


@given(names, small, small, small)
def test_every_action_once_and_in_order(name: ScheduleName, stages: int, microbatches: int, in_flight: int) -> None:
    for order in all_stages(name, stages, microbatches, in_flight):
        assert [a.microbatch for a in order if a.kind == "F"] == list(range(microbatches))
        assert [a.microbatch for a in order if a.kind == "B"] == list(range(microbatches))
        for m in range(microbatches):
            assert order.index(Action("F", m)) < order.index(Action("B", m))


@given(names, small, small, small)
def test_depth_is_reached_and_never_passed(name: ScheduleName, stages: int, microbatches: int, in_flight: int) -> None:
    for stage, order in enumerate(all_stages(name, stages, microbatches, in_flight)):
        held = most = 0
        for action in order:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
        assert most == depth(name, stage=stage, stages=stages, microbatches=microbatches, in_flight=in_flight)


@given(small, small, small)
def test_depth_of_1f1b_falls_from_in_flight_to_one(stages: int, microbatches: int, in_flight: int) -> None:
    def at(stage: int, flight: int) -> int:
        return depth("1f1b", stage=stage, stages=stages, microbatches=microbatches, in_flight=flight)

    depths = [at(stage, in_flight) for stage in range(stages)]
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] == 1
    if stages > 1:
        assert depths[0] == min(in_flight, microbatches)
    assert [at(stage, stages) for stage in range(stages)] == [
        min(microbatches, stages - stage) for stage in range(stages)
    ]


@given(names, st.integers(1, 6), small, small, st.integers(1, 4), st.integers(0, 5))
def test_accumulation_repeats_the_schedule(
    name: ScheduleName, stages: int, microbatches: int, in_flight: int, accumulation: int, latency: int
) -> None:
    once = all_stages(name, stages, microbatches, in_flight)
    spec = PipelineSpec(stages=stages, microbatches=microbatches, schedule=name, in_flight=in_flight)
    again = orders_of(spec.model_copy(update={"accumulation": accumulation}))
    for one, many in zip(once, again, strict=True):
        passes = [many[n * len(one) : (n + 1) * len(one)] for n in range(accumulation)]
        assert len(many) == accumulation * len(one)
        for turn, found in enumerate(passes):
            assert found == tuple(Action(kind, m + turn * microbatches) for kind, m in one)
    # The first stage ends a pass last, so passes do not overlap.
    assert simulate(again, latency=latency) == accumulation * simulate(once, latency=latency)


@given(names, small, small, st.integers(1, 4), st.integers(1, 4))
def test_step_time_without_latency(
    name: ScheduleName, stages: int, microbatches: int, forward: int, backward: int
) -> None:
    """(M + S - 1)(f + b) for both: 1F1B saves memory, not time (Narayanan et al. 2021)."""
    orders = all_stages(name, stages, microbatches, stages)
    assert simulate(orders, forward, backward) == (microbatches + stages - 1) * (forward + backward)


@pytest.mark.slow
@given(st.integers(2, 6), small, st.integers(0, 5))
def test_more_in_flight_hides_latency_until_it_is_gpipe_s_time(stages: int, microbatches: int, latency: int) -> None:
    times = [simulate(all_stages("1f1b", stages, microbatches, flight), latency=latency) for flight in range(1, 60)]
    assert times == sorted(times, reverse=True)
    assert times[-1] <= simulate(all_stages("gpipe", stages, microbatches, 1), latency=latency)


def test_the_classic_example() -> None:
    text = ["".join(f"{a.kind}{a.microbatch} " for a in order).strip() for order in all_stages("1f1b", 3, 4, 3)]
    assert text == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]

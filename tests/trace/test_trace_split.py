"""Traces played several times in a row, and what was played taken apart by step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.metrics.links import Pipes
from testbed.player.split import drift, find_cycle, repeated, seen_to_repeat, step_split
from testbed.predict.data_parallel_shapes import DataParallelShape
from testbed.profiles import load_profile
from testbed.spec import Exchange
from testbed.trace.check import check_trace
from testbed.trace.format import WORK, Lane, Trace
from testbed.trace.played import NodeCounters
from testbed.trace.simulate import simulate, step_ends
from tests.trace.made_traces import pipeline, played_over, traces


@given(trace=traces(), times=st.integers(1, 3))
def test_a_trace_again_and_again_makes_sense(trace: Trace, times: int) -> None:
    longer = repeated(trace, times)
    check_trace(longer, "it")
    assert longer.steps == times * trace.steps
    for lane, again in zip(trace.lanes, longer.lanes, strict=True):
        assert list(again.kind) == list(lane.kind) * times
        assert list(again.value) == list(lane.value) * times
    simulate(longer)


def test_a_pipeline_takes_as_long_every_time() -> None:
    once = pipeline(3, 4, 1, work_ns=1000)
    (step_ns,) = step_ends(once, simulate(once), 1)
    longer = repeated(once, 3)
    assert list(step_ends(longer, simulate(longer), 3)) == [step_ns, 2 * step_ns, 3 * step_ns]


def test_what_a_node_does_adds_up_to_the_step() -> None:
    trace = pipeline(3, 4, 5, work_ns=1000)
    counters = [tuple(NodeCounters(100 * step + 7, 50 * step + 7, 0, 0) for _ in range(3)) for step in range(5)]
    played = played_over(trace, counters=counters)
    split = step_split(trace, played)
    assert (split.first, len(split.steps_ns), split.step_ns) == (1, 4, 2 * 6 * 1000 + 500)
    for node in split.nodes:
        assert node.works_ns == 8500
        assert node.works_ns + node.waits_for_messages_ns + node.waits_for_events_ns == split.step_ns
        assert (node.sent_bytes, node.received_bytes) == (100, 50)
    proved = played_over(trace, steady=(1, 2), counters=counters)
    assert step_split(trace, proved).first == 3
    steps = [(1, None, 1), (2, None, 1), (3, None, 2), (4, (3, 1), 1), (2, (4, 1), 3), (3, (3, 2), 2)]
    for period, steady, first in steps:
        played = played_over(trace, steady=steady, counters=counters)
        assert step_split(trace, played, period).first == first, "whole periods count"


def _worked(steps_ms: Sequence[int]) -> Trace:
    lane = Lane(0, "")
    for each in steps_ms:
        lane.add(WORK, value=each * 1_000_000)
        lane.end_step()
    return Trace(("node",), ("",), (lane,))


@pytest.mark.parametrize(
    ("steps_ms", "steady", "mean_ms"),
    [
        ([900] + [599, 500] * 9 + [599], None, 549.5),
        ([900] + [599, 500] * 9 + [599, 1200], None, 549.5),  # what is still under way is received last
        ([900, 598, 501, 600, 499, 599, 500, 599], None, 549.5),  # on the real clock
        ([900, 100, 100, 400], (1, 3), 200),
        ([900, 100, 100, 400, 100, 100, 400, 100, 100, 400, 100], None, 200),
        ([900, 100, 101, 140, 100, 103, 98], None, 100.5),  # one that was late is no cycle
        ([900, 100, 100], None, 100),
    ],
)
def test_a_step_is_the_mean_of_a_whole_cycle(
    steps_ms: list[int], steady: tuple[int, int] | None, mean_ms: float
) -> None:
    trace = _worked(steps_ms)
    played = played_over(trace, steady=steady)
    assert step_split(trace, played).step_ns == pytest.approx(mean_ms * 1e6, rel=0.002)


def test_steps_that_are_all_the_same_have_no_cycle() -> None:
    assert find_cycle([5] * 20) == find_cycle([]) == find_cycle([3, 7, 3]) == 1
    assert find_cycle([3, 7] * 4) == 2


@pytest.mark.parametrize(
    ("exchange", "compute_ms", "steps", "repeats", "drifts"),
    [
        ("star", 100, 24, True, False),
        ("all-to-all", 197, 12, False, True),  # they run ahead in all steps, which are all the same, and a queue grows
        ("all-to-all", 197, 24, True, False),  # then they wait in each
    ],
)
def test_steps_that_overlap_repeat_or_drift(
    exchange: Exchange, compute_ms: int, steps: int, repeats: bool, drifts: bool
) -> None:
    shape = DataParallelShape(
        workers=2,
        exchange=exchange,
        staleness=2,
        compute_ns=compute_ms * 1_000_000,
        message_bytes=(499_560, 499_560),  # whole packets, so that no step's messages fill up another's
        tokens=1,
    )
    trace = shape.trace(steps)
    links = Pipes("star", (load_profile("link(20Mbit, 50ms, buffer=2s)"),), shape.nodes)
    played = played_over(trace, links)
    assert (seen_to_repeat(trace, played) is not None) == repeats
    assert (drift(trace, played, 3) > 0.01) == drifts

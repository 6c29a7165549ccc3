"""Traces played several times in a row, and what was played taken apart by step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from testbed.play.check import check_trace
from testbed.play.played import NodeCounters, Played
from testbed.play.split import repeated, step_split
from testbed.play.trace import Trace
from testbed.play.unlinked import play_unlinked, step_ends
from tests.play.made_traces import pipeline, traces


@given(trace=traces(), times=st.integers(1, 3))
def test_a_trace_again_and_again_makes_sense(trace: Trace, times: int) -> None:
    longer = repeated(trace, times)
    check_trace(longer, "it")
    assert longer.steps == times * trace.steps
    for lane, again in zip(trace.lanes, longer.lanes, strict=True):
        assert list(again.kind) == list(lane.kind) * times
        assert list(again.value) == list(lane.value) * times
    play_unlinked(longer)


def test_a_pipeline_takes_as_long_every_time() -> None:
    once = pipeline(3, 4, 1, work_ns=1000)
    (step_ns,) = step_ends(once, play_unlinked(once), 1)
    longer = repeated(once, 3)
    assert list(step_ends(longer, play_unlinked(longer), 3)) == [step_ns, 2 * step_ns, 3 * step_ns]


def test_what_a_node_does_adds_up_to_the_step() -> None:
    trace = pipeline(3, 4, 5, work_ns=1000)
    counters = [tuple(NodeCounters(100 * step + 7, 50 * step + 7, 0, 0) for _ in range(3)) for step in range(5)]
    played = Played("virtual", 5, None, play_unlinked(trace), counters, [()] * 5, 0)
    split = step_split(trace, played)
    assert (split.first, len(split.steps_ns), split.step_ns) == (1, 4, 2 * 6 * 1000 + 500)
    for node in split.nodes:
        assert node.works_ns == 8500
        assert node.works_ns + node.waits_for_messages_ns + node.waits_for_events_ns == split.step_ns
        assert (node.sent_bytes, node.received_bytes) == (100, 50)
    proved = Played("virtual", 5, (1, 2), play_unlinked(trace), counters, [()] * 5, 0)
    assert step_split(trace, proved).first == 3
    for period, steady, first in [
        (1, None, 1),
        (2, None, 1),
        (3, None, 2),
        (4, (3, 1), 1),
        (2, (4, 1), 3),
        (3, (3, 2), 2),
    ]:
        played = Played("virtual", 5, steady, play_unlinked(trace), counters, [()] * 5, 0)
        assert step_split(trace, played, period).first == first, "whole periods count"

"""The player's laws, over socket pairs and a clock that jumps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from testbed.errors import ResultsError, SpecError
from testbed.player.lanes import Director, LaneState
from testbed.player.play_job import DirectorCall
from testbed.player.play_trace import Player
from testbed.player.steady import extended, trace_repeats_from
from testbed.trace.format import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.trace.played import Played, read_played
from testbed.trace.simulate import simulate
from testbed.trace.synthetic import pipeline_trace
from tests.player.fake_network import fake
from tests.trace import made_traces


def play(
    trace: Trace, *, steps: int | None = None, prove_steady: bool = False, director: Director | None = None
) -> Played:
    with fake(trace) as (network, waiter):
        return Player(
            trace, network, waiter, clock="virtual", steps=steps, prove_steady=prove_steady, director=director
        ).play()


def synthetic(steps: int = 4, **changes: int) -> Trace:
    sizes = {"stages": 3, "microbatches": 4, "message_bytes": 5000, "forward_ns": 1000, "backward_ns": 2100}
    return pipeline_trace(**{**sizes, "encode_ns": 10, "decode_ns": 10, "update_ns": 33, "steps": steps, **changes})  # type: ignore[arg-type]


def small(trace: Trace) -> Trace:
    """The same with messages of at most 300 kB: more than a socket takes at once, little enough to be sent."""
    for lane in trace.lanes:
        lane.value = array(
            "q", [v % 300_000 + 1 if k == SEND else v for k, v in zip(lane.kind, lane.value, strict=True)]
        )
    return trace


@given(made_traces.traces())
@example(  # who waited long for a message works longer once
    made_traces.two_nodes(
        [(WORK, 0, 0, 2_000_000), (SEND, 1, 0, 1)], [(RECEIVE, 0, 0, 400_000), (WORK, 0, 0, 7), (WORK, 0, 0, 7)]
    )
)
@settings(max_examples=60)
def test_over_a_network_that_takes_no_time_it_is_the_ideal(trace: Trace) -> None:
    played, ideal = play(small(trace)), simulate(trace)
    assert played.steps == trace.steps
    for lane, best in zip(played.lanes, ideal, strict=True):
        assert lane.begin_ns == best.begin_ns
        assert lane.end_ns == best.end_ns


def test_work_takes_exactly_its_time_and_messages_arrive_in_order() -> None:
    sends = [((WORK, 0, 0, 11), (SEND, 1, tag, size)) for tag, size in ((7, 3_000_000), (8, 1), (9, 40_000))]
    receives = [(RECEIVE, 0, tag, 0) for tag in (8, 7, 9)]
    played = play(made_traces.two_nodes([operation for pair in sends for operation in pair], receives))
    a, b = played.lanes
    assert a.end_ns.tolist() == [11, 11, 22, 22, 33, 33]
    assert b.first_byte_ns.tolist() == [a.first_byte_ns[3], a.first_byte_ns[1], a.first_byte_ns[5]]
    assert b.last_byte_ns[1] <= b.last_byte_ns[0] <= b.last_byte_ns[2]


@given(st.lists(st.tuples(st.integers(1, 200_000), st.integers(0, 1)), min_size=2, max_size=6))
@settings(max_examples=30)
def test_what_is_chosen_meanwhile_is_played_as_if_it_had_stood_there(stated: list[tuple[int, int]]) -> None:
    """A sender of so many bytes in each step, who waits for none or all of the answers."""

    def trace(numbers: list[tuple[int, int]]) -> Trace:
        sender, answers, receiver = Lane(0, "sender"), Lane(0, "answers"), Lane(1, "receiver")
        for step, (size, waits) in enumerate(numbers):
            sender.add(WORK, value=11)
            sender.add(SEND, peer=1, tag=step, value=size)
            sender.add(WAIT, value=waits * (step + 1))
            receiver.add(RECEIVE, peer=0, tag=step)
            receiver.add(WORK, value=7)
            receiver.add(SEND, peer=0, tag=step, value=1)
            answers.add(RECEIVE, peer=1, tag=step)
            answers.add(SIGNAL)
            for lane in (sender, answers, receiver):
                lane.end_step()
        return Trace(("a", "b"), ("work",), (sender, answers, receiver))

    heard: list[int] = []

    class Choosing:
        def step_ended(self, lane: LaneState, lanes: Sequence[LaneState]) -> None:
            if lane is lanes[0] and lane.step < len(stated):
                size, waits = stated[lane.step]
                lane.value[3 * lane.step + 1], lane.value[3 * lane.step + 2] = size, waits * (lane.step + 1)
            if lane is lanes[1]:
                heard.append(lane.last[2 * lane.step - 2])

    played = play(trace([stated[0]] * len(stated)), director=Choosing())
    assert played.lanes == play(trace(stated)).lanes
    assert heard == [played.lanes[1].last_byte_ns[2 * step] for step in range(len(stated))]


@pytest.mark.parametrize("made_by", ["tests.play.nowhere:Growing", "tests.player.directors:Shrinking"])
def test_a_director_that_cannot_be_made_is_named(made_by: str) -> None:
    with pytest.raises(SpecError, match=f"cannot make the director {made_by}: .*Error: "):
        DirectorCall(made_by=made_by, arguments={}).make()


def test_a_lane_that_waits_for_ever_is_named() -> None:
    with pytest.raises(SpecError, match=r"lane 0 of node 0 in step 0 for event 5"):
        play(made_traces.two_nodes([(WAIT, 0, 5, 1)]))


@pytest.mark.parametrize("steps", [4, 9, 30])
def test_what_is_extended_is_what_would_have_been_played(steps: int) -> None:
    trace = synthetic(steps)
    whole, proved = play(trace), play(trace, prove_steady=True)
    assert proved.steps == 3
    longer = extended(proved, trace)
    assert longer.steps == steps
    assert longer.lanes == whole.lanes
    assert longer.counters == whole.counters
    assert longer.sockets == whole.sockets


def test_steps_that_ask_for_something_else_later_are_played() -> None:
    trace = synthetic(20)
    lane = trace.lanes[0]
    lane.value[lane.starts[15]] += 1
    played = play(trace, prove_steady=True)
    assert trace_repeats_from(trace, 1) == 16
    assert played.steps > 16
    assert extended(played, trace).lanes == play(trace).lanes


def test_a_cycle_of_two_steps_is_found() -> None:
    trace = synthetic(40)
    lane = trace.lanes[1]
    for step in range(0, 40, 2):
        place = next(i for i in range(lane.starts[step], lane.starts[step + 1]) if lane.kind[i] == WORK)
        lane.value[place] += 500
    assert (trace_repeats_from(trace, 1), trace_repeats_from(trace, 2)) == (39, 0)
    played = play(trace, prove_steady=True)
    assert played.steady[1] == 2
    assert played.steps < 10
    assert extended(played, trace).lanes == play(trace).lanes


def test_the_first_steps_alone() -> None:
    trace = synthetic(6)
    assert play(trace, steps=2).lanes == tuple(
        type(lane)(*(column[: stated.starts[2]] for column in vars(lane).values()))
        for lane, stated in zip(play(trace).lanes, trace.lanes, strict=True)
    )


def test_what_was_played_is_read_back(tmp_path: Path) -> None:
    played = play(synthetic(), prove_steady=True)
    played.write(tmp_path / "played")
    assert read_played(tmp_path / "played") == played
    content = bytearray((tmp_path / "played").read_bytes())
    content[-1] ^= 1
    (tmp_path / "played").write_bytes(content)
    with pytest.raises(ResultsError, match="checksum"):
        read_played(tmp_path / "played")

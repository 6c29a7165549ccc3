"""The line of the emulated device's time, on a clock of our own: no drift, whatever is late."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.jobs import actions as jobs
from testbed.jobs.recorder import PacedWork
from testbed.jobs.schedule import Action
from testbed.process import set_timer_slack
from testbed.records import ActionKind, ActionRecord
from testbed.runtime.pacing import LabClock, Line, wait_for_the_grid

FORWARD_NS, BACKWARD_NS, UPDATE_NS = 40_000, 80_000, 7_000
DURATIONS: dict[str, int] = {"F": FORWARD_NS, "B": BACKWARD_NS}
lateness = st.integers(0, 3_000)


class FakeClock(LabClock):
    """Moves only when told to, or waited for; then it is late by the next of `late`, for ever."""

    def __init__(self, late: Sequence[int] = (0,)) -> None:
        self.ns = 1_000_000
        self._late = itertools.cycle(late)

    def now(self) -> int:
        return self.ns

    def wait_until(self, moment_ns: int) -> int:
        if moment_ns > self.ns:
            self.ns = moment_ns + next(self._late)
        return self.ns


def a_line(clock: FakeClock, dilation: int = 1) -> Line:
    durations = {what: ns * dilation for what, ns in {**DURATIONS, "update": UPDATE_NS}.items()}
    return Line(lambda action: durations[action.what] if isinstance(action, jobs.Work) else None, dilation, clock)


def spend(line: Line, clock: FakeClock, action: jobs.Action, ns: int) -> PacedWork | None:
    began_ns = line.now()
    clock.ns += ns
    return line.spent(action, began_ns)


def act(
    line: Line, clock: FakeClock, action: Action, *, maths: int, codec: int = 0, frame: int | None = None
) -> ActionRecord:
    """One action, with input that arrives at `frame` (None: it needs none) and an output."""
    key = jobs.Key("tensor", 0)
    line.begin(True)
    asked_ns = input_ns = decoded_ns = line.recorded_ns
    if frame is not None:
        clock.wait_until(frame)
        line.came(frame)
        input_ns = line.recorded_ns
        spend(line, clock, jobs.Decode(()), codec)
        decoded_ns = line.recorded_ns
    held = spend(line, clock, jobs.Work(action.kind, key), maths)
    assert held is not None
    computed_ns = line.recorded_ns
    spend(line, clock, jobs.Encode(key), codec)
    assert line.free_ns == line.at_ns
    return ActionRecord(
        kind=action.kind,
        microbatch=action.microbatch,
        asked_ns=asked_ns,
        input_ns=input_ns,
        decoded_ns=decoded_ns,
        computed_ns=computed_ns,
        encoded_ns=line.recorded_ns,
        **held._asdict(),
    )


@given(
    st.lists(
        st.tuples(st.sampled_from(("F", "B")), st.integers(0, FORWARD_NS // 2), lateness), min_size=1, max_size=40
    ),
    st.integers(1, 5),
    st.integers(0, 2_000),
)
def test_lateness_never_adds_up(work: list[tuple[ActionKind, int, int]], dilation: int, codec: int) -> None:
    clock = FakeClock([late for _, _, late in work])
    of, begin = a_line(clock, dilation), clock.ns
    line = begin
    for number, (kind, maths, late) in enumerate(work):
        record = act(of, clock, Action(kind, number), maths=maths, codec=codec)
        assert record.due_ns == record.computed_ns == line + DURATIONS[kind] * dilation
        line = record.due_ns + codec * dilation
        assert record.encoded_ns == line
        clock.ns += late  # whatever else the process had to do
    assert line - begin == dilation * sum(DURATIONS[kind] + codec for kind, _, _ in work)


@given(st.integers(1, 200_000), st.integers(0, 5))
def test_an_overrun_is_late_by_as_much_and_is_made_up_for(over: int, more: int) -> None:
    clock = FakeClock()
    line, begin = a_line(clock), clock.ns
    late = act(line, clock, Action("F", 0), maths=FORWARD_NS + over)
    assert late.due_ns is not None
    assert late.maths_ns == late.computed_ns == late.encoded_ns == late.due_ns + over
    records = [act(line, clock, Action("F", 1 + n), maths=FORWARD_NS // 4) for n in range(more)]
    assert [record.due_ns for record in records] == [begin + FORWARD_NS * (2 + n) for n in range(more)]
    for record in records:
        assert record.encoded_ns == max(record.due_ns or 0, record.maths_ns or 0)
    past = [late, *records]
    assert all(one.encoded_ns <= two.asked_ns for one, two in itertools.pairwise(past))
    for record in past:
        times = (record.asked_ns, record.input_ns, record.decoded_ns, record.computed_ns, record.encoded_ns)
        assert list(times) == sorted(times)


@given(st.integers(-100_000, 100_000), lateness, st.integers(0, 5_000), st.integers(1, 4))
def test_only_what_arrives_later_than_the_line_moves_it(after: int, late: int, codec: int, dilation: int) -> None:
    clock = FakeClock([late])
    line = a_line(clock, dilation)
    first = act(line, clock, Action("F", 0), maths=0)
    frame = first.encoded_ns + after
    second = act(line, clock, Action("F", 1), maths=0, codec=codec, frame=frame)
    assert second.input_ns == max(first.encoded_ns, frame)
    assert second.decoded_ns == second.input_ns + codec * dilation
    assert second.due_ns == second.decoded_ns + FORWARD_NS * dilation


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5_000), st.integers(0, 5_000)), max_size=10))
def test_where_nothing_is_paced_the_line_is_the_clock(work: list[tuple[bool, int, int]]) -> None:
    clock = FakeClock()
    line, key = Line(None, 1, clock), jobs.Key("tensor", 0)
    for in_action, maths, pause in work:
        clock.ns += pause
        line.begin(in_action)
        assert (line.at_ns, line.recorded_ns, line.free_ns) == (clock.ns, clock.ns, 0)
        assert spend(line, clock, jobs.Work("F", key), maths) is None
        assert (line.at_ns, line.recorded_ns) == (clock.ns, clock.ns)
        clock.ns += pause
        line.came(clock.ns - pause)  # it is at hand when this place has it
        assert line.at_ns == clock.ns


@given(lateness, st.integers(0, 200_000))
def test_an_update_begins_where_all_have_met_and_is_no_action(late: int, after: int) -> None:
    clock = FakeClock([late])
    line = a_line(clock)
    act(line, clock, Action("F", 0), maths=0)
    met_ns = line.at_ns + after
    line.begin(False)
    line.met(met_ns)
    assert spend(line, clock, jobs.Work("update", jobs.Key("update", 0)), 0) is None
    assert line.at_ns == line.recorded_ns == met_ns + UPDATE_NS


@pytest.mark.virtual_clock
def test_a_run_begins_at_the_same_nanosecond_of_a_second_whatever_happened_before() -> None:
    set_timer_slack()
    moments = set()
    for number in range(30):
        time.sleep(0.0137 * number % 0.9)
        for _ in range(number):
            time.monotonic_ns()
        moments.add(wait_for_the_grid() % 10**9)
    assert len(moments) == 1

"""Timelines: schedules in steps, what they carry, and when a message has left."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.profiles import Bernoulli, Change, Pipe, Schedule
from testbed.profiles.timeline import timeline

SECOND = 1_000_000_000


def _pipe(schedule: Schedule | None) -> Pipe:
    return Pipe.plain(rate_bps=8_000_000, delay_ns=10_000_000, buffer_bytes=100_000, schedule=schedule)


def _change(at_s: float, rate_bps: int) -> Change:
    return Change(
        at_ns=round(at_s * SECOND), rate_bps=rate_bps, delay_ns=5_000_000, jitter_ns=0, loss=Bernoulli(probability=0.01)
    )


def _varying(repeat_s: float | None, *changes: Change) -> Pipe:
    return _pipe(Schedule(changes=changes, repeat_ns=None if repeat_s is None else round(repeat_s * SECOND)))


def test_a_pipe_that_does_not_vary_is_one_step_for_ever() -> None:
    line = timeline(_pipe(None))
    assert len(line.steps) == 1
    assert line.next_after(0) is None
    assert line.at(10**15).rate_bps == 8_000_000


def test_before_the_first_change_and_after_the_round_the_pipes_own_numbers_hold() -> None:
    line = timeline(_varying(4, _change(1, 16_000_000), _change(3, 32_000_000)))
    for second, rate in [(0, 8), (0.999, 8), (1, 16), (2.9, 16), (3, 32), (3.9, 32), (4, 8), (5, 16), (404.5, 8)]:
        assert line.at(round(second * SECOND)).rate_bps == rate * 1_000_000, second
    assert [line.next_after(round(s * SECOND)) for s in (0, 1, 3.5, 4)] == [SECOND, 3 * SECOND, 4 * SECOND, 5 * SECOND]
    assert line.at(2 * SECOND).loss == Bernoulli(probability=0.01)
    assert line.at(0).loss is None


def test_without_repeat_the_last_change_stays() -> None:
    line = timeline(_varying(None, _change(0, 16_000_000), _change(3, 32_000_000)))
    assert line.at(0).rate_bps == 16_000_000
    assert line.at(10**15).rate_bps == 32_000_000
    assert line.next_after(3 * SECOND) is None


_moments = st.integers(0, 20 * SECOND)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3 * SECOND), st.integers(1_000, 10**7)), min_size=1, max_size=5),
    st.booleans(),
    _moments,
    _moments,
    _moments,
)
def test_what_is_carried_adds_up_and_takes_its_time(
    gaps: list[tuple[int, int]], repeats: bool, a: int, b: int, c: int
) -> None:
    at, changes = 0, []
    for gap, rate in gaps:
        at += gap
        changes.append(_change(at / SECOND, rate * 8))
    line = timeline(_pipe(Schedule(changes=tuple(changes), repeat_ns=at + SECOND if repeats else None)))
    begin, middle, end = sorted((a, b, c))
    whole = line.bits_between(begin, end)
    assert line.bits_between(begin, middle) + line.bits_between(middle, end) == pytest.approx(whole)
    assert line.carried_at(begin, whole) == pytest.approx(end, abs=10)

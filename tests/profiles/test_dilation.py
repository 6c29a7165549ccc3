"""A dilated pipe is the same pipe in a slower world: everything that happens to a packet is later by the factor."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed import profiles
from testbed.errors import SpecError
from testbed.net.relay.client import pipe_table
from testbed.net.relay.wire import Opportunities, RunningTrace
from testbed.profiles import Bernoulli, Change, Pipe, RateTrace, Schedule, Slot, rate_trace
from testbed.profiles.timeline import timeline

MS = 1_000_000
FACTORS = st.integers(1, 50)
TIMES_MS = st.lists(st.integers(0, 800), min_size=1, max_size=60).map(sorted).filter(lambda times: times[-1] > 0)


def whole_rates(factor: int) -> st.SearchStrategy[int]:
    """Draw rates that the factor divides without remainder."""
    return st.integers(2_000, 1_000_000).map(lambda count: count * 8 * factor)


@st.composite
def dilations(draw: st.DrawFn) -> tuple[Pipe, int]:
    """Draw a pipe, varying or not, and a factor."""
    factor = draw(FACTORS)
    rates, delays = whole_rates(factor), st.integers(0, 100 * MS)
    moments = sorted(draw(st.sets(st.integers(0, 3_000 * MS), max_size=4)))
    changes = tuple(
        Change(at_ns=at_ns, rate_bps=draw(rates), delay_ns=(delay := draw(delays)), jitter_ns=delay // 3, loss=None)
        for at_ns in moments
    )
    repeats = st.none() | st.integers(50 * MS, 1_000 * MS).map(lambda more: moments[-1] + more)
    schedule = Schedule(changes=changes, repeat_ns=draw(repeats)) if changes else None
    slot = draw(st.none() | st.just(Slot(wait_ns=MS, wait_max_ns=2 * MS, packets=3, max_bytes=0)))
    buffer_bytes = draw(st.integers(1, 10**7))
    pipe = Pipe.plain(
        rate_bps=draw(rates),
        delay_ns=draw(delays),
        buffer_bytes=buffer_bytes,
        schedule=schedule,
        slot=slot,
        loss=Bernoulli(probability=0.1),
    )
    return pipe, factor


@settings(deadline=None)
@given(dilations(), st.integers(0, 4_000 * MS), st.integers(1, 10**6))
def test_the_same_bits_leave_so_many_times_as_late(case: tuple[Pipe, int], begin_ns: int, bits: int) -> None:
    pipe, factor = case
    once, slow = timeline(pipe), timeline(pipe.dilated(factor))
    assert slow.carried_at(begin_ns * factor, bits) == pytest.approx(once.carried_at(begin_ns, bits) * factor, rel=1e-9)
    here, there = once.at(begin_ns), slow.at(begin_ns * factor)
    assert (there.at_ns, there.delay_ns, there.jitter_ns) == tuple(
        factor * t for t in (here.at_ns, here.delay_ns, here.jitter_ns)
    )
    assert there.loss == here.loss


@given(dilations())
def test_bytes_and_shares_stay_and_dilating_twice_is_dilating_once(case: tuple[Pipe, int]) -> None:
    pipe, factor = case
    slow = pipe.dilated(factor)
    kept = {"buffer_bytes", "loss", "reorder", "duplicate", "jitter_reorders", "seed"}
    assert slow.model_dump(include=kept) == pipe.model_dump(include=kept)
    assert slow.buffer_ns == pytest.approx(pipe.buffer_ns * factor, abs=factor)
    if slow.slot is not None:
        assert (slow.slot.wait_ns, slow.slot.packets) == (factor * pipe.slot.wait_ns, pipe.slot.packets)
    assert pipe.dilated(1) == pipe
    if pipe.rate_bps % (16 * factor) == 0 and pipe.schedule is None:
        assert slow.dilated(2) == pipe.dilated(2 * factor)


@given(st.integers(8_000, 10**11), FACTORS)
def test_a_rate_stays_one_that_the_kernel_can_hold(rate_bps: int, factor: int) -> None:
    if rate_bps < 8_004 * factor:  # it would be too slow
        return
    found = Pipe.plain(rate_bps=rate_bps, delay_ns=0, buffer_bytes=1).dilated(factor).rate_bps
    assert factor == 1 or found % 8 == 0
    assert abs(found * factor - rate_bps) <= 4 * factor


@given(
    TIMES_MS,
    st.booleans(),
    st.integers(0, 799),
    FACTORS,
    st.lists(st.tuples(st.integers(0, 90 * MS), st.integers(20, 1500)), max_size=60),
)
def test_a_trace_lets_every_packet_through_so_many_times_as_late(
    times: list[int], loop: bool, offset_ms: int, factor: int, arrivals: list[tuple[int, int]]
) -> None:
    offset_ms %= times[-1]
    once = RunningTrace(Opportunities(times, loop, offset_ms), 0)
    slow = RunningTrace(Opportunities(times, loop, offset_ms, factor), 0)
    now = 0
    for gap, length in arrivals:
        now += gap
        through = once.through(now, length)
        assert slow.through(now * factor, length) == (None if through is None else through * factor)


def traced(folder: Path, times: list[int], *, loop: bool, offset_ms: int) -> Pipe:
    path = folder / "some.trace"
    path.write_text(rate_trace.format_trace(times), encoding="ascii")
    found = rate_trace.read_trace(path)
    asked = RateTrace(
        file=path.name,
        digest=found.digest,
        length_ms=times[-1],
        opportunities=len(times),
        loop=loop,
        offset_ms=offset_ms,
    )
    return Pipe.plain(rate_bps=24_000_000, delay_ns=MS, buffer_bytes=60_000, trace=asked)


@pytest.mark.parametrize("loop", [True, False])
def test_a_trace_in_steps_is_as_slow_as_packet_by_packet(tmp_path: Path, loop: bool) -> None:
    pipe = traced(tmp_path, [*range(500), *range(500, 1000, 4), 1000], loop=loop, offset_ms=250)
    slow = pipe.dilated(5)
    once, stretched = timeline(pipe), timeline(slow)
    assert [(step.at_ns, step.delay_ns) for step in stretched.steps] == [
        (5 * s.at_ns, 5 * s.delay_ns) for s in once.steps
    ]
    for bits in (10**5, 10**6, 10**7):
        # 1e-4: rates are whole bytes.
        assert stretched.carried_at(0, bits) == pytest.approx(5 * once.carried_at(0, bits), rel=1e-4)
    asked = pipe_table(slow)
    assert asked["trace"]["stretch"] == 5


def test_what_a_pipe_cannot_be_is_one_message(tmp_path: Path) -> None:
    slow = Pipe.plain(rate_bps=80_000, delay_ns=MS, buffer_bytes=3000)
    with pytest.raises(
        SpecError,
        match=r"a dilation of 100 is too large for a pipe of 80kbit: rate_bps: 800bit is out of range; choose 8kbit",
    ):
        slow.dilated(100)
    far = Pipe.plain(rate_bps=10**9, delay_ns=300 * MS, buffer_bytes=3000)
    with pytest.raises(
        SpecError, match=r"a dilation of 40 is too large for a pipe of 1Gbit: delay_ns: 12s is out of range"
    ):
        far.dilated(40)
    long = traced(tmp_path, [0, 3_600_000], loop=True, offset_ms=0)
    with pytest.raises(SpecError, match=r"a dilation of 25 is too large .*trace: it would play for 25.0 hours"):
        long.dilated(25)


def test_every_shipped_profile_can_be_dilated_a_little() -> None:
    for name in profiles.profile_files():
        profile = profiles.load_profile(name)
        slow = profile.dilated(8)
        assert slow.name == profile.name
        assert [pipe is None for pipe in (slow.up, slow.down)] == [pipe is None for pipe in (profile.up, profile.down)]
        assert profile.dilated(1) is profile

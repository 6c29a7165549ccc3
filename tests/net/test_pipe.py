"""The pipe formula as laws over any sequence of packets, for the fast class and for the one that can do everything."""

import itertools
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.net.meters import port_counters
from testbed.net.relay.loss import loss_model, mix
from testbed.net.relay.pipe import COUNTERS, Plain, Unshaped
from testbed.net.relay.shaper import Shaper, build_pipe
from testbed.net.relay.wire import OPPORTUNITY_BYTES, Opportunities, RunningTrace
from testbed.profiles.timeline import Timeline, TimelineStep

MS = 1_000_000
ARRIVALS = st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(20, 1500)), min_size=1, max_size=200)
RATES = st.integers(8_000, 10**10)
DELAYS = st.integers(0, 10**8)
BUFFERS = st.integers(1500, 10**7)
KINDS = st.sampled_from([Plain, Shaper])
TIMES_MS = st.lists(st.integers(0, 60), min_size=1, max_size=100).map(sorted).filter(lambda times: times[-1] > 0)


def asked(*, rate_bps=10**7, delay_ns=0, buffer_bytes=10**15, loss=0.0, seed=1, **others):
    return {
        "rate_bps": rate_bps,
        "delay_ns": delay_ns,
        "jitter_ns": 0,
        "buffer_bytes": buffer_bytes,
        "loss": {"model": "bernoulli", "probability": loss} if loss else None,
        "reorder": 0.0,
        "jitter_reorders": False,
        "duplicate": 0.0,
        "seed": seed,
        "steps": None,
        "repeat_ns": None,
        "trace": None,
    } | others


def shaper(kind=Shaper, *, overhead_bytes=0, stream=0, **pipe):
    return kind(asked(**pipe), overhead_bytes, stream)


def offer(pipe, arrivals, begin=0):
    """(arrival, length, times at which it leaves) of every packet."""
    now, found = begin, []
    for gap, length in arrivals:
        now += gap
        found.append((now, length, pipe.offer(now, length)))
    return found


def count(pipe, now=0):
    return dict(zip(COUNTERS, pipe.counters(now), strict=True))


def exact_ns(length, rate_bps):
    return math.ceil(length * 8e9 / rate_bps * (1 - 1e-12))


def no_faster_than(rate_bps, packets):
    """That no span of (time, bytes) carries more than the rate does in it; its first packet may have begun before."""
    total, worst = 0, None
    for time, length in packets:
        total += length
        behind = time * rate_bps - total * 8_000_000_000
        assert worst is None or behind >= worst
        worst = behind if worst is None else max(worst, behind)


@given(KINDS, ARRIVALS, RATES, DELAYS, BUFFERS, st.sampled_from([0, 14]))
def test_packets_leave_in_order_and_never_early(kind, arrivals, rate_bps, delay_ns, buffer_bytes, overhead_bytes):
    pipe = shaper(kind, rate_bps=rate_bps, delay_ns=delay_ns, buffer_bytes=buffer_bytes, overhead_bytes=overhead_bytes)
    left = [(now, length + overhead_bytes, due) for now, length, dues in offer(pipe, arrivals) for due in dues]
    assert all(due >= now + delay_ns + exact_ns(counted, rate_bps) for now, counted, due in left)
    dues = [due for _, _, due in left]
    assert dues == sorted(dues)


@given(KINDS, ARRIVALS, RATES, DELAYS, st.sampled_from([0, 14]))
def test_no_span_of_packets_is_faster_than_the_rate(kind, arrivals, rate_bps, delay_ns, overhead_bytes):
    found = offer(shaper(kind, rate_bps=rate_bps, delay_ns=delay_ns, overhead_bytes=overhead_bytes), arrivals)
    no_faster_than(rate_bps, [(due, length + overhead_bytes) for _, length, (due,) in found])


@given(KINDS, ARRIVALS, RATES)
def test_a_busy_wire_is_never_idle(kind, arrivals, rate_bps):
    """Back-to-back packets take what the rate says, and at most one nanosecond more each."""
    found = offer(shaper(kind, rate_bps=rate_bps), [(0, length) for _, length in arrivals])
    total = sum(length for _, length, _ in found)
    assert 0 <= found[-1][2][0] * rate_bps - total * 8_000_000_000 <= rate_bps * len(found)


@given(ARRIVALS, RATES, DELAYS, st.sampled_from([0.0, 0.3]))
def test_the_fast_class_and_the_full_one_agree(arrivals, rate_bps, delay_ns, loss):
    pipe = {"rate_bps": rate_bps, "delay_ns": delay_ns, "loss": loss}
    assert offer(shaper(Plain, **pipe), arrivals) == offer(shaper(Shaper, **pipe), arrivals)


@given(KINDS, ARRIVALS, RATES, BUFFERS)
def test_what_waits_never_exceeds_the_buffer_and_nothing_is_dropped_before(kind, arrivals, rate_bps, buffer_bytes):
    pipe = shaper(kind, rate_bps=rate_bps, buffer_bytes=buffer_bytes)
    free = 0
    for now, length, dues in offer(pipe, arrivals):
        waits = max(0, free - now) * rate_bps / 8e9
        # The full class counts whole packets: the one on the wire is not in the buffer, and this one has to fit in.
        if dues:
            assert waits <= buffer_bytes * (1 + 1e-9) + (1500 if kind is Shaper else 0) + 1
            free = dues[0]
        else:
            assert waits + (length if kind is Shaper else 0) > buffer_bytes * (1 - 1e-9) - 1


@given(KINDS, ARRIVALS, st.floats(0.01, 0.99), st.integers(0, 2**63 - 1), RATES, RATES)
def test_the_same_seed_loses_the_same_packets_at_any_speed(kind, arrivals, loss, seed, rate_bps, other_rate_bps):
    def lost(kind, rate_bps):
        return [not dues for _, _, dues in offer(shaper(kind, rate_bps=rate_bps, loss=loss, seed=seed), arrivals)]

    assert lost(kind, rate_bps) == lost(Shaper, other_rate_bps)


def test_streams_of_one_seed_differ():
    patterns = {
        tuple(not dues for _, _, dues in offer(shaper(Plain, loss=0.5, seed=7, stream=stream), [(0, 100)] * 64))
        for stream in range(100)
    }
    assert len(patterns) == 100


@given(st.integers(0, 2**63 - 1), st.sampled_from([0.001, 0.01, 0.3, 0.9]))
def test_the_share_of_lost_packets_is_the_probability(seed, loss):
    packets = 5_000
    pipe = shaper(Plain, loss=loss, seed=seed)
    offer(pipe, [(0, 100)] * packets)
    # Six standard deviations of a binomial count, and three packets where that is too few to be normal.
    assert abs(pipe.dropped_loss - packets * loss) <= 6 * math.sqrt(packets * loss * (1 - loss)) + 3


def gilbert_elliott(**numbers):
    return (
        {"model": "gilbert-elliott"}
        | {"enter_bad": 0.01, "leave_bad": 0.2, "lost_in_bad": 1.0, "lost_in_good": 0.0}
        | numbers
    )


@pytest.mark.slow
@given(st.integers(0, 2**63 - 1), st.sampled_from([(0.01, 0.2), (0.05, 0.5), (0.2, 0.1)]))
def test_bursts_have_the_length_and_the_share_of_the_model(seed, numbers):
    """With everything lost in the bad state and nothing in the good one: bursts are geometric with mean 1 / r."""
    enter, leave = numbers
    packets = 20_000
    model = loss_model(gilbert_elliott(enter_bad=enter, leave_bad=leave), seed, 0)
    lost = [model.lost(n) for n in range(packets)]
    bursts = sum(now and not before for before, now in pairwise([False, *lost]))
    # Six standard deviations: of a mean of geometric lengths, and of a share whose draws are correlated over
    # 1 / (p + r) packets.
    assert abs(sum(lost) / bursts - 1 / leave) <= 6 * math.sqrt((1 - leave) / bursts) / leave + 2 / bursts
    share = enter / (enter + leave)
    assert abs(sum(lost) / packets - share) <= 6 * math.sqrt(share * (1 - share) * 2 / (enter + leave) / packets)


@given(ARRIVALS, st.integers(0, 2**63 - 1), RATES)
def test_bursts_hit_the_same_packets_even_where_the_buffer_drops_some(arrivals, seed, rate_bps):
    loss = gilbert_elliott(enter_bad=0.3, leave_bad=0.3)
    model = loss_model(loss, seed, 0)
    lost = [model.lost(n + 1) for n in range(len(arrivals))]
    pipe = Shaper(asked(rate_bps=rate_bps, buffer_bytes=1500, seed=seed) | {"loss": loss}, 0, 0)
    for expected, (_, _, dues) in zip(lost, offer(pipe, arrivals), strict=True):
        assert not (expected and dues)
    assert pipe.dropped_buffer + pipe.dropped_loss >= sum(lost)
    assert pipe.dropped_loss <= sum(lost)


@pytest.mark.parametrize("kind", [Plain, Shaper])
def test_a_lost_packet_takes_no_time_on_the_wire(kind):
    found = offer(shaper(kind, rate_bps=8_000_000, loss=0.5, seed=3), [(0, 1000)] * 100)
    left = [due for _, _, dues in found for due in dues]
    assert left == [1_000_000 * (n + 1) for n in range(len(left))]


@given(
    KINDS,
    ARRIVALS,
    RATES,
    BUFFERS,
    st.sampled_from([0.0, 0.3]),
    st.sampled_from(
        [{}, {"duplicate": 0.3}, {"reorder": 0.2}, {"jitter_ns": 1000, "delay_ns": 1000, "jitter_reorders": True}]
    ),
)
def test_every_packet_is_counted_once(kind, arrivals, rate_bps, buffer_bytes, loss, effects):
    pipe = shaper(kind if not effects else Shaper, rate_bps=rate_bps, buffer_bytes=buffer_bytes, loss=loss, **effects)
    found = offer(pipe, arrivals)
    through = [length for _, length, dues in found for _ in dues]
    counted = count(pipe, found[-1][0])
    assert (counted["packets_in"], counted["bytes_in"]) == (len(found), sum(length for _, length, _ in found))
    assert (counted["packets_out"], counted["bytes_out"]) == (len(through), sum(through))
    dropped = counted["dropped_buffer"] + counted["dropped_loss"]
    assert counted["packets_in"] + counted["duplicated"] == counted["packets_out"] + dropped
    assert counted["backlog_bytes"] <= buffer_bytes + 1500


@given(KINDS, st.integers(1, 60), st.integers(20, 1500), RATES, st.sampled_from([0, 14]), st.floats(0, 1.5))
def test_what_is_counted_as_carried_has_left_the_wire(kind, packets, length, rate_bps, overhead_bytes, moment):
    pipe = shaper(kind, rate_bps=rate_bps, overhead_bytes=overhead_bytes)
    offer(pipe, [(0, length)] * packets)
    wire_bits = 8 * packets * (length + overhead_bytes)
    elapsed_ns = round(moment * wire_bits * 1e9 / rate_bps)
    carried = port_counters(count(pipe, elapsed_ns), overhead_bytes)
    share = min(1.0, elapsed_ns * rate_bps / 1e9 / wire_bits)
    clock = 2e-9 * rate_bps  # its nanosecond
    assert carried.bytes == pytest.approx(share * packets * length, abs=length + clock)
    assert carried.packets == pytest.approx(share * packets, abs=1.1 + 2e-9 * rate_bps)
    assert carried.bytes + carried.backlog_bytes == packets * length


@given(ARRIVALS, RATES, st.integers(0, 2**63 - 1), st.integers(0, 10**7), st.integers(0, 10**7))
def test_jitter_keeps_order_rate_and_its_bounds(arrivals, rate_bps, seed, jitter_ns, more_ns):
    delay_ns = jitter_ns + more_ns
    found = offer(shaper(rate_bps=rate_bps, delay_ns=delay_ns, jitter_ns=jitter_ns, seed=seed), arrivals)
    left = [due for _, _, (due,) in found]
    assert left == sorted(left)
    no_faster_than(rate_bps, [(due, length) for _, length, (due,) in found])
    before = 0
    for now, length, (due,) in found:
        own = exact_ns(length, rate_bps)
        assert due >= now + more_ns + own
        assert due <= max(now + delay_ns + jitter_ns, before) + own + 2
        before = due


@given(st.integers(0, 2**63 - 1))
def test_jitter_spreads_over_all_of_its_range(seed):
    found = offer(shaper(rate_bps=10**10, delay_ns=10**7, jitter_ns=10**7, seed=seed), [(10**8, 100)] * 500)
    late = sorted(due - now for now, _, (due,) in found)
    assert late[0] < 10**6 < 19 * 10**6 < late[-1]  # each missed once in 10**11 seeds
    assert abs(sum(late) / 500 - 10**7) < 6 * (2 * 10**7 / math.sqrt(12)) / math.sqrt(500)


@given(ARRIVALS, RATES, st.integers(0, 2**63 - 1), st.integers(1, 10**7))
def test_jitter_behind_the_wire_reorders_and_says_how_much(arrivals, rate_bps, seed, jitter_ns):
    pipe = shaper(rate_bps=rate_bps, delay_ns=jitter_ns, jitter_ns=jitter_ns, jitter_reorders=True, seed=seed)
    plain = shaper(Plain, rate_bps=rate_bps, delay_ns=jitter_ns)
    left, expected = offer(pipe, arrivals), offer(plain, arrivals)
    assert all(
        abs(due - on_time) <= jitter_ns for (_, _, (due,)), (_, _, (on_time,)) in zip(left, expected, strict=True)
    )
    dues = [due for _, _, (due,) in left]
    assert pipe.reordered == sum(due < max(dues[:n]) for n, due in enumerate(dues) if n)


@pytest.mark.slow
@given(st.integers(0, 2**63 - 1), st.sampled_from(["duplicate", "reorder"]), st.sampled_from([0.02, 0.5]))
def test_shares_are_kept(seed, what, share):
    packets = 5_000
    pipe = shaper(delay_ns=10**6, seed=seed, **{what: share})
    found = offer(pipe, [(0, 100)] * packets)
    counted = pipe.duplicated if what == "duplicate" else pipe.reordered
    assert abs(counted - packets * share) <= 6 * math.sqrt(packets * share * (1 - share))
    if what == "duplicate":
        assert sum(len(dues) for _, _, dues in found) == packets + counted
    else:  # at once, past all that wait
        assert sum(dues == (now,) for now, _, dues in found) == counted


def test_a_schedule_changes_the_rate_at_its_times_and_again_in_each_round():
    steps = [step(0, rate_bps=8_000_000), step(10 * MS, rate_bps=800_000)]
    pipe = shaper(rate_bps=80_000_000, steps=steps, repeat_ns=20 * MS)
    assert pipe.offer(5 * MS, 1000) == (5 * MS + 100_000,)
    pipe.play(100 * MS)
    for begin in (100 * MS, 120 * MS, 700 * MS):
        assert pipe.offer(begin, 1000) == (begin + 1 * MS,)
        assert pipe.offer(begin + 10 * MS, 500) == (begin + 15 * MS,)
    pipe.hold()
    assert pipe.offer(800 * MS, 1000) == (800 * MS + 100_000,)


def step(at_ns, **numbers):
    return {"at_ns": at_ns, "rate_bps": 10**7, "delay_ns": 0, "jitter_ns": 0, "loss": None} | numbers


@given(ARRIVALS, st.lists(st.tuples(RATES, DELAYS), min_size=2, max_size=4))
def test_a_changing_link_keeps_order_and_its_highest_rate(arrivals, points):
    steps = [step(n * 20 * MS, rate_bps=rate_bps, delay_ns=delay_ns) for n, (rate_bps, delay_ns) in enumerate(points)]
    pipe = shaper(steps=steps, repeat_ns=len(steps) * 20 * MS)
    pipe.play(0)
    found = offer(pipe, arrivals)
    left = [due for _, _, (due,) in found]
    assert left == sorted(left)
    no_faster_than(max(rate_bps for rate_bps, _ in points), [(due, length) for _, length, (due,) in found])


@given(st.lists(RATES, min_size=2, max_size=4), st.integers(1, 60), st.booleans())
def test_what_waits_leaves_at_the_rates_of_its_time(rates, packets, repeats):
    repeat_ns = len(rates) * 20 * MS if repeats else None
    steps = [step(n * 20 * MS, rate_bps=rate_bps) for n, rate_bps in enumerate(rates)]
    pipe = shaper(delay_ns=0, buffer_bytes=10**9, steps=steps, repeat_ns=repeat_ns)
    pipe.play(0)
    ends = [pipe.offer(0, 1000)[0] for _ in range(packets)]
    exact = Timeline(tuple(TimelineStep(**each) for each in steps), repeat_ns)
    for number, end in enumerate(ends, start=1):
        # A packet's end is rounded up to a nanosecond, which may be worth more of them at a lower rate.
        most_ns = 1 + number * max(rates) / min(rates)
        assert -1 <= end - exact.carried_at(0, number * 8000) <= most_ns


@given(ARRIVALS, ARRIVALS, RATES, RATES, DELAYS, DELAYS, KINDS)
def test_a_live_change_keeps_what_is_under_way_and_the_counters(
    before, after, rate, new_rate, delay_ns, new_delay_ns, kind
):
    old = shaper(kind, rate_bps=rate, delay_ns=delay_ns)
    left = offer(old, before)
    now = left[-1][0]
    backlog = old.backlog_bytes(now)
    new = build_pipe(asked(rate_bps=new_rate, delay_ns=new_delay_ns), 0, 0, before=old, now_ns=now)
    assert new.backlog_bytes(now) == backlog
    later = offer(new, after, begin=now)
    assert new.packets_in == len(before) + len(after)
    last_due = left[-1][2][0]
    free = last_due - delay_ns
    for arrived, length, (due,) in later:
        free = max(arrived, free) + exact_ns(length, new_rate)
        assert due >= max(last_due, free + new_delay_ns) - 1
        last_due = due


@given(st.integers(0, 2**63 - 1), st.integers(1, 199))
def test_a_live_change_goes_on_with_the_sequence_of_losses(seed, place):
    whole = [not dues for _, _, dues in offer(shaper(loss=0.3, seed=seed), [(0, 100)] * 200)]
    old = shaper(Plain, loss=0.3, seed=seed)
    first = offer(old, [(0, 100)] * place)
    new = build_pipe(asked(loss=0.3, seed=seed, rate_bps=10**6), 0, 0, before=old, now_ns=0)
    second = offer(new, [(0, 100)] * (200 - place))
    assert [not dues for _, _, dues in first + second] == whole


def opportunities_ms(times, loop, offset_ms):
    for number in itertools.count() if loop else [0]:
        yield from (at for time in times if (at := number * times[-1] + time - offset_ms) >= 0)


GAPS = st.integers(0, 3 * MS) | st.integers(0, 100).map(lambda ms: ms * MS)


@given(TIMES_MS, st.booleans(), st.integers(0, 59), st.lists(st.tuples(GAPS, st.integers(1, 4000)), max_size=30))
def test_a_packet_takes_the_first_opportunities_that_are_left(times, loop, offset_ms, arrivals):
    """Also after a long pause, where the trace jumps, and this walks."""
    offset_ms %= times[-1]
    running = RunningTrace(Opportunities(times, loop, offset_ms), 0)
    coming = opportunities_ms(times, loop, offset_ms)
    at_ms, left, now = next(coming), OPPORTUNITY_BYTES, 0
    for gap, length in arrivals:
        now, needed = now + gap, length
        while at_ms is not None and (at_ms * MS < now or left < needed):
            if at_ms * MS >= now:
                needed -= left
            at_ms, left = next(coming, None), OPPORTUNITY_BYTES
        if at_ms is None:
            assert running.through(now, length) is None
            break
        assert running.through(now, length) == at_ms * MS
        left -= needed


def test_after_its_end_a_trace_hands_over_to_the_rate():
    pipe = Shaper(asked(rate_bps=12_000_000, delay_ns=5), 0, 0, Opportunities([0, 1, 10], loop=False, offset_ms=0))
    pipe.play(100 * MS)
    found = [due for _ in range(5) for due in pipe.offer(100 * MS, 1500)]
    assert found == [at + 5 for at in (100 * MS, 101 * MS, 110 * MS, 111 * MS, 112 * MS)]
    pipe.hold()
    assert pipe.offer(200 * MS, 1500) == (201 * MS + 5,)


@given(TIMES_MS, ARRIVALS, BUFFERS)
def test_a_trace_drops_by_the_bytes_that_wait(times, arrivals, buffer_bytes):
    pipe = Shaper(asked(buffer_bytes=buffer_bytes), 0, 0, Opportunities(times, loop=True, offset_ms=0))
    pipe.play(0)
    found = offer(pipe, arrivals)
    for n, (now, length, dues) in enumerate(found):
        waiting = [size for _, size, before in found[:n] for due in before if due > now]
        assert bool(dues) == (not waiting or sum(waiting[1:]) + length <= buffer_bytes)


@given(ARRIVALS)
def test_an_unshaped_direction_only_counts(arrivals):
    pipe = Unshaped()
    assert all(dues == (now,) for now, _, dues in offer(pipe, arrivals))
    assert count(pipe)["packets_out"] == len(arrivals)


@given(st.sets(st.integers(0, 2**64 - 1), max_size=100))
def test_mixing_is_a_bijection(values):
    assert len({mix(value) for value in values}) == len(values)
    assert all(0 <= mix(value) < 2**64 for value in values)

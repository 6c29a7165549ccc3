"""The pipe formula as laws over any sequence of packets."""

import math

from hypothesis import given
from hypothesis import strategies as st

from testbed.net.relay.pipe import DROPPED, Shaper, Unshaped, counters, mix

ARRIVALS = st.lists(st.tuples(st.integers(0, 3_000_000), st.integers(20, 1500)), min_size=1, max_size=200)
RATES = st.integers(8_000, 10**10)
DELAYS = st.integers(0, 10**8)
BUFFERS = st.integers(0, 10**8)


def shaper(*, rate_bps=10**7, delay_ns=0, buffer_ns=10**12, loss=0.0, seed=1, overhead_bytes=0, stream=0):
    return Shaper(
        rate_bps=rate_bps,
        delay_ns=delay_ns,
        buffer_ns=buffer_ns,
        loss=loss,
        seed=seed,
        overhead_bytes=overhead_bytes,
        stream=stream,
    )


def offer(pipe, arrivals):
    """(arrival, length, due or DROPPED) of every packet."""
    now, found = 0, []
    for gap, length in arrivals:
        now += gap
        found.append((now, length, pipe.admit(now, length)))
    return found


def exact_ns(length, rate_bps):
    return math.ceil(length * 8e9 / rate_bps * (1 - 1e-12))


@given(ARRIVALS, RATES, DELAYS, BUFFERS, st.sampled_from([0, 14]))
def test_packets_leave_in_order_and_never_early(arrivals, rate_bps, delay_ns, buffer_ns, overhead_bytes):
    pipe = shaper(rate_bps=rate_bps, delay_ns=delay_ns, buffer_ns=buffer_ns, overhead_bytes=overhead_bytes)
    left = [(now, length + overhead_bytes, due) for now, length, due in offer(pipe, arrivals) if due != DROPPED]
    assert all(due >= now + delay_ns + exact_ns(counted, rate_bps) for now, counted, due in left)
    dues = [due for _, _, due in left]
    assert dues == sorted(dues)


@given(ARRIVALS, RATES, DELAYS, st.sampled_from([0, 14]))
def test_no_span_of_packets_is_faster_than_the_rate(arrivals, rate_bps, delay_ns, overhead_bytes):
    found = offer(shaper(rate_bps=rate_bps, delay_ns=delay_ns, overhead_bytes=overhead_bytes), arrivals)
    first_due = found[0][2]
    counted = 0
    for _, length, due in found[1:]:
        counted += length + overhead_bytes
        assert (due - first_due) * rate_bps >= counted * 8_000_000_000


@given(ARRIVALS, RATES)
def test_a_busy_wire_is_never_idle(arrivals, rate_bps):
    """Back-to-back packets take what the rate says, and at most one nanosecond more each."""
    found = offer(shaper(rate_bps=rate_bps), [(0, length) for _, length in arrivals])
    total = sum(length for _, length, _ in found)
    assert 0 <= found[-1][2] * rate_bps - total * 8_000_000_000 <= rate_bps * len(found)


@given(ARRIVALS, RATES, BUFFERS)
def test_what_waits_never_exceeds_the_buffer(arrivals, rate_bps, buffer_ns):
    pipe = shaper(rate_bps=rate_bps, buffer_ns=buffer_ns)
    for now, length, due in offer(pipe, arrivals):
        if due != DROPPED:
            assert due - now - exact_ns(length, rate_bps) <= buffer_ns + 1


@given(ARRIVALS, RATES, BUFFERS)
def test_a_packet_is_dropped_only_when_the_buffer_is_full(arrivals, rate_bps, buffer_ns):
    pipe = shaper(rate_bps=rate_bps, buffer_ns=buffer_ns)
    free = 0
    for now, _, due in offer(pipe, arrivals):
        assert (due == DROPPED) == (max(now, free) - now > buffer_ns)
        free = due if due != DROPPED else free


@given(ARRIVALS, st.floats(0.01, 0.99), st.integers(0, 2**63 - 1), RATES, RATES)
def test_the_same_seed_loses_the_same_packets_at_any_speed(arrivals, loss, seed, rate_bps, other_rate_bps):
    def lost(rate_bps, stream=0):
        return [due == DROPPED for _, _, due in offer(shaper(rate_bps=rate_bps, loss=loss, seed=seed, stream=stream), arrivals)]

    assert lost(rate_bps) == lost(other_rate_bps)


def test_streams_of_one_seed_differ():
    patterns = {
        tuple(due == DROPPED for _, _, due in offer(shaper(loss=0.5, seed=7, stream=stream), [(0, 100)] * 64))
        for stream in range(100)
    }
    assert len(patterns) == 100


@given(st.integers(0, 2**63 - 1), st.sampled_from([0.001, 0.01, 0.3, 0.9]))
def test_the_share_of_lost_packets_is_the_probability(seed, loss):
    packets = 5_000
    pipe = shaper(loss=loss, seed=seed)
    offer(pipe, [(0, 100)] * packets)
    # Six standard deviations of a binomial count, and three packets where that is too few to be normal.
    assert abs(pipe.dropped_loss - packets * loss) <= 6 * math.sqrt(packets * loss * (1 - loss)) + 3


def test_a_lost_packet_takes_no_time_on_the_wire():
    found = offer(shaper(rate_bps=8_000_000, loss=0.5, seed=3), [(0, 1000)] * 100)
    dues = [due for _, _, due in found if due != DROPPED]
    assert dues == [1_000_000 * (n + 1) for n in range(len(dues))]


@given(ARRIVALS, RATES, BUFFERS, st.sampled_from([0.0, 0.3]))
def test_every_packet_is_counted_once(arrivals, rate_bps, buffer_ns, loss):
    pipe = shaper(rate_bps=rate_bps, buffer_ns=buffer_ns, loss=loss)
    found = offer(pipe, arrivals)
    through = [length for _, length, due in found if due != DROPPED]
    count = counters(pipe, found[-1][0])
    assert (count["packets_in"], count["bytes_in"]) == (len(found), sum(length for _, length, _ in found))
    assert (count["packets_out"], count["bytes_out"]) == (len(through), sum(through))
    assert count["packets_in"] == count["packets_out"] + count["dropped_buffer"] + count["dropped_loss"]
    if loss == 0:
        assert count["backlog_bytes"] <= rate_bps * buffer_ns // 8_000_000_000 + 1500


@given(ARRIVALS)
def test_an_unshaped_direction_only_counts(arrivals):
    pipe = Unshaped()
    assert all(due == now for now, _, due in offer(pipe, arrivals))
    assert counters(pipe, 0)["packets_out"] == len(arrivals)


@given(st.sets(st.integers(0, 2**64 - 1), max_size=100))
def test_mixing_is_a_bijection(values):
    assert len({mix(value) for value in values}) == len(values)
    assert all(0 <= mix(value) < 2**64 for value in values)

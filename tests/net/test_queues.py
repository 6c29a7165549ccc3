"""When the relay wakes: for lone packets and ends of bursts on time, else at most HOLD_NS late, with few wakes."""

from hypothesis import given
from hypothesis import strategies as st

from testbed.net.relay.pipe import NEVER
from testbed.net.relay.queues import HOLD_NS, RelayQueues

GAPS = st.lists(st.integers(0, 3 * HOLD_NS), min_size=1, max_size=60)


def play(dues):
    """(due, left at) of packets that are all known before the first is due, as the loop would send them."""
    queues = RelayQueues(1)
    for number, due in enumerate(dues):
        queues.push(0, (due, number, 0, b""))
    found = []
    while (now := queues.wake_ns[0]) < NEVER:
        while queues.packets[0] and queues.packets[0][0][0] <= now:
            queues.left_ns[0] = queues.packets[0].popleft()[0]
            found.append((queues.left_ns[0], now))
        queues.plan(0)
    return found


@given(GAPS)
def test_nothing_is_early_and_nothing_later_than_the_hold(gaps):
    dues = [sum(gaps[: n + 1]) for n in range(len(gaps))]
    left = play(dues)
    assert [due for due, _ in left] == dues
    assert all(0 <= at - due <= HOLD_NS for due, at in left)


@given(GAPS)
def test_the_first_and_the_last_of_a_burst_are_on_time(gaps):
    dues = [sum(gaps[: n + 1]) for n in range(len(gaps))]
    left = dict(play(dues))
    for before, due, following in zip([-NEVER, *dues], dues, [*dues[1:], NEVER], strict=False):
        if following - due > HOLD_NS or due - before > HOLD_NS:
            assert left[due] == due


def test_a_long_burst_costs_a_wake_a_hold():
    dues = list(range(0, 100 * HOLD_NS, HOLD_NS // 4))
    assert len({at for _, at in play(dues)}) <= 101


@given(st.lists(st.integers(0, 10 * HOLD_NS), min_size=1, max_size=60))
def test_what_comes_out_of_order_leaves_in_the_order_of_its_due_times(dues):
    assert [due for due, _ in play(dues)] == sorted(dues)

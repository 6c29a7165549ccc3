"""Links as sources of events, held to packets that are simulated one by one, and to laws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from testbed.jobs.actions import Encode, Key, Program, Receive, Send, Sizes, Work
from testbed.jobs.loop import Links, Loop
from testbed.metrics.links import AlonePipes, Pipes, Queues
from testbed.metrics.wires import HEADER_BYTES, StatedLinks, WireDeviation, Wires, wire_bytes
from testbed.profiles import LinkProfile
from testbed.spec import SiteSpec, Topology
from tests.metrics.test_ideal import schedule
from tests.synthetic import pipe, profile

ROOM = 1500 - HEADER_BYTES


class Sent(NamedTuple):
    """A message."""

    at_ns: int
    source: int
    target: int
    size: int


def arrivals(
    topology: Topology,
    links: Sequence[LinkProfile],
    messages: Sequence[Sent],
    over: Links | None = None,
    **changes: int,
) -> list[int]:
    """Return when each message has arrived; of one node they are handed over in the order of time."""
    nodes = len(links) + (topology == "line")

    def place(me: int) -> Program:
        now = 0
        for number, sent in sorted(enumerate(messages), key=lambda each: each[1].at_ns):
            if sent.source == me:
                if sent.at_ns > now:
                    yield Work("pause", Key("pause", sent.at_ns - now))
                now = sent.at_ns
                yield Send((yield Encode(Key("m", number))), sent.target)

    def wait(number: int, sent: Sent) -> Program:
        message = yield Receive(Key("m", number), sent.source)
        found[number] = message.last_byte_ns

    found = [-1] * len(messages)
    wires = Wires(StatedLinks(topology, links), changes.pop("played_at_ns", None))
    loop = Loop(
        [place(node) for node in range(nodes)],
        [Sizes(lambda key: messages[key.step].size)] * nodes,
        cost=lambda node, action: action.key.step if isinstance(action, Work) else None,
        links=over or Queues(wires, **changes),
    )
    for number, sent in enumerate(messages):
        loop.run_on(sent.target, f"wait for {number}", wait(number, sent))
    loop.run()
    return found


def by_packets(links: Sequence[LinkProfile], messages: Sequence[Sent]) -> list[float]:
    """Return when each message has arrived over a star, packet after packet: every queue sends the first that came."""
    order = sorted(range(len(messages)), key=lambda number: messages[number].at_ns)
    free = [0.0] * len(links)
    left: dict[tuple[int, int], tuple[float, int]] = {}
    at_downlinks: list[list[tuple[float, int, int]]] = [[] for _ in links]

    def bit_ns(link: LinkProfile, way: str) -> float:
        shaped = link.pipe(way)  # type: ignore[arg-type]
        return (12000 * 10**9 // shaped.rate_bps) / 12000

    for number in order:
        sent = messages[number]
        until, carried = left.get((sent.source, sent.target), (0.0, 0))
        carried = carried if until > sent.at_ns else 0
        room = -carried % ROOM  # in the last packet of what is before
        sizes = [8 * min(room, sent.size)] if room else []
        for begin in range(min(room, sent.size), sent.size, ROOM):
            sizes.append(8 * (min(ROOM, sent.size - begin) + HEADER_BYTES))
        up = links[sent.source].up
        for bits in sizes:
            free[sent.source] = max(free[sent.source], sent.at_ns) + bits * bit_ns(links[sent.source], "up")
            at_downlinks[sent.target].append((free[sent.source] + up.delay_ns, number, bits))
        left[sent.source, sent.target] = free[sent.source], carried + sent.size
    found = [0.0] * len(messages)
    for link, packets in zip(links, at_downlinks, strict=True):
        now = 0.0
        for there_ns, number, bits in sorted(packets, key=lambda packet: packet[0]):
            now = max(now, there_ns) + bits * bit_ns(link, "down")
            found[number] = now + link.down.delay_ns
    return found


rates = st.integers(5_000_000, 200_000_000)
delays = st.integers(0, 5_000_000)
links = st.builds(lambda u, d, a, b: profile("x", pipe(u, a), pipe(d, b)), rates, rates, delays, delays)
stars = st.lists(links, min_size=4, max_size=4)
sends = st.builds(
    lambda at, source, further, size: Sent(at, source, (source + further) % 4, size),
    st.integers(0, 20_000_000) | st.just(0),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 60_000),
)


def packet_ns(link: LinkProfile) -> float:
    """Return how long a full packet takes in the slower direction."""
    return 12e12 / min(link.up.rate_bps, link.down.rate_bps)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(star=stars, messages=st.lists(sends, min_size=1, max_size=8))
@example(  # the third fills up the second's packet, which by packets is still behind the first
    star=[profile("x", pipe(5_000_000, 0), pipe(5_000_000, 0))] * 4,
    messages=[Sent(0, 2, 3, 2), Sent(0, 2, 0, 1), Sent(84_800, 2, 0, 1)],
)
def test_no_message_is_later_than_by_packets(star: list[LinkProfile], messages: list[Sent]) -> None:
    """All that a node gets is there no later than by packets, and so is each message, of those that come at once either
    first. But one that went ahead of its turn at a shared uplink may come before another at the next queue.
    """
    found, slow = arrivals("star", star, messages), by_packets(star, messages)
    targets = [{sent.target for sent in messages if sent.source == source} for source in range(4)]
    for node in range(4):
        own = [number for number, sent in enumerate(messages) if sent.target == node]
        there_ns, reference_ns = (sorted(times[number] for number in own) for times in (found, slow))
        ahead = [messages[number].size for number in own if len(targets[messages[number].source]) > 1]
        late_ns = sum(8e9 * wire_bytes(size, star[node]) / star[node].down.rate_bps for size in ahead)
        assert all(ours <= theirs + 1 + late_ns for ours, theirs in zip(there_ns, reference_ns, strict=True))
        assert there_ns[-1:] <= [last_ns + 1 for last_ns in reference_ns[-1:]]


@settings(max_examples=60, deadline=None)
@given(link=links, size=st.integers(1, 60_000))
def test_a_node_has_messages_of_all_others_no_sooner_than_its_links_carry_them(link: LinkProfile, size: int) -> None:
    star = [link] * 4
    everybody = [Sent(0, source, (source + further) % 4, size) for further in (1, 2, 3) for source in range(4)]
    found = arrivals("star", star, everybody)
    for node in range(4):
        bits_ns = 3 * 8 * wire_bytes(size, link) * 0.9998e9  # a packet has whole nanoseconds
        came = [there for there, sent in zip(found, everybody, strict=True) if sent.target == node]
        went = [there for there, sent in zip(found, everybody, strict=True) if sent.source == node]
        assert max(came) >= bits_ns / link.down.rate_bps
        assert max(went) >= bits_ns / link.up.rate_bps


@settings(max_examples=60, deadline=None)
@given(star=stars, messages=st.lists(sends, min_size=1, max_size=6), target=st.integers(1, 3))
def test_where_one_sender_sends_full_packets_a_message_is_there_when_its_last_one_is(
    star: list[LinkProfile], messages: list[Sent], target: int
) -> None:
    messages = [sent._replace(source=0, target=target, size=-(-sent.size // ROOM) * ROOM) for sent in messages]
    for found, reference in zip(arrivals("star", star, messages), by_packets(star, messages), strict=True):
        assert found <= reference + 1
        assert found >= reference - 3


@settings(max_examples=40, deadline=None)
@given(
    star=stars,
    messages=st.lists(sends, min_size=1, max_size=8),
    slower=st.integers(2, 5),
    more_ns=st.integers(0, 10_000_000),
)
def test_links_that_are_slower_or_longer_and_messages_that_are_larger_are_no_faster(
    star: list[LinkProfile], messages: list[Sent], slower: int, more_ns: int
) -> None:
    def worse(link: LinkProfile, slower: int, more_ns: int) -> LinkProfile:
        up, down = (
            shaped.model_copy(update={"rate_bps": shaped.rate_bps // slower, "delay_ns": shaped.delay_ns + more_ns})
            for shaped in (link.up, link.down)
        )
        return link.model_copy(update={"up": up, "down": down})

    last = max(arrivals("star", star, messages))
    # Other packets meet, so a message may be ahead of what it is counted with by a packet of each other sender.
    close = 8 * max(packet_ns(worse(link, slower, 0)) for link in star)
    assert max(arrivals("star", [worse(link, slower, 0) for link in star], messages)) >= last - close
    assert max(arrivals("star", [worse(link, 1, more_ns) for link in star], messages)) >= last + more_ns - close
    larger = [sent._replace(size=2 * sent.size) for sent in messages]
    assert max(arrivals("star", star, larger)) >= last - close


@given(sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=4), delay_ns=delays, rate=rates)
def test_over_one_queue_messages_follow_each_other(sizes: list[int], delay_ns: int, rate: int) -> None:
    link = profile("x", pipe(rate, delay_ns), pipe(rate, delay_ns))
    found = arrivals("line", [link], [Sent(0, 0, 1, size) for size in sizes])
    total = 0
    for size, there_ns in zip(sizes, found, strict=True):
        total += size
        # One connection: what follows fills the last packet up.
        assert there_ns == pytest.approx(wire_bytes(total, link) * 8e9 / rate + delay_ns, rel=2e-4, abs=2)
        assert there_ns <= wire_bytes(total, link) * 8e9 / rate + delay_ns + 1


@given(size=st.integers(1, 10**6), sender=links, receiver=links)
def test_one_message_over_two_queues_takes_the_closed_form(
    size: int, sender: LinkProfile, receiver: LinkProfile
) -> None:
    (found,) = arrivals("star", [sender, receiver], [Sent(0, 0, 1, size)])
    bits, first = 8 * wire_bytes(size, sender), 8 * wire_bytes(min(size, ROOM), sender)
    last = 8 * wire_bytes(size % ROOM or ROOM, sender) if size > ROOM else first
    delays_ns = sender.up.delay_ns + receiver.down.delay_ns
    by_receiver = first / sender.up.rate_bps + bits / receiver.down.rate_bps
    by_sender = bits / sender.up.rate_bps + last / receiver.down.rate_bps
    assert found == pytest.approx(max(by_receiver, by_sender) * 1e9 + delays_ns, rel=2e-4, abs=2)


def test_two_senders_share_a_downlink_and_both_are_through_at_the_end() -> None:
    link = profile("x", pipe(10_000_000, 0), pipe(10_000_000, 0))
    size = 100 * ROOM
    one, other = sorted(arrivals("star", [link] * 3, [Sent(0, 0, 2, size), Sent(0, 1, 2, size)]))
    packet = 1_200_000
    assert other == pytest.approx(201 * packet, abs=2)
    assert one == pytest.approx(101 * packet, abs=2)  # it may have been alone


def test_a_slow_receiver_does_not_wait_behind_fast_ones_nor_a_small_message_behind_a_large_one() -> None:
    server = profile("x", pipe(100_000_000, 0), pipe(100_000_000, 0))
    slow = profile("x", pipe(10_000_000, 0), pipe(10_000_000, 0))
    size = 100 * ROOM
    links = [server, server, server, slow]
    found = arrivals("star", links, [Sent(0, 0, target, size) for target in (1, 2, 3)])
    assert found[2] == pytest.approx(100 * 1_200_000 + 120_000, abs=2)  # its downlink is busy from the first packet on
    large, small = arrivals("star", links, [Sent(0, 0, 1, size), Sent(1, 0, 2, ROOM)])
    assert small == pytest.approx(240_000, abs=2)
    assert large == pytest.approx(101 * 120_000, abs=2)  # or the other way round


def test_alone_a_message_finds_no_other() -> None:
    link = profile("x", pipe(10_000_000, 0), pipe(10_000_000, 0))
    messages = [Sent(0, source, 3, 50_000) for source in range(3)]
    (alone,) = arrivals("star", [link] * 4, messages[:1])
    assert arrivals("star", [link] * 4, messages, AlonePipes("star", [link], 4)) == [alone] * 3


def test_a_rate_that_halves_halves_what_is_carried_from_then_on() -> None:
    link = profile("x", pipe(12_000_000, 0, schedule((0, 12, 0), (10, 6, 0))), pipe(12_000_000, 0))
    size = 15 * ROOM  # 15 ms at 12 Mbit/s
    (found,) = arrivals("line", [link], [Sent(0, 0, 1, size)], played_at_ns=0)
    assert found == pytest.approx(20_000_000, abs=2)
    (late,) = arrivals("line", [link], [Sent(0, 0, 1, size)], played_at_ns=0, begins_ns=10_000_000)
    assert late == pytest.approx(30_000_000, abs=2)
    (never_played,) = arrivals("line", [link], [Sent(0, 0, 1, size)])  # it stays at its own numbers
    assert never_played == pytest.approx(15_000_000, abs=2)


def test_a_wire_that_deviates_is_that_much_slower() -> None:
    link = profile("x", pipe(12_000_000, 1_000_000), pipe(12_000_000, 0))
    size = 10 * ROOM

    def arrives(deviation: WireDeviation) -> int:
        wires = Wires(StatedLinks("line", [link]), None, {(0, "up"): deviation})
        return arrivals("line", [link], [Sent(0, 0, 1, size)], Queues(wires))[0]

    assert arrives(WireDeviation()) == 11_000_000
    assert arrives(WireDeviation(rate=0.5)) == pytest.approx(21_000_000, abs=1)
    assert arrives(WireDeviation(delay_ns=500, packet_ns=10)) == pytest.approx(11_000_600, abs=1)
    assert arrives(WireDeviation(overflow_ns=7000, buffer_ns=9e6)) == pytest.approx(11_007_000, abs=1)
    assert arrives(WireDeviation(overflow_ns=7000, buffer_ns=10e6)) == 11_000_000


def over_sites(links: Sequence[LinkProfile], sites: Sequence[SiteSpec], messages: Sequence[Sent]) -> list[int]:
    return arrivals("star", links, messages, Pipes("star", links, len(links), tuple(sites)))


@given(
    rates=st.lists(st.integers(1, 100), min_size=4, max_size=4),
    delays_ms=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    packets=st.integers(1, 200),
)
def test_a_message_alone_crosses_four_queues_in_the_time_of_its_slowest_and_one_packet_of_each(
    rates: list[int], delays_ms: list[int], packets: int
) -> None:
    up, site_up, site_down, down = (
        profile(f"p{i}", pipe(rate * 10**6, delay * 10**6), pipe(rate * 10**6, delay * 10**6))
        for i, (rate, delay) in enumerate(zip(rates, delays_ms, strict=True))
    )
    sites = [SiteSpec(nodes=(0,), profile=site_up), SiteSpec(nodes=(1,), profile=site_down)]
    (found,) = over_sites([up, down], sites, [Sent(0, 0, 1, packets * ROOM)])
    each_ns = [1500 * 8 * 1000 // rate for rate in rates]
    assert found == pytest.approx(sum(each_ns) + (packets - 1) * max(each_ns) + sum(delays_ms) * 10**6, abs=8)


def test_nodes_behind_one_link_share_it_and_reach_each_other_without_it() -> None:
    free, slow = profile("free", None, None), profile("slow", pipe(12_000_000, 10**6), pipe(12_000_000, 10**6))
    sites = [SiteSpec(nodes=(0, 1), profile=slow)]
    size = 100 * ROOM
    first, second, inside = over_sites(
        [free] * 3, sites, [Sent(0, 0, 2, size), Sent(0, 1, 2, size), Sent(0, 0, 1, size)]
    )
    assert (first, second) == (pytest.approx(101_000_000, abs=2), pytest.approx(201_000_000, abs=2))
    assert inside == 0
    # A shared bottleneck in the middle: shaped access links in front of it.
    fast = profile("fast", pipe(120_000_000, 10**6), pipe(120_000_000, 10**6))
    later = over_sites([fast] * 3, sites, [Sent(0, 0, 2, size), Sent(0, 1, 2, size)])
    assert max(later) == pytest.approx(200_000_000 + 100_000 * 2 + 3 * 10**6, abs=8)

"""What the probe sends and understands, and its records through JSON. Measuring real links is in test_certify.py."""

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP

from testbed import process
from testbed.directions import LINK_DIRECTIONS
from testbed.net.certificate.effort import plan
from testbed.net.probe import patterns
from testbed.net.probe.__main__ import Turns, _at_once
from testbed.net.probe.datagrams import DatagramFlow, SleepTimer, exchange
from testbed.net.probe.echo import EchoAnswer, echo_replies, echo_request
from testbed.net.probe.job import ProbeJob
from testbed.net.probe.patterns import OfferPattern, order_of
from testbed.net.probe.readings import BulkTransfer, PacketTrain, Readings, TimedMessage
from testbed.net.probe.stream import Stream, warm
from tests.net.test_certify import SPACES, link_of
from tests.net.test_judge import pipe, profile

WORDS = st.integers(0, 0xFFFF)


def test_the_probe_s_process_imports_no_library_that_is_slow_to_import():
    python, *words = process.command_line("testbed.net.probe", parent=os.getpid())
    command = [python, "-X", "importtime", *words]
    ended = subprocess.run(command, input='{"jobs": []}\n', capture_output=True, text=True, check=True)
    imported = {line.split("|")[-1].strip().split(".")[0] for line in ended.stderr.splitlines()}
    assert json.loads(ended.stdout) == []
    assert {"json", "testbed"} <= imported
    assert not {"scapy", "pydantic", "numpy", "pyroute2", "typer"} & imported


def job(**changes):
    """What the quick form asks of a link, over loopback."""
    link = link_of(profile(up=pipe(rate_bps=10**7, delay_ns=5_000_000, buffer_bytes=10**5), down=None))
    ends = {"near_address": "127.0.0.1", "far_address": "127.0.0.2"}
    return replace(plan(link, SPACES, "quick", [20]), **{**ends, **changes})


def a_train():
    numbers = {"sent": 3, "offer_ns": 8, "arrived": 2, "counted": 1, "span_ns": 9, "end_ns": 12, "lost": 1, "bursts": 1}
    return PacketTrain(way="down", packet_bytes=60, transit_ns=[1, 2], **numbers)


def reply_to(request, source="10.0.0.1", **changes):
    """The packet that a kernel would answer with."""
    asked = ICMP(request)
    answer = {"type": 0, "id": asked.id, "seq": asked.seq, **changes}
    return bytes(IP(src=source, dst="10.0.0.2") / ICMP(**answer) / bytes(asked.payload))


def test_records_survive_json():
    asked = job()
    assert ProbeJob.from_dict(json.loads(json.dumps(asdict(asked)))) == asked
    found = Readings(
        link="node-0",
        rtt_ns=[1, 2],
        window_bytes={"up": 5},
        messages=[TimedMessage(way="up", size=1, elapsed_ns=2, retransmits=0)],
        light=[a_train()],
        overload=[a_train(), a_train()],
        followed=[a_train()],
        bulk=[BulkTransfer(way="up", size=1, span_ns=2, retransmits=3)],
        faults={"echo": "lost"},
    )
    assert Readings.from_dict(json.loads(json.dumps(asdict(found)))) == found


@given(WORDS, WORDS, st.integers(0, 2000))
def test_a_request_is_what_scapy_makes_of_it_with_the_asked_size_and_a_valid_checksum(
    identifier, sequence, payload_bytes
):
    packet = echo_request(identifier, sequence, payload_bytes)
    assert packet == bytes(ICMP(type="echo-request", id=identifier, seq=sequence) / packet[8:])
    assert len(packet) == 8 + payload_bytes


@given(WORDS, st.sets(WORDS, min_size=1, max_size=20))
def test_replies_are_understood_in_any_order_and_the_first_copy_counts(identifier, sequences):
    packets = [reply_to(echo_request(identifier, sequence, 20)) for sequence in sorted(sequences, reverse=True)]
    answers = [EchoAnswer(at, packet) for at, packet in enumerate(packets + packets)]
    found = echo_replies(answers, identifier, "10.0.0.1")
    assert set(found) == sequences
    assert sorted(found.values()) == list(range(len(sequences)))


@given(WORDS, WORDS)
def test_packets_of_others_are_no_answers(identifier, sequence):
    request = echo_request(identifier, sequence, 20)
    others = [
        reply_to(request, source="10.0.0.9"),
        reply_to(request, type=8),
        reply_to(request, type=3),
        reply_to(request, id=identifier ^ 1),
        bytes(IP(src="10.0.0.1") / TCP()),
    ]
    assert echo_replies([EchoAnswer(0, packet) for packet in others], identifier, "10.0.0.1") == {}


def tcp_sockets():
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM), socket.socket(socket.AF_INET, socket.SOCK_STREAM)


@pytest.mark.root  # forces socket buffers past the system's limit
def test_a_stream_carries_messages_both_ways_over_loopback():
    node, hub = tcp_sockets()
    stream = Stream(job(up=None, mtu=65_536), node, hub)
    try:
        assert all(window > 0 for window in warm(stream, together=False).values())
        for way in LINK_DIRECTIONS:
            found = stream.message(way, 3_000_000)
            assert (found.way, found.size) == (way, 3_000_000)
            assert found.elapsed_ns > 0
            bulk = stream.bulk(way, 0.02, 0.1)
            assert bulk.size > 0
            assert bulk.span_ns > 0
    finally:
        stream.close()
        hub.close()


@pytest.mark.root
def test_a_peer_that_does_not_answer_is_a_timeout_or_an_error():
    node, hub = tcp_sockets()
    with node, hub, pytest.raises(OSError, match=r"."):
        Stream(job(far_address="192.0.2.1", up=None), node, hub)


@contextlib.contextmanager
def loopback_flow(asked):
    sender, receiver = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    with sender, receiver:
        receiver.bind(("127.0.0.1", 0))
        sender.connect(receiver.getsockname())
        yield DatagramFlow(asked, "up", sender, receiver)


def test_a_light_train_counts_what_was_sent_and_what_arrived():
    with loopback_flow(job()) as flow:
        (train,) = exchange([flow], [patterns.light(flow.shape, 0.2)], timer := SleepTimer())
    assert train.sent == train.arrived > 1
    assert (train.lost, train.bursts, train.overtakers, train.copies) == (0, 0, 0, 0)
    assert train.sent <= flow.shape.light_pps * 0.2 + flow._burst  # never more than was asked for, and what is begun
    assert all(transit > 0 for transit in train.transit_ns)
    assert sum(timer.lateness) > 50


def test_a_straggler_of_an_earlier_train_counts_for_nothing():
    """An overloaded relay brings the last packets of a train when the next one has begun."""
    middle = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender, receiver = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    with middle, sender, receiver:
        middle.bind(("127.0.0.1", 0))
        receiver.bind(("127.0.0.1", 0))
        sender.connect(middle.getsockname())
        middle.connect(sender.getsockname())
        flow = DatagramFlow(job(), "up", sender, receiver)
        flow.begin(OfferPattern(60, 1000.0, 1.0))
        flow.offer(10_000_000)
        held = [middle.recv(2000) for _ in range(flow.sent)]
        flow.begin(OfferPattern(60, 10.0, 1.0))
        flow.offer(100_000_000)
        held.append(middle.recv(2000))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as onward:
            for packet in held:
                onward.sendto(packet, receiver.getsockname())
        time.sleep(0.05)
        flow.take()
        train = flow.reading(1)
    assert len(held) > train.sent == train.arrived == 1
    assert train.copies == train.lost == 0


def test_an_overload_is_its_load_and_what_fills_the_buffer():
    with loopback_flow(job()) as flow:
        pattern = patterns.overload(flow.shape, 1500, 1.05, 0.3)
        (train,) = exchange([flow], [pattern], SleepTimer())
    full = flow.shape.buffer_bytes / 1500
    assert train.sent == train.arrived  # loopback has no such buffer
    # 10 Mbit/s in packets of 1500 bytes, the buffer, and the burst that is begun.
    assert full < train.sent <= 1.05 * 10**7 * pattern.seconds / 12_000 + 1.2 * full + 2 + 60


@given(
    st.integers(10**5, 10**9),
    st.integers(1_500, 10**7),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
)
def test_an_overload_always_fills_the_buffer_before_it_ends(rate_bps, buffer_bytes, loss, reorder):
    shape = replace(job().up, rate_bps=rate_bps, buffer_bytes=buffer_bytes, loss=loss, reorder=reorder)
    pattern = patterns.overload(shape, 1500, 1.05, 0.2)
    admitted = (1 - loss) * (1 - reorder)
    carried = rate_bps / 12_000 * pattern.full_after_s
    held = pattern.wanted(round(pattern.full_after_s * 1e9) + 1) * admitted - carried
    assert pattern.seconds > pattern.full_after_s
    assert held * 1500 >= buffer_bytes


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_what_is_lost_is_counted_and_so_are_its_bursts(arrived):
    found = order_of([number for number, here in enumerate(arrived) if here], len(arrived))
    text = "".join("." if here else "x" for here in arrived)
    assert (found.lost, found.bursts) == (text.count("x"), len([run for run in text.split(".") if run]))
    assert (found.copies, found.overtakers) == (0, frozenset())


@given(st.permutations(range(12)), st.lists(st.integers(0, 11), max_size=5))
def test_overtakers_arrive_before_one_sent_earlier_and_copies_are_none(numbers, again):
    found = order_of([*numbers, *again], 12)
    expected = {place for place, n in enumerate(numbers) if any(later < n for later in numbers[place + 1 :])}
    assert found.overtakers == expected
    assert (found.lost, found.copies) == (0, len(again))


def test_links_that_could_take_every_cpu_are_measured_one_after_the_other():
    slow = job(down=job().up)
    fast = replace(slow, up=replace(slow.up, rate_bps=10**9))
    open_ended = replace(slow, up=None)
    nothing = replace(slow, up=None, down=None)
    assert [_at_once(jobs, 4) for jobs in ([slow] * 3, [slow, fast], [slow, open_ended], [nothing] * 2)] == [4, 1, 1, 4]


@pytest.mark.parametrize("count", [1, 2])
def test_no_more_than_so_many_take_a_turn_at_once(count):
    turns, inside, most = Turns(count), [], []

    def worker(n):
        for _ in range(20):
            with turns.turn():
                inside.append(n)
                most.append(len(inside))
                time.sleep(0.0002)
                inside.remove(n)

    threads = [threading.Thread(target=worker, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 100
    assert 1 <= max(most) <= count

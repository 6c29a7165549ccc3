"""What the probe sends and understands, and its records through JSON. Measuring real links is in test_certify.py."""

import json
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP

from testbed.net.probe import WAYS, Bulk, Job, Line, Message, Readings, Train, datagrams, echo
from testbed.net.probe.__main__ import Turns
from testbed.net.probe.stream import Stream, warm

WORDS = st.integers(0, 0xFFFF)


def job(**changes):
    line = Line(rate_bps=10**7, delay_ns=5_000_000, buffer_bytes=10**5, loss=0.0, overhead_bytes=0)
    fields = {
        "link": "node-0",
        "node_fd": 3,
        "hub_fd": 4,
        "node_address": "127.0.0.1",
        "hub_address": "127.0.0.2",
        "mtu": 1500,
        "congestion_control": "reno",
        "up": line,
        "down": None,
        "echoes": 20,
        "messages": ({"up": 10, "down": 20},),
        "repeats": 1,
        "idle_s": 0.1,
        "rate_s": 0.1,
        "loss_s": 0.0,
        "bulk_s": 0.0,
    }
    return Job(**{**fields, **changes})


def reply_to(request, source="10.0.0.1", **changes):
    """The packet that a kernel would answer with."""
    asked = ICMP(request)
    answer = {"type": 0, "id": asked.id, "seq": asked.seq, **changes}
    return bytes(IP(src=source, dst="10.0.0.2") / ICMP(**answer) / bytes(asked.payload))


def test_records_survive_json():
    asked = job()
    assert Job.from_dict(json.loads(json.dumps(asked.as_dict()))) == asked
    found = Readings(
        link="node-0",
        rtt_ns=[1, 2],
        window_bytes={"up": 5},
        messages=[Message(way="up", size=1, elapsed_ns=2, retransmits=0)],
        rate=[Train(way="down", sent=3, offer_ns=8, received=2, span_ns=9)],
        bulk=[Bulk(way="up", size=1, span_ns=2, retransmits=3)],
        faults={"echo": "lost"},
    )
    assert Readings.from_dict(json.loads(json.dumps(found.as_dict()))) == found


@given(WORDS, WORDS, st.integers(0, 2000))
def test_a_request_has_the_asked_size_and_a_valid_checksum(identifier, sequence, payload_bytes):
    packet = echo.craft(identifier, sequence, payload_bytes)
    assert len(packet) == 8 + payload_bytes
    words = packet + b"\0" * (len(packet) % 2)
    total = sum(int.from_bytes(words[n : n + 2], "big") for n in range(0, len(words), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    assert total == 0xFFFF


@given(WORDS, st.sets(WORDS, min_size=1, max_size=20))
def test_replies_are_understood_in_any_order_and_the_first_copy_counts(identifier, sequences):
    packets = [reply_to(echo.craft(identifier, sequence, 20)) for sequence in sorted(sequences, reverse=True)]
    answers = [echo.Answer(at, packet) for at, packet in enumerate(packets + packets)]
    found = echo.understand(answers, identifier, "10.0.0.1")
    assert set(found) == sequences
    assert sorted(found.values()) == list(range(len(sequences)))


@given(WORDS, WORDS)
def test_packets_of_others_are_no_answers(identifier, sequence):
    request = echo.craft(identifier, sequence, 20)
    others = [
        reply_to(request, source="10.0.0.9"),
        reply_to(request, type=8),
        reply_to(request, type=3),
        reply_to(request, id=identifier ^ 1),
        bytes(IP(src="10.0.0.1") / TCP()),
    ]
    assert echo.understand([echo.Answer(0, packet) for packet in others], identifier, "10.0.0.1") == {}


def tcp_sockets():
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM), socket.socket(socket.AF_INET, socket.SOCK_STREAM)


@pytest.mark.root  # forces socket buffers past the system's limit
def test_a_stream_carries_messages_both_ways_over_loopback():
    node, hub = tcp_sockets()
    stream = Stream(job(up=None, mtu=65_536), node, hub)
    try:
        assert all(window > 0 for window in warm(stream).values())
        for way in WAYS:
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
        Stream(job(hub_address="192.0.2.1", up=None), node, hub)


@pytest.mark.root
def test_a_train_counts_what_was_sent_and_what_arrived():
    sender, receiver = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    with sender, receiver:
        receiver.bind(("127.0.0.1", 0))
        sender.connect(receiver.getsockname())
        flow = datagrams.Flow(job(), "up", sender, receiver)
        before = time.monotonic_ns()
        train = flow.train(1.0, 0.2)
        assert train.sent == train.received > 1
        assert 0 < train.span_ns <= time.monotonic_ns() - before
        # Never more than the load asked for: 10 Mbit/s in packets of 1500 bytes, and the burst that is begun.
        assert train.sent <= 10**7 * train.offer_ns * 1e-9 / (1500 * 8) + 1


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

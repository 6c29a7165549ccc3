"""How long a link was at work on frames: what acknowledgements tell, whatever else happens on the connection."""

from __future__ import annotations

import socket
import statistics
import time
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import CapabilityError
from testbed.jobs.actions import Key
from testbed.net.lab import Lab
from testbed.runtime import carried
from testbed.runtime.carried import Carried
from testbed.runtime.transport import Connection
from tests.labs import lab_spec
from tests.over_loopback import tcp_pair

TOKEN = b"t" * 16
MS = 10**6
PACKET = 1448


def key(microbatch: int) -> Key:
    return Key("tensor", 0, microbatch)


def connections(stack: ExitStack, early: socket.socket, late: socket.socket) -> tuple[Connection, Connection]:
    ends = [(early, "0 <-> 1"), (late, "1 <-> 0")]
    made = [
        Connection(sock, name=name, token=TOKEN, names=("tensor",), max_payload_bytes=1 << 22, max_frames=64)
        for sock, name in ends
    ]
    return stack.enter_context(made[0]), stack.enter_context(made[1])


def noted(measure: Carried) -> list[int]:
    """The lengths of the first parts, as they are written from now on."""
    found: list[int] = []
    sending = measure.sending

    def note(frame_bytes: int, sent_ns: int) -> int:
        found.append(sending(frame_bytes, sent_ns))
        return found[-1]

    measure.sending = note  # type: ignore[method-assign]
    return found


def read_until(measure: Carried, expected: int) -> tuple[int, float]:
    """All that is read until so many bytes were, or ten seconds passed."""
    until, found, seconds = time.monotonic() + 10, 0, 0.0
    while found < expected and time.monotonic() < until:
        more, took = measure.read()
        found, seconds = found + more, seconds + took
        time.sleep(0.005)
    return found, seconds


class Wire:
    """A link of its own clock: frames are sent, their first parts acknowledged, stamps lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rtt_ns: int, ns_per_byte: int) -> None:
        self._rtt_ns, self._ns_per_byte = rtt_ns, ns_per_byte
        self.stamps: list[tuple[int, int]] = []
        self._end = self._free_ns = 0
        with socket.socket(type=socket.SOCK_DGRAM) as sock:  # one that is not connected and yet takes the option
            self.measure = Carried(sock)
        monkeypatch.setattr(self.measure, "_socket", self)
        monkeypatch.setattr(carried, "least_round_trip_ns", lambda _: rtt_ns)
        monkeypatch.setattr(self.measure, "_stamps", self._told)

    def getsockopt(self, level: int, option: int) -> int:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        return PACKET

    def _told(self) -> list[tuple[int, int]]:
        told, self.stamps = self.stamps, []
        return told

    def send(self, frame_bytes: int, at_ns: int, *, lost: bool = False) -> int:
        """Returns the bytes of the first part."""
        first = self.measure.sending(frame_bytes, at_ns)
        begun = max(at_ns + self._rtt_ns, self._free_ns)
        if first and not lost:
            self.stamps.append((self._end + first, begun + first * self._ns_per_byte))
        self._end += frame_bytes
        self._free_ns = begun + frame_bytes * self._ns_per_byte
        self.stamps.append((self._end, self._free_ns + 40 * MS))  # the last packet's: as late as receivers may be
        return first


@settings(deadline=None)
@given(
    frames=st.lists(st.tuples(st.integers(3 * PACKET, 200_000), st.integers(0, 60 * MS)), min_size=1, max_size=30),
    reads=st.sets(st.integers(0, 29)),
)
def test_a_links_rate_is_found_whatever_is_sent_when(frames: list[tuple[int, int]], reads: set[int]) -> None:
    """Pauses, frames within a round trip of each other, and frames that wait for each other: a byte takes what it
    takes.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        wire = Wire(monkeypatch, rtt_ns=20 * MS, ns_per_byte=100)
        now = expected = found = 0
        seconds = 0.0
        for number, (frame_bytes, pause_ns) in enumerate(frames):
            now += pause_ns
            expected += wire.send(frame_bytes, now)
            if number in reads or number == len(frames) - 1:
                more, took = wire.measure.read()
                found, seconds = found + more, seconds + took
    assert found == expected
    assert seconds == pytest.approx(1e-7 * expected, rel=1e-6, abs=1e-9)


def test_a_frame_whose_stamp_was_lost_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, rtt_ns=20 * MS, ns_per_byte=100)
    wire.send(50_000, 0, lost=True)
    second = wire.send(50_000, 100 * MS)
    assert wire.measure.read() == (second, pytest.approx(1e-7 * second))
    assert wire.measure.read() == (0, 0.0)


def test_nothing_is_asked_of_short_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, rtt_ns=MS, ns_per_byte=1)
    assert [wire.send(size * PACKET, 0) for size in (0, 1, 2, 3, 10)] == [0, 0, 0, PACKET, 8 * PACKET]


@pytest.mark.parametrize("unread", [0, 5, 100_000])
def test_a_real_connection_carries_frames_whole_and_tells_of_them(unread: int) -> None:
    """Also where bytes were on their way already when the measurement began."""
    with ExitStack() as stack:
        early, late = tcp_pair()
        early.sendall(bytes(unread))
        late.recv(unread, socket.MSG_WAITALL) if unread else None
        sender, receiver = connections(stack, early, late)
        measure = sender.measure()
        first = noted(measure)
        packet = early.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        payloads = [
            bytes([n]) * size for n, size in enumerate((0, 100, 3 * packet, 10 * packet + 7, 2 * packet, 6 * packet))
        ]
        for number, payload in enumerate(payloads):
            sender.send(key(number), payload)
        assert [bytes(receiver.take(key(number), 20).payload) for number in range(len(payloads))] == payloads
        found, seconds = read_until(measure, sum(first))
        assert found == sum(first) > 0
        assert 0 <= seconds < 10


def test_a_kernel_without_stamps_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried, "_SO_TIMESTAMPING", 9999)
    with socket.socket() as sock, pytest.raises(CapabilityError, match=r"SO_TIMESTAMPING.*Protocol not available"):
        Carried(sock)


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_a_links_rate_is_found_though_frames_come_seldom() -> None:
    """Frames of 4 ms, one each 15 ms, in a round trip of 20: most of what is sent never fills the link."""
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(lab_spec(("consumer-80mbps",), "netem", "line", nodes=2)))
        link = lab.links[0]
        with lab.namespaces[link.far.namespace].entered():
            listener = stack.enter_context(socket.create_server((link.far.address, 9)))
        with lab.namespaces[link.near.namespace].entered():
            early = socket.create_connection((link.far.address, 9))
        sender, receiver = connections(stack, early, listener.accept()[0])
        measure, rates = sender.measure(), []
        for number in range(40):
            sender.send(key(number), bytes(40_000))
            time.sleep(0.015)
            carried_bytes, seconds = measure.read()
            if seconds:
                rates.append(carried_bytes / seconds)
        for number in range(40):
            receiver.take(key(number), 20)
    assert len(rates) >= 10
    assert 4e6 < statistics.median(rates) < 12e6  # of 10 MB/s on the wire

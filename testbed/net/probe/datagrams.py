"""UDP packets with a number and a time of sending on each, offered in patterns: few and small (what a link loses, doubles and
reorders, and how long it takes), or more than it carries (its rate and its buffer).
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from testbed.directions import LinkDirection
from testbed.net.probe import SMALL_BYTES, Job, Line, Span, Train
from testbed.net.probe.arrivals import order_of
from testbed.net.probe.sockets import grow_buffers
from testbed.net.probe.timer import Timer

_SO_TIMESTAMPNS, _UDP_SEGMENT = 35, 103
_UDP_BYTES = 65_507  # the most that one call can send
_SEND_BUFFER_BYTES, _RECEIVE_BUFFER_BYTES = 16 << 20, 128 << 20
HEADERS = 28  # IPv4 and UDP
_TICK_NS = 1_000_000
_LEAD_NS = 20_000_000
_READ_AT_ONCE = 32  # in a tick: to read them all would take longer than the lead
_UNREAD_BYTES = 2_500  # what a packet takes at most of the receiver's buffer
_QUEUED_AT_ONCE = 200  # packets: what a device's queue holds for certain
_KEPT = 2_000  # transit times that a reading holds
_MARK = struct.Struct("<iiq")  # train, number, nanoseconds of CLOCK_REALTIME
_TIMESPEC = struct.Struct("@qq")


class Pattern(NamedTuple):
    """How packets are offered."""

    packet_bytes: int
    """Of each IP packet."""
    packets_per_s: float
    seconds: float
    lead: float = 0.0
    """Packets on top of that, to fill a buffer ..."""
    lead_per_s: float = 0.0
    """... at this speed ..."""
    at_once: float = 0.0
    """... but so many of them at the start."""

    @property
    def full_after_s(self) -> float:
        """When the lead has been sent."""
        return max(0.0, self.lead - self.at_once) / self.lead_per_s if self.lead_per_s else 0.0

    def wanted(self, elapsed_ns: int) -> float:
        """Packets to have been sent by then."""
        elapsed_s = min(elapsed_ns * 1e-9, self.seconds)
        return self.packets_per_s * elapsed_s + min(self.lead, self.at_once + self.lead_per_s * elapsed_s)


def light(line: Line, seconds: float) -> Pattern:
    """Small packets, fast, yet never so many that one of them waits for another."""
    return Pattern(SMALL_BYTES, line.light_pps, seconds)


def spaced(line: Line, seconds: float) -> Pattern:
    """Small packets so far apart that jitter cannot push one against the next: each shows its own delay."""
    packet_s = (SMALL_BYTES + line.overhead_bytes) * 8 / line.rate_bps
    return Pattern(SMALL_BYTES, 1 / (2.2e-9 * line.jitter_ns + packet_s + 0.001), seconds)


def peak(line: Line, mtu: int, seconds: float) -> Pattern:
    """More full packets than a varying link ever carries. What it loses or lets jump the queue is offered on top."""
    admitted = max(0.1, 1 - line.peak_loss) * max(0.1, 1 - line.reorder)
    return Pattern(mtu, 1.05 * line.peak_bps / ((mtu + line.overhead_bytes) * 8) / admitted, seconds)


def overload(line: Line, mtu: int, load: float, seconds: float) -> Pattern:
    """Full packets, `load` times what the link carries, and first of all what fills its buffer. It lasts until that is full, and
    `seconds` at least.
    """
    packet_bits = (mtu + line.overhead_bytes) * 8
    carried = line.rate_bps / packet_bits
    admitted = max(0.05, 1 - line.loss) * max(0.05, 1 - line.reorder)  # neither takes part in the queue
    # The lead fills the buffer once and a bit. Slow links take it at four times their rate, fast ones at a quarter more: what a
    # relay cannot read in time would be lost before the link.
    extra = min(3.0, max(0.25, 60e6 / line.rate_bps)) * carried
    buffer = line.buffer_bytes / (mtu + line.overhead_bytes)
    lead = 1.2 * buffer + 2
    at_once = min(lead, buffer / 2, _LEAD_NS * 1e-9 * carried, _QUEUED_AT_ONCE)
    filled = Pattern(mtu, load * carried / admitted, seconds, lead / admitted, extra / admitted, at_once / admitted)
    return filled._replace(seconds=max(seconds, filled.full_after_s + max(0.1, 15 / carried)))


class Flow:
    """One direction of one link: a sending and a receiving socket."""

    def __init__(self, job: Job, way: LinkDirection, sender: socket.socket, receiver: socket.socket) -> None:
        """Two UDP sockets, the sender connected to the receiver. The direction must be shaped."""
        line = job.line(way)
        assert line is not None
        self.way, self.line, self.mtu = way, line, job.mtu
        self._sender, self._receiver = sender, receiver
        self._can_cut = True
        self._train = 0
        grow_buffers(sender, _SEND_BUFFER_BYTES)
        # Packets stay in the receiver's buffer while others are offered: reading takes CPU time from sending.
        granted = grow_buffers(receiver, _RECEIVE_BUFFER_BYTES)
        self.small_buffers = granted < _RECEIVE_BUFFER_BYTES
        self._unread_most = granted // _UNREAD_BYTES // 2
        # Stamped by the kernel on arrival: the probe may sleep, and reads several at once.
        receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        for end in (sender, receiver):
            end.setblocking(False)

    def begin(self, pattern: Pattern) -> None:
        """Forget earlier trains; from now on this is offered."""
        self._pattern = pattern
        # One call sends what is due in a tick, and the kernel cuts it into packets before they reach the device: a tenth of
        # the CPU time, or slow machines could not offer enough. Not so much at once that the link's buffer would notice.
        self._payload_bytes = pattern.packet_bytes - HEADERS
        tick = int((pattern.packets_per_s + pattern.lead_per_s) * _TICK_NS * 1e-9)
        most = min(_UDP_BYTES // self._payload_bytes, self.line.buffer_bytes // pattern.packet_bytes // 4, 60)
        self._together(min(tick, most) if self._can_cut else 1)
        self._train += 1
        self.sent = 0
        self.numbers, self.sent_at, self.arrived_at = array("q"), array("q"), array("q")
        self._alone: set[int] = set()  # numbers of packets that had none of ours just before them

    def _together(self, packets: int) -> None:
        self._burst = max(1, packets)
        self._payload = bytearray(self._burst * self._payload_bytes)
        self._sender.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, self._payload_bytes if self._burst > 1 else 0)

    def offer(self, elapsed_ns: int) -> None:
        """Send what is to have been sent after this time."""
        wanted = self._pattern.wanted(elapsed_ns)
        self._alone.add(self.sent)
        while self.sent < wanted:
            now = time.time_ns()
            for place in range(self._burst):
                _MARK.pack_into(self._payload, place * self._payload_bytes, self._train, self.sent + place, now)
            try:
                self._sender.send(self._payload)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EIO or self._burst == 1:
                    raise
                self._can_cut = False  # kernels before 6.11 cannot cut where the device computes no checksums
                self._together(1)
                continue
            self.sent += self._burst

    def take(self, most: int = 1 << 62) -> None:
        """Read what has arrived, `most` packets of it."""
        for _ in range(most):
            try:
                content, ancillary, _, _ = self._receiver.recvmsg(_MARK.size, 64)
            except BlockingIOError:
                return
            train, number, sent_at = _MARK.unpack(content)
            if train != self._train:
                continue  # one that an overloaded machine brings after its own train was read
            seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
            self.numbers.append(number)
            self.sent_at.append(sent_at)
            self.arrived_at.append(seconds * 1_000_000_000 + nanoseconds)

    def take_some(self) -> None:
        """Read only if the receiver's buffer could overflow."""
        if self.sent - len(self.numbers) > self._unread_most:
            self.take(max(_READ_AT_ONCE, 3 * self._burst))

    @property
    def drained_after_ns(self) -> int:
        """How long the last packet takes to arrive at most, once offering has ended."""
        queued = self.sent * (self._pattern.packet_bytes + self.line.overhead_bytes)
        wait_ns = min(self.line.buffer_bytes, queued) * 8e9 / self.line.rate_bps
        return self.line.delay_ns + self.line.jitter_ns + round(1.1 * wait_ns) + 20 * _TICK_NS

    @property
    def complete(self) -> bool:
        """Whether nothing more can arrive."""
        return len(self.numbers) >= self.sent and not self.line.duplicate

    def reading(self, offer_ns: int) -> Train:
        """What the train showed."""
        order = order_of(self.numbers, self.sent)
        # A link whose packets jump its queue carries them beside its rate.
        beside: frozenset[int] = order.overtakers if self.line.reorder else frozenset()
        first, last, counted = self._steady(beside)
        return Train(
            way=self.way,
            packet_bytes=self._pattern.packet_bytes,
            sent=self.sent,
            offer_ns=offer_ns,
            arrived=len(self.numbers),
            counted=counted,
            span_ns=last - first,
            lost=order.lost,
            bursts=order.bursts,
            overtakers=len(order.overtakers),
            copies=order.copies,
            transit_ns=self._transits(beside),
        )

    def _steady(self, beside: frozenset[int]) -> tuple[int, int, int]:
        """First and last arrival, and how many after the first, once jitter has settled: a queue hides it from then on."""
        places = [place for place in range(len(self.numbers)) if place not in beside]
        if len(places) < 2:
            return 0, 0, 0
        begin = self.arrived_at[places[0]] + (2 * self.line.jitter_ns + 1 if self.line.jitter_ns else 0)
        steady = [place for place in places if self.arrived_at[place] >= begin]
        if len(steady) < 2:
            return 0, 0, 0
        return self.arrived_at[steady[0]], self.arrived_at[steady[-1]], len(steady) - 1

    def _transits(self, beside: frozenset[int]) -> list[int]:
        """Sending to arrival: of packets that none of ours preceded, or, once a buffer has been filled, of all sent since."""
        if not self.numbers:
            return []
        begin = min(self.sent_at) + round(self._pattern.full_after_s * 1e9)
        full = self._pattern.lead > 0
        found = [
            self.arrived_at[place] - self.sent_at[place]
            for place, number in enumerate(self.numbers)
            if place not in beside and self.sent_at[place] >= begin and (full or number in self._alone)
        ]
        return found[:: -(-len(found) // _KEPT)] if found else []


def exchange(flows: Sequence[Flow], patterns: Sequence[Pattern], timer: Timer) -> list[Train]:
    """Offer a pattern on each flow, all at once, then wait for what is under way."""
    for flow, pattern in zip(flows, patterns, strict=True):
        flow.begin(pattern)
    start = time.monotonic_ns()
    end = start + round(max((pattern.seconds for pattern in patterns), default=0.0) * 1e9)
    while (now := time.monotonic_ns()) < end:
        for flow in flows:
            flow.offer(now - start)
            flow.take_some()
        timer.sleep(_TICK_NS * 1e-9)
    offered = time.monotonic_ns()
    end = offered + max((flow.drained_after_ns for flow in flows), default=0)
    while time.monotonic_ns() < end and not all(flow.complete for flow in flows):
        timer.sleep(5 * _TICK_NS * 1e-9)
        for flow in flows:
            flow.take()
    return [
        flow.reading(min(offered - start, round(pattern.seconds * 1e9)))
        for flow, pattern in zip(flows, patterns, strict=True)
    ]


def follow(flows: Sequence[Flow], seconds: float, timer: Timer) -> list[Span]:
    """Offer more than each flow ever carries for `seconds`, and count what comes out of links that vary meanwhile."""
    started = time.monotonic_ns()
    trains = exchange(flows, [peak(flow.line, flow.mtu, seconds) for flow in flows], timer)
    to_monotonic = time.monotonic_ns() - time.time_ns()
    spans = []
    for flow, train in zip(flows, trains, strict=True):
        end = flow.arrived_at[-1] + to_monotonic if train.span_ns else started
        spans.append(
            Span(
                way=flow.way,
                begin_ns=end - train.span_ns,
                end_ns=end,
                packets=train.counted,
                packet_bytes=train.packet_bytes,
            )
        )
    return spans

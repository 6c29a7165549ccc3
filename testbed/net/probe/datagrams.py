"""Send UDP packets with a number and a time stamp each, and read them at the other end.

Few and small packets show a link's loss, duplication, reordering and delay; overload shows its rate and its buffer.
patterns.py chooses the pattern.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from array import array
from collections.abc import Sequence

from testbed.directions import LinkDirection
from testbed.net.probe.job import ProbeJob
from testbed.net.probe.patterns import OfferPattern, order_of
from testbed.net.probe.readings import PacketTrain
from testbed.net.probe.sockets import arrival_ns, grow_buffers, stamp_arrivals

HEADERS = 28  # IPv4 and UDP
_UDP_SEGMENT = 103
_UDP_BYTES = 65_507  # maximum of one call
_SEND_BUFFER_BYTES, _RECEIVE_BUFFER_BYTES = 16 << 20, 128 << 20
_TICK_NS = 1_000_000
_READ_AT_ONCE = 32  # per tick: reading all would take longer than the lead
_UNREAD_BYTES = 2_500  # maximum of the receiver's buffer per packet
_KEPT = 2_000  # transit times in a reading
_MARK = struct.Struct("<iiq")  # train, number, nanoseconds of CLOCK_REALTIME
_LATENESS_BUCKETS = 64


class SleepTimer:
    """Sleeps, and counts sleeps by lateness: the host's effect on the probe during measurement.

    The buckets are the relay's own (see `testbed.net.relay.lateness_percentile`).
    """

    def __init__(self) -> None:
        self.lateness = [0] * _LATENESS_BUCKETS
        """Element k: sleeps that ended less than 2**k us, and at least half of that, late."""

    def sleep(self, seconds: float) -> None:
        """Sleep and count."""
        due = time.monotonic_ns() + round(seconds * 1e9)
        time.sleep(seconds)
        self.lateness[(max(0, time.monotonic_ns() - due) // 1000).bit_length()] += 1


class DatagramFlow:
    """One direction of one link: a sending and a receiving socket."""

    def __init__(self, job: ProbeJob, way: LinkDirection, sender: socket.socket, receiver: socket.socket) -> None:
        """Use two UDP sockets, the sender connected to the receiver. The direction must be shaped."""
        shape = job.shape(way)
        assert shape is not None
        self.way, self.shape, self.mtu = way, shape, job.mtu
        self._sender, self._receiver = sender, receiver
        self._can_cut = True
        self._train = 0
        grow_buffers(sender, _SEND_BUFFER_BYTES)
        # Packets stay in the receiver's buffer during sending, because reading takes CPU time from it.
        granted = grow_buffers(receiver, _RECEIVE_BUFFER_BYTES)
        self.small_buffers = granted < _RECEIVE_BUFFER_BYTES
        self._unread_most = granted // _UNREAD_BYTES // 2
        # The kernel stamps arrivals, because the probe may sleep and reads several at once.
        stamp_arrivals(receiver)
        for end in (sender, receiver):
            end.setblocking(False)

    def begin(self, pattern: OfferPattern) -> None:
        """Discard earlier trains; send this pattern from now on."""
        self._pattern = pattern
        # One call sends a tick's packets, and the kernel segments them before the device, at a tenth of the CPU time,
        # which slow machines need. Bursts are too small to affect the link's buffer.
        self._payload_bytes = pattern.packet_bytes - HEADERS
        tick = int((pattern.packets_per_s + pattern.lead_per_s) * _TICK_NS * 1e-9)
        most = min(_UDP_BYTES // self._payload_bytes, self.shape.buffer_bytes // pattern.packet_bytes // 4, 60)
        self._together(min(tick, most) if self._can_cut else 1)
        self._train += 1
        self.sent = 0
        self.numbers, self.sent_at, self.arrived_at = array("q"), array("q"), array("q")
        self._alone: set[int] = set()  # numbers of packets without another of ours just before them

    def _together(self, packets: int) -> None:
        self._burst = max(1, packets)
        self._payload = bytearray(self._burst * self._payload_bytes)
        self._sender.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, self._payload_bytes if self._burst > 1 else 0)

    def offer(self, elapsed_ns: int) -> None:
        """Send the packets that the pattern schedules by this time."""
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
        """Read at most `most` arrived packets."""
        for _ in range(most):
            try:
                content, ancillary, _, _ = self._receiver.recvmsg(_MARK.size, 64)
            except BlockingIOError:
                return
            train, number, sent_at = _MARK.unpack(content)
            if train != self._train:
                continue  # a straggler from an earlier train on an overloaded machine
            self.numbers.append(number)
            self.sent_at.append(sent_at)
            self.arrived_at.append(arrival_ns(ancillary))

    def take_some(self) -> None:
        """Read only if the receiver's buffer might overflow."""
        if self.sent - len(self.numbers) > self._unread_most:
            self.take(max(_READ_AT_ONCE, 3 * self._burst))

    @property
    def drained_after_ns(self) -> int:
        """The longest time until the last packet arrives, after sending has ended."""
        queued = self.sent * (self._pattern.packet_bytes + self.shape.overhead_bytes)
        wait_ns = min(self.shape.buffer_bytes, queued) * 8e9 / self.shape.rate_bps
        return self.shape.delay_ns + self.shape.jitter_ns + round(1.1 * wait_ns) + 20 * _TICK_NS

    @property
    def complete(self) -> bool:
        """Whether all packets have arrived or can no longer do so."""
        return len(self.numbers) >= self.sent and not self.shape.duplicate

    def reading(self, offer_ns: int) -> PacketTrain:
        """Summarise the train."""
        order = order_of(self.numbers, self.sent)
        # Packets that jump the queue do not count towards the rate.
        beside: frozenset[int] = order.overtakers if self.shape.reorder else frozenset()
        first, last, counted = self._steady(beside)
        return PacketTrain(
            way=self.way,
            packet_bytes=self._pattern.packet_bytes,
            sent=self.sent,
            offer_ns=offer_ns,
            arrived=len(self.numbers),
            counted=counted,
            span_ns=last - first,
            end_ns=self.arrived_at[-1] + time.monotonic_ns() - time.time_ns() if self.arrived_at else 0,
            lost=order.lost,
            bursts=order.bursts,
            overtakers=len(order.overtakers),
            copies=order.copies,
            transit_ns=self._transits(beside),
        )

    def _steady(self, beside: frozenset[int]) -> tuple[int, int, int]:
        """Return the first and last arrival after jitter has settled, hidden by the queue, and the count after the
        first.
        """
        places = [place for place in range(len(self.numbers)) if place not in beside]
        if len(places) < 2:
            return 0, 0, 0
        begin = self.arrived_at[places[0]] + (2 * self.shape.jitter_ns + 1 if self.shape.jitter_ns else 0)
        steady = [place for place in places if self.arrived_at[place] >= begin]
        if len(steady) < 2:
            return 0, 0, 0
        return self.arrived_at[steady[0]], self.arrived_at[steady[-1]], len(steady) - 1

    def _transits(self, beside: frozenset[int]) -> list[int]:
        """Return transit times: of packets not preceded by ours, or of all sent after the buffer was full."""
        if not self.numbers:
            return []
        begin = min(self.sent_at) + round(self._pattern.full_after_s * 1e9)
        full = self._pattern.lead > 0
        transit_ns = [
            self.arrived_at[place] - self.sent_at[place]
            for place, number in enumerate(self.numbers)
            if place not in beside and self.sent_at[place] >= begin and (full or number in self._alone)
        ]
        return transit_ns[:: -(-len(transit_ns) // _KEPT)] if transit_ns else []


def exchange(flows: Sequence[DatagramFlow], patterns: Sequence[OfferPattern], timer: SleepTimer) -> list[PacketTrain]:
    """Send a pattern on each flow, concurrently, then wait for packets in flight."""
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

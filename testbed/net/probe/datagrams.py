"""UDP packets of the full MTU, offered faster than the link (what comes out is its rate) or slower (what lacks is its loss)."""

from __future__ import annotations

import errno
import socket
import struct
import time

from testbed.net.probe import Job, Train, Way

_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 32, 33, 35
_UDP_SEGMENT = 103
_UDP_BYTES = 65_507  # the most that one call can send
_BUFFER_BYTES = 16 << 20
_HEADERS = 28  # IPv4 and UDP
_UNREAD_PACKETS = 4_000  # stay in the receiver's buffer while packets are offered: reading takes CPU time from sending
_TICK_NS = 1_000_000
_LEAD_NS = 20_000_000
_READ_AT_ONCE = 32  # in a tick: to read them all would take longer than the lead
_TIMESPEC = struct.Struct("@qq")


class Flow:
    """One direction of one link: a sending and a receiving socket."""

    def __init__(self, job: Job, way: Way, sender: socket.socket, receiver: socket.socket) -> None:
        """Two UDP sockets, the sender connected to the receiver. The direction must be shaped."""
        line = job.line(way)
        assert line is not None
        self._way, self._line = way, line
        self._packet_bits = (job.mtu + line.overhead_bytes) * 8
        self._packet_payload = job.mtu - _HEADERS
        self._sender, self._receiver = sender, receiver
        # One call sends what is due in a tick, and the kernel cuts it into packets before they reach the device: a tenth of
        # the CPU time, or slow machines could not offer enough. Not so much at once that the link's buffer would notice.
        tick_packets = line.rate_bps * _TICK_NS // (self._packet_bits * 1_000_000_000)
        self._together(min(tick_packets, _UDP_BYTES // self._packet_payload, line.buffer_bytes // job.mtu // 4))
        sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_BYTES)
        receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        # Stamped by the kernel on arrival: the probe may sleep, and reads several at once.
        receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        for end in (sender, receiver):
            end.setblocking(False)
        self._reset()

    def _together(self, packets: int) -> None:
        self._burst = max(1, packets)
        self._payload = bytes(self._burst * self._packet_payload)
        self._sender.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, self._packet_payload if self._burst > 1 else 0)

    @property
    def loss(self) -> float:
        """What the direction is said to lose."""
        return self._line.loss

    def _reset(self) -> None:
        self._sent = self._received = 0
        self._first_ns = self._last_ns = 0

    def _start(self, load: float) -> None:
        """Forget earlier trains; from now on offer `load` times the rate."""
        self._reset()
        self._offered_bps = self._line.rate_bps * load
        # Ahead of time, where there is a queue to hold it: the link must not run dry while the machine looks elsewhere.
        lead_ns = min(_LEAD_NS, self._line.buffer_bytes * 4e9 / self._line.rate_bps) if load > 1 else 0
        self._lead_bits = self._offered_bps * lead_ns * 1e-9

    def _offer(self, elapsed_ns: int) -> None:
        """Send what is to have been sent after this time."""
        wanted = self._lead_bits + self._offered_bps * elapsed_ns * 1e-9
        while self._sent * self._packet_bits < wanted:
            try:
                self._sender.send(self._payload)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EIO or self._burst == 1:
                    raise
                self._together(1)  # kernels before 6.11 cannot cut where the device computes no checksums
                continue
            self._sent += self._burst

    def _take(self, most: int = 1 << 62) -> None:
        """Read what has arrived, `most` packets of it."""
        for _ in range(most):
            try:
                _, ancillary, _, _ = self._receiver.recvmsg(1, 64)
            except BlockingIOError:
                return
            seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
            self._last_ns = seconds * 1_000_000_000 + nanoseconds
            self._received += 1
            if self._received == 1:
                self._first_ns = self._last_ns

    def _drained_after_ns(self, elapsed_ns: int) -> int:
        """How long the last packet takes to arrive at most, once offering has ended."""
        queued_bits = min(
            self._line.buffer_bytes * 8.0, max(0.0, self._sent * self._packet_bits - self._line.rate_bps * elapsed_ns * 1e-9)
        )
        return self._line.delay_ns + round(queued_bits * 1e9 / self._line.rate_bps)

    def train(self, load: float, seconds: float) -> Train:
        """Offer `load` times the rate for `seconds`, then wait for what is under way."""
        self._start(load)
        start = time.monotonic_ns()
        end = start + round(seconds * 1e9)
        while (now := time.monotonic_ns()) < end:
            self._offer(now - start)
            if self._sent - self._received > _UNREAD_PACKETS:
                self._take(max(_READ_AT_ONCE, 3 * self._burst))
            time.sleep(_TICK_NS * 1e-9)
        offered = time.monotonic_ns()
        end = offered + self._drained_after_ns(offered - start) + 20 * _TICK_NS
        while time.monotonic_ns() < end:
            time.sleep(5 * _TICK_NS * 1e-9)
            self._take()
        return Train(
            way=self._way,
            sent=self._sent,
            offer_ns=offered - start,
            received=self._received,
            span_ns=self._last_ns - self._first_ns,
        )

"""Measure TCP over one link: both ends of a connection are in this process, so that one clock times a message from end
to end.
"""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from select import select

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.net.probe.job import ProbeJob
from testbed.net.probe.readings import BulkTransfer, TimedMessage
from testbed.net.probe.sockets import grow_buffers
from testbed.tcp_info import TcpInfo, read_tcp_info

_BUFFER_BYTES = 64 << 20
_CHUNK = bytes(1 << 20)
_READ_PAUSE_S = 0.001
_UNSHAPED_WINDOW = 1 << 20
_FILLED = 0.6
"""Share of the buffer that a stream fills, enough to cover a reader that is a few milliseconds late."""

_BBR_LEAST_PACKETS, _BBR_PAUSE_NS = 4, 200_000_000  # its PROBE_RTT: Cardwell et al., BBR, ACM Queue 2016


class Stream:
    """One warm TCP connection over the link, used in both directions."""

    def __init__(self, job: ProbeJob, near: socket.socket, far: socket.socket) -> None:
        """Connect two fresh TCP sockets, one in the namespace of each end. OSError when they cannot connect."""
        self._job = job
        name = job.congestion_control.encode()
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            grow_buffers(end, _BUFFER_BYTES)
        far.bind((job.far_address, 0))
        far.listen(1)
        far.settimeout(5 + 4e-9 * job.round_trip_ns)
        near.settimeout(5 + 4e-9 * job.round_trip_ns)
        near.bind((job.near_address, 0))
        near.connect(far.getsockname())
        peer, _ = far.accept()
        for end in (near, peer):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)
        self._ends: dict[LinkDirection, tuple[socket.socket, socket.socket]] = {
            "up": (near, peer),
            "down": (peer, near),
        }
        self._read = bytearray(1 << 20)

    def close(self) -> None:
        for end in self._ends["up"]:
            end.close()

    @property
    def packet_payload_bytes(self) -> int:
        """The bytes of payload in a full packet."""
        return self._ends["up"][0].getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)

    def _sender_info(self, way: LinkDirection) -> TcpInfo:
        return read_tcp_info(self._ends[way][0])

    def window_bytes(self, way: LinkDirection) -> int:
        """Return the congestion window of a direction's sender."""
        return self._sender_info(way).cwnd_packets * self.packet_payload_bytes

    def _set_congestion_control(self, way: LinkDirection, name: str) -> None:
        sender = self._ends[way][0]
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        granted = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        if granted != name:
            raise OSError(f"requested congestion control {name}, the socket has {granted}")

    def _product(self, way: LinkDirection) -> float:
        """Return the bandwidth-delay product of a shaped direction over both delays; 0 if unshaped."""
        shape = self._job.shape(way)
        return shape.rate_bps * self._job.round_trip_ns / 8e9 if shape else 0.0

    def _window_goal(self, way: LinkDirection) -> int:
        """Return a window that keeps the link busy, and that fits into the link's buffer."""
        shape = self._job.shape(way)
        if shape is None:
            return _UNSHAPED_WINDOW
        product = self._product(way)
        return round(min(1.25 * product + 16 * self._job.mtu, product + shape.buffer_bytes / 2))

    def _most_under_way(self, way: LinkDirection) -> int:
        """Return the maximum bytes of a message in flight: enough to keep the wire busy, but at most the buffer, into
        which a message goes at once after a pause.

        An overflow would measure the congestion control, not the link.
        """
        shape = self._job.shape(way)
        if shape is None:
            return 1 << 62
        return round(max(1.05 * self._product(way) + 8 * self._job.mtu, 0.85 * shape.buffer_bytes))

    def _patience_ns(self, way: LinkDirection, size: int) -> int:
        shape = self._job.shape(way)
        return 5_000_000_000 + (
            4 * (8_000_000_000 * size // shape.rate_bps) + 20 * self._job.round_trip_ns if shape else 0
        )

    def _transfer(self, way: LinkDirection, size: int) -> int:
        """Transfer `size` bytes; returns the ns until the last was read. TimeoutError when that takes far too long."""
        sender, receiver = self._ends[way]
        shape = self._job.shape(way)
        # Far from the end the reader polls once a millisecond, which saves a wake-up per packet; near the end it reads
        # at once.
        near = 0 if shape is None else max(1 << 16, shape.rate_bps // 8 * 4 // 1000)
        sent = received = 0
        start = time.monotonic_ns()
        deadline = start + self._patience_ns(way, size)
        most = self._most_under_way(way)
        while received < size:
            sent += _fill(sender, min(size - sent, most - (sent - received)))
            if shape is not None and size - received > near:
                time.sleep(_READ_PAUSE_S)
            elif not select((receiver,), (), (), 0.1)[0] and time.monotonic_ns() > deadline:
                break
            try:
                if not (count := receiver.recv_into(self._read)):
                    raise ConnectionError(f"the connection ended {size - received} bytes before the end of a message")
                received += count
            except BlockingIOError:
                if time.monotonic_ns() > deadline:
                    break
        if received < size:
            raise TimeoutError(f"{received} of {size} bytes arrived in {(deadline - start) / 1e9:.1f} s")
        return time.monotonic_ns() - start

    def warm_up(self, way: LinkDirection) -> None:
        """Stream until the congestion window keeps the link busy, at most `ProbeJob.warm_up_s`; then switch back to the
        profile's congestion control.

        A loss-based control is warmed up with reno, whose slow start has no early exit (cubic's exits at half the
        required window, and needs seconds for the rest); the window carries over. A training run reaches this state by
        itself; the measurements then use the profile's own control.
        """
        final = self._job.congestion_control
        if final != "bbr":
            self._set_congestion_control(way, "reno")
        goal = self._window_goal(way)
        limit = time.monotonic_ns() + round(self._job.warm_up_s * 1e9)
        # bbr must also leave its start-up phase, which takes some round trips.
        at_least = time.monotonic_ns() + (10 * self._job.round_trip_ns + 50_000_000 if final == "bbr" else 0)
        step = max(4 * self._job.mtu, goal // 2)
        # Its window then oscillates around the link's capacity; that of others grows until it is stopped.
        enough = 0.9 * self._product(way) if final == "bbr" else goal
        while (now := time.monotonic_ns()) < limit and (now < at_least or self.window_bytes(way) < enough):
            self._transfer(way, step)
            step = min(max(step, self.window_bytes(way) * 2), 2 * goal)
        self._set_congestion_control(way, final)

    def message(self, way: LinkDirection, size: int) -> TimedMessage:
        """Send one message now and time it."""
        before = self._sender_info(way).retransmits
        elapsed = self._transfer(way, size)
        return TimedMessage(
            way=way, size=size, elapsed_ns=elapsed, retransmits=self._sender_info(way).retransmits - before
        )

    def bulk(self, way: LinkDirection, lead_s: float, seconds: float) -> BulkTransfer:
        """Stream for `lead_s` uncounted, then for `seconds`, which are counted; then wait until all data has been
        read.
        """
        sender, receiver = self._ends[way]
        shape = self._job.shape(way)
        before = self._sender_info(way).retransmits
        # The capacity of the wire and part of the buffer. More would overflow the buffer, and cubic needs ten seconds
        # to reopen a window after two cuts (measured: 66 of 77 Mbit/s at 80 Mbit/s and 100 ms), which is a property of
        # cubic, not of the link.
        ahead = 4 * _UNSHAPED_WINDOW if shape is None else round(self._product(way) + _FILLED * shape.buffer_bytes)
        sent = received = 0
        first: tuple[int, int] | None = None  # time, and bytes received by then
        last = (0, 0)
        start = time.monotonic_ns() + round(lead_s * 1e9)
        end = start + round(seconds * 1e9)
        floor = _BBR_LEAST_PACKETS * self.packet_payload_bytes if shape and self._job.congestion_control == "bbr" else 0
        while (now := time.monotonic_ns()) < end:
            if floor and self.window_bytes(way) <= floor:
                # bbr drains the link every ten seconds to measure its RTT; counting restarts after that.
                start = now + _BBR_PAUSE_NS + round(lead_s * 1e9)
                end, first, floor = start + round(seconds * 1e9), None, 0
            sent += _fill(sender, ahead - (sent - received))
            if shape is None:
                select((receiver,), (), (), _READ_PAUSE_S)
            else:
                time.sleep(_READ_PAUSE_S)
            try:
                received += receiver.recv_into(self._read)
            except BlockingIOError:
                continue
            now = time.monotonic_ns()
            if now >= start:
                # Arrived bytes, read or not: on a busy machine the reader lags by varying amounts.
                last = (now, read_tcp_info(receiver).bytes_received)
                first = first or last
        self._finish(way, sent - received)
        first = first or last
        retransmits = self._sender_info(way).retransmits - before
        return BulkTransfer(way=way, size=last[1] - first[1], span_ns=last[0] - first[0], retransmits=retransmits)

    def _finish(self, way: LinkDirection, left: int) -> None:
        receiver = self._ends[way][1]
        deadline = time.monotonic_ns() + self._patience_ns(way, left)
        while left > 0:
            if not select((receiver,), (), (), 0.1)[0]:
                if time.monotonic_ns() > deadline:
                    raise TimeoutError(f"{left} bytes of a stream did not arrive")
                continue
            left -= receiver.recv_into(self._read)


def _fill(sender: socket.socket, most: int) -> int:
    """Send up to `most` bytes, as many as the socket accepts now; returns their number."""
    sent, content = 0, memoryview(_CHUNK)
    with contextlib.suppress(BlockingIOError):
        while sent < most:
            sent += sender.send(content[: most - sent])
    return sent


def warm(stream: Stream, together: bool) -> dict[LinkDirection, int]:
    """Warm up both directions, `together` or one after the other; returns the congestion windows."""
    with ThreadPoolExecutor(max_workers=2 if together else 1) as pool:
        for done in [pool.submit(stream.warm_up, way) for way in LINK_DIRECTIONS]:
            done.result()
    return {way: stream.window_bytes(way) for way in LINK_DIRECTIONS}

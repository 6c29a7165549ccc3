"""TCP over one link: a connection whose two ends are in this process, so that one clock times a message from end to end."""

from __future__ import annotations

import socket
import struct
import time
from select import select

from testbed.net.probe import WAYS, Bulk, Job, Message, Way

_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_BUFFER_BYTES = 64 << 20
_INFO_WINDOW, _INFO_RETRANSMITS = 80, 100  # offsets into struct tcp_info
_CHUNK = bytes(1 << 20)
_READ_PAUSE_S = 0.001
_WARM_UP_LIMIT_NS = 3_000_000_000
_UNSHAPED_WINDOW = 1 << 20


class Stream:
    """One warm TCP connection over the link, used in both directions."""

    def __init__(self, job: Job, node: socket.socket, hub: socket.socket) -> None:
        """`node` is a fresh TCP socket in the node's namespace, `hub` one in the hub's. OSError when they cannot connect."""
        self._job = job
        name = job.congestion_control.encode()
        for end in (node, hub):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            end.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_BYTES)
            end.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
        hub.bind((job.hub_address, 0))
        hub.listen(1)
        hub.settimeout(5 + 4e-9 * job.round_trip_ns)
        node.settimeout(5 + 4e-9 * job.round_trip_ns)
        node.bind((job.node_address, 0))
        node.connect(hub.getsockname())
        peer, _ = hub.accept()
        for end in (node, peer):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)
        self._ends: dict[Way, tuple[socket.socket, socket.socket]] = {"up": (node, peer), "down": (peer, node)}
        self._read = bytearray(1 << 20)

    def close(self) -> None:
        for end in self._ends["up"]:
            end.close()

    @property
    def packet_payload_bytes(self) -> int:
        """What a full packet carries."""
        return self._ends["up"][0].getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)

    def _info(self, way: Way, offset: int) -> int:
        raw = self._ends[way][0].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, offset + 4)
        found: int = struct.unpack_from("@I", raw, offset)[0]
        return found

    def window_bytes(self, way: Way) -> int:
        """The congestion window."""
        return self._info(way, _INFO_WINDOW) * self.packet_payload_bytes

    def _set_congestion_control(self, way: Way, name: str) -> None:
        sender = self._ends[way][0]
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        found = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        if found != name:
            raise OSError(f"asked the socket for congestion control {name}, it has {found}")

    def _window_goal(self, way: Way) -> int:
        """A window that keeps the link busy, and that the link's buffer can take at once."""
        line = self._job.line(way)
        if line is None:
            return _UNSHAPED_WINDOW
        product = line.rate_bps * self._job.round_trip_ns / 8e9
        return round(min(1.25 * product + 16 * self._job.mtu, product + line.buffer_bytes / 2))

    def _patience_ns(self, way: Way, size: int) -> int:
        line = self._job.line(way)
        return 5_000_000_000 + (4 * (8_000_000_000 * size // line.rate_bps) + 20 * self._job.round_trip_ns if line else 0)

    def _transfer(self, way: Way, size: int) -> int:
        """Move `size` bytes; nanoseconds until the last was read. TimeoutError when that takes far too long."""
        sender, receiver = self._ends[way]
        line = self._job.line(way)
        # Far from the end the reader looks once a millisecond, which spares a wake-up per packet; near it, at once.
        near = 0 if line is None else max(1 << 16, line.rate_bps // 8 * 4 // 1000)
        content = memoryview(_CHUNK)
        sent = received = 0
        start = time.monotonic_ns()
        deadline = start + self._patience_ns(way, size)
        while received < size:
            while sent < size:
                try:
                    sent += sender.send(content[: size - sent])
                except BlockingIOError:
                    break
            if line is not None and size - received > near:
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

    def warm_up(self, way: Way) -> None:
        """Stream until the congestion window keeps the link busy (at most 3 s), then return to the profile's control.

        A loss-based control is warmed up by reno, whose slow start has no early exit (cubic's leaves at half the window
        that is needed, and takes seconds for the rest); the window is handed on. It is a state that a training run
        reaches by itself; what is measured afterwards is the profile's own control.
        """
        final = self._job.congestion_control
        if final != "bbr":
            self._set_congestion_control(way, "reno")
        goal = self._window_goal(way)
        limit = time.monotonic_ns() + _WARM_UP_LIMIT_NS
        # bbr has to leave its start-up phase too, a matter of round trips.
        at_least = time.monotonic_ns() + (10 * self._job.round_trip_ns + 50_000_000 if final == "bbr" else 0)
        step = max(4 * self._job.mtu, goal // 2)
        while (now := time.monotonic_ns()) < limit and (now < at_least or self.window_bytes(way) < goal):
            self._transfer(way, step)
            step = max(step, self.window_bytes(way) * 2)
        self._set_congestion_control(way, final)

    def message(self, way: Way, size: int) -> Message:
        """Send one message now."""
        before = self._info(way, _INFO_RETRANSMITS)
        elapsed = self._transfer(way, size)
        return Message(way=way, size=size, elapsed_ns=elapsed, retransmits=self._info(way, _INFO_RETRANSMITS) - before)

    def bulk(self, way: Way, lead_s: float, seconds: float) -> Bulk:
        """Stream for `lead_s` and then for `seconds`, of which the latter count; then wait until all has been read."""
        sender, receiver = self._ends[way]
        line = self._job.line(way)
        content = memoryview(_CHUNK)
        before = self._info(way, _INFO_RETRANSMITS)
        # No more in the kernel than the link can hold a few times over, or the end would wait for tens of megabytes.
        ahead = 4 * (self._window_goal(way) + (line.buffer_bytes if line else _UNSHAPED_WINDOW))
        sent = received = 0
        first: tuple[int, int] | None = None  # time, and bytes read by then
        last = (0, 0)
        start = time.monotonic_ns() + round(lead_s * 1e9)
        end = start + round(seconds * 1e9)
        while (now := time.monotonic_ns()) < end:
            while sent - received < ahead:
                try:
                    sent += sender.send(content[: ahead - (sent - received)])
                except BlockingIOError:
                    break
            if line is None:
                select((receiver,), (), (), _READ_PAUSE_S)
            else:
                time.sleep(_READ_PAUSE_S)
            try:
                received += receiver.recv_into(self._read)
            except BlockingIOError:
                continue
            now = time.monotonic_ns()
            if now >= start:
                last = (now, received)
                first = first or last
        self._finish(way, sent - received)
        first = first or last
        retransmits = self._info(way, _INFO_RETRANSMITS) - before
        return Bulk(way=way, size=last[1] - first[1], span_ns=last[0] - first[0], retransmits=retransmits)

    def _finish(self, way: Way, left: int) -> None:
        receiver = self._ends[way][1]
        deadline = time.monotonic_ns() + self._patience_ns(way, left)
        while left > 0:
            if not select((receiver,), (), (), 0.1)[0]:
                if time.monotonic_ns() > deadline:
                    raise TimeoutError(f"{left} bytes of a stream did not arrive")
                continue
            left -= receiver.recv_into(self._read)


def warm(stream: Stream) -> dict[Way, int]:
    """Warm both directions up; the congestion windows."""
    for way in WAYS:
        stream.warm_up(way)
    return {way: stream.window_bytes(way) for way in WAYS}

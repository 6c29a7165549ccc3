"""Measure how long a link was busy with the frames that it carried, from the times of their acknowledgements.

The kernel stamps the acknowledgement of each write's last byte (SO_TIMESTAMPING with TX_ACK, Linux 4.19 or newer; the
stamps wait in the socket's error queue). TCP_INFO's busy time is too coarse: it counts in jiffies, 4 ms on most
kernels, and includes pauses between frames that follow within a round trip. The last packet of a frame may be
acknowledged 40 ms late, because receivers delay acknowledgements, so a frame is written in two parts and the first
part's stamp is used.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from testbed import tcp_info
from testbed.errors import CapabilityError

# <linux/net_tstamp.h>, <linux/errqueue.h>; missing from the socket module.
_SO_TIMESTAMPING = 37
_SOFTWARE, _OPT_ID, _TX_ACK, _OPT_TSONLY = 1 << 4, 1 << 7, 1 << 9, 1 << 11
_STAMP = struct.Struct("=qq")
_CAUSE = struct.Struct("=IBBBBII")
_OF_TIMESTAMPING, _OF_ACK = 4, 2
_STREAM = 2**32
"""The kernel's byte counter wraps here."""
_LEFT_PACKETS = 2
"""Minimum packets after the first part: receivers acknowledge every second full packet at once."""


class _FirstPart(NamedTuple):
    """The first part, not acknowledged yet, of a frame that was sent."""

    end: int
    """Bytes of the stream up to the first part's end, counted from the start of the measurement."""
    first_bytes: int
    frame_bytes: int
    sent_ns: int


def least_round_trip_ns(sock: socket.socket) -> int:
    """Return the kernel's minimum round-trip time. CapabilityError on a kernel before 4.19."""
    return 1000 * tcp_info.read_tcp_info(sock).min_rtt_us


class Carried:
    """Measures one connection from now on. Call `sending` before each frame, and `read` for the bytes that have
    arrived.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Enable the kernel's time stamps. CapabilityError where it has none."""
        flags = _TX_ACK | _SOFTWARE | _OPT_ID | _OPT_TSONLY
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, flags)
        except OSError as error:
            raise CapabilityError(
                f"cannot get time stamps of acknowledgements (SO_TIMESTAMPING): {error.strerror}; "
                "codecs that adapt to their link need Linux 4.19 or newer; use another codec"
            ) from None
        self._socket = sock
        # The kernel counts from the first byte that was unacknowledged when stamps were enabled.
        (before,) = struct.unpack("=i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
        self._before = int(before)
        self._counted = self._end = 0
        self._frames: deque[_FirstPart] = deque()
        self._free_ns = 0

    def sending(self, frame_bytes: int, sent_ns: int) -> int:
        """Note that a frame is sent now (CLOCK_MONOTONIC). Returns the size of the part to write first, separately:
        whole packets; 0 for a frame too short to measure. Call from the sending thread; everything else belongs to the
        reader.
        """
        packet = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        first = max(0, frame_bytes // packet - _LEFT_PACKETS) * packet
        if first:
            self._frames.append(_FirstPart(self._end + first, first, frame_bytes, sent_ns))
        self._end += frame_bytes
        return first

    def read(self) -> tuple[int, float]:
        """Return the bytes (of frames' first parts) that have arrived since the last call, and the seconds for which
        the link was busy with them, possibly 0.

        The link is busy from the sending of a frame, or from the end of the previous one, until the last byte arrives.
        The sender learns of that a round trip later, so the minimum round trip so far is subtracted. A part that ends
        between two acknowledgements appears up to two packets late, and short frames just before one appear as part of
        it.
        """
        carried, seconds, rtt_ns = 0, 0.0, None
        for end, stamped_ns in self._stamps():
            while self._frames and self._frames[0].end <= end:
                frame = self._frames.popleft()
                if frame.end < end:  # its own stamp was lost
                    continue
                rtt_ns = least_round_trip_ns(self._socket) if rtt_ns is None else rtt_ns
                took_ns = max(0, stamped_ns - max(frame.sent_ns + rtt_ns, self._free_ns))
                self._free_ns = stamped_ns + took_ns * (frame.frame_bytes - frame.first_bytes) // frame.first_bytes
                carried += frame.first_bytes
                seconds += 1e-9 * took_ns
        return carried, seconds

    def _stamps(self) -> Iterator[tuple[int, int]]:
        """Yield acknowledged positions in the stream, in bytes, with their times (CLOCK_MONOTONIC)."""
        while True:
            try:
                _, ancillary, _, _ = self._socket.recvmsg(0, 256, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            stamp = cause = None
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPING):
                    stamp = _STAMP.unpack_from(data)
                elif len(data) >= _CAUSE.size:
                    cause = _CAUSE.unpack_from(data)
            if stamp is None or cause is None or (cause[1], cause[5]) != (_OF_TIMESTAMPING, _OF_ACK):
                continue
            self._counted += (cause[6] + 1 - self._counted) % _STREAM
            yield self._counted - self._before, stamp[0] * 10**9 + stamp[1] - time.time_ns() + time.monotonic_ns()

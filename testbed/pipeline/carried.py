"""Measure how long a link was at work on the frames that it carried, by the moments at which the neighbour's kernel
acknowledged them.

The kernel stamps the acknowledgement of each write's last byte (SO_TIMESTAMPING with TX_ACK, Linux 4.19 or newer; the
stamps wait in the socket's error queue). TCP_INFO's busy time would not do: it counts in jiffies, 4 ms on most kernels,
and where frames follow one another within a round trip, the pauses between them too. The last packet of a frame may be
acknowledged 40 ms late, as receivers wait for a second one, so a frame is written in two parts and the stamp of the
first one is read.
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

# <linux/net_tstamp.h>, <linux/errqueue.h>; the socket module does not have them.
_SO_TIMESTAMPING = 37
_SOFTWARE, _OPT_ID, _TX_ACK, _OPT_TSONLY = 1 << 4, 1 << 7, 1 << 9, 1 << 11
_STAMP = struct.Struct("=qq")
_CAUSE = struct.Struct("=IBBBBII")
_OF_TIMESTAMPING, _OF_ACK = 4, 2
_STREAM = 2**32
"""The kernel counts a stream's bytes up to this."""
_LEFT_PACKETS = 2
"""After the first part at least so many follow: the second full packet that is not acknowledged yet is so at once."""


class _FirstPart(NamedTuple):
    """A frame that was sent and whose first part is not acknowledged yet."""

    end: int
    """Bytes of the stream up to the first part's end, counted from where the measurement began."""
    first_bytes: int
    frame_bytes: int
    sent_ns: int


def least_round_trip_ns(sock: socket.socket) -> int:
    """Return the least round-trip time that the kernel has seen. CapabilityError on a kernel before 4.19."""
    return 1000 * tcp_info.read_tcp_info(sock).min_rtt_us


class Carried:
    """Measures one connection from now on: tell it of each frame before it is sent, and ask it what has arrived."""

    def __init__(self, sock: socket.socket) -> None:
        """Ask the kernel for the stamps. CapabilityError where it has none."""
        flags = _TX_ACK | _SOFTWARE | _OPT_ID | _OPT_TSONLY
        try:
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, flags)
        except OSError as error:
            raise CapabilityError(
                f"cannot get time stamps of acknowledgements (SO_TIMESTAMPING): {error.strerror}; "
                "a codec that goes by its link needs them, others do not"
            ) from None
        self._socket = sock
        # The kernel counts from the first byte that was not acknowledged when it was asked.
        (before,) = struct.unpack("=i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
        self._before = int(before)
        self._counted = self._end = 0
        self._frames: deque[_FirstPart] = deque()
        self._free_ns = 0

    def sending(self, frame_bytes: int, sent_ns: int) -> int:
        """Note that a frame goes now (CLOCK_MONOTONIC). Returns how much of it is to be written first, apart from the
        rest: whole packets; 0 where it is too short to tell anything. From the thread that sends; all else is the
        reader's.
        """
        packet = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        first = max(0, frame_bytes // packet - _LEFT_PACKETS) * packet
        if first:
            self._frames.append(_FirstPart(self._end + first, first, frame_bytes, sent_ns))
        self._end += frame_bytes
        return first

    def read(self) -> tuple[int, float]:
        """Return how many bytes (of frames' first parts) have arrived since the last call, and for how many seconds the
        link was at work on them, which may be 0.

        It is at work from when a frame was sent, or from when the one before it had been carried, until the last byte
        came. That is known here a round trip later, so the least round trip so far is allowed for. A part that ends
        between two acknowledgements seems up to two packets late, and short frames just before one seem to be part of
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
        """Yield up to which byte of the stream what was sent is acknowledged, and when (CLOCK_MONOTONIC)."""
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

"""What the kernel knows of a socket: TCP_INFO, read in a microsecond, touching no packet."""

from __future__ import annotations

import socket
import struct
from typing import Literal

from testbed.errors import CapabilityError
from testbed.records import SocketRecord

# struct tcp_info of <linux/tcp.h>, up to tcpi_bytes_retrans (Linux 4.19): 8 bytes, 24 words from tcpi_rto to
# tcpi_total_retrans, 4 long words, 6 words, 4 long words, 2 words, 2 long words.
_TCP_INFO = struct.Struct("=8B24I4Q6I4Q2I2Q")
_RTT, _CWND, _RETRANSMITS = 8 + 15, 8 + 18, 8 + 23
_SEGMENTS_OUT, _SEGMENTS_IN, _MIN_RTT = 36, 37, 39
_BYTES_SENT, _BYTES_RETRANSMITTED = 48, 49


def congestion_control(sock: socket.socket) -> str:
    """The algorithm that this socket runs, as the kernel says."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0", 1)[0].decode()


def read_socket(sock: socket.socket, peer: Literal["upstream", "downstream"]) -> SocketRecord:
    """TCP_INFO of a connected socket. CapabilityError on a kernel whose TCP_INFO is too short (before 4.19)."""
    found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(found) < _TCP_INFO.size:
        raise CapabilityError(f"TCP_INFO of this kernel has {len(found)} bytes, not {_TCP_INFO.size}; use Linux 4.19 or newer")
    info = _TCP_INFO.unpack_from(found)
    return SocketRecord(
        peer=peer,
        congestion_control=congestion_control(sock),
        rtt_us=info[_RTT],
        min_rtt_us=info[_MIN_RTT],
        cwnd_packets=info[_CWND],
        bytes_sent=info[_BYTES_SENT],
        bytes_retransmitted=info[_BYTES_RETRANSMITTED],
        segments_out=info[_SEGMENTS_OUT],
        segments_in=info[_SEGMENTS_IN],
        retransmits=info[_RETRANSMITS],
    )

"""Kernel statistics of a TCP connection (TCP_INFO), from a socket or from the socket list of a namespace."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from testbed.errors import CapabilityError

# struct tcp_info of <linux/tcp.h>, up to tcpi_bytes_retrans (Linux 4.19): 8 bytes, 24 words from tcpi_rto to
# tcpi_total_retrans, 4 long words, 6 words, 4 long words, 2 words, 2 long words.
_LAYOUT = struct.Struct("=8B24I4Q6I4Q2I2Q")


class TcpInfo(NamedTuple):
    """Kernel statistics of a connection, counted from its start."""

    unacked_packets: int
    """Packets sent but not yet acknowledged."""
    rtt_us: int
    """Smoothed round-trip time."""
    min_rtt_us: int
    cwnd_packets: int
    retransmits: int
    bytes_acked: int
    """Bytes sent by this end and acknowledged by the other."""
    bytes_received: int
    segments_out: int
    segments_in: int
    delivery_rate_bps: int
    """The kernel's estimate of the payload rate."""
    bytes_sent: int
    """TCP payload, including retransmissions."""
    bytes_retransmitted: int

    def fields_of(self, record: type) -> dict[str, int]:
        """Return the numbers that are also fields of a record, by name."""
        return {name: value for name, value in self._asdict().items() if name in record.__annotations__}


def read_tcp_info(sock: socket.socket) -> TcpInfo:
    """Read TCP_INFO of a connected socket. CapabilityError as `parse_tcp_info`."""
    return parse_tcp_info(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))


def parse_tcp_info(data: bytes) -> TcpInfo:
    """Parse a struct tcp_info. CapabilityError for a kernel whose TCP_INFO is too short (before 4.19)."""
    if len(data) < _LAYOUT.size:
        raise CapabilityError(
            f"TCP_INFO of this kernel has {len(data)} bytes, not {_LAYOUT.size}; use Linux 4.19 or newer"
        )
    field = _LAYOUT.unpack_from(data)
    return TcpInfo(
        unacked_packets=field[12],
        rtt_us=field[23],
        cwnd_packets=field[26],
        retransmits=field[31],
        bytes_acked=field[34],
        bytes_received=field[35],
        segments_out=field[36],
        segments_in=field[37],
        min_rtt_us=field[39],
        delivery_rate_bps=8 * field[42],
        bytes_sent=field[48],
        bytes_retransmitted=field[49],
    )

"""What the kernel knows of a socket: TCP_INFO, read in a microsecond, touching no packet."""

from __future__ import annotations

import socket
from typing import Literal

from testbed import tcp_info
from testbed.records import SocketRecord


def congestion_control(sock: socket.socket) -> str:
    """The algorithm that this socket runs, as the kernel says."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0", 1)[0].decode()


def read_socket(sock: socket.socket, peer: Literal["upstream", "downstream"]) -> SocketRecord:
    """TCP_INFO of a connected socket. CapabilityError on a kernel whose TCP_INFO is too short (before 4.19)."""
    info = tcp_info.parse(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))
    return SocketRecord(
        peer=peer,
        congestion_control=congestion_control(sock),
        rtt_us=info.rtt_us,
        min_rtt_us=info.min_rtt_us,
        cwnd_packets=info.cwnd_packets,
        bytes_sent=info.bytes_sent,
        bytes_retransmitted=info.bytes_retransmitted,
        segments_out=info.segments_out,
        segments_in=info.segments_in,
        retransmits=info.retransmits,
    )

"""What the kernel knows of a socket: TCP_INFO, read in a microsecond, touching no packet."""

from __future__ import annotations

import socket
from typing import Literal

from testbed import tcp_info
from testbed.records import SocketRecord


def congestion_control(sock: socket.socket) -> str:
    """The algorithm that this socket runs, as the kernel says."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0", 1)[0].decode()


def least_round_trip_ns(sock: socket.socket) -> int:
    """Of those that the kernel has seen. CapabilityError on a kernel whose TCP_INFO is too short (before 4.19)."""
    return 1000 * _info(sock).min_rtt_us


def read_socket(sock: socket.socket, peer: Literal["upstream", "downstream"]) -> SocketRecord:
    """TCP_INFO of a connected socket. CapabilityError on a kernel whose TCP_INFO is too short (before 4.19)."""
    info = _info(sock)
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


def _info(sock: socket.socket) -> tcp_info.TcpInfo:
    return tcp_info.parse(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))

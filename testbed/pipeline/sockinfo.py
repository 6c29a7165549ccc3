"""What the kernel knows of a socket: TCP_INFO, read in a microsecond, touching no packet."""

from __future__ import annotations

import socket
from typing import Literal, NamedTuple

from testbed import tcp_info
from testbed.records import SocketRecord


def congestion_control(sock: socket.socket) -> str:
    """The algorithm that this socket runs, as the kernel says."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0", 1)[0].decode()


class Progress(NamedTuple):
    """How far a connection has come, counted from its start."""

    acked_bytes: int = 0
    busy_s: float = 0.0
    """Seconds in which anything was to be sent or acknowledged."""
    min_rtt_s: float = 0.0
    idle: bool = True
    """Nothing is."""


def read_progress(sock: socket.socket) -> Progress:
    """CapabilityError on a kernel whose TCP_INFO is too short (before 4.19)."""
    info = _info(sock)
    return Progress(info.bytes_acked, info.busy_us * 1e-6, info.min_rtt_us * 1e-6, info.unacked_packets == 0)


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

"""Open sockets inside a lab's namespaces, with buffers beyond the system's limits where the kernel grants them, and
read the kernel's arrival stamps, which exclude the probe's wake-up time.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from testbed.net.kernel.namespace import enter

_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_TIMESTAMPNS = 32, 33, 35
_TIMESPEC = struct.Struct("@qq")


def socket_in(namespace_fd: int, kind: int) -> socket.socket:
    """Open an IPv4 socket in a namespace, which this process enters permanently."""
    enter(namespace_fd)
    return socket.socket(socket.AF_INET, kind)


def grow_buffers(end: socket.socket, wanted_bytes: int) -> int:
    """Request buffers of `wanted_bytes` in both directions; returns the size of the receive buffer as counted by the
    kernel.

    Without privilege (a lab in a user namespace) net.core.rmem_max and wmem_max limit it.
    """
    for force, ask in ((_SO_SNDBUFFORCE, socket.SO_SNDBUF), (_SO_RCVBUFFORCE, socket.SO_RCVBUF)):
        try:
            end.setsockopt(socket.SOL_SOCKET, force, wanted_bytes)
        except PermissionError:
            # TCP's buffers grow by themselves, and further, unless a size is set.
            if end.type == socket.SOCK_DGRAM:
                end.setsockopt(socket.SOL_SOCKET, ask, wanted_bytes)
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def stamp_arrivals(receiver: socket.socket) -> None:
    """Make the kernel stamp every packet on arrival; `recvmsg` with room for 64 ancillary bytes returns the stamp."""
    receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def arrival_ns(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    """Return a packet's arrival stamp, in ns of CLOCK_REALTIME."""
    stamp: tuple[int, int] = _TIMESPEC.unpack(ancillary[0][2])
    return stamp[0] * 1_000_000_000 + stamp[1]

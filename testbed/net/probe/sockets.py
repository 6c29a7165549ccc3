"""Sockets inside a lab's namespaces, with buffers beyond the system's limits where the kernel grants them."""

from __future__ import annotations

import ctypes
import os
import socket

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


def enter(namespace_fd: int) -> None:
    """Move this process; it stays there. Sockets opened before stay where they are."""
    if _libc.setns(namespace_fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter a network namespace of the lab: {os.strerror(number)}")


def socket_in(namespace_fd: int, kind: int) -> socket.socket:
    """An IPv4 socket there."""
    enter(namespace_fd)
    return socket.socket(socket.AF_INET, kind)


def grow_buffers(end: socket.socket, wanted_bytes: int) -> int:
    """Ask for buffers of `wanted_bytes` both ways; what the receive buffer then holds, in the kernel's count.

    Without the privilege (a lab in a user namespace) it is what net.core.rmem_max and wmem_max allow.
    """
    for force, ask in ((_SO_SNDBUFFORCE, socket.SO_SNDBUF), (_SO_RCVBUFFORCE, socket.SO_RCVBUF)):
        try:
            end.setsockopt(socket.SOL_SOCKET, force, wanted_bytes)
        except PermissionError:
            if (
                end.type == socket.SOCK_DGRAM
            ):  # TCP's buffers grow by themselves, and further, as long as nothing is asked
                end.setsockopt(socket.SOL_SOCKET, ask, wanted_bytes)
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

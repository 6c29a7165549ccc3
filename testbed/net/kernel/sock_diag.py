"""TCP_INFO of every connection in a namespace, regardless of owner: the kernel's list of sockets (see sock_diag(7)).

Needs no privilege inside the namespace and touches no packet. One request returns a few kilobytes for all connections.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from typing import NamedTuple

from testbed.closing import Closing
from testbed.errors import CapabilityError, LabError
from testbed.net.kernel import messages
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import dump_answers
from testbed.tcp_info import TcpInfo, parse_tcp_info

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_TCP_INFO, _CONGESTION = 2, 4
"""INET_DIAG_INFO and INET_DIAG_CONG: attribute numbers, and the bits that request them."""
_CONNECTED = sum(1 << state for state in (1, 4, 5, 8, 9, 11))
"""ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK, CLOSING of <net/tcp_states.h>: states that may still carry
data."""

_QUESTION = struct.Struct("=BBBxI48x")
_ANSWER = struct.Struct("!B3x2H16s16s")
"""inet_diag_msg up to its addresses: ports and addresses are in network order."""
_FAMILIES = socket.AF_INET, socket.AF_INET6
"""A server on [::] has sockets of IPv6 whose addresses are mapped ones of IPv4."""
_MAPPED = b"\0" * 10 + b"\xff\xff"
_ANSWER_BYTES = 72
_PATIENCE_S = 2.0
_GROUPS_ENDED = 1, 3
"""SKNLGRP_INET_TCP_DESTROY and SKNLGRP_INET6_TCP_DESTROY of <linux/sock_diag.h>."""
_SO_RCVBUFFORCE = 33
_WAITING_BYTES = 4 << 20
"""Receive buffer for announcements: enough for a few thousand connections that end at once."""


class TcpConnection(NamedTuple):
    """One end of a TCP connection."""

    local: str
    """address:port"""
    remote: str
    congestion_control: str
    info: TcpInfo


def parse_connection(answer: bytes) -> TcpConnection | None:
    """Parse one inet_diag_msg with its attributes; None without TCP_INFO: the connection has ended; and for IPv6."""
    family, source_port, remote_port, *addresses = _ANSWER.unpack_from(answer)
    held = messages.attributes(answer, _ANSWER_BYTES)
    mapped = family == socket.AF_INET6
    if _TCP_INFO not in held or (mapped and any(address[:12] != _MAPPED for address in addresses)):
        return None
    source, remote = (address[12:] if mapped else address[:4] for address in addresses)
    return TcpConnection(
        local=f"{socket.inet_ntoa(source)}:{source_port}",
        remote=f"{socket.inet_ntoa(remote)}:{remote_port}",
        congestion_control=messages.text(held.get(_CONGESTION, b"")),
        info=parse_tcp_info(held[_TCP_INFO]),
    )


class SocketDiagnosis(Closing):
    """Lists the IPv4 connections of one namespace; a context manager that closes its socket."""

    def __init__(self, namespace: Namespace) -> None:
        self.name = namespace.name
        with namespace.entered():  # a socket stays in its namespace
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        self._socket.settimeout(_PATIENCE_S)
        self._number = 0

    def connections(self) -> list[TcpConnection]:
        """List the current connections.

        CapabilityError where this kernel has no tcp_diag, LabError without a response.
        """
        return [connection for family in _FAMILIES for connection in self._of_family(family)]

    def _of_family(self, family: int) -> list[TcpConnection]:
        self._number += 1
        asked_for = 1 << _TCP_INFO - 1 | 1 << _CONGESTION - 1
        question = _QUESTION.pack(family, socket.IPPROTO_TCP, asked_for, _CONNECTED)
        flags = messages.REQUEST | messages.DUMP
        connections = []
        try:
            self._socket.send(messages.frame(_SOCK_DIAG_BY_FAMILY, flags, self._number, question))
            for kind, _, body in dump_answers(self._socket, self._number):
                if kind == messages.ERROR and family != socket.AF_INET:
                    return []  # this kernel has no IPv6
                if kind == messages.ERROR:
                    raise self._refusal(-struct.unpack_from("=i", body)[0])
                if kind == _SOCK_DIAG_BY_FAMILY and (connection := parse_connection(body)) is not None:
                    connections.append(connection)
        except OSError as error:
            raise LabError(f"{self.name}: cannot list the TCP connections: {error.strerror or error}") from None
        return connections

    def _refusal(self, number: int) -> CapabilityError | LabError:
        if number == errno.ENOENT:
            return CapabilityError(
                f"{self.name}: this kernel cannot list TCP connections; load its module: modprobe tcp_diag"
            )
        return LabError(f"{self.name}: cannot list the TCP connections: {os.strerror(number)}")

    def close(self) -> None:
        self._socket.close()


class EndedConnections(Closing):
    """The IPv4 connections of one namespace that have ended, with their last TCP_INFO, as announced by the kernel."""

    def __init__(self, namespace: Namespace) -> None:
        """Listen from now on. CapabilityError where this kernel announces nothing."""
        self.name = namespace.name
        with namespace.entered():
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, _NETLINK_SOCK_DIAG
            )
            for option in (socket.SO_RCVBUF, _SO_RCVBUFFORCE):  # by root alone beyond rmem_max
                with contextlib.suppress(PermissionError):
                    self._socket.setsockopt(socket.SOL_SOCKET, option, _WAITING_BYTES)
            try:
                self._socket.bind((0, sum(1 << group - 1 for group in _GROUPS_ENDED)))
            except OSError as error:
                self._socket.close()
                raise CapabilityError(
                    f"{self.name}: this kernel does not announce ended connections: {error.strerror}; load its module: "
                    "modprobe tcp_diag"
                ) from None

    def take(self) -> list[TcpConnection]:
        """Return those announced since the last call; never waits. LabError where announcements were lost."""
        connections: list[TcpConnection] = []
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return connections
            except OSError as error:  # ENOBUFS
                raise LabError(f"{self.name}: cannot follow the TCP connections that end: {error.strerror}") from None
            for kind, _, _, body in messages.split_messages(data):
                if kind == _SOCK_DIAG_BY_FAMILY and body[0] in _FAMILIES:
                    connection = parse_connection(body)
                    connections += [connection] if connection is not None else []

    def close(self) -> None:
        self._socket.close()

"""TCP_INFO of every connection in a namespace, whoever owns it: the kernel's list of sockets (see sock_diag(7)).

Needs no privilege inside the namespace and touches no packet. One question and a few kilobytes of answer for all connections.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

from testbed import tcp_info
from testbed.errors import CapabilityError, LabError
from testbed.net.kernel.namespace import Namespace
from testbed.tcp_info import TcpInfo

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_TCP_INFO, _CONGESTION = 2, 4
"""INET_DIAG_INFO and INET_DIAG_CONG: numbers of attributes, and of the bits that ask for them."""
_CONNECTED = sum(1 << state for state in (1, 4, 5, 8, 9, 11))
"""ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK, CLOSING of <net/tcp_states.h>: what may still carry data."""

_HEADER = struct.Struct("=IHHII")
_QUESTION = struct.Struct("=BBBxI48x")
_ANSWER = struct.Struct("!4x2H4s12x4s12x")
"""inet_diag_msg up to its addresses: ports and addresses are in network order."""
_ANSWER_BYTES = 72
_ATTRIBUTE = struct.Struct("=HH")
_LARGEST_BYTES = 1 << 16
_PATIENCE_S = 2.0


class Connection(NamedTuple):
    """One end of a TCP connection."""

    local: str
    """address:port"""
    remote: str
    congestion_control: str
    info: TcpInfo


def _padded(length: int) -> int:
    return (length + 3) & ~3


def parse(answer: bytes) -> Connection | None:
    """One inet_diag_msg with its attributes; None where the kernel gave no TCP_INFO (the connection ended meanwhile)."""
    source_port, remote_port, source, remote = _ANSWER.unpack_from(answer)
    found: dict[int, bytes] = {}
    at = _ANSWER_BYTES
    while at + _ATTRIBUTE.size <= len(answer):
        length, kind = _ATTRIBUTE.unpack_from(answer, at)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = answer[at + _ATTRIBUTE.size : at + length]
        at += _padded(length)
    if _TCP_INFO not in found:
        return None
    return Connection(
        local=f"{socket.inet_ntoa(source)}:{source_port}",
        remote=f"{socket.inet_ntoa(remote)}:{remote_port}",
        congestion_control=found.get(_CONGESTION, b"").split(b"\0", 1)[0].decode(),
        info=tcp_info.parse_tcp_info(found[_TCP_INFO]),
    )


class SocketDiagnosis:
    """Asks for the IPv4 connections of one namespace; a context manager that closes its socket."""

    def __init__(self, namespace: Namespace) -> None:
        self.name = namespace.name
        with namespace.entered():  # a socket stays in its namespace
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        self._socket.settimeout(_PATIENCE_S)
        self._number = 0

    def connections(self) -> list[Connection]:
        """Every connection as it is now. CapabilityError where this kernel has no tcp_diag, LabError when it does not answer."""
        self._number += 1
        question = _QUESTION.pack(
            socket.AF_INET, socket.IPPROTO_TCP, 1 << _TCP_INFO - 1 | 1 << _CONGESTION - 1, _CONNECTED
        )
        header = _HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, self._number, 0)
        try:
            self._socket.send(header + question)
            return [found for answer in self._answers() if (found := parse(answer)) is not None]
        except OSError as error:
            raise LabError(f"{self.name}: cannot list the TCP connections: {error.strerror or error}") from None

    def _answers(self) -> Iterator[bytes]:
        while True:
            data = self._socket.recv(_LARGEST_BYTES)
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, _, number, _ = _HEADER.unpack_from(data, at)
                body = data[at + _HEADER.size : at + length]
                at += _padded(max(length, _HEADER.size))
                if number != self._number:  # of a question that was given up
                    continue
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    self._refused(-struct.unpack_from("=i", body)[0])
                yield body

    def _refused(self, number: int) -> None:
        if number == errno.ENOENT:
            raise CapabilityError(
                f"{self.name}: this kernel cannot list TCP connections; load its module: modprobe tcp_diag"
            )
        raise LabError(f"{self.name}: cannot list the TCP connections: {os.strerror(number)}")

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> SocketDiagnosis:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""TCP connections between the nodes of a lab, all of them held by this process, and what their devices count.

There is one connection for each two nodes that talk to each other, both ways: the lower node connects to the higher,
as stages do. Every port is stated, so that nothing about a connection is left to chance but its sequence numbers.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from types import TracebackType

from testbed.counters import DeviceCounters
from testbed.errors import TransportError
from testbed.net.lab import Lab
from testbed.play.played import NodeCounters, SocketState
from testbed.spec import Topology
from testbed.tcp_info import read_tcp_info

_LISTENING_PORT, _CONNECTING_PORT = 20000, 30000
_PATIENCE_S = 60.0
_CONDITIONS_BYTES = 8 + 24 * 4
"""Of struct tcp_info: its flags, and its words up to tcpi_total_retrans."""
_EXPECTATIONS = 8 + 21 * 4
"""Where tcpi_rcv_rtt and tcpi_rcv_space lie."""
_TOLD = [field.name for field in fields(SocketState)][3:]
"""What TCP_INFO has of a socket's state."""


def reachable(topology: Topology, node: int, peer: int) -> bool:
    """Say whether two nodes of a lab reach each other."""
    return topology == "star" or abs(node - peer) == 1


class Connections:
    """Connections that stand until they are closed; a context manager."""

    def __init__(self, lab: Lab, pairs: Sequence[tuple[int, int]]) -> None:
        """Connect each pair (lower, higher). TransportError where one cannot reach the other."""
        self.sockets: dict[tuple[int, int], socket.socket] = {}
        with ExitStack() as stack:
            begun = [(lower, higher, *self._begin(lab, lower, higher, stack)) for lower, higher in pairs]
            for lower, higher, listener, connecting in begun:
                self._finish(lower, higher, listener, connecting, stack)
            self._counters = []
            for node in lab.nodes:
                with node.namespace.entered():
                    self._counters.append(stack.enter_context(DeviceCounters(node.devices, lab.record.overhead_bytes)))
            self._algorithms = {
                ends: sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
                for ends, sock in self.sockets.items()
            }
            self._stack = stack.pop_all()

    def _begin(self, lab: Lab, lower: int, higher: int, stack: ExitStack) -> tuple[socket.socket, socket.socket]:
        """Let the higher node listen and the lower one begin to connect."""
        address = (lab.nodes[higher].address, _LISTENING_PORT + lower)
        try:
            with lab.nodes[higher].namespace.entered():
                listener = stack.enter_context(socket.socket())
            listener.bind(address)
            listener.listen(1)
            with lab.nodes[lower].namespace.entered():
                connecting = stack.enter_context(socket.socket())
            connecting.bind(("0.0.0.0", _CONNECTING_PORT + higher))
            connecting.setblocking(False)
            error = connecting.connect_ex(address)
        except OSError as problem:
            error = problem.errno or errno.EIO
        if error not in (0, errno.EINPROGRESS):
            raise TransportError(f"node {lower} cannot connect to node {higher}: {os.strerror(error)}")
        return listener, connecting

    def _finish(
        self, lower: int, higher: int, listener: socket.socket, connecting: socket.socket, stack: ExitStack
    ) -> None:
        listener.settimeout(_PATIENCE_S)
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            raise TransportError(f"node {lower} did not reach node {higher} within {_PATIENCE_S:.0f} s") from None
        listener.close()
        stack.enter_context(accepted)
        for sock in (accepted, connecting):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets[lower, higher], self.sockets[higher, lower] = connecting, accepted

    def counters(self) -> tuple[NodeCounters, ...]:
        """Read what each node's devices have counted since the connections stood."""
        return tuple(
            NodeCounters(read.sent_bytes, read.received_bytes, read.sent_packets, read.received_packets)
            for read in (counters.read() for counters in self._counters)
        )

    def states(self) -> tuple[SocketState, ...]:
        """Read TCP_INFO of every socket."""
        states = []
        for ends, sock in self.sockets.items():
            told = read_tcp_info(sock)
            states.append(SocketState(*ends, self._algorithms[ends], *(getattr(told, name) for name in _TOLD)))
        return tuple(states)

    def conditions(self) -> bytes:
        """Read what decides how every connection goes on, as far as the kernel shows it: TCP_INFO up to its totals.

        Without what a receiver expects (tcpi_rcv_rtt, tcpi_rcv_space): it creeps for dozens of steps, and decides only
        how far the window that it offers may still grow, which it does while nothing is held up by it.
        """
        conditions = []
        for sock in self.sockets.values():
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _CONDITIONS_BYTES)
            conditions.append(told[:_EXPECTATIONS] + told[_EXPECTATIONS + 8 :])
        return b"".join(conditions)

    def close(self) -> None:
        """Close them all."""
        self._stack.close()

    def __enter__(self) -> Connections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""TCP connections between the nodes of a lab, all held by this process, and the counters of their devices.

Each pair of communicating nodes has one connection for both directions: the lower node connects to the higher one, as
stages do. Every port is fixed, so that only a connection's sequence numbers are random.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from testbed.closing import Closing
from testbed.counters import DeviceCounters
from testbed.errors import TransportError
from testbed.net.lab import Lab
from testbed.spec import Topology
from testbed.tcp_info import read_tcp_info
from testbed.trace.played import NodeCounters, SocketState

_LISTENING_PORT, _CONNECTING_PORT = 20000, 30000
_PATIENCE_S = 60.0
_CONDITIONS_BYTES = 8 + 24 * 4
"""Size of struct tcp_info's flags, and its words up to tcpi_total_retrans."""
_EXPECTATIONS = 8 + 21 * 4
"""Position of tcpi_rcv_rtt and tcpi_rcv_space."""


def reachable(topology: Topology, node: int, peer: int) -> bool:
    """Return whether two nodes of a lab can reach each other."""
    return topology == "star" or abs(node - peer) == 1


class Connections(Closing):
    """The connections of a lab, until closed; a context manager."""

    def __init__(self, lab: Lab, pairs: Sequence[tuple[int, int]]) -> None:
        """Connect each pair (lower, higher). TransportError if one cannot reach the other."""
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
        """Make the higher node listen, and the lower one start to connect."""
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
        """Read the counters of each node's devices since the connections were established."""
        return tuple(NodeCounters(**dict(counters.read())) for counters in self._counters)

    def states(self) -> tuple[SocketState, ...]:
        """Read TCP_INFO of every socket."""
        return tuple(
            SocketState(
                node=node,
                peer=peer,
                congestion_control=self._algorithms[node, peer],
                **read_tcp_info(sock).fields_of(SocketState),
            )
            for (node, peer), sock in self.sockets.items()
        )

    def conditions(self) -> bytes:
        """Read the state that determines how every connection continues, as far as the kernel exposes it: TCP_INFO up
        to its totals.

        Without the receiver's estimates (tcpi_rcv_rtt, tcpi_rcv_space): these drift for dozens of steps, but affect
        only the further growth of the advertised window, which delays nothing.
        """
        conditions = []
        for sock in self.sockets.values():
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _CONDITIONS_BYTES)
            conditions.append(told[:_EXPECTATIONS] + told[_EXPECTATIONS + 8 :])
        return b"".join(conditions)

    def close(self) -> None:
        """Close them all."""
        self._stack.close()

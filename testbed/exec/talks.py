"""Traffic between pairs of nodes: TCP's own counters of every connection, including those that have ended.

The kernel announces each socket that it destroys, with its last TCP_INFO; open sockets are listed. No packets are
captured, so the numbers are exact and cost nothing per packet. UDP and other protocols appear only in the links'
counters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack

from testbed.closing import Closing
from testbed.exec.order import Talk
from testbed.net.kernel.sock_diag import EndedConnections, SocketDiagnosis, TcpConnection
from testbed.net.lab import Lab


class Talks(Closing):
    """Follows the connections of a lab's nodes; a context manager. Call `note` from time to time."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._ended: list[tuple[int, TcpConnection]] = []
        with ExitStack() as stack:
            self._ending = [stack.enter_context(EndedConnections(node.namespace)) for node in lab.nodes]
            self._standing = [stack.enter_context(SocketDiagnosis(node.namespace)) for node in lab.nodes]
            self._stack = stack.pop_all()

    def note(self) -> None:
        """Collect the kernel's announcements."""
        for node, ending in enumerate(self._ending):
            self._ended += [(node, connection) for connection in ending.take()]

    def total(self) -> tuple[Talk, ...]:
        """Return the traffic so far, by pair of nodes; connections to other hosts are omitted."""
        self.note()
        owner = _owners(self._lab)
        sums: Mapping[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
        standing = [(node, each) for node, diagnosis in enumerate(self._standing) for each in diagnosis.connections()]
        for node, connection in self._ended + standing:
            target = owner.get(connection.remote.rpartition(":")[0])
            if target is None or target == node:
                continue
            total = sums[node, target]
            total[0] += connection.info.bytes_sent - connection.info.bytes_retransmitted
            total[1] += connection.info.bytes_retransmitted
            total[2] += 1
        return tuple(
            Talk(source=a, target=b, payload_bytes=sent, retransmitted_bytes=again, connections=count)
            for (a, b), (sent, again, count) in sorted(sums.items())
        )

    def close(self) -> None:
        self._stack.close()


def _owners(lab: Lab) -> dict[str, int]:
    """Return the node of each address."""
    names = {node.name: node.index for node in lab.nodes}
    ends = [end for link in lab.links for end in (link.near, link.far)]
    return {end.address.partition("/")[0]: names[end.namespace] for end in ends if end.namespace in names}

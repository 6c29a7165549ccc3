"""A network of socket pairs and a clock that jumps: traces are played in no time, without privilege."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from testbed.player.lanes import pairs
from testbed.trace.format import SEND, Trace
from testbed.trace.played import NodeCounters, SocketState
from testbed.waiting import DUE


class FakeWaiter:
    """Time passes only where no socket is ready."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._poll = select.epoll()
        self._watched: set[int] = set()

    def now(self) -> int:
        return self.now_ns

    def watch(self, descriptor: int, events: int) -> None:
        (self._poll.modify if descriptor in self._watched else self._poll.register)(descriptor, events)
        self._watched.add(descriptor)

    def wait(self, due_ns: int | None) -> list[tuple[int, int]]:
        if not (events := self._poll.poll(0)):
            assert due_ns is not None, "the player waits for ever"
            self.now_ns = max(self.now_ns, due_ns)
            return [(DUE, 0)]
        return events

    def stand_still(self, grid_ns: int) -> None:
        pass

    def close(self) -> None:
        self._poll.close()


class FakeNetwork:
    """One socket pair for each two nodes that talk."""

    def __init__(self, trace: Trace) -> None:
        self.sockets: dict[tuple[int, int], socket.socket] = {}
        for lower, higher in pairs(trace):
            self.sockets[lower, higher], self.sockets[higher, lower] = socket.socketpair()
        for sock in self.sockets.values():
            sock.setblocking(False)
        self._trace, self._steps = trace, 0

    def counters(self) -> tuple[NodeCounters, ...]:
        """As if each message were counted in the step that sends it."""
        self._steps += 1
        sent = [0] * len(self._trace.nodes)
        for lane in self._trace.lanes:
            stop = lane.starts[self._steps]
            sent[lane.node] += sum(
                value for kind, value in zip(lane.kind[:stop], lane.value[:stop], strict=True) if kind == SEND
            )
        return tuple(NodeCounters(count, 0, count // 1000, 0) for count in sent)

    def states(self) -> tuple[SocketState, ...]:
        return tuple(
            SocketState(node, peer, "cubic", 100, 90, 10, 1000 * self._steps, 0, 7 * self._steps, 3 * self._steps, 0)
            for node, peer in self.sockets
        )

    def conditions(self) -> bytes:
        return b""


@contextmanager
def fake(trace: Trace) -> Iterator[tuple[FakeNetwork, FakeWaiter]]:
    network, waiter = FakeNetwork(trace), FakeWaiter()
    try:
        yield network, waiter
    finally:
        waiter.close()
        for sock in network.sockets.values():
            sock.close()

"""Plays a trace over sockets, in one process and one loop, without threads or polling the clock.

lanes.py tracks what each lane does next, waiting.py wakes the loop, connections.py creates the sockets; this module
sends and receives the bytes. Standard library only.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from testbed.errors import SpecError, TransportError
from testbed.faults import NodeFault
from testbed.player.lanes import Director, Lanes, MessageInFlight, pairs
from testbed.player.steady import Repetition, difference
from testbed.trace.format import Trace
from testbed.trace.played import NodeCounters, Played, SocketState
from testbed.waiting import DUE, READABLE, WRITABLE, Waiter

Clock = Literal["virtual", "real"]

_PAYLOAD: Final = memoryview(bytes(1 << 20))
"""Content of every message. Constant, because links do not depend on the content."""
GRID_NS: Final = 10_000_000
"""A multiple of the kernel's tick, whatever its HZ is."""
_TAKEN: Final = bytearray(4 << 20)
"""Receive buffer; never written to, because the kernel discards received bytes (MSG_TRUNC)."""


class Network(Protocol):
    """The network that a trace is played over."""

    @property
    def sockets(self) -> Mapping[tuple[int, int], socket.socket]:
        """Connected, non-blocking sockets by (node, peer): each connection twice, once per end."""
        ...

    def counters(self) -> tuple[NodeCounters, ...]:
        """Read the counters of each node's devices since the player began."""
        ...

    def states(self) -> tuple[SocketState, ...]:
        """Read TCP_INFO of every socket."""
        ...

    def conditions(self) -> bytes:
        """Read the state that determines how every connection continues, as far as the kernel exposes it."""
        ...


class VaryingLinks(Protocol):
    """Links whose settings vary with time."""

    def next_due(self) -> int | None:
        """Return when the next change is due, on the player's clock; None: never."""
        ...

    def follow(self) -> None:
        """Make the change that is due."""
        ...


class _ConnectionEnd:
    """One end of a connection: messages to its peer, and messages from it."""

    __slots__ = ("blocked", "expected", "fd", "node", "peer", "sock", "waiting")

    def __init__(self, node: int, peer: int, sock: socket.socket) -> None:
        self.node, self.peer, self.sock, self.fd = node, peer, sock, sock.fileno()
        self.waiting: deque[MessageInFlight] = deque()  # to be sent
        self.expected: deque[MessageInFlight] = deque()  # from the peer, in the order of its sends
        self.blocked = False


class Player:
    """Plays one trace once."""

    def __init__(
        self,
        trace: Trace,
        network: Network,
        waiter: Waiter,
        *,
        clock: Clock,
        steps: int | None = None,
        prove_steady: bool = False,
        schedules: VaryingLinks | None = None,
        director: Director | None = None,
        faults: Sequence[NodeFault] = (),
        step_done: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`steps`: maximum number of steps; None: all. `prove_steady`: stop once steps provably repeat; the clock may
        then pause between two steps for less than `GRID_NS`. The trace must satisfy `check.check_trace`.
        """
        assert all(pair in network.sockets for pair in pairs(trace))
        assert not (prove_steady and director)
        self._steps = trace.steps if steps is None else min(steps, trace.steps)
        self._network, self._waiter, self._clock, self._schedules = network, waiter, clock, schedules
        self._step_done = step_done
        self._lanes = Lanes(trace, self._steps, self._hand_over, halt=prove_steady, director=director, faults=faults)
        stops = [fault for fault in faults if fault.stops]
        self._switches = sorted((at, f.node, at == f.at_ns) for f in stops for at in (f.at_ns, f.end_ns))
        """When a node stops or goes on, which node, and whether it stops; the next one first."""
        self._repetition = Repetition(trace, [lane.times for lane in self._lanes.states]) if prove_steady else None
        self._aligned = {0}  # steps that began at the same phase of the kernel's ticks
        self._begun = 0  # the last step that a lane may have begun
        self._flows = {ends: _ConnectionEnd(*ends, sock) for ends, sock in network.sockets.items()}
        self._by_fd = {flow.fd: flow for flow in self._flows.values()}
        # On the virtual clock, compute takes no time, but every reading of the clock takes a little.
        self._fresh = clock == "real"
        self._now_ns, self._stale = 0, True
        self._in_flight = 0  # messages handed over but not yet received
        self._arrivals = 0
        self._counters: list[tuple[NodeCounters, ...]] = []
        self._states: list[tuple[SocketState, ...]] = []
        self._sends = 0

    def play(self) -> Played:
        """Play the trace and return its times. SpecError if lanes deadlock, TransportError if a connection ends."""
        lanes, schedules = self._lanes, self._schedules
        for flow in self._flows.values():
            self._waiter.watch(flow.fd, READABLE)
        steady = None
        while True:
            lanes.advance(self._now())
            while len(self._counters) < lanes.steps_done and steady is None:
                steady = self._end_step(len(self._counters))
            if steady is not None or lanes.steps_done == self._steps:
                return self._played(steady)
            if lanes.halted:
                self._align()
                continue
            due_ns = lanes.next_due_ns
            change_ns = schedules.next_due() if schedules is not None else None
            if due_ns is None and not self._in_flight:
                raise SpecError(f"the trace deadlocks: {lanes.stuck()}")
            switch_ns = self._switches[0][0] if self._switches else None
            due_ns = min((at for at in (due_ns, change_ns, switch_ns) if at is not None), default=None)
            if self._await(due_ns):
                if change_ns is not None and change_ns <= self._now():
                    assert schedules is not None
                    schedules.follow()
                if switch_ns is not None and switch_ns <= self._now():
                    self._switch(*self._switches.pop(0)[1:])
                lanes.end_work(self._now())

    def _switch(self, node: int, stops: bool) -> None:
        """Stop reading and sending at a node, or go on with it."""
        for flow in self._flows.values():
            if flow.node == node:
                self._waiter.watch(flow.fd, 0 if stops else READABLE | (WRITABLE if flow.blocked else 0))

    def _await(self, due_ns: int | None) -> bool:
        """Send and receive bytes until `due_ns` (returns True) or until a message is complete. Most packets complete
        none.
        """
        waiter, by_fd, due = self._waiter, self._by_fd, False
        self._arrivals = 0
        while not self._arrivals and not due:
            events = waiter.wait(due_ns)
            self._stale = True
            for fd, event in events:
                if fd == DUE:
                    due = True
                    continue
                flow = by_fd[fd]
                if event & READABLE:
                    self._receive(flow)
                if event & WRITABLE:
                    waiter.watch(fd, READABLE)
                    flow.blocked = False
                    self._send(flow)
        return due

    def _hand_over(self, message: MessageInFlight, node: int, peer: int) -> None:
        flow = self._flows[node, peer]
        flow.waiting.append(message)
        self._in_flight += 1
        self._flows[peer, node].expected.append(message)
        if not flow.blocked and len(flow.waiting) == 1:
            self._send(flow)

    def _send(self, flow: _ConnectionEnd) -> None:
        """Hand waiting bytes to the kernel until it accepts no more."""
        waiting = flow.waiting
        while waiting:
            message = waiting[0]
            left = message.unsent
            if left == message.size:
                message.first_ns = message.lane.first[message.index] = self._now()
            piece = _PAYLOAD[:left]
            self._sends += 1
            try:
                sent = flow.sock.send(piece)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise TransportError(f"node {flow.node} lost node {flow.peer}: {error.strerror}") from None
            message.unsent = left - sent
            if sent < len(piece):
                flow.blocked = True
                self._waiter.watch(flow.fd, READABLE | WRITABLE)
                return
            if not message.unsent:
                message.lane.last[message.index] = self._now()
                waiting.popleft()

    def _receive(self, flow: _ConnectionEnd) -> None:
        """Receive the bytes that have arrived."""
        try:
            count = flow.sock.recv_into(_TAKEN, 0, socket.MSG_TRUNC)
        except BlockingIOError:
            return
        except OSError as error:
            raise TransportError(f"node {flow.node} lost node {flow.peer}: {error.strerror}") from None
        if count == 0:
            raise TransportError(f"node {flow.node} lost node {flow.peer}: the connection was closed")
        expected = flow.expected
        while count:
            message = expected[0]
            if count < message.unreceived:
                message.unreceived -= count
                return
            count -= message.unreceived
            expected.popleft()
            self._in_flight -= 1
            self._arrivals += 1
            self._lanes.arrived(message, flow.node, flow.peer, self._now())

    def _align(self) -> None:
        """Begin the next step at the same phase of the kernel's ticks as the previous one, if the lab is silent.

        TCP counts some of its times in ticks. Without this, an otherwise identical step would have another phase, and
        its acknowledgements might come at other times.
        """
        lanes = self._lanes
        step = max(lane.step for lane in lanes.halted)
        if step > self._begun:
            self._begun = step
            if not self._in_flight and lanes.only_work_left:
                self._waiter.stand_still(GRID_NS)
                self._aligned.add(step)
        lanes.go_on()

    def _now(self) -> int:
        if self._fresh or self._stale:
            self._now_ns, self._stale = self._waiter.now(), False
        return self._now_ns

    def _end_step(self, step: int) -> tuple[int, int] | None:
        """Record the step's counters. Returns (first, period) once steps provably repeat."""
        counters, states = self._network.counters(), self._network.states()
        self._counters.append(counters)
        self._states.append(states)
        self._step_done(step)
        if self._repetition is None:
            return None
        if step not in self._aligned or any(flow.waiting for flow in self._flows.values()):
            return self._repetition.add(step, None)
        counted = self._counters[step] if step == 0 else difference(counters, self._counters[step - 1])
        return self._repetition.add(step, (counted, self._network.conditions()))

    def _played(self, steady: tuple[int, int] | None) -> Played:
        steps = len(self._counters)
        late = sorted(self._lanes.late_ns)
        about: dict[str, Any] = {
            "sends": self._sends,
            "ends_of_work": len(late),
            "late_p99_ns": late[len(late) * 99 // 100] if late else 0,
            "late_max_ns": late[-1] if late else 0,
        }
        return Played(
            clock=self._clock,
            steps=steps,
            steady=steady,
            lanes=tuple(lane.played(steps) for lane in self._lanes.states),
            counters=self._counters,
            sockets=self._states,
            played_at_ns=0,
            about=about,
        )

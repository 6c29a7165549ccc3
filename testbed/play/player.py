"""Play a trace over sockets: one process, one loop, no thread; nothing waits by looking at the clock.

lanes.py says what each lane does next, waiting.py wakes us, connections.py makes the sockets; this hands bytes over and
takes them. Standard library only.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol

from testbed.errors import SpecError, TransportError
from testbed.play.lanes import Director, Lanes, MessageInFlight, pairs
from testbed.play.played import NodeCounters, Played, SocketState
from testbed.play.steady import Repetition, difference
from testbed.play.trace import Trace
from testbed.play.waiting import DUE, READABLE, WRITABLE, Waiter

Clock = Literal["virtual", "real"]

_PAYLOAD: Final = memoryview(bytes(1 << 20))
"""What every message consists of. Constant: a link counts bytes and does not read them."""
GRID_NS: Final = 10_000_000
"""A multiple of the kernel's tick, whatever its HZ is."""
_TAKEN: Final = bytearray(4 << 20)
"""Never written to: the kernel throws received bytes away (MSG_TRUNC)."""


class Network(Protocol):
    """What a trace is played over."""

    @property
    def sockets(self) -> Mapping[tuple[int, int], socket.socket]:
        """Connected and non-blocking, by (node, peer): each connection twice, once for each end."""
        ...

    def counters(self) -> tuple[NodeCounters, ...]:
        """Read what each node's devices have counted since the player began."""
        ...

    def states(self) -> tuple[SocketState, ...]:
        """Read TCP_INFO of every socket."""
        ...

    def conditions(self) -> bytes:
        """Read what decides how every connection goes on, as far as the kernel shows it."""
        ...


class VaryingLinks(Protocol):
    """Links that vary."""

    def next_due(self) -> int | None:
        """Return when the next change is due, on the player's clock; None: never."""
        ...

    def follow(self) -> None:
        """Make the change that is due."""
        ...


class _ConnectionEnd:
    """One end of a connection: what it sends to its peer, and what it receives."""

    __slots__ = ("blocked", "expected", "fd", "node", "peer", "sock", "waiting")

    def __init__(self, node: int, peer: int, sock: socket.socket) -> None:
        self.node, self.peer, self.sock, self.fd = node, peer, sock, sock.fileno()
        self.waiting: deque[MessageInFlight] = deque()  # to be sent
        self.expected: deque[MessageInFlight] = deque()  # the peer's, in the order in which they leave it
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
        step_done: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`steps`: at most so many; None: all. `prove_steady`: stop when steps are proved to repeat; between two steps
        the clock may then stand still for less than `GRID_NS`. The trace is one that `check.check_trace` accepts.
        """
        assert all(pair in network.sockets for pair in pairs(trace))
        assert not (prove_steady and director)
        self._steps = trace.steps if steps is None else min(steps, trace.steps)
        self._network, self._waiter, self._clock, self._schedules = network, waiter, clock, schedules
        self._step_done = step_done
        self._lanes = Lanes(trace, self._steps, self._hand_over, halt=prove_steady, director=director)
        self._repetition = Repetition(trace, [lane.times for lane in self._lanes.states]) if prove_steady else None
        self._aligned = {0}  # steps that began where the kernel's ticks lie alike
        self._begun = 0  # the last step that a lane was let into
        self._flows = {ends: _ConnectionEnd(*ends, sock) for ends, sock in network.sockets.items()}
        self._by_fd = {flow.fd: flow for flow in self._flows.values()}
        # On the virtual clock computing takes no time, and every look at the clock takes a little.
        self._fresh = clock == "real"
        self._now_ns, self._stale = 0, True
        self._in_flight = 0  # messages that were handed over and have not arrived
        self._arrivals = 0
        self._counters: list[tuple[NodeCounters, ...]] = []
        self._states: list[tuple[SocketState, ...]] = []
        self._sends = 0

    def play(self) -> Played:
        """Play it and return what happened. SpecError where lanes wait for what never comes, TransportError when a
        connection ends.
        """
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
                raise SpecError(f"the trace cannot go on: {lanes.stuck()}")
            if change_ns is not None and (due_ns is None or change_ns < due_ns):
                due_ns = change_ns
            if self._await(due_ns):
                if change_ns is not None and change_ns <= self._now():
                    assert schedules is not None
                    schedules.follow()
                lanes.end_work(self._now())

    def _await(self, due_ns: int | None) -> bool:
        """Hand over and take bytes until a moment has come, which is True, or a message. Most packets end none."""
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
        """Give the kernel as much of what waits as it takes."""
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
        """Take what has come."""
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
        """Let the next step begin where the kernel's ticks lie as they did in the step before, if the lab is silent.

        TCP counts some of its times in ticks. Without this a step that is like the one before in everything else finds
        them elsewhere, and its acknowledgements may come at other times.
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
        """Note the step's counters. (first, period) once steps are proved to repeat."""
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

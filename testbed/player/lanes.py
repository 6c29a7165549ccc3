"""Tracks the next operation of each lane of a trace: work, and waits for messages and events. No sockets, no clock.

A lane has its own time, the end of its last operation: work takes exactly the trace's duration, even if the player
noticed its end late. An external event (a message) has the time at which it was noticed.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from testbed.faults import NodeFault, goes_on_ns, worked_ns
from testbed.trace.format import KINDS, RECEIVE, SEND, SIGNAL, WORK, Trace
from testbed.trace.played import PlayedLane
from testbed.waking import waking_ns


class MessageInFlight:
    """One message, from its hand-over until its receipt."""

    __slots__ = ("first_ns", "index", "lane", "size", "tag", "unreceived", "unsent")

    def __init__(self, tag: int, size: int, lane: LaneState, index: int) -> None:
        self.tag, self.size, self.lane, self.index = tag, size, lane, index
        self.unsent = self.unreceived = size
        self.first_ns = 0


class LaneState:
    """Progress of a lane."""

    __slots__ = (
        "at_ns", "begin", "end", "first", "index", "kind", "last", "node", "number", "peer", "starts", "step", "tag",
        "value", "waking_ns",
    )  # fmt: skip

    def __init__(self, number: int, trace: Trace, steps: int) -> None:
        lane = trace.lanes[number]
        self.number, self.node = number, lane.node
        self.kind, self.peer, self.tag, self.value = lane.kind, lane.peer, lane.tag, lane.value
        self.starts = lane.starts
        self.index = self.step = self.at_ns = self.waking_ns = 0
        self.begin, self.end, self.first, self.last = (array("q", bytes(8 * lane.starts[steps])) for _ in range(4))

    @property
    def times(self) -> PlayedLane:
        """The times recorded so far; they grow during play."""
        return PlayedLane(self.begin, self.end, self.first, self.last)

    def played(self, steps: int) -> PlayedLane:
        """Return the recorded times of the first `steps` steps."""
        count = self.starts[steps]
        return PlayedLane(self.begin[:count], self.end[:count], self.first[:count], self.last[:count])


class Director(Protocol):
    """Changes a trace during play, based on the times so far: sizes of messages, counts to wait for.

    A `Played` records times but not the director's choices, and the director ends with the process that plays. A
    director that depends on these times alone can be called again afterwards with the played times; any other must
    store its choices. Links are certified with the messages of the original trace.
    """

    def step_ended(self, lane: LaneState, lanes: Sequence[LaneState]) -> None:
        """Called when a lane has ended a step; `lane.step` is its next. May change the `value` of operations that their
        lane has not reached.
        """
        ...


class Lanes:
    """All lanes of a trace during play."""

    def __init__(
        self,
        trace: Trace,
        steps: int,
        hand_over: Callable[[MessageInFlight, int, int], None],
        *,
        halt: bool = False,
        director: Director | None = None,
        faults: Sequence[NodeFault] = (),
    ) -> None:
        """`hand_over(message, node, peer)` is called for each send, in order. `halt`: lanes begin their next step only
        when `go_on` is called.
        """
        self.states = [LaneState(number, trace, steps) for number in range(len(trace.lanes))]
        self.steps_done = 0
        """Number of steps that all lanes have ended."""
        self.late_ns = array("q")
        """Lateness with which each end of work was noticed."""
        self.halted: list[LaneState] = []
        """Lanes that have ended a step, and wait to begin the next."""
        faults = sorted(faults, key=lambda fault: fault.at_ns)
        self._faults = [[fault for fault in faults if fault.node == lane.node] for lane in self.states]
        self._steps, self._hand_over, self._halt, self._director = steps, hand_over, halt, director
        self._ready = deque(self.states)
        self._due: list[tuple[int, int]] = []  # a heap of (when work ends, which lane)
        self._arrived: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._receiving: dict[tuple[int, int, int], LaneState] = {}
        self._signals: dict[int, list[int]] = {}  # of each event, when it was counted up to 1, 2, ...
        self._waiting: dict[int, list[tuple[int, LaneState]]] = {}
        self._unfinished = [len(self.states)] * steps

    @property
    def next_due_ns(self) -> int | None:
        """When the next work ends; None if no lane works."""
        return self._due[0][0] if self._due else None

    def end_work(self, now_ns: int) -> None:
        """Advance the lanes whose work has ended."""
        due = self._due
        while due and due[0][0] <= now_ns:
            when_ns, number = heapq.heappop(due)
            self.late_ns.append(now_ns - when_ns)
            self._ready.append(self.states[number])

    def arrived(self, message: MessageInFlight, node: int, peer: int, now_ns: int) -> None:
        """Note that `node` has received the whole message of `peer`."""
        key = (node, peer, message.tag)
        self._arrived[key] = (message.first_ns, now_ns)
        if (lane := self._receiving.pop(key, None)) is not None:
            self._ready.append(lane)

    def advance(self, now_ns: int) -> None:
        """Advance all lanes until each of them waits."""
        ready = self._ready
        while ready:
            self._run(ready.popleft(), now_ns)

    def _run(self, lane: LaneState, now_ns: int) -> None:
        kind, value, starts = lane.kind, lane.value, lane.starts
        begin, end, at_ns, i, faults = lane.begin, lane.end, lane.at_ns, lane.index, self._faults[lane.number]
        while lane.step < self._steps:
            stop = starts[lane.step + 1]
            while i < stop:
                if faults and (until_ns := goes_on_ns(faults, at_ns)) > at_ns:
                    at_ns = until_ns
                    if at_ns > now_ns:
                        lane.at_ns, lane.index = at_ns, i
                        heapq.heappush(self._due, (at_ns, lane.number))
                        return
                begin[i] = at_ns
                what = kind[i]
                if what == WORK:
                    work_ns = value[i] + lane.waking_ns
                    at_ns = worked_ns(faults, at_ns, work_ns) if faults else at_ns + work_ns
                    lane.waking_ns = 0
                    end[i] = at_ns
                    i += 1
                    if at_ns > now_ns:
                        lane.at_ns, lane.index = at_ns, i
                        heapq.heappush(self._due, (at_ns, lane.number))
                        return
                    continue
                if what == SEND:
                    self._hand_over(MessageInFlight(lane.tag[i], value[i], lane, i), lane.node, lane.peer[i])
                elif what == RECEIVE:
                    key = (lane.node, lane.peer[i], lane.tag[i])
                    if (times := self._arrived.pop(key, None)) is None:
                        lane.at_ns, lane.index = at_ns, i
                        self._receiving[key] = lane
                        return
                    lane.first[i], lane.last[i] = times
                    if (waited_ns := times[1] - at_ns) > 0:
                        at_ns = times[1]
                        lane.waking_ns = waking_ns(value[i], waited_ns)
                elif what == SIGNAL:
                    self._signal(lane.tag[i], at_ns)
                else:
                    signals = self._signals.get(lane.tag[i], ())
                    if len(signals) < value[i]:
                        lane.at_ns, lane.index = at_ns, i
                        self._waiting.setdefault(lane.tag[i], []).append((value[i], lane))
                        return
                    if value[i] > 0:
                        at_ns = max(at_ns, signals[value[i] - 1])
                end[i] = at_ns
                i += 1
            lane.at_ns, lane.index = at_ns, i
            self._unfinished[lane.step] -= 1
            lane.step += 1
            while self.steps_done < self._steps and not self._unfinished[self.steps_done]:
                self.steps_done += 1
            if self._director is not None:
                self._director.step_ended(lane, self.states)
            if self._halt and lane.step < self._steps:
                self.halted.append(lane)
                return

    def go_on(self) -> None:
        """Advance the lanes that have ended a step."""
        self._ready.extend(self.halted)
        self.halted.clear()

    @property
    def only_work_left(self) -> bool:
        """Whether every lane is between two steps, or has only work left in its step."""
        return all(
            lane.index in (lane.starts[lane.step], lane.starts[-1])
            or all(kind == WORK for kind in lane.kind[lane.index : lane.starts[lane.step + 1]])
            for lane in self.states
        )

    def _signal(self, event: int, at_ns: int) -> None:
        signals = self._signals.setdefault(event, [])
        signals.append(max(at_ns, signals[-1]) if signals else at_ns)
        if (waiting := self._waiting.get(event)) is not None:
            count = len(signals)
            self._ready.extend(lane for value, lane in waiting if value <= count)
            self._waiting[event] = [(value, lane) for value, lane in waiting if value > count]

    def stuck(self) -> str:
        """Describe what the lanes wait for in a deadlock."""
        waits = []
        for lane in self.states:
            if lane.step < self._steps:
                kind, tag, peer = KINDS[lane.kind[lane.index]], lane.tag[lane.index], lane.peer[lane.index]
                whom = f"message {tag} of node {peer}" if kind == "receive" else f"event {tag}"
                waits.append(f"lane {lane.number} of node {lane.node} in step {lane.step} for {whom}")
        more = f" and {len(waits) - 4} more" if len(waits) > 4 else ""
        return "; ".join(waits[:4]) + more


def pairs(trace: Trace) -> list[tuple[int, int]]:
    """Return the pairs of nodes that exchange messages, the lower node first, in order."""
    both = {
        (min(lane.node, peer), max(lane.node, peer))
        for lane in trace.lanes
        for kind, peer in set(zip(lane.kind, lane.peer, strict=True))
        if kind in (SEND, RECEIVE)
    }
    return sorted(both)

"""What the lanes of a trace do next: work that ends, messages and events that are waited for. No sockets, no clock.

A lane keeps a time of its own, which is when its last operation ended: work takes exactly as long as the trace says,
also where the player noticed its end late. What came from outside (a message) has the time at which it was seen.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from testbed.play.played import PlayedLane
from testbed.play.trace import KINDS, RECEIVE, SEND, SIGNAL, WORK, Trace
from testbed.waking import waking_ns


class MessageInFlight:
    """One message, from the moment at which it is handed over until it is received."""

    __slots__ = ("first_ns", "index", "lane", "size", "tag", "unreceived", "unsent")

    def __init__(self, tag: int, size: int, lane: LaneState, index: int) -> None:
        self.tag, self.size, self.lane, self.index = tag, size, lane, index
        self.unsent = self.unreceived = size
        self.first_ns = 0


class LaneState:
    """How far a lane has come."""

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
        """What was noted so far, and will be."""
        return PlayedLane(self.begin, self.end, self.first, self.last)

    def played(self, steps: int) -> PlayedLane:
        """Return what was noted of the first `steps` steps."""
        count = self.starts[steps]
        return PlayedLane(self.begin[:count], self.end[:count], self.first[:count], self.last[:count])


class Director(Protocol):
    """Who chooses while a trace is played, by when what happened: how large messages are, for how many it is waited.

    A `Played` says when what happened and not what was chosen, and the director ends with the process that plays. One
    that decides by these times alone may be asked again afterwards, with the times that were played; another has
    to keep what it chose. Links are certified with the messages of the trace as it was written.
    """

    def step_ended(self, lane: LaneState, lanes: Sequence[LaneState]) -> None:
        """A lane has ended a step, and `lane.step` is its next. The `value` of an operation which its lane has not come
        to may be changed.
        """
        ...


class Lanes:
    """All lanes of a trace, being played."""

    def __init__(
        self,
        trace: Trace,
        steps: int,
        hand_over: Callable[[MessageInFlight, int, int], None],
        *,
        halt: bool = False,
        director: Director | None = None,
    ) -> None:
        """`hand_over(message, node, peer)` is called for each send, in order. `halt`: lanes go into their next step
        only when `go_on` is called.
        """
        self.states = [LaneState(number, trace, steps) for number in range(len(trace.lanes))]
        self.steps_done = 0
        """How many steps all lanes have ended."""
        self.late_ns = array("q")
        """By how much each end of work was noticed late."""
        self.halted: list[LaneState] = []
        """Who has ended a step, and would begin the next."""
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
        """When the next work ends; None where nobody works."""
        return self._due[0][0] if self._due else None

    def end_work(self, now_ns: int) -> None:
        """Let go on whose work has ended."""
        due = self._due
        while due and due[0][0] <= now_ns:
            when_ns, number = heapq.heappop(due)
            self.late_ns.append(now_ns - when_ns)
            self._ready.append(self.states[number])

    def arrived(self, message: MessageInFlight, node: int, peer: int, now_ns: int) -> None:
        """Note that `node` has the whole message of `peer`."""
        key = (node, peer, message.tag)
        self._arrived[key] = (message.first_ns, now_ns)
        if (lane := self._receiving.pop(key, None)) is not None:
            self._ready.append(lane)

    def advance(self, now_ns: int) -> None:
        """Let every lane that can go on do so, until each of them waits for something."""
        ready = self._ready
        while ready:
            self._run(ready.popleft(), now_ns)

    def _run(self, lane: LaneState, now_ns: int) -> None:
        kind, value, starts = lane.kind, lane.value, lane.starts
        begin, end, at_ns, i = lane.begin, lane.end, lane.at_ns, lane.index
        while lane.step < self._steps:
            stop = starts[lane.step + 1]
            while i < stop:
                begin[i] = at_ns
                what = kind[i]
                if what == WORK:
                    at_ns += value[i] + lane.waking_ns
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
        """Let those go on who have ended a step."""
        self._ready.extend(self.halted)
        self.halted.clear()

    @property
    def only_work_left(self) -> bool:
        """Whether every lane is between two steps, or has only work to do until the end of its step."""
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
        """Say what the lanes wait for, where nothing can happen any more."""
        waits = []
        for lane in self.states:
            if lane.step < self._steps:
                kind, tag, peer = KINDS[lane.kind[lane.index]], lane.tag[lane.index], lane.peer[lane.index]
                whom = f"message {tag} of node {peer}" if kind == "receive" else f"event {tag}"
                waits.append(f"lane {lane.number} of node {lane.node} in step {lane.step} for {whom}")
        more = f" and {len(waits) - 4} more" if len(waits) > 4 else ""
        return "; ".join(waits[:4]) + more


def pairs(trace: Trace) -> list[tuple[int, int]]:
    """Return which nodes talk to each other, the lower one first, in order."""
    both = {
        (min(lane.node, peer), max(lane.node, peer))
        for lane in trace.lanes
        for kind, peer in set(zip(lane.kind, lane.peer, strict=True))
        if kind in (SEND, RECEIVE)
    }
    return sorted(both)

"""Simulates a trace: when each operation begins and ends if messages take no time, or the time given by a formula.

Each lane of the trace runs as a program on the event loop of jobs (`jobs.loop`). Without a network the result is the
ideal that no network can beat; over formula links (`metrics.links`) it is the bound set by rates and delays alone,
without a transport.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any

from testbed.errors import SpecError
from testbed.jobs.actions import EndStep, Message, Receive, Send, Sizes, Work
from testbed.jobs.loop import Await, Links, Loop, NodeLane, Observer, Signal, StuckError
from testbed.trace.format import KINDS, RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.trace.played import PlayedLane


def replay(
    trace: Trace, steps: int | None = None, links: Links | None = None, observers: Sequence[Observer] = ()
) -> array[int]:
    """Run the first `steps` steps (None: all) of a trace; return the end of each step in ns, i.e. of its last
    operation. Observers are notified of every operation; lanes are named by their number in the trace.

    `links` gives the transfer times of messages; None: zero. SpecError if lanes deadlock. Expects a checked trace
    (check.py).
    """
    steps = trace.steps if steps is None else steps
    ends = array("q", [0] * steps)
    waking = {
        (lane.node, peer, tag): value
        for lane in trace.lanes
        for kind, peer, tag, value in zip(lane.kind, lane.peer, lane.tag, lane.value, strict=True)
        if kind == RECEIVE and value
    }

    def cost(node: int, action: Any) -> int:
        if type(action) is Work:
            return action.value  # type: ignore[no-any-return]
        return waking.get((node, action.peer, action.key), 0)

    def goes_on(node: int, step: int) -> bool:
        ends[step] = max(ends[step], loop.now_ns)
        return True

    nodes = [Sizes(lambda key: 0)] * len(trace.nodes)
    loop = Loop([], nodes, cost=cost, links=links, observers=observers, goes_on=goes_on)
    for number, lane in enumerate(trace.lanes):
        loop.run_on(lane.node, str(number), _program(lane, steps))
    try:
        loop.run()
    except StuckError as error:
        waits = "; ".join(_waits(trace, lane) for lane in error.lanes[:4])
        raise SpecError(f"{len(error.lanes)} lanes of the trace deadlock, each waiting for another: {waits}") from None
    for step in range(1, steps):
        ends[step] = max(ends[step], ends[step - 1])
    return ends


def _waits(trace: Trace, stuck: NodeLane) -> str:
    lane, doing = trace.lanes[stuck.number], stuck.doing
    asked: Any
    if type(doing) is Receive:
        kind, asked, what = RECEIVE, (doing.peer, doing.key), f"message {doing.key} of {trace.nodes[doing.peer]}"
        said = zip(lane.kind, zip(lane.peer, lane.tag, strict=True), strict=True)
    else:
        kind, asked, what = WAIT, (doing.event, doing.times), f"event {doing.event}"
        said = zip(lane.kind, zip(lane.tag, lane.value, strict=True), strict=True)
    at = list(said).index((kind, asked))
    return f"{trace.nodes[lane.node]} {lane.name} at operation {at} ({KINDS[kind]}) for the {what}"


def _program(lane: Lane, steps: int) -> Generator[Any, Any, Any]:
    kinds, tags, values, peers = lane.kind, lane.tag, lane.value, lane.peer
    key: Any
    for step in range(steps):
        for at in range(lane.starts[step], lane.starts[step + 1]):
            kind, key = kinds[at], tags[at]  # a tag identifies a message within a trace
            if kind == WORK:
                yield Work("", key, values[at])
            elif kind == SEND:
                yield Send(Message(key, range(values[at])), peers[at])
            elif kind == RECEIVE:
                yield Receive(key, peers[at])
            elif kind == SIGNAL:
                yield Signal(key)
            else:
                yield Await(key, values[at])
        yield EndStep(step)


def ideal_steps_ns(trace: Trace, links: Links | None, steps: int = 3) -> list[int]:
    """Return the duration of each of the first `steps` steps over these links; None: messages take no time.

    SpecError as from `replay`.
    """
    return [after - before for before, after in pairwise([0, *replay(trace, steps, links)])]


def ideal_step_ns(trace: Trace, links: Links | None, steps: int = 3) -> int:
    """Return the duration of the last of the first `steps` steps, see `ideal_steps_ns`."""
    return ideal_steps_ns(trace, links, steps)[-1]


class _OperationTimes:
    """Records when operations begin and end."""

    def __init__(self, lanes: int) -> None:
        self.lanes = tuple(PlayedLane() for _ in range(lanes))

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note one."""
        if type(action) is EndStep:
            return
        played, first_ns, last_ns = self.lanes[lane.number], 0, 0
        if type(action) is Receive:
            first_ns, last_ns = value.first_byte_ns, value.last_byte_ns
        elif type(action) is Send:
            first_ns = last_ns = begin_ns
        played.begin_ns.append(begin_ns)
        played.end_ns.append(end_ns)
        played.first_byte_ns.append(first_ns)
        played.last_byte_ns.append(last_ns)


class _Order:
    """Records the order in which operations end."""

    def __init__(self, lanes: int) -> None:
        self.done: list[tuple[int, int]] = []
        self._next = [0] * lanes

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note one."""
        if type(action) is not EndStep:
            self.done.append((lane.number, self._next[lane.number]))
            self._next[lane.number] += 1


def in_order(trace: Trace) -> Sequence[tuple[int, int]]:
    """Return all operations as (lane, number in it), in an order that satisfies every wait. SpecError as above."""
    order = _Order(len(trace.lanes))
    replay(trace, observers=[order])
    return order.done


def simulate(trace: Trace, steps: int | None = None, links: Links | None = None) -> tuple[PlayedLane, ...]:
    """Return when the operations of the first `steps` steps (None: all) begin and end over `links`, see `replay`.

    The first byte of a message counts as sent when the message is handed over. SpecError as from `replay`.
    """
    times = _OperationTimes(len(trace.lanes))
    replay(trace, steps, links, [times])
    return times.lanes


def step_ends(trace: Trace, lanes: tuple[PlayedLane, ...], steps: int) -> array[int]:
    """Return the end of each of the first `steps` steps in ns, i.e. of its last operation."""
    ends = array("q", [0] * (steps + 1))
    for lane, played in zip(trace.lanes, lanes, strict=True):
        for step in range(steps):
            last = lane.starts[step + 1]
            if last > lane.starts[step]:
                ends[step + 1] = max(ends[step + 1], played.end_ns[last - 1])
    for step in range(steps):
        ends[step + 1] = max(ends[step + 1], ends[step])
    return ends[1:]

"""When does each operation of a trace happen where messages take no time, or as long as a formula says?

Without a network that is the ideal that no network can beat; over links that are a formula (`ideal.py`) it is what
their rates and delays leave, without a transport. The operations are done in the order of time, which also tells lanes
that wait for each other in a circle.
"""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol

from testbed.errors import SpecError
from testbed.play.played import PlayedLane
from testbed.play.trace import KINDS, RECEIVE, SEND, SIGNAL, WORK, Lane, Trace
from testbed.waking import waking_ns


class Links(Protocol):
    """What carries messages, as a formula. Both methods are called in the order of time."""

    def sent(self, node: int, peer: int, size: int, now_ns: int) -> int:
        """Take a message of `size` bytes; return when its last byte reaches the peer, as far as that is known now."""
        ...

    def taken(self, node: int, peer: int, size: int, arrives_ns: int) -> int:
        """Return when a node has a message that it asks its peer for, which arrived or will arrive at `arrives_ns`."""
        ...


class NoLinks:
    """Messages take no time."""

    def sent(self, node: int, peer: int, size: int, now_ns: int) -> int:
        """Deliver it at once."""
        return now_ns

    def taken(self, node: int, peer: int, size: int, arrives_ns: int) -> int:
        """Change nothing."""
        return arrives_ns


def in_order(trace: Trace, steps: int | None = None, links: Links | None = None) -> Iterator[tuple[int, int, int, int]]:
    """Do the first `steps` steps (None: all); yield (lane, operation, begin ns, end ns) as each ends.

    A message that takes no time and an event that takes none come before what they are waited for by. `links`: how
    long messages take; None: no time. SpecError where lanes wait for each other for ever. The trace was checked
    (check.py).
    """
    links = links or NoLinks()
    lanes = trace.lanes
    ends = [lane.starts[trace.steps if steps is None else steps] for lane in lanes]
    next_up, began, waking = [0] * len(lanes), [0] * len(lanes), [0] * len(lanes)
    under_way: dict[tuple[int, int, int], tuple[int, int]] = {}  # its size, and when it arrives
    coming: set[int] = set()  # lanes that wait for a message of which it is known when they will have it
    counts: dict[int, int] = defaultdict(int)
    by_message: dict[tuple[int, int, int], int] = {}  # the lane that waits for it
    by_event: dict[int, list[int]] = defaultdict(list)
    ready = [(0, number) for number in range(len(lanes))]
    while ready:
        now, number = heapq.heappop(ready)
        lane, at, end = lanes[number], next_up[number], ends[number]
        kinds, tags, values, peers, node = lane.kind, lane.tag, lane.value, lane.peer, lane.node
        while at < end:
            kind, begin = kinds[at], began[number]
            if kind == WORK:
                later = begin + values[at] + waking[number]
                if later > now:
                    if ready and ready[0][0] < later:  # others come first
                        heapq.heappush(ready, (later, number))
                        break
                    now = later
            elif kind == SEND:
                message = (node, peers[at], tags[at])
                if message in by_message:
                    heapq.heappush(ready, (now, by_message.pop(message)))
                under_way[message] = values[at], links.sent(node, peers[at], values[at], now)
            elif kind == RECEIVE and number in coming:
                coming.remove(number)
            elif kind == RECEIVE:
                message = (peers[at], node, tags[at])
                if message not in under_way:
                    by_message[message] = number
                    break
                later = links.taken(node, peers[at], *under_way.pop(message))
                if later > now:
                    if ready and ready[0][0] < later:
                        coming.add(number)
                        heapq.heappush(ready, (later, number))
                        break
                    now = later
            elif kind == SIGNAL:
                counts[tags[at]] += 1
                for waiting in by_event.pop(tags[at], ()):
                    heapq.heappush(ready, (now, waiting))
            elif counts[tags[at]] < values[at]:
                by_event[tags[at]].append(number)
                break
            if kind == WORK:
                waking[number] = 0
            elif kind == RECEIVE and now > begin:
                waking[number] = waking_ns(values[at], now - begin)
            yield number, at, begin, now
            began[number] = now
            at += 1
        next_up[number] = at
    if stuck := [number for number, at in enumerate(next_up) if at < ends[number]]:
        waits = "; ".join(_waits(trace, lanes[number], next_up[number]) for number in stuck[:4])
        raise SpecError(f"{len(stuck)} lanes of the trace wait for each other for ever: {waits}")


def _waits(trace: Trace, lane: Lane, at: int) -> str:
    kind, tag = lane.kind[at], lane.tag[at]
    what = f"message {tag} of {trace.nodes[lane.peer[at]]}" if kind == RECEIVE else f"event {tag}"
    return f"{trace.nodes[lane.node]} {lane.name} at operation {at} ({KINDS[kind]}) for the {what}"


def play_unlinked(trace: Trace, steps: int | None = None, links: Links | None = None) -> tuple[PlayedLane, ...]:
    """Return when the operations of the first `steps` steps (None: all) begin and end over `links`, see `in_order`.

    Of a message only when it was sent is noted. SpecError as from `in_order`.
    """
    lanes = [PlayedLane() for _ in trace.lanes]
    left: dict[tuple[int, int, int], int] = {}
    for number, at, begin, end in in_order(trace, steps, links):
        lane, played = trace.lanes[number], lanes[number]
        played.begin_ns.append(begin)
        played.end_ns.append(end)
        moment = 0
        if lane.kind[at] == SEND:
            moment = left[lane.node, lane.peer[at], lane.tag[at]] = begin
        elif lane.kind[at] == RECEIVE:
            moment = left.pop((lane.peer[at], lane.node, lane.tag[at]))
        played.first_byte_ns.append(moment)
        played.last_byte_ns.append(moment)
    return tuple(lanes)


def step_ends(trace: Trace, lanes: tuple[PlayedLane, ...], steps: int) -> array[int]:
    """Return when each of the first `steps` steps ends, in ns: when its last operation does."""
    ends = array("q", [0] * (steps + 1))
    for lane, played in zip(trace.lanes, lanes, strict=True):
        for step in range(steps):
            last = lane.starts[step + 1]
            if last > lane.starts[step]:
                ends[step + 1] = max(ends[step + 1], played.end_ns[last - 1])
    for step in range(steps):
        ends[step + 1] = max(ends[step + 1], ends[step])
    return ends[1:]

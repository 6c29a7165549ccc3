"""Links as sources of events: when does the last byte of a message arrive over links that do what they are asked to?

A message is as many packets as TCP makes of its bytes, with their headers; what follows in one connection before the
last of them has left fills it up. Each direction of a link is a queue that sends packet after packet. In a line a
message crosses one queue; in a star its sender's uplink and then its receiver's downlink, where every packet is stored
and forwarded. Packets are not simulated one by one: a message is a stretch of time in each queue.

What this bounds. Messages of one sender to one receiver follow each other. Where those of several share a queue, nobody
knows how TCP divides it, so each message gets the earlier of two finish times: first come, first served, or ordered by
when each message would finish alone. Nothing is lost, late by chance, acknowledged or held
back by a window. With one flow in each queue it is exact. With several, all that a node gets is there no later than by
packets that are sent in the order in which they come, and so is each message, unless another that is ahead of its turn
at a shared uplink comes before it at the next queue (a test holds them to that); and messages of one size that are
handed over at once end when a queue's rate lets them.

It is no proof where jobs wait for one of several messages that share a queue, and TCP prefers that one to what both
orders give it: TCP may. No job that was played was faster. Where a rate falls, the kernel still sends at the old rate
what is queued (it times packets as they come), and so may be ahead.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from testbed.directions import LinkDirection
from testbed.jobs.loop import Clock, NoLinks
from testbed.metrics.wires import HEADER_BYTES, StatedLinks, Wire, Wires
from testbed.profiles import LinkProfile
from testbed.spec import Topology, link_count

_HAIR_NS = 1e-3
"""Floats may be this much below the nanosecond that they mean."""


class _Busy:
    """A stretch of time in which a queue has something to send, if its messages come whole with their first packets."""

    __slots__ = ("as_came_ns", "as_ended_ns", "begin_ns", "end_ns")

    def __init__(self, begin_ns: float) -> None:
        self.begin_ns = self.end_ns = begin_ns
        self.as_came_ns = self.as_ended_ns = begin_ns
        """When all that has come, or ended, so far could have been sent."""


class _Queue:
    """One direction of a link."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._busy = _Busy(-math.inf)

    def join(self, first_ns: float, bits: float) -> _Busy:
        """Let a message come with its first packet; return the stretch that it is sent in."""
        busy = self._busy
        if first_ns > busy.end_ns:
            busy = self._busy = _Busy(first_ns)
        elif first_ns < busy.begin_ns:  # the uplinks differ in length
            earlier_ns = busy.begin_ns - first_ns
            busy.begin_ns -= earlier_ns
            busy.as_came_ns -= earlier_ns
            busy.as_ended_ns -= earlier_ns
        busy.end_ns = self.wire.carried_at(busy.end_ns, bits)
        return busy

    def came(self, busy: _Busy, bits: float) -> float:
        """Return when a message has been sent after all that came before; messages come in order."""
        busy.as_came_ns = self.wire.carried_at(busy.as_came_ns, bits)
        return busy.as_came_ns

    def ended(self, busy: _Busy, bits: float) -> float:
        """Return when a message has been sent after all that ended before, were it alone; messages end in order."""
        busy.as_ended_ns = self.wire.carried_at(busy.as_ended_ns, bits)
        return busy.as_ended_ns


_Part = tuple[int, int]
"""Bytes, and for how many packets' headers they count."""


class _Message(NamedTuple):
    """A message under way."""

    size: int
    packets: int
    """That it takes beyond those of the messages that it follows."""
    first: _Part
    """What of it reaches a second queue first."""
    last: _Part
    now_ns: float
    """When it was handed over."""
    bits: int
    """On the first queue."""
    busy: _Busy
    """The first queue's."""
    in_turn_ns: float
    """When it has left the first queue, were messages sent in the order in which they were handed over."""
    deliver: Callable[[], None]


class _MessageFlow:
    """All messages of one sender to one receiver. They are sent one after the other."""

    def __init__(self, first: _Queue | None, second: _Queue | None, room: int) -> None:
        self.first, self.second = first, second
        self.room = room
        """Of a packet, for what is sent, in bytes."""
        self.bytes = 0
        """Sent without a pause."""
        self.sending: deque[_Message] = deque()
        self.left_ns = self.there_ns = self.served_ns = self.reached_ns = -math.inf
        """When the last message has left the first queue, reached the second, left it and arrived."""
        self.in_turn_ns = -math.inf
        """When the last message has left the first queue, were messages sent in the order in which they were handed
        over: what follows may fill its last packet up until then, wherever it stood in the queue."""

    def pack(self, size: int, now_ns: float) -> tuple[int, _Part, _Part]:
        """Hand a message over; return how many more packets it takes, and what of it reaches a second queue first and
        last.
        """
        before = self.bytes if self.sending or max(self.left_ns, self.in_turn_ns) > now_ns else 0
        after = self.bytes = before + size
        packets = -(-after // self.room) - -(-before // self.room)
        left = -before % self.room
        first = (min(size, left), 0) if left else (min(size, self.room), 1)
        return packets, first, (min(size, (after - 1) % self.room + 1), min(1, packets))


class _Second(NamedTuple):
    """A message on its way through the second queue."""

    flow: _MessageFlow
    message: _Message
    queue: _Queue
    busy: _Busy
    """The second queue's."""
    bits: int
    last_bits: int
    """Of its last packet."""
    first_ns: float
    there_ns: float
    """When its first packet, and its last, reach the queue."""


class Queues:
    """The links of a lab, for one run of `jobs.loop`."""

    def __init__(self, wires: Wires, *, begins_ns: float = 0) -> None:
        """`begins_ns`: when the run does, since the links were played."""
        self._wires, self._begins_ns = wires, begins_ns
        self._queues: dict[tuple[int, LinkDirection], _Queue | None] = {}
        self._flows: dict[tuple[int, int], _MessageFlow] = {}

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Let a message cross the links of its path."""
        flow = self._flows.get((source, target)) or self._flow(source, target)
        now_ns = clock.now_ns + self._begins_ns
        packets, first, last = flow.pack(size, now_ns)
        if flow.first is None:
            message = _Message(size, packets, first, last, now_ns, 0, _Busy(now_ns), now_ns, deliver)
            return self._reach(clock, flow, message, now_ns, now_ns, whole=True)
        bits = 8 * size + packets * flow.first.wire.header_bits
        busy = flow.first.join(now_ns, bits)
        in_turn_ns = flow.in_turn_ns = flow.first.came(busy, bits)
        flow.sending.append(_Message(size, packets, first, last, now_ns, bits, busy, in_turn_ns, deliver))
        return self._send(clock, flow) if len(flow.sending) == 1 else None

    def _send(self, clock: Clock, flow: _MessageFlow) -> None:
        """Begin to send a flow's next message."""
        assert flow.first is not None
        message = flow.sending[0]
        begin_ns = max(message.now_ns, flow.left_ns)
        alone_ns = flow.first.wire.carried_at(begin_ns, message.bits)
        self._at(clock, alone_ns, self._leave, clock, flow, begin_ns, alone_ns)

    def _leave(self, clock: Clock, flow: _MessageFlow, begin_ns: float, alone_ns: float) -> None:
        """Let a message leave the first queue, where it would have left it now had it been alone."""
        queue, message = flow.first, flow.sending.popleft()
        assert queue is not None
        wire = queue.wire
        left_ns = max(alone_ns, min(message.in_turn_ns, queue.ended(message.busy, message.bits)))
        flow.left_ns = left_ns
        if flow.sending:
            self._send(clock, flow)
        delay_ns = wire.still.delay_ns
        if wire.varies:  # order is kept even while the delay falls, inside a message too
            delay_ns = max(s.end_ns - left_ns + s.delay_ns for s in wire.stretches(begin_ns, left_ns))
        delay_ns = max(delay_ns, flow.there_ns - left_ns)
        delay_ns += wire.late_ns(message.packets, left_ns - message.now_ns)
        flow.there_ns = left_ns + delay_ns
        first_ns = wire.carried_at(begin_ns, 8 * message.first[0] + message.first[1] * wire.header_bits) + delay_ns
        self._reach(clock, flow, message, first_ns, flow.there_ns)

    def _reach(
        self,
        clock: Clock,
        flow: _MessageFlow,
        message: _Message,
        first_ns: float,
        there_ns: float,
        *,
        whole: bool = False,
    ) -> None:
        """Let a message reach the second queue, or its receiver, first packet and last."""
        queue = flow.second
        if queue is None:
            return self._at(clock, there_ns, message.deliver)
        bits = 8 * message.size + message.packets * queue.wire.header_bits
        last_bits = bits if whole else 8 * message.last[0] + message.last[1] * queue.wire.header_bits
        second = _Second(flow, message, queue, queue.join(first_ns, bits), bits, last_bits, first_ns, there_ns)
        return self._at(clock, there_ns, self._come, clock, second)

    def _come(self, clock: Clock, second: _Second) -> None:
        """A message's last packet is at the second queue."""
        flow, wire = second.flow, second.queue.wire
        in_turn_ns = second.queue.came(second.busy, second.bits)
        alone_ns = wire.carried_at(max(second.first_ns, flow.served_ns), second.bits)
        alone_ns = flow.served_ns = max(alone_ns, wire.carried_at(second.there_ns, second.last_bits))
        self._at(clock, alone_ns, self._serve, clock, second, in_turn_ns, alone_ns)

    def _serve(self, clock: Clock, second: _Second, in_turn_ns: float, alone_ns: float) -> None:
        """Let a message leave the second queue, where it would have left it now had it been alone."""
        flow, wire, message = second.flow, second.queue.wire, second.message
        served_ns = max(alone_ns, min(in_turn_ns, second.queue.ended(second.busy, second.bits)))
        due_ns = served_ns + wire.delay_at(served_ns) + wire.late_ns(message.packets, served_ns - second.there_ns)
        flow.reached_ns = max(due_ns, flow.reached_ns)
        self._at(clock, flow.reached_ns, message.deliver)

    def _at(self, clock: Clock, when_ns: float, call: Callable[..., None], *arguments: object) -> None:
        clock.at(max(clock.now_ns, math.floor(when_ns - self._begins_ns + _HAIR_NS)), call, *arguments)

    def _flow(self, source: int, target: int) -> _MessageFlow:
        wires = self._wires
        if wires.topology == "star":
            path: list[tuple[int, LinkDirection]] = [(source, "up"), (target, "down")]
        else:
            path = [(min(source, target), "up" if target > source else "down")]
        queues = [self._queue(*hop) for hop in path]
        room = min(wires.links[link].mtu for link, _ in path) - HEADER_BYTES
        flow = self._flows[source, target] = _MessageFlow(queues[0], queues[1] if len(queues) > 1 else None, room)
        return flow

    def _queue(self, link: int, way: LinkDirection) -> _Queue | None:
        if (link, way) not in self._queues:
            wire = self._wires.wire(link, way)
            self._queues[link, way] = None if wire is None else _Queue(wire)
        return self._queues[link, way]


class Pipes(Queues):
    """Links that are as they were stated."""

    def __init__(self, topology: Topology, profiles: Sequence[LinkProfile], nodes: int) -> None:
        """`profiles`: one for all links, or one per link."""
        alike = len(profiles) == 1
        super().__init__(Wires(StatedLinks(topology, list(profiles) * (link_count(topology, nodes) if alike else 1))))


class InboundWire(NoLinks):
    """The meter of ProtocolNanoGPT (train_gpt.py, SimPipelineStage.add_delay): all that a node receives shares one
    wire, whichever neighbour it comes from; a message occupies it for its bits and for the delay; messages follow each
    other in the order in which the node asks for them. It counts payload, not packets.
    """

    def __init__(self, rate_bps: int, delay_ns: int) -> None:
        self._rate_bps, self._delay_ns = rate_bps, delay_ns
        self._free_ns: dict[int, int] = defaultdict(int)

    def take(self, clock: Clock, target: int, size: int, came_ns: int, deliver: Callable[[], None]) -> None:
        """Let it cross the receiver's wire, from when it was sent on."""
        start_ns = max(self._free_ns[target], came_ns)
        self._free_ns[target] = start_ns - (-size * 8_000_000_000 // self._rate_bps) + self._delay_ns
        clock.at(max(clock.now_ns, self._free_ns[target]), deliver)


class AlonePipes(Pipes):
    """The same, but each message finds its links empty: what no message can be faster than, however TCP's flows share
    them.
    """

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Let a message cross the links of its path, as if there were no other."""
        self._queues.clear()
        self._flows.clear()
        super().carry(clock, source, target, size, deliver)

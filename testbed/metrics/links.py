"""Links as event sources: the arrival time of a message's last byte over links that match their profile exactly.

A message consists of the packets that TCP makes of its bytes, with headers; a following message on the same connection
first fills the last packet, if that has not left. Each direction of a link is a queue that sends packet after packet.
In a line a message crosses one queue; in a star its sender's uplink and then its receiver's downlink, and between them
the uplink and the downlink of their sites, store-and-forward. Packets are not simulated one by one: a message occupies
an interval of time in each queue. Background flows are not part of it: with them, it is a lower bound.

What this bounds. Messages from one sender to one receiver are sequential. Where several flows share a queue, TCP's
division of it is unknown, so each message gets the earlier of two finish times: first come, first served, or in the
order of their finish times alone. There is no loss, jitter, acknowledgement or window. With one flow per queue the
result is exact. With several, the total traffic to a node arrives no later than with packets sent in order of arrival,
and so does each message, unless another message that overtook it at a shared uplink precedes it at the next queue (a
test checks that); and equal messages sent at the same time finish when the queue's rate permits.

It is not a strict bound where a job waits for one of several messages in a shared queue and TCP favours that message
beyond both orders. No played job was faster. Where a rate falls, a message may be up to two packets of the lower
rate faster: the kernel charges a packet after it has left.
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
from testbed.spec import Sites, Topology, link_count

_HAIR_NS = 1e-3
"""Tolerance for floats slightly below the intended nanosecond."""


class _Busy:
    """A busy period of a queue, assuming that messages arrive whole with their first packets."""

    __slots__ = ("as_came_ns", "as_ended_ns", "begin_ns", "end_ns")

    def __init__(self, begin_ns: float) -> None:
        self.begin_ns = self.end_ns = begin_ns
        self.as_came_ns = self.as_ended_ns = begin_ns
        """Time at which all messages that have arrived, or ended, so far could have been sent."""


class _Queue:
    """One direction of a link."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._busy = _Busy(-math.inf)

    def join(self, first_ns: float, bits: float) -> _Busy:
        """Add a message on arrival of its first packet; returns its busy period."""
        busy = self._busy
        if first_ns > busy.end_ns:
            busy = self._busy = _Busy(first_ns)
        elif first_ns < busy.begin_ns:  # the uplinks have different delays
            earlier_ns = busy.begin_ns - first_ns
            busy.begin_ns -= earlier_ns
            busy.as_came_ns -= earlier_ns
            busy.as_ended_ns -= earlier_ns
        busy.end_ns = self.wire.carried_at(busy.end_ns, bits)
        return busy

    def came(self, busy: _Busy, bits: float) -> float:
        """Return the time at which a message has been sent after all earlier arrivals; messages arrive in order."""
        busy.as_came_ns = self.wire.carried_at(busy.as_came_ns, bits)
        return busy.as_came_ns

    def ended(self, busy: _Busy, bits: float) -> float:
        """Return the time at which a message has been sent after all that would have ended before it alone; messages
        end in order.
        """
        busy.as_ended_ns = self.wire.carried_at(busy.as_ended_ns, bits)
        return busy.as_ended_ns


_Part = tuple[int, int]
"""Bytes, and the number of packets whose headers they carry."""


class _Message(NamedTuple):
    """A message in transit."""

    size: int
    packets: int
    """Packets that it needs in addition to those of preceding messages."""
    first: _Part
    """The part that reaches the second queue, and those behind it, first."""
    last: _Part
    now_ns: float
    """When it was sent."""
    bits: int
    """Its bits on the first queue."""
    busy: _Busy
    """Busy period of the first queue."""
    in_turn_ns: float
    """When it leaves the first queue in FIFO order."""
    deliver: Callable[[], None]


class _MessageFlow:
    """All messages from one sender to one receiver, sent one after another."""

    def __init__(self, first: _Queue | None, later: Sequence[_Queue], room: int) -> None:
        self.first, self.later = first, later
        self.room = room
        """Payload capacity of a packet, in bytes."""
        self.bytes = 0
        """Bytes sent without a pause."""
        self.sending: deque[_Message] = deque()
        self.left_ns = self.there_ns = -math.inf
        """When the last message left the first queue and reached the second."""
        self.served_ns, self.reached_ns = ([-math.inf] * len(later) for _ in range(2))
        """When the last message left each later queue, and reached what follows it."""
        self.in_turn_ns = -math.inf
        """When the last message leaves the first queue in FIFO order; until then a following message may fill its last
        packet, wherever it is in the queue."""

    def pack(self, size: int, now_ns: float) -> tuple[int, _Part, _Part]:
        """Send a message; returns its additional packets, and the parts that reach the second queue first and last."""
        before = self.bytes if self.sending or max(self.left_ns, self.in_turn_ns) > now_ns else 0
        after = self.bytes = before + size
        packets = -(-after // self.room) - -(-before // self.room)
        left = -before % self.room
        first = (min(size, left), 0) if left else (min(size, self.room), 1)
        return packets, first, (min(size, (after - 1) % self.room + 1), min(1, packets))


class _Later(NamedTuple):
    """A message in a later queue."""

    flow: _MessageFlow
    message: _Message
    place: int
    """Of the queue among the flow's later ones."""
    queue: _Queue
    busy: _Busy
    """Busy period of the queue."""
    bits: int
    last_bits: int
    """Bits of its last packet."""
    first_ns: float
    there_ns: float
    """When its first and its last packet reach the queue."""


class Queues:
    """The links of a lab, for one run of `jobs.loop`."""

    def __init__(self, wires: Wires, *, begins_ns: float = 0) -> None:
        """`begins_ns`: start of the run, counted from when the links were played."""
        self._wires, self._begins_ns = wires, begins_ns
        self._queues: dict[tuple[int, LinkDirection], _Queue | None] = {}
        self._flows: dict[tuple[int, int], _MessageFlow] = {}

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Send a message over the links of its path."""
        flow = self._flows.get((source, target)) or self._flow(source, target)
        now_ns = clock.now_ns + self._begins_ns
        packets, first, last = flow.pack(size, now_ns)
        if flow.first is None:
            message = _Message(size, packets, first, last, now_ns, 0, _Busy(now_ns), now_ns, deliver)
            return self._reach(clock, flow, message, 0, now_ns, now_ns, whole=True)
        bits = 8 * size + packets * flow.first.wire.header_bits
        busy = flow.first.join(now_ns, bits)
        in_turn_ns = flow.in_turn_ns = flow.first.came(busy, bits)
        flow.sending.append(_Message(size, packets, first, last, now_ns, bits, busy, in_turn_ns, deliver))
        return self._send(clock, flow) if len(flow.sending) == 1 else None

    def _send(self, clock: Clock, flow: _MessageFlow) -> None:
        """Start to send a flow's next message."""
        assert flow.first is not None
        message = flow.sending[0]
        begin_ns = max(message.now_ns, flow.left_ns)
        alone_ns = flow.first.wire.carried_at(begin_ns, message.bits)
        self._at(clock, alone_ns, self._leave, clock, flow, begin_ns, alone_ns)

    def _leave(self, clock: Clock, flow: _MessageFlow, begin_ns: float, alone_ns: float) -> None:
        """Send a message from the first queue, at the time at which it would have left alone."""
        queue, message = flow.first, flow.sending.popleft()
        assert queue is not None
        wire = queue.wire
        left_ns = max(alone_ns, min(message.in_turn_ns, queue.ended(message.busy, message.bits)))
        flow.left_ns = left_ns
        if flow.sending:
            self._send(clock, flow)
        delay_ns = wire.still.delay_ns
        if wire.varies:  # keeps order while the delay falls, even within a message
            delay_ns = max(s.end_ns - left_ns + s.delay_ns for s in wire.stretches(begin_ns, left_ns))
        delay_ns = max(delay_ns, flow.there_ns - left_ns)
        delay_ns += wire.late_ns(message.packets, left_ns - message.now_ns)
        flow.there_ns = left_ns + delay_ns
        first_ns = wire.carried_at(begin_ns, 8 * message.first[0] + message.first[1] * wire.header_bits) + delay_ns
        self._reach(clock, flow, message, 0, first_ns, flow.there_ns)

    def _reach(
        self,
        clock: Clock,
        flow: _MessageFlow,
        message: _Message,
        place: int,
        first_ns: float,
        there_ns: float,
        *,
        whole: bool = False,
    ) -> None:
        """Deliver a message's first and last packet to a later queue, or to its receiver behind the last one."""
        if place == len(flow.later):
            return self._at(clock, there_ns, message.deliver)
        queue = flow.later[place]
        bits = 8 * message.size + message.packets * queue.wire.header_bits
        last_bits = bits if whole else 8 * message.last[0] + message.last[1] * queue.wire.header_bits
        later = _Later(flow, message, place, queue, queue.join(first_ns, bits), bits, last_bits, first_ns, there_ns)
        return self._at(clock, there_ns, self._come, clock, later)

    def _come(self, clock: Clock, later: _Later) -> None:
        """Handle the arrival of a message's last packet at a later queue."""
        flow, wire = later.flow, later.queue.wire
        in_turn_ns = later.queue.came(later.busy, later.bits)
        begin_ns = max(later.first_ns, flow.served_ns[later.place])
        alone_ns = max(wire.carried_at(begin_ns, later.bits), wire.carried_at(later.there_ns, later.last_bits))
        flow.served_ns[later.place] = alone_ns
        self._at(clock, alone_ns, self._serve, clock, later, in_turn_ns, begin_ns, alone_ns)

    def _serve(self, clock: Clock, later: _Later, in_turn_ns: float, begin_ns: float, alone_ns: float) -> None:
        """Send a message from a later queue, at the time at which it would have left alone."""
        flow, wire, message, place = later.flow, later.queue.wire, later.message, later.place
        served_ns = max(alone_ns, min(in_turn_ns, later.queue.ended(later.busy, later.bits)))
        due_ns = served_ns + wire.delay_at(served_ns) + wire.late_ns(message.packets, served_ns - later.there_ns)
        flow.reached_ns[place] = due_ns = max(due_ns, flow.reached_ns[place])
        first_ns = wire.carried_at(begin_ns, 8 * message.first[0] + message.first[1] * wire.header_bits)
        self._reach(clock, flow, message, place + 1, min(due_ns, first_ns + wire.delay_at(first_ns)), due_ns)

    def _at(self, clock: Clock, when_ns: float, call: Callable[..., None], *arguments: object) -> None:
        clock.at(max(clock.now_ns, math.floor(when_ns - self._begins_ns + _HAIR_NS)), call, *arguments)

    def _flow(self, source: int, target: int) -> _MessageFlow:
        path = self._wires.path(source, target)
        room = min(self._wires.links[link].mtu for link, _ in path) - HEADER_BYTES
        first, *later = [self._queue(*hop) for hop in path]
        while first is None and len(later) > 1:  # the sender's site is its first queue
            first, *later = later
        shaped = [queue for queue in later if queue is not None]
        flow = self._flows[source, target] = _MessageFlow(first, shaped, room)
        return flow

    def _queue(self, link: int, way: LinkDirection) -> _Queue | None:
        if (link, way) not in self._queues:
            wire = self._wires.wire(link, way)
            self._queues[link, way] = None if wire is None else _Queue(wire)
        return self._queues[link, way]


class Pipes(Queues):
    """Links with stated parameters."""

    def __init__(
        self,
        topology: Topology,
        profiles: Sequence[LinkProfile],
        nodes: int,
        sites: Sites = None,
        *,
        begins_ns: float = 0,
    ) -> None:
        """`profiles`: one for all links, or one per link, without those of the sites; `begins_ns`: as in `Queues`."""
        links = list(profiles) * (link_count(topology, nodes) if len(profiles) == 1 else 1)
        links += [site.profile for site in sites or ()]
        super().__init__(Wires(StatedLinks(topology, links, sites), played_at_ns=0), begins_ns=begins_ns)


class InboundWire(NoLinks):
    """The meter of ProtocolNanoGPT (train_gpt.py, SimPipelineStage.add_delay): all messages to a node share one wire,
    whichever neighbour sends them; a message occupies it for its bits and for the delay; messages are sequential, in
    the order in which the node asks for them. It counts payload, not packets.
    """

    def __init__(self, rate_bps: int, delay_ns: int) -> None:
        self._rate_bps, self._delay_ns = rate_bps, delay_ns
        self._free_ns: dict[int, int] = defaultdict(int)

    def take(self, clock: Clock, target: int, size: int, came_ns: int, deliver: Callable[[], None]) -> None:
        """Send the message over the receiver's wire, from its time of sending on."""
        start_ns = max(self._free_ns[target], came_ns)
        self._free_ns[target] = start_ns - (-size * 8_000_000_000 // self._rate_bps) + self._delay_ns
        clock.at(max(clock.now_ns, self._free_ns[target]), deliver)


class AlonePipes(Pipes):
    """The same, but each message finds its links empty: a lower bound, however TCP's flows share them."""

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Send a message over the links of its path, as if it were the only one."""
        self._queues.clear()
        self._flows.clear()
        super().carry(clock, source, target, size, deliver)

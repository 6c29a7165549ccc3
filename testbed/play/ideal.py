"""How long does a step take where links do exactly what they are asked to, without a transport? Links as formulas.

A message is as many bytes as its packets have with their headers. What is left out is what a real transport adds:
windows that open, acknowledgements against the other direction, packets that are sent again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from testbed.directions import LinkDirection
from testbed.metrics.wires import Wires, wire_bytes
from testbed.play.trace import Trace
from testbed.play.unlinked import Links, play_unlinked, step_ends
from testbed.profiles import LinkProfile
from testbed.spec import Cell, Topology

Duplex = Literal["full", "inbound"]


class Pipes:
    """Each direction of each link is a pipe: `start = max(now, free); free = start + bits / rate; due = free + delay`.

    In a line a message crosses the link between two neighbours. In a star it crosses its sender's link and its
    receiver's, which begins to send on when it has the first packet; messages of two senders for one receiver follow
    each other in the order in which they were handed over.
    """

    def __init__(self, topology: Topology, profiles: Sequence[LinkProfile], nodes: int) -> None:
        """`profiles`: one for all links, or one per link."""
        count = nodes if topology == "star" else nodes - 1
        self._topology = topology
        self._profiles = list(profiles) * (count if len(profiles) == 1 else 1)
        self._free: dict[tuple[int, LinkDirection], int] = defaultdict(int)

    def sent(self, node: int, peer: int, size: int, now_ns: int) -> int:
        """Let a message cross the links of its path."""
        if self._topology == "line":
            return self._cross(min(node, peer), "up" if peer > node else "down", size, now_ns, now_ns)[1]
        return self._cross(peer, "down", size, *self._cross(node, "up", size, now_ns, now_ns))[1]

    def taken(self, node: int, peer: int, size: int, arrives_ns: int) -> int:
        """Change nothing: it has arrived when it has arrived."""
        return arrives_ns

    def _cross(self, link: int, way: LinkDirection, size: int, first_ns: int, last_ns: int) -> tuple[int, int]:
        """Return when a message's first packet and its last byte leave a link that they reach at these times."""
        profile = self._profiles[link]
        if (pipe := profile.pipe(way)) is None:
            return first_ns, last_ns
        total = wire_bytes(size, profile)
        packet_ns = _ns(min(total, profile.mtu + profile.overhead_bytes), pipe.rate_bps)
        start = max(first_ns, self._free[link, way])
        free = self._free[link, way] = max(
            start + _ns(total, pipe.rate_bps), last_ns + packet_ns * (last_ns > first_ns)
        )
        return start + packet_ns + pipe.delay_ns, free + pipe.delay_ns


class PipesFound(Pipes):
    """The same over a cell's wires, which may vary with time, and deviate from what was asked for."""

    def __init__(self, cell: Cell, wires: Wires, *, begins_ns: int = 0) -> None:
        """`begins_ns`: when the trace does, since the links were played."""
        super().__init__(cell.topology, cell.links, cell.nodes)
        self._wires, self._begins_ns = wires, begins_ns
        self._reached: dict[tuple[int, LinkDirection], float] = defaultdict(float)

    def _cross(self, link: int, way: LinkDirection, size: int, first_ns: int, last_ns: int) -> tuple[int, int]:
        if (wire := self._wires.wire(link, way)) is None:
            return first_ns, last_ns
        bits, origin = wire.bits(size), self._begins_ns
        start = max(first_ns, self._free[link, way])
        packet_ns = min(bits, wire.packet_bits) * 1e9 / wire.rate_at(origin + start)
        left = max(wire.carried_at(origin + start, bits) - origin, last_ns + packet_ns * (last_ns > first_ns))
        free = self._free[link, way] = math.ceil(left)
        due = free + wire.delay_at(origin + free) + wire.late_ns(size, free - last_ns)
        # Order is kept even while the delay falls.
        reached = self._reached[link, way] = max(due, self._reached[link, way])
        return math.ceil(start + packet_ns + wire.delay_at(origin + start)), math.ceil(reached)


class InboundWire:
    """The meter of ProtocolNanoGPT (train_gpt.py, SimPipelineStage.add_delay): all that a node receives shares one
    wire, whichever neighbour it comes from; a message occupies it for its bits and for the delay; messages follow each
    other in the order in which the node asks for them. It counts payload, not packets.
    """

    def __init__(self, rate_bps: int, delay_ns: int) -> None:
        self._rate_bps, self._delay_ns = rate_bps, delay_ns
        self._free: dict[int, int] = defaultdict(int)

    def sent(self, node: int, peer: int, size: int, now_ns: int) -> int:
        """Note when it was sent."""
        return now_ns

    def taken(self, node: int, peer: int, size: int, arrives_ns: int) -> int:
        """Let it cross the receiver's wire."""
        start = max(self._free[node], arrives_ns)
        self._free[node] = start + _ns(size, self._rate_bps) + self._delay_ns
        return self._free[node]


class AlonePipes(Pipes):
    """Pipes, but each message finds its links empty: what no message can be faster than, however TCP's flows share
    them.
    """

    def sent(self, node: int, peer: int, size: int, now_ns: int) -> int:
        """Let a message cross the links of its path, as if there were no other."""
        self._free.clear()
        return super().sent(node, peer, size, now_ns)


def ideal_steps_ns(trace: Trace, links: Links | None, steps: int = 3) -> list[int]:
    """Return how long each of the first `steps` steps takes over these links; None: where messages take no time.

    SpecError as from `unlinked.in_order`.
    """
    ends = step_ends(trace, play_unlinked(trace, steps, links), steps)
    return [after - before for before, after in pairwise([0, *ends])]


def ideal_step_ns(trace: Trace, links: Links | None, steps: int = 3) -> int:
    """Return how long the last of the first `steps` steps takes, see `ideal_steps_ns`."""
    return ideal_steps_ns(trace, links, steps)[-1]


def _ns(count: int, rate_bps: int) -> int:
    return -(-count * 8_000_000_000 // rate_bps)

"""Packets that wait until they are due, in lanes: one a direction, in order. When to wake for them.

To wake costs tens of microseconds in a guest of a hypervisor, as much as several packets. In the middle of a burst a packet may
therefore leave up to HOLD_NS after it was due, together with those behind it. A packet that is alone, and the first and the
last of a burst, never wait: round trips, the time that a burst takes and the time at which a message is complete are as asked.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from testbed.net.relay.pipe import NEVER

HOLD_NS = 750_000
"""How long a packet with others close behind it may be held. The certificate's gate for lateness is 1 ms."""

Waiting = tuple[int, int, int, bytes]
"""When it is due, a number that orders what is due at once, the descriptor to write to, the packet."""


class Lanes:
    """The lanes of a relay, by number."""

    def __init__(self, count: int) -> None:
        self.queues: list[deque[Waiting]] = [deque() for _ in range(count)]
        self.first_ns = [NEVER] * count
        """When each lane's first packet is due; NEVER where there is none."""
        self.wake_ns = [NEVER] * count
        """When to wake for each lane."""
        self.held_ns = [-1] * count
        """The same where packets are being held until then, so that it does not matter if the wake is a little late; else -1."""
        self.left_ns = [-NEVER] * count
        """When the packet was due that left each lane last; the loop notes it."""

    def push(self, lane: int, packet: Waiting) -> None:
        """Let a packet wait."""
        queue, due = self.queues[lane], packet[0]
        if queue and due < queue[-1][0]:
            insort(queue, packet)
        else:
            queue.append(packet)
        if due <= self.first_ns[lane] + 2 * HOLD_NS:  # further back it changes nothing for the first ones
            self.plan(lane)

    def plan(self, lane: int) -> None:
        """Decide anew when to wake for a lane: after packets left it."""
        queue = self.queues[lane]
        self.held_ns[lane] = -1
        if not queue:
            self.first_ns[lane] = self.wake_ns[lane] = NEVER
            return
        self.first_ns[lane] = last = queue[0][0]
        # The first of a burst is on time.
        limit = last + HOLD_NS if last - self.left_ns[lane] <= HOLD_NS else last
        for due, _, _, _ in queue:
            if due > limit:
                if last < limit and due - last <= HOLD_NS:  # the burst goes on
                    self.wake_ns[lane] = self.held_ns[lane] = limit
                    return
                break
            last = due
        self.wake_ns[lane] = last  # the end of the burst

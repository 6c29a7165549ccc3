"""Packets that wait until they are due, in one ordered queue per direction, and when to wake for them.

Waking costs tens of microseconds in a guest of a hypervisor, as much as several packets. In the middle of a burst a
packet may therefore leave up to HOLD_NS after it was due, together with those behind it. A packet that is alone, and
the first and the last of a burst, never wait: round trips, the time that a burst takes and the time at which a message
is complete are as asked.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from testbed.net.relay.pipe import NEVER

HOLD_NS = 750_000
"""How long a packet with others close behind it may be held. The certificate's gate for lateness is 1 ms."""

Waiting = tuple[int, int, int, bytes]
"""When it is due, a number that orders what is due at once, the descriptor to write to, the packet."""


class RelayQueues:
    """The queues of a relay, by number."""

    def __init__(self, count: int) -> None:
        self.packets: list[deque[Waiting]] = [deque() for _ in range(count)]
        self.first_ns = [NEVER] * count
        """When each queue's first packet is due; NEVER where there is none."""
        self.wake_ns = [NEVER] * count
        """When to wake for each queue."""
        self.held_ns = [-1] * count
        """When to wake, where packets are held until then and a late wake does not matter; else -1."""
        self.left_ns = [-NEVER] * count
        """When the packet was due that left each queue last; the loop notes it."""

    def push(self, number: int, packet: Waiting) -> None:
        """Let a packet wait."""
        queue, due = self.packets[number], packet[0]
        if queue and due < queue[-1][0]:
            insort(queue, packet)
        else:
            queue.append(packet)
        if due <= self.first_ns[number] + 2 * HOLD_NS:  # further back it changes nothing for the first ones
            self.plan(number)

    def plan(self, number: int) -> None:
        """Decide anew when to wake for a queue, after packets have left it."""
        queue = self.packets[number]
        self.held_ns[number] = -1
        if not queue:
            self.first_ns[number] = self.wake_ns[number] = NEVER
            return
        self.first_ns[number] = last = queue[0][0]
        # The first of a burst is on time.
        limit = last + HOLD_NS if last - self.left_ns[number] <= HOLD_NS else last
        for due, _, _, _ in queue:
            if due > limit:
                if last < limit and due - last <= HOLD_NS:  # the burst goes on
                    self.wake_ns[number] = self.held_ns[number] = limit
                    return
                break
            last = due
        self.wake_ns[number] = last  # the end of the burst

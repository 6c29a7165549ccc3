"""Packets waiting until they are due, in one ordered queue per direction, and the wake-up times for them.

A wake-up costs tens of microseconds in a virtual machine, as much as several packets. Within a burst a packet may
therefore leave up to HOLD_NS late, together with those behind it. A lone packet, and the first and the last of a burst,
are never held, so round trips, durations of bursts and completion times of messages are exact.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from testbed.net.relay.pipe import NEVER

HOLD_NS = 750_000
"""Maximum holding time of a packet with others close behind it. Certificates tolerate a lateness of 1 ms."""

Waiting = tuple[int, int, int, bytes]
"""Due time, a tie-breaking number, the descriptor to write to, the packet."""


class RelayQueues:
    """The queues of a relay, by number."""

    def __init__(self, count: int) -> None:
        self.packets: list[deque[Waiting]] = [deque() for _ in range(count)]
        self.first_ns = [NEVER] * count
        """Due time of each queue's first packet; NEVER if empty."""
        self.wake_ns = [NEVER] * count
        """Wake-up time of each queue."""
        self.held_ns = [-1] * count
        """Wake-up time if packets are held until then and lateness does not matter; otherwise -1."""
        self.left_ns = [-NEVER] * count
        """Due time of the last packet that left each queue, set by the loop."""

    def push(self, number: int, packet: Waiting) -> None:
        """Queue a packet."""
        queue, due = self.packets[number], packet[0]
        if queue and due < queue[-1][0]:
            insort(queue, packet)
        else:
            queue.append(packet)
        if due <= self.first_ns[number] + 2 * HOLD_NS:  # further back it does not affect the first ones
            self.plan(number)

    def plan(self, number: int) -> None:
        """Recompute the wake-up time of a queue, after packets have left it."""
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
                if last < limit and due - last <= HOLD_NS:  # the burst continues
                    self.wake_ns[number] = self.held_ns[number] = limit
                    return
                break
            last = due
        self.wake_ns[number] = last  # the end of the burst

"""When is a packet through the wire? At a rate, or at a trace's delivery opportunities. Whole nanoseconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

OPPORTUNITY_BYTES = 1500
"""What one opportunity carries at most, whatever the MTU: mahimahi's unit."""
_MS = 1_000_000


def serialisation_ns(counted_bytes: int, rate_bps: int) -> int:
    """Return how long the bytes take, rounded up: the wire may be a nanosecond slow, never fast."""
    return (counted_bytes * 8_000_000_000 + rate_bps - 1) // rate_bps


class Opportunities(NamedTuple):
    """A trace: its opportunities in ms, none smaller than the one before it."""

    times_ms: Sequence[int]
    loop: bool
    offset_ms: int
    stretch: int = 1
    """How many milliseconds pass for each one of the trace."""


class RunningTrace:
    """A trace from the moment at which it began.

    An opportunity that nobody waits for is lost. Several packets may share one, and a packet that does not fit into one
    is through when the last that it needs has come.
    """

    def __init__(self, trace: Opportunities, start_ns: int) -> None:
        times, self._length_ms = trace.times_ms, trace.times_ms[-1]
        self._ms_ns = trace.stretch * _MS
        self._times, self._start_ns = times, start_ns - trace.offset_ms * self._ms_ns
        self._round, self._place, self._left = 0, bisect_left(times, trace.offset_ms), OPPORTUNITY_BYTES
        self.end_ns = None if trace.loop else self._start_ns + self._length_ms * self._ms_ns
        """From here on the trace carries nothing more; None: never."""

    def _at(self) -> int:
        return self._start_ns + (self._round * self._length_ms + self._times[self._place]) * self._ms_ns

    def _next(self) -> bool:
        self._place += 1
        self._left = OPPORTUNITY_BYTES
        if self._place < len(self._times):
            return True
        if self.end_ns is not None:
            self._place -= 1
            self._left = 0
            return False
        self._round, self._place = self._round + 1, 0
        return True

    def _skip_to(self, now_ns: int) -> None:
        """Jump to the first opportunity that is not over: a link may have been idle for long."""
        elapsed_ms = -((self._start_ns - now_ns) // self._ms_ns)  # rounded up
        if self.end_ns is None and elapsed_ms > 0:
            # A round's last moment, not the first of the next one: the sequence begins with the earlier of the two.
            self._round, elapsed_ms = (elapsed_ms - 1) // self._length_ms, (elapsed_ms - 1) % self._length_ms + 1
        self._place, self._left = bisect_left(self._times, elapsed_ms), OPPORTUNITY_BYTES
        if self._place == len(self._times):
            self._place -= 1
            self._left = 0

    def through(self, arrival_ns: int, counted_bytes: int) -> int | None:
        """When bytes that arrive then are through, behind all that came before; None: not before the trace's end."""
        if self._at() < arrival_ns:
            self._skip_to(arrival_ns)
        needed = counted_bytes
        while needed > self._left:
            needed -= self._left
            if not self._next():
                return None
        self._left -= needed
        return self._at()

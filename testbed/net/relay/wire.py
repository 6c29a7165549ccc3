"""Transmission times of packets on the wire, at a rate or at a trace's delivery opportunities. Whole nanoseconds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

OPPORTUNITY_BYTES = 1500
"""Capacity of one opportunity, regardless of the MTU: mahimahi's unit."""
_MS = 1_000_000


def serialisation_ns(counted_bytes: int, rate_bps: int) -> int:
    """Return the transmission time, rounded up: the wire may be a nanosecond slow, never fast."""
    return (counted_bytes * 8_000_000_000 + rate_bps - 1) // rate_bps


class Opportunities(NamedTuple):
    """A trace: its opportunities in ms, in non-decreasing order."""

    times_ms: Sequence[int]
    loop: bool
    offset_ms: int
    stretch: int = 1
    """Milliseconds that pass per millisecond of the trace."""


class RunningTrace:
    """A trace that has started.

    An opportunity without a waiting packet is lost. Several packets may share one, and a packet larger than one departs
    with the last opportunity that it needs.
    """

    def __init__(self, trace: Opportunities, start_ns: int) -> None:
        times, self._length_ms = trace.times_ms, trace.times_ms[-1]
        self._ms_ns = trace.stretch * _MS
        self._times, self._start_ns = times, start_ns - trace.offset_ms * self._ms_ns
        self._round, self._place, self._left = 0, bisect_left(times, trace.offset_ms), OPPORTUNITY_BYTES
        self.end_ns = None if trace.loop else self._start_ns + self._length_ms * self._ms_ns
        """End of the trace; None: never."""

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
        """Skip to the first opportunity that is not over, because the link may have been idle."""
        elapsed_ms = -((self._start_ns - now_ns) // self._ms_ns)  # rounded up
        if self.end_ns is None and elapsed_ms > 0:
            # Use the last moment of a repetition rather than the first of the next, because the sequence starts with
            # the earlier.
            self._round, elapsed_ms = (elapsed_ms - 1) // self._length_ms, (elapsed_ms - 1) % self._length_ms + 1
        self._place, self._left = bisect_left(self._times, elapsed_ms), OPPORTUNITY_BYTES
        if self._place == len(self._times):
            self._place -= 1
            self._left = 0

    def through(self, arrival_ns: int, counted_bytes: int) -> int | None:
        """Return when bytes that arrive at `arrival_ns` have left the wire, after all earlier ones; None if the trace
        ends first.
        """
        if self._at() < arrival_ns:
            self._skip_to(arrival_ns)
        needed = counted_bytes
        while needed > self._left:
            needed -= self._left
            if not self._next():
                return None
        self._left -= needed
        return self._at()

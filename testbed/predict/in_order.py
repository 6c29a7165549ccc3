"""A star of equal links whose packets leave every queue in the order in which they came.

A sender's uplink carries its messages whole, one after another. Where messages of several senders meet in a downlink,
their packets mix, and each message ends once all that came before its last packet has left: of two that meet, both end
as late as the second. `metrics.links`, a bound, lets the first of them end early. Without loss, window and jitter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from testbed.jobs.loop import Clock
from testbed.metrics.wires import wire_bytes
from testbed.profiles import LinkProfile, Pipe


class _Downlink:
    """The queue in front of a node."""

    def __init__(self) -> None:
        self.bits = self.at_ns = self.coming = 0.0
        """Its content at a time, and the bits per nanosecond that come in."""

    def change(self, now_ns: int, more: float, leaving: float) -> float:
        """Change what comes in by `more`; return the content now. `leaving`: bits per nanosecond."""
        self.bits = max(0.0, self.bits + (self.coming - leaving) * (now_ns - self.at_ns))
        self.at_ns, self.coming = now_ns, max(0.0, self.coming + more)
        return self.bits


class InOrderStar:
    """The links, for one run of `jobs.loop`."""

    def __init__(self, profile: LinkProfile, up: Pipe, down: Pipe, *, delayed: bool = True) -> None:
        """`delayed`: whether messages take the links' delay besides their transmission."""
        self._profile, self._up, self._down = profile, up.rate_bps / 1e9, down.rate_bps / 1e9
        self._there_ns, self._back_ns = (pipe.delay_ns * delayed for pipe in (up, down))
        self._packet_ns = 8 * (profile.mtu + profile.overhead_bytes) / self._down
        self._free_ns: dict[int, float] = defaultdict(float)
        self._downlinks: dict[int, _Downlink] = defaultdict(_Downlink)

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Send a message over its sender's uplink and its receiver's downlink."""
        begin_ns = max(clock.now_ns, self._free_ns[source])
        end_ns = self._free_ns[source] = begin_ns + 8 * wire_bytes(size, self._profile) / self._up
        clock.at(math.ceil(begin_ns + self._there_ns), self._begin, clock, target)
        clock.at(math.ceil(end_ns + self._there_ns), self._end, clock, target, deliver)

    def _begin(self, clock: Clock, target: int) -> None:
        self._downlinks[target].change(clock.now_ns, self._up, self._down)

    def _end(self, clock: Clock, target: int, deliver: Callable[[], None]) -> None:
        waiting = self._downlinks[target].change(clock.now_ns, -self._up, self._down)
        clock.at(math.ceil(clock.now_ns + waiting / self._down + self._packet_ns + self._back_ns), deliver)

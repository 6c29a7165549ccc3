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
from testbed.profiles import LinkProfile


class InOrderStar:
    """The links, for one run of `jobs.loop`."""

    def __init__(self, profile: LinkProfile, *, delayed: bool = True) -> None:
        """`profile`: shaped both ways. `delayed`: whether messages take its delay besides their transmission."""
        up, down = profile.pipes
        self._profile, self._up, self._down = profile, up.rate_bps / 1e9, down.rate_bps / 1e9
        self._there_ns, back_ns = (pipe.delay_ns * delayed for pipe in (up, down))
        self._last_ns = 8 * (profile.mtu + profile.overhead_bytes) / self._down + back_ns
        self._free_ns = defaultdict[int, float](float)
        self._downlinks = defaultdict[int, tuple[float, float, int]](lambda: (0.0, 0.0, 0))
        """Bits that wait in front of a node, and bits per nanosecond that come, since a time."""

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Send a message over its sender's uplink and its receiver's downlink."""
        begin_ns = max(clock.now_ns, self._free_ns[source])
        end_ns = self._free_ns[source] = begin_ns + 8 * wire_bytes(size, self._profile) / self._up
        clock.at(math.ceil(begin_ns + self._there_ns), self._change, clock, target, self._up)
        clock.at(math.ceil(end_ns + self._there_ns), self._end, clock, target, deliver)

    def _change(self, clock: Clock, target: int, more: float) -> None:
        """Change what comes to a node by `more`."""
        waiting, coming, since_ns = self._downlinks[target]
        waiting += (coming - self._down) * (clock.now_ns - since_ns)
        self._downlinks[target] = max(0.0, waiting), coming + more, clock.now_ns

    def _end(self, clock: Clock, target: int, deliver: Callable[[], None]) -> None:
        self._change(clock, target, -self._up)
        clock.at(math.ceil(clock.now_ns + self._downlinks[target][0] / self._down + self._last_ns), deliver)

"""Estimates of a link: an oracle reads its profile, a passive estimator observes its messages.

Small messages say little about a link's rate, because they end before TCP reaches it; and a policy that compresses more
on apparently slower links would rely on ever smaller messages. Therefore only large messages count.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from testbed.directions import LinkDirection
from testbed.errors import SpecError
from testbed.profiles import LinkProfile
from testbed.profiles.timeline import timeline

LEAST_BYTES = 64 * 1024
LEAST_PRODUCTS = 4
"""Minimum size of a message in bandwidth-delay products; a shorter one measures slow start."""
_NEW = 0.3
"""Weight of the newest rate; earlier weights fall by a factor of 0.7 with each message."""
_WINDOW = 20
"""Number of round trips whose minimum counts, because longer ones include queueing."""


class LinkEstimate(NamedTuple):
    """One direction of a link."""

    rate_bps: float
    """Rate of messages: the link's rate minus headers and acknowledgements."""
    delay_ns: int
    """One-way delay."""

    @property
    def product_bytes(self) -> float:
        """The bandwidth-delay product over a round trip."""
        return self.rate_bps / 8 * 2 * self.delay_ns / 1e9


def oracle(profile: LinkProfile, way: LinkDirection, elapsed_ns: int = 0) -> LinkEstimate:
    """Return a link's estimate for messages at a time after it was played. SpecError for an unshaped link."""
    if (pipe := profile.pipe(way)) is None:
        raise SpecError(f"link {profile.name} has no rate {way}, which this policy needs; set one")
    step = timeline(pipe).at(elapsed_ns)
    return LinkEstimate(step.rate_bps * profile.payload_share, step.delay_ns)


class PassiveEstimator:
    """Estimates one direction of a link from its messages and from round trips of small ones."""

    def __init__(self, least_products: float = LEAST_PRODUCTS) -> None:
        """`least_products`: minimum size of a message in bandwidth-delay products; 0 if windows stay open between
        messages, so that only the first ones measure slow start.
        """
        self._least_products = least_products
        self._rate_bps: float | None = None
        self._round_trips_ns: deque[int] = deque(maxlen=_WINDOW)

    @property
    def estimate(self) -> LinkEstimate | None:
        """The estimate; None before a large enough message and a round trip."""
        if self._rate_bps is None or not self._round_trips_ns:
            return None
        return LinkEstimate(self._rate_bps, min(self._round_trips_ns) // 2)

    def heard(self, size_bytes: int, first_ns: int, last_ns: int, round_trip_ns: int) -> None:
        """Observe a message, from the sending of its first byte to the arrival of its last, and the minimum round trip
        so far, half of which is its delay.
        """
        self.round_trip(round_trip_ns)
        self.message(size_bytes, first_ns + round_trip_ns // 2, last_ns)

    def message(self, size_bytes: int, first_ns: int, last_ns: int) -> None:
        """Observe the arrival of a message's first and last bytes at its receiver, excluding the sender's waits."""
        known = self.estimate
        least = max(LEAST_BYTES, 0 if known is None else self._least_products * known.product_bytes)
        if size_bytes < least or last_ns <= first_ns:
            return
        rate_bps = 8e9 * size_bytes / (last_ns - first_ns)
        self._rate_bps = rate_bps if self._rate_bps is None else (1 - _NEW) * self._rate_bps + _NEW * rate_bps

    def round_trip(self, nanoseconds: int) -> None:
        """Observe the round trip of a small message."""
        self._round_trips_ns.append(nanoseconds)

"""What a link is known to be: an oracle reads its profile, a passive estimator goes by what was sent.

Small messages say little of a link's rate, because they end before TCP has found it; and a policy that compresses more
the slower a link seems would go by ever smaller messages. So only large ones count, and the estimator says when it has
seen none for so long that a larger one should be sent.
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
"""Bandwidth-delay products: a shorter message measures slow start."""
_NEW = 0.3
"""The weight of the newest rate; earlier ones' falls by 0.7 with each."""
_WINDOW = 20
"""Round trips of which the shortest counts: longer ones waited in a queue."""


class LinkEstimate(NamedTuple):
    """One direction of a link."""

    rate_bps: float
    """Of messages: what headers and acknowledgements leave of the link's."""
    delay_ns: int
    """One way."""

    @property
    def product_bytes(self) -> float:
        """The bandwidth-delay product of a round trip."""
        return self.rate_bps / 8 * 2 * self.delay_ns / 1e9


def oracle(profile: LinkProfile, way: LinkDirection, elapsed_ns: int = 0) -> LinkEstimate:
    """Return what messages find of a link at a moment after it was played. SpecError where it is not shaped."""
    if (pipe := profile.pipe(way)) is None:
        raise SpecError(f"link {profile.name} has no rate {way}, so no policy can choose by it")
    step = timeline(pipe).at(elapsed_ns)
    return LinkEstimate(step.rate_bps * profile.payload_share, step.delay_ns)


class PassiveEstimator:
    """Learns of one direction of a link from messages that crossed it and round trips of small ones."""

    def __init__(self, least_products: float = LEAST_PRODUCTS) -> None:
        """`least_products`: how many bandwidth-delay products a message must have to count; 0 where windows stay open
        between messages, so that none but the first ones measure slow start.
        """
        self._least_products = least_products
        self._rate_bps: float | None = None
        self._round_trips_ns: deque[int] = deque(maxlen=_WINDOW)

    @property
    def estimate(self) -> LinkEstimate | None:
        """What is known; None before a large enough message and a round trip."""
        if self._rate_bps is None or not self._round_trips_ns:
            return None
        return LinkEstimate(self._rate_bps, min(self._round_trips_ns) // 2)

    def heard(self, size_bytes: int, first_ns: int, last_ns: int, round_trip_ns: int) -> None:
        """Learn of a message from when its first byte was handed over to when its last was there, and of the least
        round trip that is known by then, half of which it was on its way.
        """
        self.round_trip(round_trip_ns)
        self.message(size_bytes, first_ns + round_trip_ns // 2, last_ns)

    def message(self, size_bytes: int, first_ns: int, last_ns: int) -> None:
        """Learn when a message's first and last bytes came, from its receiver: what the sender waited for does not
        count.
        """
        known = self.estimate
        least = max(LEAST_BYTES, 0 if known is None else self._least_products * known.product_bytes)
        if size_bytes < least or last_ns <= first_ns:
            return
        rate_bps = 8e9 * size_bytes / (last_ns - first_ns)
        self._rate_bps = rate_bps if self._rate_bps is None else (1 - _NEW) * self._rate_bps + _NEW * rate_bps

    def round_trip(self, nanoseconds: int) -> None:
        """Learn how long a small message took there and back."""
        self._round_trips_ns.append(nanoseconds)

"""Plan patterns of packets, and derive loss, copies and order from received numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from testbed.net.probe.job import SMALL_BYTES, DirectionShape

_LEAD_S = 0.02
_QUEUED_AT_ONCE = 200  # packets that a device's queue always holds


# ------------------------------------------------------------------ sending
class OfferPattern(NamedTuple):
    """A pattern of sent packets."""

    packet_bytes: int
    """Size of each IP packet."""
    packets_per_s: float
    seconds: float
    lead: float = 0.0
    """Packets on top of that, to fill a buffer ..."""
    lead_per_s: float = 0.0
    """... at this speed ..."""
    at_once: float = 0.0
    """... except for this many, sent at the start."""

    @property
    def full_after_s(self) -> float:
        """The time at which the lead has been sent."""
        return max(0.0, self.lead - self.at_once) / self.lead_per_s if self.lead_per_s else 0.0

    def wanted(self, elapsed_ns: int) -> float:
        """Return the number of packets due by then."""
        elapsed_s = min(elapsed_ns * 1e-9, self.seconds)
        return self.packets_per_s * elapsed_s + min(self.lead, self.at_once + self.lead_per_s * elapsed_s)


def light(shape: DirectionShape, seconds: float) -> OfferPattern:
    """Send small packets, fast, but never so many that one waits for another."""
    return OfferPattern(SMALL_BYTES, shape.light_pps, seconds)


def spaced(shape: DirectionShape, seconds: float) -> OfferPattern:
    """Send small packets so far apart that jitter cannot bunch them: each shows its own delay."""
    packet_s = (SMALL_BYTES + shape.overhead_bytes) * 8 / shape.rate_bps
    return OfferPattern(SMALL_BYTES, 1 / (2.2e-9 * shape.jitter_ns + packet_s + 0.001), seconds)


def peak(shape: DirectionShape, mtu: int, seconds: float) -> OfferPattern:
    """Send more full packets than a varying link ever carries, plus those that it loses or lets jump the queue."""
    admitted = max(0.1, 1 - shape.peak_loss) * max(0.1, 1 - shape.reorder)
    return OfferPattern(mtu, 1.05 * shape.peak_bps / ((mtu + shape.overhead_bytes) * 8) / admitted, seconds)


def overload(shape: DirectionShape, mtu: int, load: float, seconds: float) -> OfferPattern:
    """Send full packets at `load` times the link's rate, after a lead that fills its buffer. It lasts until the buffer
    is full, and at least for `seconds`.
    """
    packet_bits = (mtu + shape.overhead_bytes) * 8
    carried = shape.rate_bps / packet_bits
    admitted = max(0.05, 1 - shape.loss) * max(0.05, 1 - shape.reorder)  # neither enters the queue
    # The lead slightly overfills the buffer. Slow links get it at four times their rate, fast ones at 1.25 times,
    # because packets that a relay cannot read in time would be lost before the link.
    extra = min(3.0, max(0.25, 60e6 / shape.rate_bps)) * carried
    buffer = shape.buffer_bytes / (mtu + shape.overhead_bytes)
    lead = 1.2 * buffer + 2
    at_once = min(lead, buffer / 2, _LEAD_S * carried, _QUEUED_AT_ONCE)
    filled = OfferPattern(
        mtu, load * carried / admitted, seconds, lead / admitted, extra / admitted, at_once / admitted
    )
    return filled._replace(seconds=max(seconds, filled.full_after_s + max(0.1, 15 / carried)))


# ------------------------------------------------------------------ arrivals
class ArrivalOrder(NamedTuple):
    """Arrivals of a train of packets numbered from 0."""

    lost: int
    """Numbers that never arrived."""
    bursts: int
    """Runs of consecutive lost numbers."""
    overtakers: frozenset[int]
    """Positions in the arrival order, from 0, of packets that arrived before an earlier one. A packet that jumps a
    queue of k is one overtaker; RFC 4737 would count the k packets that it passed as reordered.
    """
    copies: int
    """Arrivals of a number that had arrived before."""


def order_of(numbers: Sequence[int], sent: int) -> ArrivalOrder:
    """Compare the `numbers` in their order of arrival with those sent: 0 to `sent` - 1."""
    seen = bytearray(sent)
    copies = 0
    first_copies: list[int] = []
    for place, number in enumerate(numbers):
        if seen[number]:
            copies += 1
        else:
            seen[number] = 1
            first_copies.append(place)
    smallest_later = sent
    overtakers = []
    for place in reversed(first_copies):
        if numbers[place] > smallest_later:
            overtakers.append(place)
        else:
            smallest_later = numbers[place]
    bursts = seen.count(b"\1\0") + (1 if sent and not seen[0] else 0)
    return ArrivalOrder(lost=seen.count(0), bursts=bursts, overtakers=frozenset(overtakers), copies=copies)

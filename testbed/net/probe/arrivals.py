"""What the numbers on packets say about the way they took: lost, in bursts, overtaken, twice. Pure, after the measuring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Order(NamedTuple):
    """A train of packets numbered from 0, as they arrived."""

    lost: int
    """Numbers that never arrived."""
    bursts: int
    """Runs of consecutive lost numbers."""
    overtakers: frozenset[int]
    """Places in the arrival order, from 0, of packets that arrived before one that was sent earlier. A packet that jumps a queue
    of k is one overtaker; RFC 4737 would count the k that it passed as reordered."""
    copies: int
    """Arrivals of a number that had arrived before."""


def order_of(numbers: Sequence[int], sent: int) -> Order:
    """`numbers` in the order of arrival; 0 to `sent` - 1 were sent."""
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
    return Order(lost=seen.count(0), bursts=bursts, overtakers=frozenset(overtakers), copies=copies)

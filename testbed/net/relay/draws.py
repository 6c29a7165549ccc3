"""Random numbers by counting: a draw depends on (seed, stream, what is drawn, packet number) and on nothing else.

So neither timing nor another link, nor whether a draw was made for the packet before, changes what a packet meets with.
"""

from __future__ import annotations

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
CERTAIN = 1 << 64
"""The threshold that every draw is below."""


def mix(value: int) -> int:
    """Mix 64 bits well: splitmix64's finaliser (Steele, Lea, Flood: Fast splittable generators, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def threshold(probability: float) -> int:
    """Convert a probability to the number that a draw is below with that probability."""
    return round(probability * CERTAIN)


class Draws:
    """One sequence of draws: of one kind, on one direction of one link."""

    def __init__(self, seed: int, stream: int, kind: int) -> None:
        """`stream` tells directions that share a seed apart, `kind` what is drawn on one of them."""
        self._key = mix(mix(mix(seed & _MASK) + stream * _GOLDEN & _MASK) + kind * _GOLDEN & _MASK)

    def at(self, number: int) -> int:
        """Return the draw of packet `number`, uniform in 0 .. 2**64 - 1."""
        return mix(self._key + number * _GOLDEN & _MASK)

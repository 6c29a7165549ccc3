"""A fault of a pipe: an interval in which it is worse than its profile states."""

from __future__ import annotations

from pydantic import Field, model_validator

from testbed.frozen import Frozen, is_none
from testbed.profiles.ranges import Chance, DelayNs, MomentNs, PeriodNs, RateBps


class PipeFault(Frozen):
    """An interval in which a pipe is worse than stated.

    Its own schedule or trace goes on beneath. Where a fault meets that, or another fault, the worse value counts: the
    lower rate, the longer delay, the larger share.
    """

    at_ns: MomentNs
    """Begin, from when the links are played."""
    for_ns: PeriodNs
    """Duration."""
    rate_bps: RateBps | None = Field(default=None, exclude_if=is_none)
    """The rate collapses to this."""
    delay_ns: DelayNs | None = Field(default=None, exclude_if=is_none)
    """The delay rises to this."""
    loss: Chance | None = Field(default=None, exclude_if=is_none)
    """Share of packets lost, independently; 1 is an outage."""
    reorder: Chance | None = Field(default=None, exclude_if=is_none)
    """Share of packets that overtake the queue."""
    duplicate: Chance | None = Field(default=None, exclude_if=is_none)
    """Share of packets sent twice."""
    corrupt: Chance | None = Field(default=None, exclude_if=is_none)
    """Share of packets with an inverted bit; their checksums make it a loss."""

    @property
    def end_ns(self) -> int:
        """Its end."""
        return self.at_ns + self.for_ns

    @property
    def effects(self) -> dict[str, float]:
        """The values in force during it, by name."""
        return {name: value for name in EFFECTS if (value := getattr(self, name)) is not None}

    @property
    def drawn(self) -> bool:
        """Whether it decides by chance, for each packet."""
        return any(
            name in ("loss", "reorder", "duplicate", "corrupt") and part < 1 for name, part in self.effects.items()
        )

    @model_validator(mode="after")
    def _does_something(self) -> PipeFault:
        if not self.effects:
            raise ValueError(f"it changes nothing; state at least one of {', '.join(EFFECTS)}")
        return self


EFFECTS = tuple(name for name in PipeFault.model_fields if name not in ("at_ns", "for_ns"))
"""Names of what a fault changes."""

"""Tell the probe what to measure on one link: numbers that size its tests, not what the readings are judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from testbed.directions import LINK_DIRECTIONS, LinkDirection

SMALL_BYTES = 60
"""An IP packet of ours that carries a number, a time and little more."""
ECHO_BYTES = 84
"""An IP packet of an ICMP echo, as ping sends it."""


@dataclass(frozen=True, kw_only=True)
class DirectionShape:
    """What the probe must know of one shaped direction to size its tests."""

    rate_bps: int
    delay_ns: int
    jitter_ns: int
    buffer_bytes: int
    loss: float
    """Share of packets, in the long run."""
    reorder: float
    duplicate: float
    overhead_bytes: int
    """Counted on top of each IP packet: 14 where the rate counts Ethernet frames, else 0."""
    light_pps: float
    """Small packets per second that leave room on the wire, in the buffer and on the CPU."""
    peak_bps: int
    """The highest rate that the direction ever has while it is played."""
    peak_loss: float


@dataclass(frozen=True, kw_only=True)
class ProbeJob:
    """What to measure on one link, and for how long."""

    link: str
    near_fd: int
    """The near end's network namespace; `up` leads from there to the far end."""
    far_fd: int
    near_address: str
    far_address: str
    mtu: int
    congestion_control: str
    up: DirectionShape | None
    """None: unshaped."""
    down: DirectionShape | None
    echoes: int
    echo_spacing_ns: int
    messages: tuple[dict[LinkDirection, int], ...]
    """Sizes in bytes, by direction."""
    repeats: int
    """Times that each message is sent."""
    idle_s: float
    """Silence before each message."""
    warm_up_s: float
    """How long each direction is given to open its congestion window."""
    light_s: float
    """How long small packets are offered in both directions at once."""
    spaced_s: float
    """How long packets are sent so far apart that each shows its own jitter; 0: there is none."""
    rate_s: float
    """How long UDP packets are offered, faster than the link, at least: until its buffer is full."""
    bulk_s: float
    """How long TCP streams once it is up to speed; 0: not at all."""
    follow_s: float
    """Where not 0, only this is done: the link varies and is offered more than it ever carries, for this long."""

    def shape(self, way: LinkDirection) -> DirectionShape | None:
        """Return one direction; None: unshaped."""
        return self.up if way == "up" else self.down

    @property
    def round_trip_ns(self) -> int:
        """Both delays, without serialisation."""
        return sum(shape.delay_ns for shape in (self.up, self.down) if shape)

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> ProbeJob:
        """Return the inverse of `asdict`, through JSON."""
        shapes: dict[str, Any] = {way: DirectionShape(**table[way]) if table[way] else None for way in LINK_DIRECTIONS}
        return cls(**{**table, **shapes, "messages": tuple(table["messages"])})

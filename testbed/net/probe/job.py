"""The probe's order for one link: sizes of its tests, without the values that readings are judged by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from testbed.directions import LINK_DIRECTIONS, LinkDirection

SMALL_BYTES = 60
"""IP packet of the probe with a number and a time stamp."""
ECHO_BYTES = 84
"""An IP packet of an ICMP echo, as ping sends it."""


@dataclass(frozen=True, kw_only=True)
class DirectionShape:
    """Properties of a shaped direction that size the probe's tests."""

    rate_bps: int
    delay_ns: int
    jitter_ns: int
    buffer_bytes: int
    loss: float
    """Long-run share of lost packets."""
    reorder: float
    duplicate: float
    overhead_bytes: int
    """Counted in addition to each IP packet: 14 where the rate counts Ethernet frames, otherwise 0."""
    light_pps: float
    """Rate of small packets that leaves headroom on the wire, in the buffer and on the CPU."""
    peak_bps: int
    """The direction's maximum rate while it is played."""
    peak_loss: float


@dataclass(frozen=True, kw_only=True)
class ProbeJob:
    """Measurements of one link and their durations."""

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
    """Time for each direction to open its congestion window."""
    light_s: float
    """Duration of small packets in both directions at once."""
    spaced_s: float
    """Duration of packets spaced so widely that each shows its own jitter; 0: no jitter."""
    rate_s: float
    """Minimum duration of UDP overload, which lasts until the buffer is full."""
    bulk_s: float
    """Duration of TCP streaming at full speed; 0: none."""
    follow_s: float
    """If not 0, measure only this: overload of the varying link for this long."""

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

"""A cell's links as carriers of bits: how large a frame is on a link, and when a number of bits has left it.

A link that varies is followed along its timeline, from the moment at which the lab was played. A wire may deviate from
its pipe, as a certificate found it: `metrics.bound` asks how long a step then takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.profiles import LinkProfile, Pipe
from testbed.profiles.link_profile import TCP_HEADER_BYTES
from testbed.profiles.timeline import timeline
from testbed.spec import Cell, route

HEADER_BYTES = TCP_HEADER_BYTES
"""On every packet of a frame."""


def wire_bytes(frame_bytes: int, profile: LinkProfile) -> int:
    """Return a frame's size on the profile's layer: the frame and the headers of its packets."""
    packets = -(-frame_bytes // (profile.mtu - HEADER_BYTES))
    return frame_bytes + packets * (HEADER_BYTES + profile.overhead_bytes)


class ConstantStretch(NamedTuple):
    """A stretch of time in which a wire does not change."""

    begin_ns: float
    end_ns: float
    rate_bps: float
    delay_ns: float


class WireDeviation(NamedTuple):
    """How a wire differs from its pipe."""

    rate: float = 1.0
    """Found / asked."""
    delay_ns: float = 0.0
    """More (or, negative, less) of it on every message."""
    packet_ns: float = 0.0
    """On every message for each of its packets."""
    overflow_ns: float = 0.0
    """On every message that waits for longer than `buffer_ns`, itself included."""
    buffer_ns: float = math.inf


EXACT = WireDeviation()


class Wire:
    """One shaped direction of a link. All times are nanoseconds since the links were played."""

    def __init__(
        self, key: tuple[int, str], profile: LinkProfile, pipe: Pipe, *, played: bool, deviation: WireDeviation = EXACT
    ) -> None:
        """Make a wire; `key` tells a lab's wires apart; a pipe that was never `played` stays at its own numbers."""
        self.key, self.profile = key, profile
        self._pipe, self._deviation = pipe, deviation
        self._timeline = timeline(pipe) if played and pipe.varies else None

    def bits(self, frame_bytes: int) -> int:
        """Return the size of a frame on this wire, in bits."""
        return 8 * wire_bytes(frame_bytes, self.profile)

    @property
    def packet_bits(self) -> int:
        """The size of a full packet on this wire, in bits."""
        return 8 * (self.profile.mtu + self.profile.overhead_bytes)

    def rate_at(self, now_ns: float) -> float:
        rate_bps = self._pipe.rate_bps if self._timeline is None else self._timeline.at(int(now_ns)).rate_bps
        return rate_bps * self._deviation.rate

    def delay_at(self, now_ns: float) -> float:
        delay_ns = self._pipe.delay_ns if self._timeline is None else self._timeline.at(int(now_ns)).delay_ns
        return max(0.0, delay_ns + self._deviation.delay_ns)

    def late_ns(self, frame_bytes: int, waited_ns: float) -> float:
        """Return what a deviating wire adds to a frame's delay: one whose last bit left `waited_ns` after it came."""
        deviation = self._deviation
        overflow_ns = deviation.overflow_ns if waited_ns > deviation.buffer_ns else 0.0
        return deviation.packet_ns * -(-frame_bytes // (self.profile.mtu - HEADER_BYTES)) + overflow_ns

    def carried_at(self, begin_ns: float, bits: float) -> float:
        """Return when `bits`, the first of which leaves at `begin_ns`, have all left."""
        bits /= self._deviation.rate
        if self._timeline is None:
            return begin_ns + bits * 1e9 / self._pipe.rate_bps
        return self._timeline.carried_at(begin_ns, bits)

    def stretches(self, begin_ns: float, end_ns: float) -> Iterator[ConstantStretch]:
        """Cut the time from `begin_ns` to `end_ns` where the wire changes."""
        now = begin_ns
        while (
            self._timeline is not None
            and (following := self._timeline.next_after(int(now))) is not None
            and following < end_ns
        ):
            yield ConstantStretch(now, following, self.rate_at(now), self.delay_at(now))
            now = float(following)
        yield ConstantStretch(now, end_ns, self.rate_at(now), self.delay_at(now))


class Wires:
    """Every wire of a cell's lab. Make it once per run, because it reads traces from their files."""

    def __init__(
        self,
        cell: Cell,
        played_at_ns: int | None = None,
        deviations: Mapping[tuple[int, str], WireDeviation] = MappingProxyType({}),
    ) -> None:
        """Make the wires; `played_at_ns` is that of the lab's record; `deviations` by link and direction. SpecError
        when the file of a trace is gone.
        """
        self._cell = cell
        self.played_at_ns = played_at_ns
        self._wires: dict[tuple[int, str], Wire] = {}
        for index, profile in enumerate(cell.links):
            for side in LINK_DIRECTIONS:
                if (pipe := profile.pipe(side)) is not None:
                    self._wires[index, side] = Wire(
                        (index, side),
                        profile,
                        pipe,
                        played=played_at_ns is not None,
                        deviation=deviations.get((index, side), EXACT),
                    )

    def wire(self, link: int, way: LinkDirection) -> Wire | None:
        """Return one direction of a link; None where it is not shaped."""
        return self._wires.get((link, way))

    def path(self, sender: int, receiver: int) -> tuple[Wire | None, ...]:
        """Return the wires that a frame crosses between two neighbouring stages; None for an unshaped direction."""
        return tuple(self._wires.get((hop.link, hop.side)) for hop in route(self._cell, sender, receiver))

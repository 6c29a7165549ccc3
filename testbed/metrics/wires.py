"""A lab's links as carriers of bits: the size of a frame on a link, and the time at which bits have left it.

A varying link follows its timeline from the moment at which the lab was played. A wire may deviate from its pipe, as
measured by a certificate; `metrics.bound` simulates steps over such wires.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.profiles import LinkProfile, Pipe
from testbed.profiles.link_profile import TCP_HEADER_BYTES
from testbed.profiles.timeline import timeline
from testbed.spec import Cell, Sites, Topology, link_path

HEADER_BYTES = TCP_HEADER_BYTES
"""Headers of every packet of a frame."""


def wire_bytes(frame_bytes: int, profile: LinkProfile) -> int:
    """Return a frame's size on the profile's layer: the frame and the headers of its packets."""
    packets = -(-frame_bytes // (profile.mtu - HEADER_BYTES))
    return frame_bytes + packets * (HEADER_BYTES + profile.overhead_bytes)


class ConstantStretch(NamedTuple):
    """An interval of time in which a wire does not change."""

    begin_ns: float
    end_ns: float
    rate_bps: float
    delay_ns: float


class WireDeviation(NamedTuple):
    """How a wire differs from its pipe."""

    rate: float = 1.0
    """Measured / specified rate."""
    delay_ns: float = 0.0
    """Additional (or, negative, less) delay of every message."""
    packet_ns: float = 0.0
    """Additional delay of a message for each of its packets."""
    overflow_ns: float = 0.0
    """Additional delay of every message that waits longer than `buffer_ns`, including its own transmission."""
    buffer_ns: float = math.inf

    @property
    def matters(self) -> bool:
        """Whether a frame is carried otherwise than by an exact wire."""
        return self[:-1] != EXACT[:-1]


EXACT = WireDeviation()


class Wire:
    """One shaped direction of a link. All times are nanoseconds since the links were played."""

    def __init__(
        self, key: tuple[int, str], profile: LinkProfile, pipe: Pipe, *, played: bool, deviation: WireDeviation = EXACT
    ) -> None:
        """Make a wire; `key` tells a lab's wires apart; a pipe that was not `played` keeps its initial numbers."""
        self.key, self.profile = key, profile
        self._deviation = deviation
        self._timeline = timeline(pipe) if played and pipe.varies else None
        self.packet_bits = 8 * (profile.mtu + profile.overhead_bytes)
        """The size of a full packet on this wire."""
        # The kernel rounds a packet's duration down to whole nanoseconds.
        self._bit_ns = max(1, self.packet_bits * 10**9 // pipe.rate_bps) / self.packet_bits / deviation.rate
        self.header_bits = 8 * (HEADER_BYTES + profile.overhead_bytes)
        """Header bits of every packet."""
        delay_ns = max(0.0, pipe.delay_ns + deviation.delay_ns)
        self.still = ConstantStretch(-math.inf, math.inf, 1e9 / self._bit_ns, delay_ns)
        """The whole timeline of a constant wire."""
        self.varies = self._timeline is not None

    def bits(self, frame_bytes: int) -> int:
        """Return the size of a frame on this wire, in bits."""
        return 8 * wire_bytes(frame_bytes, self.profile)

    def rate_at(self, now_ns: float) -> float:
        if self._timeline is None:
            return self.still.rate_bps
        return self._timeline.at(int(now_ns)).rate_bps * self._deviation.rate

    def delay_at(self, now_ns: float) -> float:
        if self._timeline is None:
            return self.still.delay_ns
        return max(0.0, self._timeline.at(int(now_ns)).delay_ns + self._deviation.delay_ns)

    def late_ns(self, packets: int, waited_ns: float) -> float:
        """Return a deviating wire's additional delay for a frame of `packets` packets whose last bit left `waited_ns`
        after its arrival.
        """
        if (deviation := self._deviation) is EXACT:
            return 0.0
        return deviation.packet_ns * packets + (deviation.overflow_ns if waited_ns > deviation.buffer_ns else 0.0)

    def carried_at(self, begin_ns: float, bits: float) -> float:
        """Return the time at which `bits`, the first of which leaves at `begin_ns`, have all left."""
        if self._timeline is None:
            return begin_ns + bits * self._bit_ns
        return self._timeline.carried_at(begin_ns, bits / self._deviation.rate)

    def stretches(self, begin_ns: float, end_ns: float) -> Iterator[ConstantStretch]:
        """Split the time from `begin_ns` to `end_ns` at the wire's changes."""
        now = begin_ns
        while (
            self._timeline is not None
            and (following := self._timeline.next_after(int(now))) is not None
            and following < end_ns
        ):
            yield ConstantStretch(now, following, self.rate_at(now), self.delay_at(now))
            now = float(following)
        yield ConstantStretch(now, end_ns, self.rate_at(now), self.delay_at(now))


class StatedLinks(NamedTuple):
    """Links without a cell: one per node of a star, one per two neighbours of a line; then those of the sites."""

    topology: Topology
    links: Sequence[LinkProfile]
    sites: Sites = None


class Wires:
    """All wires of a lab. Make it once per run, because it reads trace files."""

    def __init__(
        self,
        lab: Cell | StatedLinks,
        played_at_ns: int | None = None,
        deviations: Mapping[tuple[int, str], WireDeviation] = MappingProxyType({}),
    ) -> None:
        """Make the wires; `played_at_ns` is that of the lab's record; `deviations` by link and direction. SpecError for
        a missing trace file.
        """
        self.links, self.played_at_ns, self._lab = lab.links, played_at_ns, lab
        self._wires = {
            (index, side): Wire(
                (index, side),
                profile,
                pipe,
                played=played_at_ns is not None,
                deviation=deviations.get((index, side), EXACT),
            )
            for index, profile in enumerate(self.links)
            for side in LINK_DIRECTIONS
            if (pipe := profile.pipe(side)) is not None
        }

    def path(self, source: int, target: int) -> tuple[tuple[int, LinkDirection], ...]:
        """Return the links from one node to another, and their directions."""
        sites = self._lab.sites
        return link_path(self._lab.topology, len(self.links) - len(sites or ()), sites, source, target)

    def wire(self, link: int, way: LinkDirection) -> Wire | None:
        """Return one direction of a link; None where it is not shaped."""
        return self._wires.get((link, way))

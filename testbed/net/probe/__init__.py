"""Measure access links from outside: one process per link that holds sockets at both ends and one clock, all at once,
but no more of them moving bulk at a time than there are CPUs.

This module is what goes in (Job) and what comes out (Readings): plain numbers, no verdicts; certify.py judges them.
echo.py sends and reads ICMP (scapy), stream.py TCP, datagrams.py UDP (arrivals.py counts what came), session.py does one link,
__main__.py all of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from testbed.directions import LINK_DIRECTIONS, LinkDirection

SMALL_BYTES = 60
"""An IP packet of ours that carries a number, a time and little more."""
ECHO_BYTES = 84
"""An IP packet of an ICMP echo, as ping sends it."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """What the probe must know of one shaped direction to size its tests. It is not what the readings are judged by."""

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
    """Small packets a second that leave room on the wire, in the buffer and on the CPU."""
    peak_bps: int
    """The highest rate that the direction ever has while it is played."""
    peak_loss: float


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure on one link."""

    link: str
    near_fd: int
    """The near end's network namespace; `up` leads from there to the far end."""
    far_fd: int
    near_address: str
    far_address: str
    mtu: int
    congestion_control: str
    up: Line | None
    """None: unshaped."""
    down: Line | None
    echoes: int
    echo_spacing_ns: int
    messages: tuple[dict[LinkDirection, int], ...]
    """Sizes in bytes, by direction."""
    repeats: int
    """How often each message is sent."""
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
    """Where not 0, nothing else is measured: for so long the link is offered more than it ever carries, while it varies."""

    def line(self, way: LinkDirection) -> Line | None:
        return self.up if way == "up" else self.down

    @property
    def round_trip_ns(self) -> int:
        """Without serialisation."""
        return sum(line.delay_ns for line in (self.up, self.down) if line)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Job:
        """The inverse of `as_dict`, through JSON."""
        lines: dict[str, Any] = {way: Line(**table[way]) if table[way] else None for way in LINK_DIRECTIONS}
        return cls(**{**table, **lines, "messages": tuple(table["messages"])})


@dataclass(kw_only=True)
class Message:
    """One message after silence."""

    way: LinkDirection
    size: int
    elapsed_ns: int
    """From before the first byte was handed to the kernel to when the last byte had been read at the other end."""
    retransmits: int


@dataclass(kw_only=True)
class Train:
    """UDP packets in one direction, numbered and stamped."""

    way: LinkDirection
    packet_bytes: int
    """Of each IP packet."""
    sent: int
    offer_ns: int
    """How long it took to send them."""
    arrived: int
    """Copies included."""
    counted: int
    """Those that arrived in `span_ns`, the first not counted, without those that jumped a queue."""
    span_ns: int
    """From the first arrival, or from when jitter had settled, to the last, by the kernel's clock."""
    lost: int
    bursts: int
    """Runs of consecutive lost packets."""
    overtakers: int
    """Packets that arrived before one sent earlier."""
    copies: int
    transit_ns: list[int]
    """From sending to arrival, of a sample of them; in overload only of those sent after the buffer was full."""


@dataclass(kw_only=True)
class Span:
    """What came out of an overloaded link in a stretch of time."""

    way: LinkDirection
    begin_ns: int
    """CLOCK_MONOTONIC, at the receiver."""
    end_ns: int
    packets: int
    packet_bytes: int


@dataclass(kw_only=True)
class Bulk:
    """TCP in one direction."""

    way: LinkDirection
    size: int
    """Payload bytes read in `span_ns`."""
    span_ns: int
    retransmits: int


@dataclass(kw_only=True)
class Readings:
    """What was found on one link."""

    link: str
    scheduling: str = ""
    """Scheduling class of the probe."""
    rtt_ns: list[int] = field(default_factory=list)
    """One per ICMP echo that was answered."""
    echoes: int = 0
    echo_bytes: int = 0
    """Of each echo packet."""
    full_packet_passed: bool = False
    """A packet of the MTU's size, not to be fragmented, was answered."""
    bigger_packet_refused: bool = False
    """One byte more was refused by the kernel."""
    packet_payload_bytes: int = 0
    """TCP payload of a full packet, as the kernel says."""
    window_bytes: dict[LinkDirection, int] = field(default_factory=dict)
    """Congestion window after the warm-up."""
    messages: list[Message] = field(default_factory=list)
    light: list[Train] = field(default_factory=list)
    """Small packets, few enough not to wait for each other."""
    spaced: list[Train] = field(default_factory=list)
    """Small packets that jitter cannot push together; none where no jitter was asked for."""
    overload: list[Train] = field(default_factory=list)
    """Full packets, more than the link carries."""
    spans: list[Span] = field(default_factory=list)
    bulk: list[Bulk] = field(default_factory=list)
    small_buffers: bool = False
    """The kernel refused socket buffers beyond its limits."""
    timer: list[int] = field(default_factory=list)
    """The probe's own sleeps by how late they ended, see `timer.Timer`."""
    faults: dict[str, str] = field(default_factory=dict)
    """Phase ('echo', 'stream', 'datagrams') to why it could not be finished."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Readings:
        """The inverse of `as_dict`, through JSON."""
        kinds: dict[str, type[Any]] = {
            "messages": Message,
            "light": Train,
            "spaced": Train,
            "overload": Train,
            "spans": Span,
            "bulk": Bulk,
        }
        lists = {key: [kind(**item) for item in table[key]] for key, kind in kinds.items()}
        return cls(**{**table, **lists})

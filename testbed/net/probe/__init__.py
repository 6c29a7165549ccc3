"""Measure access links from outside: one process per link that holds sockets at both ends and one clock, all at once,
but no more of them moving bulk at a time than there are CPUs.

This module is what goes in (Job) and what comes out (Readings): plain numbers, no verdicts; certify.py judges them.
echo.py sends and reads ICMP (scapy), stream.py TCP, datagrams.py UDP, session.py does one link, __main__.py all of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Way = Literal["up", "down"]
WAYS: tuple[Way, Way] = ("up", "down")


@dataclass(frozen=True, kw_only=True)
class Line:
    """What the probe must know of one shaped direction to size its tests. It is not what the readings are judged by."""

    rate_bps: int
    delay_ns: int
    buffer_bytes: int
    loss: float
    overhead_bytes: int
    """Counted on top of each IP packet: 14 where the rate counts Ethernet frames, else 0."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to measure on one link."""

    link: str
    node_fd: int
    """The node's network namespace."""
    hub_fd: int
    node_address: str
    hub_address: str
    mtu: int
    congestion_control: str
    up: Line | None
    """None: unshaped."""
    down: Line | None
    echoes: int
    messages: tuple[dict[Way, int], ...]
    """Sizes in bytes, by direction."""
    repeats: int
    """How often each message is sent."""
    idle_s: float
    """Silence before each message."""
    rate_s: float
    """How long UDP packets are offered, faster than the link."""
    loss_s: float
    """How long they are offered slower than the link; 0: not at all."""
    bulk_s: float
    """How long TCP streams once it is up to speed; 0: not at all."""

    def line(self, way: Way) -> Line | None:
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
        lines: dict[str, Any] = {way: Line(**table[way]) if table[way] else None for way in WAYS}
        return cls(**{**table, **lines, "messages": tuple(table["messages"])})


@dataclass(kw_only=True)
class Message:
    """One message after silence."""

    way: Way
    size: int
    elapsed_ns: int
    """From before the first byte was handed to the kernel to when the last byte had been read at the other end."""
    retransmits: int


@dataclass(kw_only=True)
class Train:
    """UDP packets of the full MTU in one direction."""

    way: Way
    sent: int
    offer_ns: int
    """How long it took to send them."""
    received: int
    span_ns: int
    """From the arrival of the first to that of the last, by the kernel's clock."""


@dataclass(kw_only=True)
class Bulk:
    """TCP in one direction."""

    way: Way
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
    window_bytes: dict[Way, int] = field(default_factory=dict)
    """Congestion window after the warm-up."""
    messages: list[Message] = field(default_factory=list)
    rate: list[Train] = field(default_factory=list)
    loss: list[Train] = field(default_factory=list)
    bulk: list[Bulk] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    """Phase ('echo', 'stream', 'datagrams') to why it could not be finished."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Readings:
        """The inverse of `as_dict`, through JSON."""
        kinds: dict[str, type[Any]] = {"messages": Message, "rate": Train, "loss": Train, "bulk": Bulk}
        lists = {key: [kind(**item) for item in table[key]] for key, kind in kinds.items()}
        return cls(**{**table, **lists})

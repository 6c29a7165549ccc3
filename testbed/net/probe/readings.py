"""Readings of one link: plain numbers, no verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from testbed.directions import LinkDirection


@dataclass(kw_only=True)
class TimedMessage:
    """One message after silence."""

    way: LinkDirection
    size: int
    elapsed_ns: int
    """From just before the first byte was passed to the kernel until the last byte was read at the other end."""
    retransmits: int


@dataclass(kw_only=True)
class PacketTrain:
    """Numbered and stamped UDP packets in one direction: sent and received."""

    way: LinkDirection
    packet_bytes: int = 0
    """The size of each IP packet."""
    sent: int = 0
    offer_ns: int = 0
    """Duration of sending."""
    arrived: int = 0
    """Copies included."""
    counted: int = 0
    """Packets that arrived in `span_ns`, without the first and those that jumped a queue."""
    span_ns: int = 0
    """From the first arrival, or after jitter had settled, to the last, by the kernel's clock."""
    end_ns: int = 0
    """Time of the last arrival, on CLOCK_MONOTONIC."""
    lost: int = 0
    bursts: int = 0
    """Runs of consecutive lost packets."""
    overtakers: int = 0
    """Packets that arrived before one sent earlier."""
    copies: int = 0
    transit_ns: list[int] = field(default_factory=list)
    """Transit times of a sample of packets; under overload only of those sent after the buffer was full."""


@dataclass(kw_only=True)
class BulkTransfer:
    """TCP in one direction, at full speed."""

    way: LinkDirection
    size: int
    """Payload bytes read in `span_ns`."""
    span_ns: int
    retransmits: int


@dataclass(kw_only=True)
class Readings:
    """All readings of one link."""

    link: str
    scheduling: str = ""
    """Scheduling class of the probe."""
    rtt_ns: list[int] = field(default_factory=list)
    """One per ICMP echo with a reply."""
    echoes: int = 0
    echo_bytes: int = 0
    """The size of each echo packet."""
    full_packet_passed: bool = False
    """Whether an unfragmented packet of the MTU's size got a reply."""
    bigger_packet_refused: bool = False
    """Whether the kernel refused a packet one byte larger."""
    packet_payload_bytes: int = 0
    """TCP payload of a full packet, according to the kernel."""
    window_bytes: dict[LinkDirection, int] = field(default_factory=dict)
    """Congestion window after the warm-up."""
    messages: list[TimedMessage] = field(default_factory=list)
    light: list[PacketTrain] = field(default_factory=list)
    """Small packets, sparse enough not to wait for each other."""
    spaced: list[PacketTrain] = field(default_factory=list)
    """Small packets too sparse for jitter to bunch; empty without jitter in the profile."""
    overload: list[PacketTrain] = field(default_factory=list)
    """Full packets, beyond the link's rate."""
    followed: list[PacketTrain] = field(default_factory=list)
    """Full packets, beyond the varying link's maximum rate."""
    bulk: list[BulkTransfer] = field(default_factory=list)
    small_buffers: bool = False
    """Whether the kernel refused socket buffers beyond its limits."""
    timer: list[int] = field(default_factory=list)
    """Histogram of the lateness of the probe's own sleeps, see `datagrams.SleepTimer`."""
    faults: dict[str, str] = field(default_factory=dict)
    """Incomplete phases ('echo', 'stream', 'datagrams'), with the reason."""

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Readings:
        """Return the inverse of `asdict`, through JSON."""
        kinds: dict[str, type[Any]] = {"messages": TimedMessage, "bulk": BulkTransfer}
        kinds |= dict.fromkeys(("light", "spaced", "overload", "followed"), PacketTrain)
        lists = {key: [kind(**item) for item in table[key]] for key, kind in kinds.items()}
        return cls(**{**table, **lists})

"""Report what was found on one link: plain numbers, no verdicts."""

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
    """From before the first byte was handed to the kernel to when the last byte had been read at the other end."""
    retransmits: int


@dataclass(kw_only=True)
class PacketTrain:
    """UDP packets in one direction, numbered and stamped: what was sent and what became of it."""

    way: LinkDirection
    packet_bytes: int = 0
    """The size of each IP packet."""
    sent: int = 0
    offer_ns: int = 0
    """The time that it took to send them."""
    arrived: int = 0
    """Copies included."""
    counted: int = 0
    """Packets that arrived in `span_ns`, without the first and without those that jumped a queue."""
    span_ns: int = 0
    """From the first arrival, or from when jitter had settled, to the last, by the kernel's clock."""
    end_ns: int = 0
    """The last arrival, on CLOCK_MONOTONIC."""
    lost: int = 0
    bursts: int = 0
    """Runs of consecutive lost packets."""
    overtakers: int = 0
    """Packets that arrived before one sent earlier."""
    copies: int = 0
    transit_ns: list[int] = field(default_factory=list)
    """Times from sending to arrival of a sample of them; in overload only of those sent after the buffer was full."""


@dataclass(kw_only=True)
class BulkTransfer:
    """TCP in one direction, as fast as it goes."""

    way: LinkDirection
    size: int
    """Payload bytes read in `span_ns`."""
    span_ns: int
    retransmits: int


@dataclass(kw_only=True)
class Readings:
    """Everything that was found on one link."""

    link: str
    scheduling: str = ""
    """Scheduling class of the probe."""
    rtt_ns: list[int] = field(default_factory=list)
    """One per ICMP echo that was answered."""
    echoes: int = 0
    echo_bytes: int = 0
    """The size of each echo packet."""
    full_packet_passed: bool = False
    """A packet of the MTU's size, not to be fragmented, was answered."""
    bigger_packet_refused: bool = False
    """One byte more was refused by the kernel."""
    packet_payload_bytes: int = 0
    """TCP payload of a full packet, as the kernel says."""
    window_bytes: dict[LinkDirection, int] = field(default_factory=dict)
    """Congestion window after the warm-up."""
    messages: list[TimedMessage] = field(default_factory=list)
    light: list[PacketTrain] = field(default_factory=list)
    """Small packets, few enough not to wait for each other."""
    spaced: list[PacketTrain] = field(default_factory=list)
    """Small packets that jitter cannot push together; none where no jitter was asked for."""
    overload: list[PacketTrain] = field(default_factory=list)
    """Full packets, more than the link carries."""
    followed: list[PacketTrain] = field(default_factory=list)
    """Full packets, more than the link ever carries while it varies."""
    bulk: list[BulkTransfer] = field(default_factory=list)
    small_buffers: bool = False
    """The kernel refused socket buffers beyond its limits."""
    timer: list[int] = field(default_factory=list)
    """The probe's own sleeps by how late they ended, see `timer.SleepTimer`."""
    faults: dict[str, str] = field(default_factory=dict)
    """Phases ('echo', 'stream', 'datagrams') that could not be finished, with the reason."""

    @classmethod
    def from_dict(cls, table: dict[str, Any]) -> Readings:
        """Return the inverse of `asdict`, through JSON."""
        kinds: dict[str, type[Any]] = {"messages": TimedMessage, "bulk": BulkTransfer}
        kinds |= dict.fromkeys(("light", "spaced", "overload", "followed"), PacketTrain)
        lists = {key: [kind(**item) for item in table[key]] for key, kind in kinds.items()}
        return cls(**{**table, **lists})

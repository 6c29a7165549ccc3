"""When each operation of a trace happened: what a player writes and everything after it reads.

Times are nanoseconds of the lab's clock since the player began. A lane's columns are as long as the operations that
were played: the first `steps` steps of the trace.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any


@dataclass
class PlayedLane:
    """One lane, by operation."""

    begin_ns: array[int] = field(default_factory=lambda: array("q"))
    """When the lane reached the operation."""
    end_ns: array[int] = field(default_factory=lambda: array("q"))
    """When it went on."""
    first_byte_ns: array[int] = field(default_factory=lambda: array("q"))
    """send: just before the kernel was given the first byte; receive: the same moment, at the sender; else 0."""
    last_byte_ns: array[int] = field(default_factory=lambda: array("q"))
    """send: when the kernel had taken the last byte; receive: when the receiver had it; else 0."""


@dataclass(frozen=True)
class NodeCounters:
    """What a node's devices counted since the player began, in IP packets (without what devices count on top)."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


@dataclass(frozen=True)
class SocketState:
    """TCP_INFO of one end of a connection: fields as in `records.SocketRecord`."""

    node: int
    peer: int
    congestion_control: str
    rtt_us: int
    min_rtt_us: int
    cwnd_packets: int
    bytes_sent: int
    bytes_retransmitted: int
    segments_out: int
    segments_in: int
    retransmits: int


@dataclass
class Played:
    """A trace that was played over one network."""

    clock: str
    """virtual or real."""
    steps: int
    """How many steps were played."""
    steady: tuple[int, int] | None
    """(first, length): from step `first` on, steps repeat to the nanosecond with this period; None: not proved."""
    lanes: tuple[PlayedLane, ...]
    """As in the trace."""
    counters: list[tuple[NodeCounters, ...]]
    """By step, then node, at the step's end."""
    sockets: list[tuple[SocketState, ...]]
    """By step, at its end."""
    played_at_ns: int
    """When links that vary began to, on the lab's own clock; the player's times count from its own beginning."""
    lab: dict[str, Any] = field(default_factory=dict)
    """The lab as the kernel says it is: `records.LabRecord`, dumped."""
    about: dict[str, Any] = field(default_factory=dict)
    """Host seconds, guest seconds, packets."""

"""The times of a trace's operations, as written by the player and read by everything after it.

Times are nanoseconds of the lab's clock since the player began. A lane's columns cover the operations that were played:
the first `steps` steps of the trace.

File (version 1): the bytes of `MAGIC`, the length of the header (4 bytes), the header in JSON, then for each lane, in
order, its columns `begin_ns`, `end_ns`, `first_byte_ns`, `last_byte_ns` (8 bytes each, little-endian). The header has
the other fields, the lanes' numbers of operations and `sha256` (of all the columns). It contains no time or place other
than the lab's own clock: on the virtual clock, a job gives the same bytes every time.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import asdict, astuple, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from testbed.errors import ResultsError
from testbed.trace.format import pack_column, unpack_column

MAGIC: Final = b"testbed played\n"
VERSION: Final = 1
_COLUMNS: Final = ("begin_ns", "end_ns", "first_byte_ns", "last_byte_ns")


@dataclass
class PlayedLane:
    """The times of one lane, by operation."""

    begin_ns: array[int] = field(default_factory=lambda: array("q"))
    """When the lane reached the operation."""
    end_ns: array[int] = field(default_factory=lambda: array("q"))
    """When the lane continued."""
    first_byte_ns: array[int] = field(default_factory=lambda: array("q"))
    """send: just before the first byte was handed to the kernel; receive: the same moment, at the sender; else 0."""
    last_byte_ns: array[int] = field(default_factory=lambda: array("q"))
    """send: when the kernel had accepted the last byte; receive: when the receiver had read it; else 0."""


@dataclass(frozen=True)
class NodeCounters:
    """Counters of a node's devices since the player began, in IP packets (without the devices' own headers)."""

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
    """A trace played over one network."""

    clock: str
    """virtual or real."""
    steps: int
    """Number of steps played."""
    steady: tuple[int, int] | None
    """(first, length): from step `first` on, steps repeat to the nanosecond with this period; None: not proved."""
    lanes: tuple[PlayedLane, ...]
    """As in the trace."""
    counters: list[tuple[NodeCounters, ...]]
    """By step, then node, at the step's end."""
    sockets: list[tuple[SocketState, ...]]
    """By step, at its end."""
    played_at_ns: int
    """When varying links began to vary, on this clock: 0, because the player begins at the same moment."""
    lab: dict[str, Any] = field(default_factory=dict)
    """The lab as read back from the kernel: `records.LabRecord`, dumped."""
    about: dict[str, Any] = field(default_factory=dict)
    """The player's notes about itself: see `play_trace.Player`."""

    def write(self, path: Path) -> None:
        """Write it to a file."""
        columns = b"".join(pack_column(getattr(lane, name)) for lane in self.lanes for name in _COLUMNS)
        header = {
            "version": VERSION,
            "clock": self.clock,
            "steps": self.steps,
            "steady": self.steady,
            "lanes": [len(lane.begin_ns) for lane in self.lanes],
            "counters": [[astuple(node) for node in step] for step in self.counters],
            "sockets": [[list(asdict(state).values()) for state in step] for step in self.sockets],
            "played_at_ns": self.played_at_ns,
            "lab": self.lab,
            "about": self.about,
            "sha256": hashlib.sha256(columns).hexdigest(),
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        path.write_bytes(b"".join((MAGIC, len(text).to_bytes(4, "little"), text, columns)))


def read_played(path: Path) -> Played:
    """Read a file of the player. ResultsError, with the fault, if it is not complete and valid."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    begin = len(MAGIC) + 4
    if not content.startswith(MAGIC) or len(content) < begin:
        raise ResultsError(f"{path} was not written by the player: it does not begin with {MAGIC!r}")
    length = int.from_bytes(content[len(MAGIC) : begin], "little")
    try:
        header = json.loads(content[begin : begin + length])
        if header["version"] != VERSION:
            raise ResultsError(f"{path} has version {header['version']}, not {VERSION}; play the trace again")
        columns = content[begin + length :]
        if hashlib.sha256(columns).hexdigest() != header["sha256"]:
            raise ResultsError(f"{path} is corrupt or truncated: its checksum does not match its header")
        return Played(
            clock=str(header["clock"]),
            steps=int(header["steps"]),
            steady=tuple(header["steady"]) if header["steady"] else None,
            lanes=_lanes(header["lanes"], columns),
            counters=[tuple(NodeCounters(*node) for node in step) for step in header["counters"]],
            sockets=[tuple(SocketState(*state) for state in step) for step in header["sockets"]],
            played_at_ns=int(header["played_at_ns"]),
            lab=dict(header["lab"]),
            about=dict(header["about"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ResultsError(f"{path} has an invalid header: {error}") from None


def _lanes(lengths: list[int], columns: bytes) -> tuple[PlayedLane, ...]:
    lanes, at = [], 0
    for length in lengths:
        ends = [at + 8 * length * column for column in range(len(_COLUMNS) + 1)]
        lanes.append(PlayedLane(*(unpack_column("q", columns[begin:end]) for begin, end in pairwise(ends))))
        at = ends[-1]
    if at != len(columns) or min(lengths, default=0) < 0:
        raise ValueError(f"its lanes need {at} bytes, but it has {len(columns)}")
    return tuple(lanes)

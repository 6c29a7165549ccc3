"""A trace: what every node of a job does, step by step, whatever the network. The record between algorithms and
networks; a player needs nothing else to know. docs/traces.md has the format and an example.

A node has lanes, and a lane does its operations in order, one after the other; the lanes of a node go on side by side:

work     be busy for `value` nanoseconds
send     hand `value` bytes for `peer` over, under `tag`; the lane goes on at once, and what was handed over to one peer
         leaves in that order
receive  wait until the message of `peer` with this `tag` has arrived whole; who waited long has to be woken: the next
         work takes `value` nanoseconds longer, or less after a shorter wait (waking.py)
signal   count the event `tag` up by one
wait     wait until the event `tag` was counted up `value` times, since the trace began

An event belongs to the trace, not to a node: it takes no time and crosses no link, as a control plane of its own does.
A tag names one message of a sender to a receiver, and no other of the whole trace.

Reading refuses what is not a whole trace. Whether sends and receives match, and waits can be met, is `check.py`'s.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from testbed.errors import SpecError

MAGIC: Final = b"testbed trace\n"
VERSION: Final = 2
_READABLE: Final = (1, VERSION)
"""In version 1 waking took no time: its receives have the value 0."""
_DIGEST: Final = 32
"""Bytes of the checksum (SHA-256) of all that follows it."""
_LENGTH: Final = 4
"""Bytes that say how long the header is."""
WORK, SEND, RECEIVE, SIGNAL, WAIT = range(5)
KINDS: Final = ("work", "send", "receive", "signal", "wait")
_COLUMNS: Final = (("kind", "B"), ("label", "B"), ("peer", "H"), ("tag", "I"), ("value", "q"), ("starts", "I"))


class Operation(NamedTuple):
    """One operation of a lane."""

    kind: int
    label: int
    """Which of the trace's labels says what it is."""
    peer: int
    """The other node's number; 0 where there is none."""
    tag: int
    """Of the message, or which event; 0 for work."""
    value: int
    """Nanoseconds, bytes, or a count; 0 for signal."""


@dataclass
class Lane:
    """Operations of one node that are done one after the other, as columns."""

    node: int
    name: str
    kind: array[int] = field(default_factory=lambda: array("B"))
    label: array[int] = field(default_factory=lambda: array("B"))
    peer: array[int] = field(default_factory=lambda: array("H"))
    tag: array[int] = field(default_factory=lambda: array("I"))
    value: array[int] = field(default_factory=lambda: array("q"))
    starts: array[int] = field(default_factory=lambda: array("I", [0]))
    """Where each step begins; at the end, where the last one ends."""

    def __len__(self) -> int:
        return len(self.kind)

    def operations(self, step: int) -> Iterator[Operation]:
        """Yield the operations of one step."""
        for i in range(self.starts[step], self.starts[step + 1]):
            yield Operation(self.kind[i], self.label[i], self.peer[i], self.tag[i], self.value[i])

    def add(self, kind: int, label: int = 0, peer: int = 0, tag: int = 0, value: int = 0) -> None:
        """Put one more operation at the end."""
        self.kind.append(kind)
        self.label.append(label)
        self.peer.append(peer)
        self.tag.append(tag)
        self.value.append(value)

    def end_step(self) -> None:
        """End a step: what follows belongs to the next."""
        self.starts.append(len(self.kind))


@dataclass
class Trace:
    """What every node of a job does."""

    nodes: tuple[str, ...]
    labels: tuple[str, ...]
    """Names of what is worked on and sent, for people: 'forward', 'encode'."""
    lanes: tuple[Lane, ...]
    about: dict[str, Any] = field(default_factory=dict)
    """What its maker says of it."""

    @property
    def steps(self) -> int:
        """How many steps; every lane has as many."""
        return len(self.lanes[0].starts) - 1 if self.lanes else 0

    def write(self, path: Path) -> None:
        """Write it to a file."""
        header = {
            "version": VERSION,
            "nodes": self.nodes,
            "labels": self.labels,
            "steps": self.steps,
            "lanes": [{"node": lane.node, "name": lane.name, "operations": len(lane)} for lane in self.lanes],
            "about": self.about,
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        columns = (pack_column(getattr(lane, name)) for lane in self.lanes for name, _ in _COLUMNS)
        body = b"".join((len(text).to_bytes(_LENGTH, "little"), text, *columns))
        path.write_bytes(b"".join((MAGIC, hashlib.sha256(body).digest(), body)))


def read_trace(path: Path) -> Trace:
    """Read a trace from its file. SpecError, which says what was found, for anything that is not a whole trace."""
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise SpecError(f"cannot read the trace {path}: {error.strerror}") from None
    return parse_trace(content, str(path))


def parse_trace(content: memoryview, where: str) -> Trace:
    """Read a trace from the bytes of its file; `where` is for messages. SpecError as from `read_trace`."""
    if bytes(content[: len(MAGIC)]) != MAGIC:
        raise SpecError(f"{where} is not a trace: it does not begin with {MAGIC!r}")
    digest, body = content[len(MAGIC) : len(MAGIC) + _DIGEST], content[len(MAGIC) + _DIGEST :]
    if hashlib.sha256(body).digest() != digest:
        raise SpecError(f"{where} was changed or cut off: its checksum is not that of its content")
    end = _LENGTH + int.from_bytes(body[:_LENGTH], "little")
    try:
        header = json.loads(bytes(body[_LENGTH:end]))
        if header["version"] not in _READABLE:
            known = " and ".join(map(str, _READABLE))
            raise SpecError(f"{where} is a trace of version {header['version']}; this testbed reads versions {known}")
        return _trace(header, body[end:])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise SpecError(f"{where} is not a trace that testbed wrote: {error}") from None


def _trace(header: Mapping[str, Any], columns: memoryview) -> Trace:
    nodes, labels = tuple(map(str, header["nodes"])), tuple(map(str, header["labels"]))
    steps, lanes, at = int(header["steps"]), [], 0
    for stated in header["lanes"]:
        lane, operations = Lane(int(stated["node"]), str(stated["name"])), int(stated["operations"])
        for name, code in _COLUMNS:
            size = (steps + 1 if name == "starts" else operations) * array(code).itemsize
            setattr(lane, name, unpack_column(code, columns[at : at + size]))
            at += size
        _check_lane(lane, operations, nodes)
        lanes.append(lane)
    if at != len(columns):
        raise ValueError(f"its lanes take {at} bytes and it has {len(columns)}")
    if steps < 0 or (steps > 0 and not lanes):
        raise ValueError(f"it has {steps} steps and {len(lanes)} lanes")
    return Trace(nodes, labels, tuple(lanes), dict(header["about"]))


def _check_lane(lane: Lane, operations: int, nodes: Sequence[str]) -> None:
    """Check what every reader relies on; ValueError says what is wrong."""
    if not 0 <= lane.node < len(nodes):
        raise ValueError(f"the lane {lane.name!r} is of node {lane.node}, and there are {len(nodes)} nodes")
    starts = lane.starts
    if not starts or starts[0] or starts[-1] != operations or any(a > b for a, b in pairwise(starts)):
        raise ValueError(f"the steps of the lane {lane.name!r} of {nodes[lane.node]} do not divide its operations")


def pack_column(column: array[int]) -> bytes:
    """Return a column's bytes, little-endian."""
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def unpack_column(code: str, content: bytes | memoryview) -> array[int]:
    """Return the column of such numbers that these bytes are."""
    column = array(code)
    column.frombytes(content)
    if sys.byteorder == "big":
        column.byteswap()
    return column

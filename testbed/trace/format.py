"""A trace: what every node of a job does, step by step, independent of the network. The interface between algorithms
and networks: a player needs nothing else. docs/traces.md documents the format, with an example.

A node has lanes. A lane executes its operations one after the other; the lanes of a node run in parallel:

work     be busy for `value` nanoseconds
send     hand over `value` bytes to `peer`, as message `tag`; the lane continues at once, and messages to one peer leave
         in the order of their sends
receive  wait until message `tag` from `peer` has arrived completely; after a long wait, the next work takes `value`
         nanoseconds longer for waking up, or less after a shorter wait (waking.py)
signal   increment the event `tag`
wait     wait until the event `tag` was incremented `value` times since the trace began

An event belongs to the trace, not to a node: it takes no time and crosses no link, as with a separate control plane.
A tag identifies one message from a sender to a receiver within the whole trace.

The reader rejects an incomplete trace. check.py verifies that sends match receives, and that waits can be met.
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
"""In version 1, waking took no time: its receives have the value 0."""
_DIGEST: Final = 32
"""Bytes of the checksum (SHA-256) of everything after it."""
_LENGTH: Final = 4
"""Bytes of the header's length."""
WORK, SEND, RECEIVE, SIGNAL, WAIT = range(5)
KINDS: Final = ("work", "send", "receive", "signal", "wait")
_COLUMNS: Final = (("kind", "B"), ("label", "B"), ("peer", "H"), ("tag", "I"), ("value", "q"), ("starts", "I"))


class Operation(NamedTuple):
    """One operation of a lane."""

    kind: int
    label: int
    """Index of its name in the trace's labels."""
    peer: int
    """Number of the other node; 0 if there is none."""
    tag: int
    """Tag of the message or event; 0 for work."""
    value: int
    """Nanoseconds, bytes, or a count; 0 for signal."""


@dataclass
class Lane:
    """Sequential operations of one node, as columns."""

    node: int
    name: str
    kind: array[int] = field(default_factory=lambda: array("B"))
    label: array[int] = field(default_factory=lambda: array("B"))
    peer: array[int] = field(default_factory=lambda: array("H"))
    tag: array[int] = field(default_factory=lambda: array("I"))
    value: array[int] = field(default_factory=lambda: array("q"))
    starts: array[int] = field(default_factory=lambda: array("I", [0]))
    """Position of the first operation of each step, and finally the number of operations."""

    def __len__(self) -> int:
        return len(self.kind)

    def operations(self, step: int) -> Iterator[Operation]:
        """Yield the operations of one step."""
        for i in range(self.starts[step], self.starts[step + 1]):
            yield Operation(self.kind[i], self.label[i], self.peer[i], self.tag[i], self.value[i])

    def add(self, kind: int, label: int = 0, peer: int = 0, tag: int = 0, value: int = 0) -> None:
        """Append an operation."""
        self.kind.append(kind)
        self.label.append(label)
        self.peer.append(peer)
        self.tag.append(tag)
        self.value.append(value)

    def end_step(self) -> None:
        """End the current step: further operations belong to the next one."""
        self.starts.append(len(self.kind))


@dataclass
class Trace:
    """The operations of every node of a job."""

    nodes: tuple[str, ...]
    labels: tuple[str, ...]
    """Readable names of work and messages: 'forward', 'encode'."""
    lanes: tuple[Lane, ...]
    about: dict[str, Any] = field(default_factory=dict)
    """Notes of its maker."""

    @property
    def steps(self) -> int:
        """Number of steps, the same in every lane."""
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
    """Read a trace from its file. SpecError, with the fault, if it is not a complete trace."""
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise SpecError(f"cannot read the trace {path}: {error.strerror}") from None
    return parse_trace(content, str(path))


def parse_trace(content: memoryview, where: str) -> Trace:
    """Parse the bytes of a trace file; `where` is for messages. SpecError as from `read_trace`."""
    if bytes(content[: len(MAGIC)]) != MAGIC:
        raise SpecError(f"{where} is not a trace: it does not begin with {MAGIC!r}")
    digest, body = content[len(MAGIC) : len(MAGIC) + _DIGEST], content[len(MAGIC) + _DIGEST :]
    if hashlib.sha256(body).digest() != digest:
        raise SpecError(f"{where} is corrupt or truncated: its checksum does not match its content")
    end = _LENGTH + int.from_bytes(body[:_LENGTH], "little")
    try:
        header = json.loads(bytes(body[_LENGTH:end]))
        if header["version"] not in _READABLE:
            known = " and ".join(map(str, _READABLE))
            raise SpecError(f"{where} is a trace of version {header['version']}, but this testbed reads {known}")
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
        raise ValueError(f"its lanes need {at} bytes, but it has {len(columns)}")
    if steps < 0 or (steps > 0 and not lanes):
        raise ValueError(f"it has {steps} steps and {len(lanes)} lanes")
    return Trace(nodes, labels, tuple(lanes), dict(header["about"]))


def _check_lane(lane: Lane, operations: int, nodes: Sequence[str]) -> None:
    """Check the invariants that readers rely on. ValueError, with the fault, if one is violated."""
    if not 0 <= lane.node < len(nodes):
        raise ValueError(f"the lane {lane.name!r} belongs to node {lane.node}, but there are only {len(nodes)} nodes")
    starts = lane.starts
    if not starts or starts[0] or starts[-1] != operations or any(a > b for a, b in pairwise(starts)):
        raise ValueError(f"the steps of the lane {lane.name!r} of {nodes[lane.node]} do not partition its operations")


def pack_column(column: array[int]) -> bytes:
    """Return the bytes of a column, little-endian."""
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def unpack_column(code: str, content: bytes | memoryview) -> array[int]:
    """Return the column of numbers of type `code` in these bytes."""
    column = array(code)
    column.frombytes(content)
    if sys.byteorder == "big":
        column.byteswap()
    return column

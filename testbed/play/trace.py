"""A trace: what every node of a job does, step by step, whatever the network. The record between algorithms and
networks; a player needs nothing else to know.

A node has lanes, and a lane does its operations in order, one after the other; the lanes of a node go on side by side:

work     be busy for `value` nanoseconds
send     hand `value` bytes for `peer` over, under `tag`; the lane goes on at once, and what was handed over to one peer
         leaves in that order
receive  wait until the message of `peer` with this `tag` has arrived whole
signal   count the event `tag` up by one
wait     wait until the event `tag` was counted up `value` times

An event belongs to the trace, not to a node: it takes no time and crosses no link, as a control plane of its own does.
A tag names one message of a sender to a receiver, and no other of the whole trace.

Format (version 1): the bytes of `MAGIC`, the length of the header (4 bytes), the header in JSON, then for each lane,
in order, its columns `kind` (1 byte), `label` (1), `peer` (2), `tag` (4), `value` (8), each as long as the lane has
operations, and `starts` (4 each; one more than there are steps): where each step begins. All little-endian. The header
has `version`, `nodes` (names), `labels` (names), `steps`, `lanes` (node, name, operations), `about` (free) and `sha256`
(of all the columns).
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from testbed.errors import SpecError

MAGIC: Final = b"testbed trace\n"
VERSION: Final = 1
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
    """Nanoseconds, bytes, or a count; 0 for receive and signal."""


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

    def add(self, kind: int, *, label: int = 0, peer: int = 0, tag: int = 0, value: int = 0) -> None:
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
        columns = b"".join(_packed(getattr(lane, name)) for lane in self.lanes for name, _ in _COLUMNS)
        header = {
            "version": VERSION,
            "nodes": self.nodes,
            "labels": self.labels,
            "steps": self.steps,
            "lanes": [{"node": lane.node, "name": lane.name, "operations": len(lane)} for lane in self.lanes],
            "about": self.about,
            "sha256": hashlib.sha256(columns).hexdigest(),
        }
        text = json.dumps(header, separators=(",", ":")).encode()
        path.write_bytes(b"".join((MAGIC, len(text).to_bytes(4, "little"), text, columns)))


def read_trace(path: Path) -> Trace:
    """Read a trace from its file. SpecError, which says what was found, for anything that is not a whole trace."""
    try:
        content = memoryview(path.read_bytes())
    except OSError as error:
        raise SpecError(f"cannot read the trace {path}: {error.strerror}") from None
    return parse_trace(content, str(path))


def parse_trace(content: memoryview, where: str) -> Trace:
    """Read a trace from the bytes of its file; `where` is for messages. SpecError as from `read_trace`."""
    begin = len(MAGIC) + 4
    if bytes(content[: len(MAGIC)]) != MAGIC or len(content) < begin:
        raise SpecError(f"{where} is not a trace: it does not begin with {MAGIC!r}")
    length = int.from_bytes(content[len(MAGIC) : begin], "little")
    try:
        header = json.loads(bytes(content[begin : begin + length]))
        if header["version"] != VERSION:
            raise SpecError(f"{where} is a trace of version {header['version']}; this testbed reads version {VERSION}")
        columns = content[begin + length :]
        if hashlib.sha256(columns).hexdigest() != header["sha256"]:
            raise SpecError(f"{where} was changed or cut off: its checksum is not the one in its header")
        return _trace(header, columns)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SpecError(f"{where} has a header that is not a trace's: {error}") from None


def _trace(header: Mapping[str, Any], columns: memoryview) -> Trace:
    steps, lanes, at = int(header["steps"]), [], 0
    for stated in header["lanes"]:
        lane = Lane(int(stated["node"]), str(stated["name"]))
        for name, code in _COLUMNS:
            column = array(code)
            size = (steps + 1 if name == "starts" else int(stated["operations"])) * column.itemsize
            column.frombytes(columns[at : at + size])
            if sys.byteorder == "big":
                column.byteswap()
            setattr(lane, name, column)
            at += size
        lanes.append(lane)
    if at != len(columns):
        raise ValueError(f"its lanes take {at} bytes and it has {len(columns)}")
    return Trace(tuple(header["nodes"]), tuple(header["labels"]), tuple(lanes), dict(header["about"]))


def _packed(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()

"""What may change while data parallel training lasts, and how one place tells the others: in notes of its messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from testbed.errors import CodecError
from testbed.jobs.actions import Message

_LENGTH = struct.Struct("<I")


class Decision(NamedTuple):
    """Numbers that all workers go by from one step on. Tuples have one entry per worker."""

    effective_from: int
    """The first step for which it holds."""
    staleness: tuple[int, ...]
    local_steps: tuple[int, ...]
    codecs: tuple[str, ...]
    """Of each worker's messages, as a cell's `codec` writes one."""


class Decisions:
    """What has been decided so far, and what holds when."""

    def __init__(self, first: Decision, later: Iterable[Decision] = ()) -> None:
        self._known = [first, *later]

    def add(self, decision: Decision) -> None:
        """Learn of one more."""
        self._known.append(decision)

    def at(self, step: int) -> Decision:
        """Return what holds in a step."""
        return [decision for decision in self._known if decision.effective_from <= step][-1]


class Chooser(Protocol):
    """Decides at one place, by how the others' messages have crossed their links."""

    def heard(self, worker: int, message: Message, decision: Decision) -> None:
        """Learn of a worker's message of a step in which that decision held."""
        ...

    def decide(self, step: int) -> Decision | None:
        """Decide, before the place's message of a step leaves; None: nothing changes."""
        ...


def note_of(decision: Decision | None) -> bytes:
    """Return the note of a message that tells of a decision, or that there is none: the length (4 bytes, little-endian)
    of a decision in JSON, and that.
    """
    text = b"" if decision is None else json.dumps(decision, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


def read_note(note: bytes) -> Decision | None:
    """Return what `note_of` wrote. CodecError for anything else."""
    try:
        (length,) = _LENGTH.unpack(note[: _LENGTH.size])
        text = note[_LENGTH.size :]
        if len(text) != length:
            raise ValueError(f"{len(text)} bytes where {length} were to come")
        if not text:
            return None
        effective_from, *others = json.loads(text)
        staleness, local_steps, codecs = map(tuple, others)
        return Decision(int(effective_from), staleness, local_steps, codecs)
    except (struct.error, ValueError, TypeError) as error:
        raise CodecError(f"the note of a leader's message is no decision: {error}") from None

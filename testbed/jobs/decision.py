"""Parameters that may change during data parallel training, announced by one place in the notes of its messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from testbed.errors import CodecError
from testbed.jobs.actions import Message

_LENGTH = struct.Struct("<I")


class Decision(NamedTuple):
    """Parameters that all workers use from a given step on. Tuples have one entry per worker."""

    effective_from: int
    """The first step to which it applies."""
    staleness: tuple[int, ...]
    local_steps: tuple[int, ...]
    codecs: tuple[str, ...]
    """Codec of each worker's messages, in the notation of a cell's `codec`."""


class Decisions:
    """The decisions so far, looked up by step."""

    def __init__(self, first: Decision, later: Iterable[Decision] = ()) -> None:
        self._known = [first, *later]

    def add(self, decision: Decision) -> None:
        """Add a decision."""
        self._known.append(decision)

    def at(self, step: int) -> Decision:
        """Return the decision in force in a step."""
        return [decision for decision in self._known if decision.effective_from <= step][-1]


class Chooser(Protocol):
    """Makes decisions at one place, from the transfer times of the other places' messages."""

    def heard(self, worker: int, message: Message, decision: Decision) -> None:
        """Observe a worker's message from a step in which `decision` was in force."""
        ...

    def decide(self, step: int) -> Decision | None:
        """Decide, before the place sends its message of a step; None: no change."""
        ...


def note_of(decision: Decision | None) -> bytes:
    """Return the note that announces a decision or None: the length of the JSON (4 bytes, little-endian), then the
    JSON.
    """
    text = b"" if decision is None else json.dumps(decision, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


def read_note(note: bytes) -> Decision | None:
    """Parse a note made by `note_of`. CodecError for anything else."""
    try:
        (length,) = _LENGTH.unpack(note[: _LENGTH.size])
        text = note[_LENGTH.size :]
        if len(text) != length:
            raise ValueError(f"{len(text)} bytes, expected {length}")
        if not text:
            return None
        effective_from, *others = json.loads(text)
        staleness, local_steps, codecs = map(tuple, others)
        return Decision(int(effective_from), staleness, local_steps, codecs)
    except (struct.error, ValueError, TypeError, OverflowError) as error:
        raise CodecError(f"cannot read the decision in a leader's note: {error}") from None

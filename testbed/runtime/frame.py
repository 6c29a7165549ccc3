"""The frame: 56 bytes of header, then note and payload. Packing and checking only; `transport` moves the bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from testbed.errors import TransportError
from testbed.jobs.actions import Key
from testbed.message_key import Phase
from testbed.records import FRAME_HEADER_BYTES

_MAGIC = b"TBFR"
_VERSION = 2
NAME = 255
"""Name of a frame whose payload is a name: it assigns the next number to that name, for later frames of its
direction."""
_PHASES: tuple[Phase, ...] = ("train", "evaluation", "uncompressed")

# magic, version, kind, phase, origin, token, step, part, sizes, first byte (ns), CRC-32 of note and payload; then a
# CRC-32 of all that, so that a damaged length is detected before anyone waits for that many bytes.
_FIELDS = struct.Struct("!4sBBBB16sIIQQI")
_CHECK = struct.Struct("!I")
_NOTE_BITS = 16
"""Low bits of the sizes field, which hold the note's size."""
LARGEST_NOTE_BYTES = (1 << _NOTE_BITS) - 1
HEADER_BYTES = _FIELDS.size + _CHECK.size
assert HEADER_BYTES == FRAME_HEADER_BYTES


class FrameHeader(NamedTuple):
    """A frame's header, checked. Between two places no two frames of one direction have the same key."""

    key: Key
    note_bytes: int
    payload_bytes: int
    """Size without the note."""
    first_byte_ns: int
    """CLOCK_MONOTONIC of the sender, just before it handed the frame to the kernel."""
    crc: int

    @property
    def size(self) -> int:
        """Bytes that follow the header."""
        return self.note_bytes + self.payload_bytes


def say(key: Key) -> str:
    """Return a message's description, for error messages."""
    origin = f" of node {key.origin}" if key.origin else ""
    return f"{key.what}{origin} of {key.phase} step {key.step}, part {key.part}"


def pack_frame_header(header: FrameHeader, token: bytes, names: Sequence[str]) -> bytes:
    """Return the HEADER_BYTES bytes of a header, with the run's token of 16 bytes. `names` are the names of messages of
    its direction, the same at both ends; a frame that adds a name to them is `NAME`.
    """
    what, step, part, origin, phase = header.key
    sizes = header.payload_bytes << _NOTE_BITS | header.note_bytes
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        names.index(what) if what else NAME,
        _PHASES.index(phase),
        origin,
        token,
        step,
        part,
        sizes,
        header.first_byte_ns,
        header.crc,
    )
    return fields + _CHECK.pack(zlib.crc32(fields))


def parse_frame_header(
    data: bytes | bytearray, *, token: bytes, names: Sequence[str], max_payload_bytes: int
) -> FrameHeader:
    """Check HEADER_BYTES bytes and return their header.

    TransportError for anything but a header of this run that announces at most `max_payload_bytes`.
    """
    fields = _FIELDS.unpack_from(data)
    magic, version, what, phase, origin, sent_token, step, part, sizes, first_byte_ns, crc = fields
    if magic != _MAGIC or version != _VERSION:
        raise TransportError(f"expected a frame ({_MAGIC!r}, version {_VERSION}), got {magic!r}, version {version}")
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(bytes(data[: _FIELDS.size])):
        raise TransportError("a frame's header is damaged: its CRC does not match")
    if sent_token != token:
        raise TransportError(f"a frame of another run: token {sent_token.hex()}, expected {token.hex()}")
    if (what >= len(names) and what != NAME) or phase >= len(_PHASES):
        raise TransportError(f"a frame has an unknown kind or phase: kind {what}, phase {phase}")
    payload_bytes, note_bytes = sizes >> _NOTE_BITS, sizes & LARGEST_NOTE_BYTES
    if payload_bytes > max_payload_bytes:
        raise TransportError(f"a frame announces {payload_bytes} bytes; this job accepts at most {max_payload_bytes}")
    called = "" if what == NAME else names[what]
    return FrameHeader(Key(called, step, part, origin, _PHASES[phase]), note_bytes, payload_bytes, first_byte_ns, crc)

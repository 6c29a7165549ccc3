"""The frame: 60 bytes of header, then the payload. Packing and checking only; `transport` moves the bytes."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from testbed.errors import TransportError
from testbed.message_key import Direction, Phase

_MAGIC = b"TBFR"
_VERSION = 1
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_PHASES: tuple[Phase, ...] = ("train", "evaluation", "uncompressed")

# magic, version, direction, phase, nothing, token, step, micro-batch, payload bytes, first byte (ns), CRC-32 of the payload;
# then a CRC-32 of all that, so that a damaged length is found before anyone waits for that many bytes.
_FIELDS = struct.Struct("!4sBBBx16sIIQQI")
_CHECK = struct.Struct("!I")
HEADER_BYTES = _FIELDS.size + _CHECK.size
TOKEN_BYTES = 16


class Key(NamedTuple):
    """What a frame is: within a run no two frames have the same key."""

    phase: Phase
    step: int
    direction: Direction
    microbatch: int

    def __str__(self) -> str:
        return f"{self.direction} tensor of {self.phase} step {self.step}, micro-batch {self.microbatch}"


class Header(NamedTuple):
    """A frame's header, checked."""

    key: Key
    payload_bytes: int
    first_byte_ns: int
    """CLOCK_MONOTONIC of the sender, just before it handed the frame to the kernel."""
    payload_crc: int


def pack(header: Header, token: bytes) -> bytes:
    """HEADER_BYTES bytes."""
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        _DIRECTIONS.index(header.key.direction),
        _PHASES.index(header.key.phase),
        token,
        header.key.step,
        header.key.microbatch,
        header.payload_bytes,
        header.first_byte_ns,
        header.payload_crc,
    )
    return fields + _CHECK.pack(zlib.crc32(fields))


def parse(data: bytes | bytearray, *, token: bytes, max_payload_bytes: int) -> Header:
    """HEADER_BYTES bytes to a header. TransportError for anything but a header of this run with a payload that is allowed."""
    magic, version, direction, phase, found, step, microbatch, payload_bytes, first_byte_ns, crc = _FIELDS.unpack_from(
        data
    )
    if magic != _MAGIC or version != _VERSION:
        raise TransportError(f"expected a frame ({_MAGIC!r}, version {_VERSION}), found {magic!r}, version {version}")
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(bytes(data[: _FIELDS.size])):
        raise TransportError("a frame's header is damaged: its CRC does not match")
    if found != token:
        raise TransportError(
            f"a frame carries the run token {found.hex()}, this run has {token.hex()}: another run sent it"
        )
    if direction >= len(_DIRECTIONS) or phase >= len(_PHASES):
        raise TransportError(f"a frame has direction {direction} and phase {phase}, which do not exist")
    if payload_bytes > max_payload_bytes:
        raise TransportError(f"a frame announces {payload_bytes} bytes; this job takes {max_payload_bytes} at most")
    return Header(Key(_PHASES[phase], step, _DIRECTIONS[direction], microbatch), payload_bytes, first_byte_ns, crc)

"""The frame: 60 bytes of header, then the payload. Packing and checking only; `transport` moves the bytes."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from testbed.errors import TransportError
from testbed.message_key import Direction, MessageKey, Phase

_MAGIC = b"TBFR"
_VERSION = 1
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_PHASES: tuple[Phase, ...] = ("train", "evaluation", "uncompressed")

# magic, version, direction, phase, nothing, token, step, micro-batch, payload bytes, first byte (ns), CRC-32 of the
# payload; then a CRC-32 of all that, so that a damaged length is found before anyone waits for that many bytes.
_FIELDS = struct.Struct("!4sBBBx16sIIQQI")
_CHECK = struct.Struct("!I")
HEADER_BYTES = _FIELDS.size + _CHECK.size


class FrameHeader(NamedTuple):
    """A frame's header, checked. Within a run no two frames have the same direction and key."""

    direction: Direction
    key: MessageKey
    """Without the sample ids: both ends derive them from the order of the data."""
    payload_bytes: int
    first_byte_ns: int
    """CLOCK_MONOTONIC of the sender, just before it handed the frame to the kernel."""
    payload_crc: int

    def __str__(self) -> str:
        return f"{self.direction} tensor of {self.key}"


def pack_frame_header(header: FrameHeader, token: bytes) -> bytes:
    """Return the HEADER_BYTES bytes of a header, with the run's token of 16 bytes."""
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        _DIRECTIONS.index(header.direction),
        _PHASES.index(header.key.phase),
        token,
        header.key.step,
        header.key.microbatch,
        header.payload_bytes,
        header.first_byte_ns,
        header.payload_crc,
    )
    return fields + _CHECK.pack(zlib.crc32(fields))


def parse_frame_header(data: bytes | bytearray, *, token: bytes, max_payload_bytes: int) -> FrameHeader:
    """Check HEADER_BYTES bytes and return their header.

    TransportError for anything but a header of this run that announces at most `max_payload_bytes`.
    """
    fields = _FIELDS.unpack_from(data)
    magic, version, direction, phase, sent_token, step, microbatch, payload_bytes, first_byte_ns, crc = fields
    if magic != _MAGIC or version != _VERSION:
        raise TransportError(f"expected a frame ({_MAGIC!r}, version {_VERSION}), found {magic!r}, version {version}")
    if _CHECK.unpack_from(data, _FIELDS.size)[0] != zlib.crc32(bytes(data[: _FIELDS.size])):
        raise TransportError("a frame's header is damaged: its CRC does not match")
    if sent_token != token:
        raise TransportError(
            f"a frame carries the run token {sent_token.hex()}, this run has {token.hex()}: another run sent it"
        )
    if direction >= len(_DIRECTIONS) or phase >= len(_PHASES):
        raise TransportError(f"a frame has direction {direction} and phase {phase}, which do not exist")
    if payload_bytes > max_payload_bytes:
        raise TransportError(f"a frame announces {payload_bytes} bytes; this job takes {max_payload_bytes} at most")
    key = MessageKey(_PHASES[phase], step, microbatch, ())
    return FrameHeader(_DIRECTIONS[direction], key, payload_bytes, first_byte_ns, crc)

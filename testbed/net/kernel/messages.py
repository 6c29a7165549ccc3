"""Netlink messages of any family as bytes: headers, attributes, errors.

Pure; netlink.py and sock_diag.py send and receive them. A message is a header and a body; a body is a fixed structure,
then attributes with length and type (RFC 3549).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from testbed.errors import LabError

REQUEST, ACK, DUMP, DUMP_INTERRUPTED = 0x1, 0x4, 0x300, 0x10
ERROR, DONE = 2, 3

HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ATTRIBUTE = struct.Struct("=HH")  # length with this header, type
_TYPE_MASK = 0x3FFF  # without the nested and byte-order flags
_CAPPED, _ACK_TLVS = 0x100, 0x200
_ERROR_MESSAGE = 1


def _padded(length: int) -> int:
    return length + -length % 4


def frame(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """Add a header before a body, and padding after it, so that another message may follow."""
    return HEADER.pack(HEADER.size + len(body), kind, flags, sequence, 0) + body + bytes(-len(body) % 4)


def split_messages(content: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (type, flags, sequence, body) of each message in received bytes."""
    at = 0
    while at + HEADER.size <= len(content):
        length, kind, flags, sequence, _ = HEADER.unpack_from(content, at)
        yield kind, flags, sequence, content[at + HEADER.size : at + length]
        at += _padded(max(length, HEADER.size))


def attribute(kind: int, content: bytes) -> bytes:
    """Write one attribute, padded."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(content), kind) + content + bytes(-len(content) % 4)


def attributes(content: bytes, at: int = 0) -> dict[int, bytes]:
    """Read the attributes from `at` on, by type; the last one of a type wins.

    LabError for an attribute whose length is shorter than its header, or exceeds the content.
    """
    by_kind = {}
    while at + _ATTRIBUTE.size <= len(content):
        length, kind = _ATTRIBUTE.unpack_from(content, at)
        if not _ATTRIBUTE.size <= length <= len(content) - at:
            raise LabError(f"netlink attribute {kind} at byte {at} claims {length} bytes of {len(content) - at}")
        by_kind[kind & _TYPE_MASK] = content[at + _ATTRIBUTE.size : at + length]
        at += _padded(length)
    return by_kind


def text(content: bytes) -> str:
    """Read a string that ends with a zero byte."""
    return content.split(b"\0")[0].decode(errors="replace")


def read_error(body: bytes, flags: int) -> tuple[int, str]:
    """Read an ERROR message: the errno (0 for an acknowledgement), and the kernel's explanation, if any."""
    number = -struct.unpack_from("=i", body)[0]
    at = 4 + HEADER.size  # the request's header; its body only if not capped
    if not flags & _CAPPED and number:
        (length,) = struct.unpack_from("=I", body, 4)
        at = 4 + _padded(length)
    told = attributes(body, at).get(_ERROR_MESSAGE, b"") if flags & _ACK_TLVS else b""
    return number, text(told)

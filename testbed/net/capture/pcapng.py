"""Write pcapng files: one section, several interfaces, nanoseconds (draft-ietf-opsawg-pcapng)."""

from __future__ import annotations

import struct
from typing import BinaryIO

LINKTYPE_ETHERNET, LINKTYPE_RAW = 1, 101
INBOUND, OUTBOUND = 1, 2
_SECTION, _INTERFACE, _STATISTICS, _PACKET = 0x0A0D0D0A, 1, 5, 6
_BYTE_ORDER = 0x1A2B3C4D
_END, _NAME, _RESOLUTION, _FLAGS, _RECEIVED, _DROPPED, _APPLICATION = 0, 2, 9, 2, 4, 5, 4
_NANOSECONDS = b"\x09"  # 10^-9 s
_PACKET_HEAD = struct.Struct("<IIIIIII")
_FLAGS_AND_END = struct.Struct("<HHIHH")


def _option(code: int, value: bytes) -> bytes:
    return struct.pack("<HH", code, len(value)) + value + bytes(-len(value) % 4)


def _block(kind: int, body: bytes) -> bytes:
    length = struct.pack("<I", len(body) + 12)
    return struct.pack("<I", kind) + length + body + length


class PcapngWriter:
    """A capture file that grows block by block."""

    def __init__(self, file: BinaryIO, application: str) -> None:
        """Start the section; `application` is the writer's name."""
        self._file, self._interfaces = file, 0
        options = _option(_APPLICATION, application.encode()) + _option(_END, b"")
        file.write(_block(_SECTION, struct.pack("<IHHq", _BYTE_ORDER, 1, 0, -1) + options))

    def interface(self, name: str, link_type: int, most_bytes: int) -> int:
        """Add an interface that captures `most_bytes` of each packet; returns its number."""
        options = _option(_NAME, name.encode()) + _option(_RESOLUTION, _NANOSECONDS) + _option(_END, b"")
        self._file.write(_block(_INTERFACE, struct.pack("<HHI", link_type, 0, most_bytes) + options))
        self._interfaces += 1
        return self._interfaces - 1

    def packet(self, interface: int, at_ns: int, content: bytes, length: int, direction: int) -> None:
        """Append a packet of `length` bytes that starts with `content`, captured at `at_ns` of CLOCK_REALTIME."""
        padded = content + bytes(-len(content) % 4)
        total = 28 + len(padded) + 12 + 4
        self._file.write(
            _PACKET_HEAD.pack(_PACKET, total, interface, at_ns >> 32, at_ns & 0xFFFFFFFF, len(content), length)
            + padded
            + _FLAGS_AND_END.pack(_FLAGS, 4, direction, _END, 0)
            + struct.pack("<I", total)
        )

    def statistics(self, interface: int, at_ns: int, received: int, dropped: int) -> None:
        """Append the numbers of packets that the interface's capture received and dropped."""
        options = (
            _option(_RECEIVED, struct.pack("<Q", received))
            + _option(_DROPPED, struct.pack("<Q", dropped))
            + _option(_END, b"")
        )
        self._file.write(_block(_STATISTICS, struct.pack("<III", interface, at_ns >> 32, at_ns & 0xFFFFFFFF) + options))

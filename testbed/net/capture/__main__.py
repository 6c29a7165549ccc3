"""The capturing program: reports when the capture is running and, at the end of its input, the packet counts.

Started by `testbed.net.capture.capture`.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

from testbed.net.capture.pcapng import INBOUND, LINKTYPE_ETHERNET, LINKTYPE_RAW, OUTBOUND, PcapngWriter
from testbed.net.capture.ring import KEPT_BYTES, PacketRing
from testbed.net.kernel.namespace import enter
from testbed.process import Parent

_LAST_BLOCK_S = 0.1  # exceeds the kernel's delay in passing on a partial block
_SIOCGIFHWADDR, _ARPHRD_NONE = 0x8927, 0xFFFE


def _open(point: Mapping[str, Any]) -> tuple[PacketRing, int]:
    """Start to capture at a `CapturePoint`; returns its ring and its link type."""
    enter(point["namespace_fd"])
    try:
        return PacketRing(point["device"]), _link_type(point["device"])
    except OSError as error:
        sys.exit(f"{point['name']}: {error.strerror}")


def _link_type(device: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFHWADDR, struct.pack("16s24x", device.encode()))
    (kind,) = struct.unpack_from("@H", answer, 16)
    return LINKTYPE_RAW if kind == _ARPHRD_NONE else LINKTYPE_ETHERNET


def main() -> None:
    """Capture until the end of the input."""
    parent = Parent()
    points = parent.request["points"]
    rings = [_open(point) for point in points]
    kept = 0
    with os.fdopen(parent.request["file"], "wb", buffering=1 << 20) as file:
        writer = PcapngWriter(file, "testbed")
        numbers = {
            ring: writer.interface(point["name"], kind, KEPT_BYTES)
            for point, (ring, kind) in zip(points, rings, strict=True)
        }
        parent.answer("ready")
        end = None
        while end is None or time.monotonic() < end:
            waiting: list[PacketRing | int] = [*numbers, *([parent.requests_fd] if end is None else [])]
            ready, _, _ = select.select(waiting, [], [], _LAST_BLOCK_S)
            if parent.requests_fd in ready:
                end = time.monotonic() + _LAST_BLOCK_S
            for ring, number in numbers.items():
                for packet in ring.ready_packets():
                    way = OUTBOUND if packet.outgoing else INBOUND
                    writer.packet(number, packet.at_ns, packet.content, packet.length, way)
                    kept += 1
        for ring, number in numbers.items():
            ring.count()
            writer.statistics(number, time.time_ns(), ring.seen, ring.lost)
    parent.answer({"kept": kept, "lost": sum(ring.lost for ring in numbers)})


if __name__ == "__main__":
    main()

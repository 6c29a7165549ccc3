"""Read the packets of a device as the kernel saw them, from a ring in shared memory (AF_PACKET, TPACKET_V3, packet(7)).

Packets arrive in blocks with kernel time stamps, which avoids a system call per packet.
"""

from __future__ import annotations

import mmap
import socket
import struct
from collections.abc import Iterator
from ctypes import addressof, c_char
from typing import NamedTuple

KEPT_BYTES = 128
"""Captured bytes per packet: all headers, and the start of the payload."""
_SOL_PACKET = 263
_RX_RING, _STATISTICS, _VERSION = 5, 6, 10
_TPACKET_V3 = 2
_ETH_P_ALL = 3
_SO_ATTACH_FILTER = 26
_RETURN = 0x06  # BPF_RET | BPF_K
_BLOCK_BYTES, _BLOCKS, _FRAME_BYTES = 1 << 19, 16, 2048
_RETIRE_MS = 20
_TO_USER = 1
_BLOCK = struct.Struct("=8xIIII")  # status, packets, offset to the first, length
# next, seconds, nanoseconds, kept, length, status, offset of the packet, of its network header
_FRAME = struct.Struct("=IIIIII H H")
_ADDRESS_AT = 48  # a sockaddr_ll follows the frame's header, with its packet type at 10
_OUTGOING = 4


class CapturedPacket(NamedTuple):
    """One packet at one device."""

    at_ns: int
    """CLOCK_REALTIME."""
    content: bytes
    """Its first KEPT_BYTES."""
    length: int
    outgoing: bool


class PacketRing:
    """A capture of one device of the calling thread's namespace, from now on; a context manager."""

    def __init__(self, device: str) -> None:
        """Start to capture. OSError when the kernel refuses."""
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        try:
            # A one-instruction filter that keeps the first bytes of every packet.
            program = bytearray(struct.pack("=HBBI", _RETURN, 0, 0, KEPT_BYTES))
            buffer = (c_char * len(program)).from_buffer(program)
            attached = struct.pack("@HP", 1, addressof(buffer))
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, attached)
            self._socket.setsockopt(_SOL_PACKET, _VERSION, _TPACKET_V3)
            frames = _BLOCK_BYTES * _BLOCKS // _FRAME_BYTES
            request = struct.pack("=7I", _BLOCK_BYTES, _BLOCKS, _FRAME_BYTES, frames, _RETIRE_MS, 0, 0)
            self._socket.setsockopt(_SOL_PACKET, _RX_RING, request)
            self._memory = mmap.mmap(self._socket.fileno(), _BLOCK_BYTES * _BLOCKS)
            self._socket.bind((device, _ETH_P_ALL))
        except BaseException:
            self._socket.close()
            raise
        self._next = 0
        self.seen = self.lost = 0
        """Numbers of all packets, and of those lost for lack of room in the ring; updated by `count`."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when a block is full, or shortly after its first packet."""
        return self._socket.fileno()

    def ready_packets(self) -> Iterator[CapturedPacket]:
        """Yield every packet of the blocks that are ready."""
        memory = self._memory
        while True:
            base = self._next * _BLOCK_BYTES
            status, packets, offset, _ = _BLOCK.unpack_from(memory, base)
            if not status & _TO_USER:
                return
            place = base + offset
            for _ in range(packets):
                following, seconds, nanoseconds, kept, length, _, at, _ = _FRAME.unpack_from(memory, place)
                content = memory[place + at : place + at + kept]
                outgoing = memory[place + _ADDRESS_AT + 10] == _OUTGOING
                yield CapturedPacket(seconds * 1_000_000_000 + nanoseconds, content, length, outgoing)
                place += following
            struct.pack_into("=I", memory, base + 8, 0)  # returns the block to the kernel
            self._next = (self._next + 1) % _BLOCKS

    def count(self) -> None:
        """Bring `seen` and `lost` up to date."""
        seen, lost, _ = struct.unpack("=3I", self._socket.getsockopt(_SOL_PACKET, _STATISTICS, 12))
        self.seen += seen  # the kernel resets its counts on each read
        self.lost += lost

    def close(self) -> None:
        self._memory.close()
        self._socket.close()

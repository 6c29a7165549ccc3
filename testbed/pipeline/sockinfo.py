"""What the kernel counts: TCP_INFO of a socket, and the bytes of a device. Both cost microseconds and touch no packet."""

from __future__ import annotations

import os
import socket
import struct
from typing import Literal, NamedTuple

from testbed.errors import CapabilityError, StageError
from testbed.records import CountersRecord, SocketRecord

# struct tcp_info of <linux/tcp.h>, up to tcpi_bytes_retrans (Linux 4.19): 8 bytes, 24 words from tcpi_rto to
# tcpi_total_retrans, 4 long words, 6 words, 4 long words, 2 words, 2 long words.
_TCP_INFO = struct.Struct("=8B24I4Q6I4Q2I2Q")
_RTT, _CWND, _RETRANSMITS = 8 + 15, 8 + 18, 8 + 23
_SEGMENTS_OUT, _SEGMENTS_IN, _MIN_RTT = 36, 37, 39
_BYTES_SENT, _BYTES_RETRANSMITTED = 48, 49


def congestion_control(sock: socket.socket) -> str:
    """The algorithm that this socket runs, as the kernel says."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0", 1)[0].decode()


def read_socket(sock: socket.socket, peer: Literal["upstream", "downstream"]) -> SocketRecord:
    """TCP_INFO of a connected socket. CapabilityError on a kernel whose TCP_INFO is too short (before 4.19)."""
    found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(found) < _TCP_INFO.size:
        raise CapabilityError(f"TCP_INFO of this kernel has {len(found)} bytes, not {_TCP_INFO.size}; use Linux 4.19 or newer")
    info = _TCP_INFO.unpack_from(found)
    return SocketRecord(
        peer=peer,
        congestion_control=congestion_control(sock),
        rtt_us=info[_RTT],
        min_rtt_us=info[_MIN_RTT],
        cwnd_packets=info[_CWND],
        bytes_sent=info[_BYTES_SENT],
        bytes_retransmitted=info[_BYTES_RETRANSMITTED],
        segments_out=info[_SEGMENTS_OUT],
        segments_in=info[_SEGMENTS_IN],
        retransmits=info[_RETRANSMITS],
    )


class _Counts(NamedTuple):
    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


class DeviceCounters:
    """The counters of one device in this process's network namespace, from the moment that this object was made."""

    def __init__(self, device: str, overhead_bytes: int) -> None:
        """`overhead_bytes` is what the device counts on top of each IP packet. StageError where there is no such device."""
        self._device, self._overhead_bytes = device, overhead_bytes
        self._file = os.open("/proc/self/net/dev", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._base = self._read()
        except StageError:
            self.close()
            raise

    def _read(self) -> _Counts:
        text = os.pread(self._file, 1 << 16, 0)
        for line in text.splitlines()[2:]:
            name, _, numbers = line.partition(b":")
            if name.strip() == self._device.encode():
                field = [int(number) for number in numbers.split()]
                received_bytes, received_packets, sent_bytes, sent_packets = field[0], field[1], field[8], field[9]
                return _Counts(
                    sent_bytes - sent_packets * self._overhead_bytes,
                    received_bytes - received_packets * self._overhead_bytes,
                    sent_packets,
                    received_packets,
                )
        names = [line.partition(b":")[0].strip().decode() for line in text.splitlines()[2:]]
        raise StageError(f"there is no device {self._device} in the stage's namespace; found: {', '.join(names) or 'none'}")

    def read(self) -> CountersRecord:
        """Bytes of IP packets and packets, each way."""
        now = self._read()
        return CountersRecord(**{name: getattr(now, name) - getattr(self._base, name) for name in _Counts._fields})

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

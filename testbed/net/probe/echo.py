"""ICMP echo trains: crafted and understood by scapy before and after, sent and stamped in between without it.

Dissecting a packet takes scapy longer than a packet takes on the links that are measured. Replies are stamped by the kernel
as they arrive, for how long this process takes to wake up is no property of the link.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from select import select
from typing import NamedTuple

from scapy.layers.inet import ICMP, IP

from testbed.net.probe import ECHO_BYTES

_IP_MTU_DISCOVER, _IP_PMTUDISC_DO = 10, 2
_SO_TIMESTAMPNS = 35
_SOL_RAW, _ICMP_FILTER = 255, 1
_ONLY_REPLIES = struct.pack("=I", 0xFFFFFFFF & ~1)
"""Types that are kept back, by bit: a node in the middle of a line also hears the requests of its other link's probe."""
_TIMESPEC = struct.Struct("@qq")
_HEADERS = 28  # IPv4 and ICMP
PAYLOAD_BYTES = ECHO_BYTES - _HEADERS


class Answer(NamedTuple):
    """A packet as it came."""

    at_ns: int
    """CLOCK_REALTIME, the one that the kernel stamps packets with."""
    packet: bytes


def craft(identifier: int, sequence: int, payload_bytes: int) -> bytes:
    """An ICMP echo request whose payload says whose it is."""
    mark = b"testbed link probe "
    payload = (mark * (payload_bytes // len(mark) + 1))[:payload_bytes]
    return bytes(ICMP(type="echo-request", id=identifier, seq=sequence) / payload)


def understand(answers: list[Answer], identifier: int, source: str) -> dict[int, int]:
    """Sequence number to time of arrival of every echo reply from `source` to our requests; the first copy counts."""
    found: dict[int, int] = {}
    for answer in answers:
        packet = IP(answer.packet)
        if packet.src == source and ICMP in packet and packet[ICMP].type == 0 and packet[ICMP].id == identifier:
            found.setdefault(packet[ICMP].seq, answer.at_ns)
    return found


def open_socket() -> socket.socket:
    """A raw ICMP socket in the calling thread's namespace that never fragments."""
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    raw.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
    raw.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    raw.setsockopt(_SOL_RAW, _ICMP_FILTER, _ONLY_REPLIES)
    raw.setblocking(False)
    return raw


def _collect(raw: socket.socket, until_ns: int, wanted: int, answers: list[Answer]) -> None:
    """Read until `until_ns` (monotonic), or until there are `wanted` answers."""
    while len(answers) < wanted and (left := until_ns - time.monotonic_ns()) > 0:
        if select((raw,), (), (), left * 1e-9)[0]:
            packet, ancillary, _, _ = raw.recvmsg(65535, 64)
            seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
            answers.append(Answer(seconds * 1_000_000_000 + nanoseconds, packet))


def train(raw: socket.socket, target: str, count: int, spacing_ns: int, patience_ns: int) -> tuple[int, list[int]]:
    """Send `count` echoes, one each `spacing_ns`; the size of one packet and the round-trip times of those answered.

    One more goes first and is not counted: it fills caches and, where there are any, neighbour tables.
    """
    identifier = id(raw) & 0xFFFF
    packets = [craft(identifier, sequence, PAYLOAD_BYTES) for sequence in range(count + 1)]
    sent: list[int] = []
    answers: list[Answer] = []
    for number, packet in enumerate(packets):
        sent.append(time.time_ns())
        raw.sendto(packet, (target, 0))
        pause = patience_ns if number in (0, count) else spacing_ns
        # After the first and the last, wait for all that is missing, no longer than patience.
        _collect(raw, time.monotonic_ns() + pause, number + 1 if number in (0, count) else count + 2, answers)
    arrived = understand(answers, identifier, target)
    return len(packets[0]) + 20, [arrived[n] - sent[n] for n in range(1, count + 1) if n in arrived]


def passes(raw: socket.socket, target: str, packet_bytes: int, patience_ns: int, attempts: int) -> bool:
    """Whether an unfragmented IP packet of this size is answered; False when none of the attempts is, or it is too big."""
    identifier = ~id(raw) & 0xFFFF
    for attempt in range(attempts):
        try:
            raw.sendto(craft(identifier, attempt, packet_bytes - _HEADERS), (target, 0))
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                raise
            return False
        answers: list[Answer] = []
        _collect(raw, time.monotonic_ns() + patience_ns, 1, answers)
        if understand(answers, identifier, target):
            return True
    return False


def refused(raw: socket.socket, target: str, packet_bytes: int) -> bool:
    """Whether the kernel refuses to send an unfragmented packet of this size."""
    try:
        raw.sendto(craft(~id(raw) & 0xFFFF, 0xFFFF, packet_bytes - _HEADERS), (target, 0))
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise
        return True
    return False

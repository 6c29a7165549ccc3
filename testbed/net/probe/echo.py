"""Send ICMP echoes and read the replies: round-trip times, and whether a packet of a given size passes unfragmented.
Packets are built before a train and parsed after it, so that nothing but sending and receiving happens in between.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from select import select
from typing import NamedTuple

from testbed.net.probe.job import ECHO_BYTES
from testbed.net.probe.sockets import arrival_ns, stamp_arrivals

_IP_MTU_DISCOVER, _IP_PMTUDISC_DO = 10, 2
_SOL_RAW, _ICMP_FILTER = 255, 1
_ONLY_REPLIES = struct.pack("=I", 0xFFFFFFFF & ~1)
"""Types to filter out, by bit: a middle node of a line also receives requests from its other link's probe."""
_ECHO_REPLY, _ECHO_REQUEST = 0, 8
_ECHO = struct.Struct("!BBHHH")  # type, code, checksum, identifier, sequence number (RFC 792)
_HEADERS = 28  # IPv4 and ICMP
PAYLOAD_BYTES = ECHO_BYTES - _HEADERS


class EchoAnswer(NamedTuple):
    """A received packet."""

    at_ns: int
    """CLOCK_REALTIME, the kernel's clock for stamping packets."""
    packet: bytes
    """From its IPv4 header on."""


def echo_request(identifier: int, sequence: int, payload_bytes: int) -> bytes:
    """Build an ICMP echo request whose payload identifies its sender."""
    mark = b"testbed link probe "
    payload = (mark * (payload_bytes // len(mark) + 1))[:payload_bytes]
    checksum = _checksum(_ECHO.pack(_ECHO_REQUEST, 0, 0, identifier, sequence) + payload)
    return _ECHO.pack(_ECHO_REQUEST, 0, checksum, identifier, sequence) + payload


def _checksum(content: bytes) -> int:
    """Return the Internet checksum (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{(len(content) + 1) // 2}H", content + bytes(len(content) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def echo_replies(answers: list[EchoAnswer], identifier: int, source: str) -> dict[int, int]:
    """Map each sequence number that `source` replied to, to the arrival of the first reply."""
    wanted = socket.inet_aton(source)
    arrived: dict[int, int] = {}
    for at_ns, packet in answers:
        header_bytes = (packet[0] & 0x0F) * 4
        if packet[12:16] != wanted or packet[9] != socket.IPPROTO_ICMP or len(packet) < header_bytes + _ECHO.size:
            continue
        kind, _, _, whose, sequence = _ECHO.unpack_from(packet, header_bytes)
        if kind == _ECHO_REPLY and whose == identifier:
            arrived.setdefault(sequence, at_ns)
    return arrived


def open_echo_socket() -> socket.socket:
    """Open a raw ICMP socket in the calling thread's namespace that never fragments and receives only replies."""
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    raw.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DO)
    stamp_arrivals(raw)
    raw.setsockopt(_SOL_RAW, _ICMP_FILTER, _ONLY_REPLIES)
    raw.setblocking(False)
    return raw


def _collect(raw: socket.socket, until_ns: int, wanted: int, answers: list[EchoAnswer]) -> None:
    """Read until `until_ns` (monotonic), or until there are `wanted` answers."""
    while len(answers) < wanted and (left := until_ns - time.monotonic_ns()) > 0:
        if select((raw,), (), (), left * 1e-9)[0]:
            packet, ancillary, _, _ = raw.recvmsg(65535, 64)
            answers.append(EchoAnswer(arrival_ns(ancillary), packet))


def echo_train(raw: socket.socket, target: str, count: int, spacing_ns: int, patience_ns: int) -> tuple[int, list[int]]:
    """Send `count` echoes, one each `spacing_ns`; return the size of one packet and the round-trip times. An uncounted
    first one fills caches and neighbour tables.
    """
    identifier = id(raw) & 0xFFFF
    packets = [echo_request(identifier, sequence, PAYLOAD_BYTES) for sequence in range(count + 1)]
    sent: list[int] = []
    answers: list[EchoAnswer] = []
    for number, packet in enumerate(packets):
        sent.append(time.time_ns())
        raw.sendto(packet, (target, 0))
        pause = patience_ns if number in (0, count) else spacing_ns
        # After the first and the last, wait for missing replies, at most `patience_ns`.
        _collect(raw, time.monotonic_ns() + pause, number + 1 if number in (0, count) else count + 2, answers)
    arrived = echo_replies(answers, identifier, target)
    return len(packets[0]) + 20, [arrived[n] - sent[n] for n in range(1, count + 1) if n in arrived]


def packet_passes(raw: socket.socket, target: str, packet_bytes: int, patience_ns: int, attempts: int) -> bool:
    """Return whether one of the attempts gets a reply to an unfragmented IP packet of this size."""
    identifier = ~id(raw) & 0xFFFF
    for attempt in range(attempts):
        if packet_refused(raw, target, packet_bytes, attempt):
            return False
        answers: list[EchoAnswer] = []
        _collect(raw, time.monotonic_ns() + patience_ns, 1, answers)
        if echo_replies(answers, identifier, target):
            return True
    return False


def packet_refused(raw: socket.socket, target: str, packet_bytes: int, sequence: int = 0xFFFF) -> bool:
    """Send an unfragmented packet of this size; returns whether the kernel refuses."""
    try:
        raw.sendto(echo_request(~id(raw) & 0xFFFF, sequence, packet_bytes - _HEADERS), (target, 0))
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise
        return True
    return False

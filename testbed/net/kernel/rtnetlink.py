"""Route netlink as bytes: packing of requests and parsing of the kernel's responses. Pure.

pyroute2's message classes pack requests in the kernel's layouts; its sockets are not used, because they send one
request at a time and fork to enter another namespace. This module parses responses itself, independently of the
packing, so that a packing error cannot confirm itself on reading back. (pyroute2 0.9.7's own netem has several.)
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from testbed.net.kernel.messages import HEADER, attributes, text
from testbed.net.kernel.packing import nlmsg, tcmsg

REPLACE, EXCLUSIVE, CREATE = 0x100, 0x200, 0x400
NEW_LINK, GET_LINK, NEW_ADDRESS, NEW_ROUTE, GET_ROUTE = 16, 18, 20, 24, 26
NEW_NEIGHBOUR, NEW_QDISC, DELETE_QDISC, GET_QDISC, NEW_CLASS, GET_CLASS = 28, 36, 37, 38, 40, 42
ROOT = 0xFFFFFFFF
"""The parent of a device's root qdisc."""

STATE_UP = 6
"""The device has a carrier, and the kernel has processed that."""

_LINK = struct.Struct("=BxHiII")  # family, hardware type, index, flags, which flags are meant
# family, destination length, source length, tos, table, protocol, scope, type, flags
_ROUTE = struct.Struct("=BBBBBBBBI")
QDISC = struct.Struct("=BxxxiIII")  # family, index, handle, parent, info
UP = 1
MAIN_TABLE = 254
_NAME, _MAC, _MTU, _QUEUE, _STATE = 3, 1, 4, 13, 16
_DESTINATION, _OUT_DEVICE, _METRICS, _CONGESTION_CONTROL = 1, 4, 8, 16
_KIND, _OPTIONS, _STATISTICS, _SIZES = 1, 2, 7, 8


class NetworkDevice(NamedTuple):
    """A device as reported by the kernel."""

    number: int
    """The kernel's index of the device."""
    name: str
    mac: str | None
    mtu: int
    queue_packets: int
    up: bool
    state: int
    """RFC 2863's operational state: see STATE_UP."""


class Qdisc(NamedTuple):
    """A qdisc or class of a device as reported by the kernel."""

    device: int
    """The device's index."""
    handle: int
    parent: int
    kind: str
    options: bytes
    statistics: bytes
    """TCA_STATS2; netem.py reads it."""
    sizes: bytes
    """TCA_STAB: how packets are counted."""


class HeldRoute(NamedTuple):
    """A route as reported by the kernel."""

    destination: str
    """'default' or a prefix."""
    device: int
    congestion_control: str | None


def packed(message: nlmsg, fields: Mapping[str, int], stated: Sequence[tuple[str, Any]]) -> bytes:
    """Pack the body of a request, without its header."""
    for name, value in fields.items():
        message[name] = value
    message["attrs"] = list(stated)
    message["header"]["type"] = message["header"]["flags"] = 0
    message.encode()
    return bytes(message.data)[HEADER.size :]


class QdiscRequest(nlmsg):  # type: ignore[misc]  # pyroute2 is untyped
    """A qdisc request (struct tcmsg) whose options stay bytes: netem.py packs them."""

    prefix = "TCA_"
    fields = tcmsg.fields
    nla_map = (
        (0, "TCA_UNSPEC", "none"),
        (1, "TCA_KIND", "asciiz"),
        (2, "TCA_OPTIONS", "cdata"),
        (8, "TCA_STAB", "cdata"),
    )


def read_link(body: bytes) -> NetworkDevice:
    """Parse a device from NEW_LINK."""
    _, _, index, flags, _ = _LINK.unpack_from(body)
    held = attributes(body, _LINK.size)
    mac = held.get(_MAC)
    return NetworkDevice(
        number=index,
        name=text(held[_NAME]),
        mac=mac.hex(":") if mac else None,
        mtu=_integer(held[_MTU]),
        queue_packets=_integer(held[_QUEUE]),
        up=bool(flags & UP),
        state=held.get(_STATE, b"\0")[0],
    )


def read_qdisc(body: bytes) -> Qdisc:
    """Parse NEW_QDISC or NEW_CLASS."""
    _, index, handle, parent, _ = QDISC.unpack_from(body)
    held = attributes(body, QDISC.size)
    content = (held.get(kind, b"") for kind in (_OPTIONS, _STATISTICS, _SIZES))
    return Qdisc(index, handle, parent, text(held[_KIND]), *content)


def read_route(body: bytes) -> HeldRoute | None:
    """Parse a route of the main table from NEW_ROUTE; None for another table, or without a device."""
    _, length, _, _, table, *_ = _ROUTE.unpack_from(body)
    held = attributes(body, _ROUTE.size)
    if table != MAIN_TABLE or _OUT_DEVICE not in held:
        return None
    algorithm = attributes(held.get(_METRICS, b"")).get(_CONGESTION_CONTROL)
    destination = f"{socket.inet_ntoa(held[_DESTINATION])}/{length}" if length else "default"
    return HeldRoute(destination, _integer(held[_OUT_DEVICE]), text(algorithm) if algorithm else None)


def _integer(content: bytes) -> int:
    return int.from_bytes(content, "little" if struct.pack("=H", 1)[0] else "big")

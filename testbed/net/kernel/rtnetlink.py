"""Route netlink as bytes: how requests are packed, and what the kernel's answers mean. Pure.

Requests are packed by pyroute2's message classes, which know the kernel's layouts; its sockets are not used, because
they send one request at a time and go into another namespace by forking. Answers are understood here, apart from what
packed the requests: so that a fault of the packing cannot confirm itself when what was set is read back. (pyroute2
0.9.7's own netem has several.)
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pyroute2.netlink import nlmsg
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from testbed.net.kernel.messages import HEADER, attributes, text

REPLACE, EXCLUSIVE, CREATE = 0x100, 0x200, 0x400
NEW_LINK, GET_LINK, NEW_ADDRESS, NEW_ROUTE, GET_ROUTE = 16, 18, 20, 24, 26
NEW_NEIGHBOUR, NEW_QDISC, GET_QDISC = 28, 36, 38
ROOT = 0xFFFFFFFF
"""The parent of a device's root qdisc."""

STATE_UP = 6
"""The device has a carrier, and the kernel has acted on it."""

_LINK = struct.Struct("=BxHiII")  # family, hardware type, index, flags, which flags are meant
# family, destination length, source length, tos, table, protocol, scope, type, flags
_ROUTE = struct.Struct("=BBBBBBBBI")
QDISC = struct.Struct("=BxxxiIII")  # family, index, handle, parent, info
UP = 1
MAIN_TABLE = 254
_NAME, _MAC, _MTU, _QUEUE, _STATE = 3, 1, 4, 13, 16
_DESTINATION, _OUT_DEVICE, _METRICS, _CONGESTION_CONTROL = 1, 4, 8, 16
_KIND, _OPTIONS, _STATISTICS = 1, 2, 7


class NetworkDevice(NamedTuple):
    """A device as the kernel says it is."""

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
    """The root qdisc of a device as the kernel says it is."""

    kind: str
    options: bytes
    statistics: bytes
    """TCA_STATS2; netem.py reads it."""


class HeldRoute(NamedTuple):
    """A route as the kernel says it is."""

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
    nla_map = (("TCA_UNSPEC", "none"), ("TCA_KIND", "asciiz"), ("TCA_OPTIONS", "cdata"))


def read_link(body: bytes) -> NetworkDevice:
    """Read a device out of NEW_LINK."""
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


def read_qdisc(body: bytes) -> tuple[int, bool, Qdisc]:
    """Read NEW_QDISC: the device's index, whether the qdisc is its root, and the qdisc."""
    _, index, _, parent, _ = QDISC.unpack_from(body)
    held = attributes(body, QDISC.size)
    return index, parent == ROOT, Qdisc(text(held[_KIND]), held.get(_OPTIONS, b""), held.get(_STATISTICS, b""))


def read_route(body: bytes) -> HeldRoute | None:
    """Read a route of the main table out of NEW_ROUTE; None for one of another table, or without a device."""
    _, length, _, _, table, *_ = _ROUTE.unpack_from(body)
    held = attributes(body, _ROUTE.size)
    if table != MAIN_TABLE or _OUT_DEVICE not in held:
        return None
    algorithm = attributes(held.get(_METRICS, b"")).get(_CONGESTION_CONTROL)
    destination = f"{socket.inet_ntoa(held[_DESTINATION])}/{length}" if length else "default"
    return HeldRoute(destination, _integer(held[_OUT_DEVICE]), text(algorithm) if algorithm else None)


def _integer(content: bytes) -> int:
    return int.from_bytes(content, "little" if struct.pack("=H", 1)[0] else "big")

"""Route netlink as bytes. Pure; netlink.py sends and receives them.

Requests are packed by pyroute2's message classes, which know the kernel's layouts; its sockets are not used, because they send
one request at a time and go into another namespace by forking. Answers are understood here, apart from what packed the requests:
so a fault of the packing cannot confirm itself when what was set is read back. (pyroute2 0.9.7's own netem has several.)
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pyroute2.netlink import nlmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg
from pyroute2.netlink.rtnl.tcmsg import tcmsg

REQUEST, ACK, DUMP, DUMP_INTERRUPTED = 0x1, 0x4, 0x300, 0x10
REPLACE, EXCLUSIVE, CREATE = 0x100, 0x200, 0x400
ERROR, DONE = 2, 3
NEW_LINK, GET_LINK, NEW_ADDRESS, NEW_ROUTE, GET_ROUTE, NEW_NEIGHBOUR, NEW_QDISC, GET_QDISC = (
    16,
    18,
    20,
    24,
    26,
    28,
    36,
    38,
)
ROOT = 0xFFFFFFFF
"""The parent of a device's root qdisc."""

STATE_UP = 6
"""The device has a carrier, and the kernel has acted on it."""

HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ATTRIBUTE = struct.Struct("=HH")
_LINK = struct.Struct("=BxHiII")  # family, hardware type, index, flags, which flags are meant
_ROUTE = struct.Struct(
    "=BBBBBBBBI"
)  # family, destination length, source length, tos, table, protocol, scope, type, flags
_QDISC = struct.Struct("=BxxxiIII")  # family, index, handle, parent, info
_UP, _PERMANENT, _ONLINK = 1, 0x80, 4
_MAIN_TABLE, _BY_ADMINISTRATOR, _UNICAST, _SCOPE_LINK, _SCOPE_GLOBAL = 254, 4, 1, 253, 0
_IFNAME, _MAC, _MTU, _QUEUE, _STATE = 3, 1, 4, 13, 16
_SKIP_STATISTICS = 8
_METRICS, _CONGESTION_CONTROL = 8, 16


class Device(NamedTuple):
    """A device as the kernel says it is."""

    number: int
    """The kernel's index of it."""
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
    """TCA_STATS2; tca.py understands it."""


class HeldRoute(NamedTuple):
    """A route as the kernel says it is."""

    destination: str
    """'default' or a prefix."""
    device: int
    congestion_control: str | None


def _packed(message: nlmsg, fields: Mapping[str, int], attributes: Sequence[tuple[str, Any]]) -> bytes:
    """The body of a request, without its header."""
    for name, value in fields.items():
        message[name] = value
    message["attrs"] = list(attributes)
    message["header"]["type"] = message["header"]["flags"] = 0
    message.encode()
    return bytes(message.data)[HEADER.size :]


def attributes(content: bytes, at: int) -> dict[int, bytes]:
    """The attributes that begin at `at`; of several of a kind the last."""
    found = {}
    while at + 4 <= len(content):
        length, kind = _ATTRIBUTE.unpack_from(content, at)
        if length < 4:
            break
        found[kind & 0x3FFF] = content[at + 4 : at + length]
        at += length + -length % 4
    return found


def new_veth(device: str, mac: str, mtu: int, peer_netns: int, peer: str, peer_mac: str) -> bytes:
    """Make a veth pair, one end here and one in the namespace of that descriptor, both down."""
    far = [("IFLA_IFNAME", peer), ("IFLA_ADDRESS", peer_mac), ("IFLA_MTU", mtu), ("IFLA_NET_NS_FD", peer_netns)]
    kind = [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", {"attrs": [("VETH_INFO_PEER", {"attrs": far})]})]
    near = [("IFLA_IFNAME", device), ("IFLA_ADDRESS", mac), ("IFLA_MTU", mtu), ("IFLA_LINKINFO", {"attrs": kind})]
    return _packed(ifinfmsg(), {}, near)


def set_up(index: int, mtu: int | None, queue_packets: int | None) -> bytes:
    """Switch a device on."""
    stated = [(name, value) for name, value in (("IFLA_MTU", mtu), ("IFLA_TXQLEN", queue_packets)) if value is not None]
    return _packed(ifinfmsg(), {"index": index, "flags": _UP, "change": _UP}, stated)


def new_address(index: int, address: str) -> bytes:
    """An address that stands alone (/32)."""
    stated = [("IFA_ADDRESS", address), ("IFA_LOCAL", address)]
    return _packed(ifaddrmsg(), {"family": socket.AF_INET, "prefixlen": 32, "index": index}, stated)


def new_route(
    destination: str, index: int, *, via: str | None, source: str | None, congestion_control: str | None
) -> bytes:
    """A route to 'default' or a prefix, out of a device."""
    prefix, _, length = ("", "/", "0") if destination == "default" else destination.partition("/")
    fields = {
        "family": socket.AF_INET,
        "dst_len": int(length),
        "table": _MAIN_TABLE,
        "proto": _BY_ADMINISTRATOR,
        "scope": _SCOPE_GLOBAL if via else _SCOPE_LINK,
        "type": _UNICAST,
        "flags": _ONLINK if via else 0,
    }
    stated: list[tuple[str, Any]] = [("RTA_DST", prefix)] if prefix else []
    stated.append(("RTA_OIF", index))
    stated += [(name, value) for name, value in (("RTA_GATEWAY", via), ("RTA_PREFSRC", source)) if value]
    if congestion_control:
        stated.append(("RTA_METRICS", {"attrs": [("RTAX_CC_ALGO", congestion_control)]}))
    return _packed(rtmsg(), fields, stated)


def new_neighbour(index: int, address: str, mac: str) -> bytes:
    """A neighbour that is never asked for."""
    fields = {"family": socket.AF_INET, "ifindex": index, "state": _PERMANENT}
    return _packed(ndmsg(), fields, [("NDA_DST", address), ("NDA_LLADDR", mac)])


class _QdiscRequest(nlmsg):  # type: ignore[misc]  # pyroute2 is untyped
    """A qdisc request (struct tcmsg) whose options stay bytes: tca.py makes them."""

    prefix = "TCA_"
    fields = tcmsg.fields
    nla_map = (("TCA_UNSPEC", "none"), ("TCA_KIND", "asciiz"), ("TCA_OPTIONS", "cdata"))


def new_qdisc(index: int, kind: str, options: bytes) -> bytes:
    """A root qdisc, or its change."""
    return _packed(_QdiscRequest(), {"index": index, "parent": ROOT}, [("TCA_KIND", kind), ("TCA_OPTIONS", options)])


def all_links() -> bytes:
    """The body of a dump of devices, without their statistics."""
    return _packed(ifinfmsg(), {}, [("IFLA_EXT_MASK", _SKIP_STATISTICS)])


def all_routes() -> bytes:
    """The body of a dump of IPv4 routes."""
    return _packed(rtmsg(), {"family": socket.AF_INET}, [])


def all_qdiscs() -> bytes:
    """The body of a dump of qdiscs."""
    return bytes(_QDISC.size)


def understand_link(body: bytes) -> Device:
    """A device out of NEW_LINK."""
    _, _, index, flags, _ = _LINK.unpack_from(body)
    found = attributes(body, _LINK.size)
    mac = found.get(_MAC)
    return Device(
        number=index,
        name=_string(found[_IFNAME]),
        mac=mac.hex(":") if mac else None,
        mtu=_integer(found[_MTU]),
        queue_packets=_integer(found[_QUEUE]),
        up=bool(flags & _UP),
        state=found.get(_STATE, b"\0")[0],
    )


def understand_qdisc(body: bytes) -> tuple[int, bool, Qdisc]:
    """The device's index, whether it is its root, and the qdisc, out of NEW_QDISC."""
    _, index, _, parent, _ = _QDISC.unpack_from(body)
    found = attributes(body, _QDISC.size)
    return index, parent == ROOT, Qdisc(_string(found[1]), found.get(2, b""), found.get(7, b""))


def understand_route(body: bytes) -> HeldRoute | None:
    """A route of the main table out of NEW_ROUTE."""
    _, length, _, _, table, *_ = _ROUTE.unpack_from(body)
    found = attributes(body, _ROUTE.size)
    if table != _MAIN_TABLE or 4 not in found:
        return None
    algorithm = attributes(found.get(_METRICS, b""), 0).get(_CONGESTION_CONTROL)
    destination = f"{socket.inet_ntoa(found[1])}/{length}" if length else "default"
    return HeldRoute(destination, _integer(found[4]), _string(algorithm) if algorithm else None)


def understand_error(body: bytes, flags: int) -> tuple[int, str]:
    """The errno (0: an acknowledgement) out of ERROR, and what the kernel says about it, if anything."""
    number = -struct.unpack_from("=i", body)[0]
    at = 4 + HEADER.size  # the header of the request; its body only where it is not capped
    if not flags & 0x100:
        (length,) = struct.unpack_from("=I", body, 4)
        at = 4 + length + -length % 4 if number else at
    told = attributes(body, at).get(1, b"") if flags & 0x200 else b""
    return number, _string(told)


def framed(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """A request with its header, padded so that another may follow."""
    return HEADER.pack(HEADER.size + len(body), kind, flags, sequence, 0) + body + bytes(-len(body) % 4)


def messages(content: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(type, flags, sequence, body) of each message in what a socket has received."""
    at = 0
    while at + HEADER.size <= len(content):
        length, kind, flags, sequence, _ = HEADER.unpack_from(content, at)
        yield kind, flags, sequence, content[at + HEADER.size : at + length]
        at += length + -length % 4


def _string(content: bytes) -> str:
    return content.split(b"\0")[0].decode(errors="replace")


def _integer(content: bytes) -> int:
    return int.from_bytes(content, "little" if struct.pack("=H", 1)[0] else "big")

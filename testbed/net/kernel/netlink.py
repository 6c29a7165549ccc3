"""Configure one network namespace through a netlink socket inside it: devices, addresses, routes, neighbours, qdiscs.

pyroute2 packs the requests and rtnetlink.py reads the answers; this says what is asked for, sends many requests at
once, and says what was refused, and why.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from testbed.closing import Closing
from testbed.errors import CapabilityError, LabError
from testbed.net.kernel import messages, rtnetlink
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.rtnetlink import HeldRoute, NetworkDevice, Qdisc

_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_AT_ONCE = 64  # a socket's receive buffer surely holds that many acknowledgements
_LARGEST_ANSWER = 1 << 17
_NEW = rtnetlink.CREATE | rtnetlink.EXCLUSIVE
_SKIP_STATISTICS = 8
_PERMANENT, _ONLINK = 0x80, 4
_BY_ADMINISTRATOR, _UNICAST, _SCOPE_LINK, _SCOPE_GLOBAL = 4, 1, 253, 0


def dump_answers(sock: socket.socket, sequence: int) -> Iterator[tuple[int, int, bytes]]:
    """Give (type, flags, body) of each answer to a dump request, DONE included; skip answers to earlier requests."""
    while True:
        for kind, flags, number, body in messages.split_messages(sock.recv(_LARGEST_ANSWER)):
            if number == sequence:
                yield kind, flags, body
                if kind == messages.DONE:
                    return


class _Step(NamedTuple):
    """A request and what it is for."""

    attempt: str
    kind: int
    flags: int
    body: bytes
    without: str | None = None
    """What this kernel lacks when it answers ENOENT; None: then something else is missing."""


class Netlink(Closing):
    """One namespace's network configuration; a context manager. LabError names the step that failed.

    Inside `with netlink.batch():` steps are only noted, and sent together at its end.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._indices: dict[str, int] = {}
        self._waiting: list[_Step] | None = None
        self._sequence = 0
        try:
            with namespace.entered():  # a socket stays in its namespace
                self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        except OSError as error:
            raise LabError(f"{namespace.name}: cannot open a netlink socket: {error.strerror}") from None
        self._socket.bind((0, 0))
        self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)  # the kernel's own words with an error

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Send the steps stated inside together, in their order: one system call for up to 64.

        Errors are those of each step.
        """
        assert self._waiting is None
        self._waiting = []
        try:
            yield
            steps, self._waiting = self._waiting, None
            self._send(steps)
        finally:
            self._waiting = None

    def _do(self, attempt: str, kind: int, flags: int, body: bytes, without: str | None = None) -> None:
        step = _Step(attempt, kind, flags, body, without)
        if self._waiting is None:
            self._send([step])
        else:
            self._waiting.append(step)

    def _send(self, steps: list[_Step]) -> None:
        for first in range(0, len(steps), _AT_ONCE):
            part = steps[first : first + _AT_ONCE]
            base, self._sequence = self._sequence + 1, self._sequence + len(part)
            request = b"".join(
                messages.frame(step.kind, messages.REQUEST | messages.ACK | step.flags, base + i, step.body)
                for i, step in enumerate(part)
            )
            self._socket.send(request)
            for step, (number, told) in zip(part, self._acknowledgements(base, len(part)), strict=True):
                if number:  # the first: what fails later may be its consequence
                    raise self._error(step, number, told)

    def _acknowledgements(self, first: int, count: int) -> list[tuple[int, str]]:
        """Collect (errno, the kernel's words) of `count` requests, whose sequence numbers begin at `first`."""
        answers: dict[int, tuple[int, str]] = {}
        while len(answers) < count:
            for kind, flags, sequence, body in messages.split_messages(self._socket.recv(_LARGEST_ANSWER)):
                if kind == messages.ERROR and first <= sequence < first + count:
                    answers[sequence] = messages.read_error(body, flags)
        return [answers[first + i] for i in range(count)]

    def _error(self, step: _Step, number: int, told: str) -> LabError | CapabilityError:
        name, why = self.namespace.name, f"{os.strerror(number)}{f' ({told})' if told else ''}"
        if number in (errno.EPERM, errno.EACCES):
            return CapabilityError(f"{name}: not permitted to {step.attempt}; run as root (sudo python -m testbed ...)")
        if number == errno.EOPNOTSUPP:
            return CapabilityError(f"{name}: this kernel cannot {step.attempt}: {why}")
        if number == errno.ENOENT and step.without:
            return CapabilityError(f"this kernel has no {step.without} ({name}: cannot {step.attempt})")
        return LabError(f"{name}: cannot {step.attempt}: {why}")

    def _dump(self, kind: int, body: bytes, attempt: str) -> list[tuple[int, bytes]]:
        """Return every (type, body) that the kernel lists."""
        self._sequence += 1
        self._socket.send(messages.frame(kind, messages.REQUEST | messages.DUMP, self._sequence, body))
        listed: list[tuple[int, bytes]] = []
        for answer, flags, content in dump_answers(self._socket, self._sequence):
            if answer == messages.ERROR:
                raise self._error(_Step(attempt, kind, 0, body), *messages.read_error(content, flags))
            if flags & messages.DUMP_INTERRUPTED:
                raise LabError(f"{self.namespace.name}: cannot {attempt}: somebody else changed it meanwhile")
            listed.append((answer, content))
        return listed

    def devices(self) -> dict[str, NetworkDevice]:
        """List every device by name."""
        question = rtnetlink.packed(ifinfmsg(), {}, [("IFLA_EXT_MASK", _SKIP_STATISTICS)])
        bodies = self._dump(rtnetlink.GET_LINK, question, "list the devices")
        devices = [rtnetlink.read_link(body) for kind, body in bodies if kind == rtnetlink.NEW_LINK]
        self._indices = {device.name: device.number for device in devices}
        return {device.name: device for device in devices}

    def _index(self, device: str) -> int:
        if device not in self._indices:
            self.devices()
        if device not in self._indices:
            raise LabError(f"{self.namespace.name}: there is no device {device}; it has: {', '.join(self._indices)}")
        return self._indices[device]

    def add_veth(self, device: str, mac: str, mtu: int, peer: Namespace, peer_device: str, peer_mac: str) -> None:
        """Lay a veth cable from here into another namespace; both ends are still down."""
        far = [("IFLA_IFNAME", peer_device), ("IFLA_ADDRESS", peer_mac), ("IFLA_MTU", mtu), ("IFLA_NET_NS_FD", peer.fd)]
        kind = [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", {"attrs": [("VETH_INFO_PEER", {"attrs": far})]})]
        near = [("IFLA_IFNAME", device), ("IFLA_ADDRESS", mac), ("IFLA_MTU", mtu), ("IFLA_LINKINFO", {"attrs": kind})]
        attempt = f"lay a veth cable {device} to {peer_device} in {peer.name}"
        self._do(attempt, rtnetlink.NEW_LINK, _NEW, rtnetlink.packed(ifinfmsg(), {}, near))

    def set_up(self, device: str, *, mtu: int | None = None, queue_packets: int | None = None) -> None:
        """Switch a device on."""
        fields = {"index": self._index(device), "flags": rtnetlink.UP, "change": rtnetlink.UP}
        asked = {"IFLA_MTU": mtu, "IFLA_TXQLEN": queue_packets}
        stated = [(name, value) for name, value in asked.items() if value is not None]
        self._do(f"switch {device} on", rtnetlink.NEW_LINK, 0, rtnetlink.packed(ifinfmsg(), fields, stated))

    def add_address(self, device: str, address: str) -> None:
        """Give a device an address of its own, without a subnet around it (/32)."""
        fields = {"family": socket.AF_INET, "prefixlen": 32, "index": self._index(device)}
        body = rtnetlink.packed(ifaddrmsg(), fields, [("IFA_ADDRESS", address), ("IFA_LOCAL", address)])
        self._do(f"give {device} the address {address}", rtnetlink.NEW_ADDRESS, _NEW, body)

    def add_route(
        self,
        destination: str,
        device: str,
        *,
        via: str | None,
        source: str | None,
        congestion_control: str | None = None,
    ) -> None:
        """Route `destination` ("default" or a prefix) through a device: to the neighbour `via`, or straight out of it.

        `congestion_control`: what the TCP connections that take it use, unless their program chooses another.
        """
        prefix, _, length = ("", "/", "0") if destination == "default" else destination.partition("/")
        fields = {
            "family": socket.AF_INET,
            "dst_len": int(length),
            "table": rtnetlink.MAIN_TABLE,
            "proto": _BY_ADMINISTRATOR,
            "scope": _SCOPE_GLOBAL if via else _SCOPE_LINK,
            "type": _UNICAST,
            "flags": _ONLINK if via else 0,
        }
        metrics = {"attrs": [("RTAX_CC_ALGO", congestion_control)]} if congestion_control else None
        asked = {
            "RTA_DST": prefix,
            "RTA_OIF": self._index(device),
            "RTA_GATEWAY": via,
            "RTA_PREFSRC": source,
            "RTA_METRICS": metrics,
        }
        stated = [(name, value) for name, value in asked.items() if value]
        attempt = f"route {destination} through {device}" + (f" to {via}" if via else "")
        attempt += f" with the congestion control {congestion_control}" if congestion_control else ""
        self._do(attempt, rtnetlink.NEW_ROUTE, _NEW, rtnetlink.packed(rtmsg(), fields, stated))

    def routes(self) -> list[HeldRoute]:
        """List every IPv4 route of the main table."""
        question = rtnetlink.packed(rtmsg(), {"family": socket.AF_INET}, [])
        bodies = self._dump(rtnetlink.GET_ROUTE, question, "list the routes")
        routes = (rtnetlink.read_route(body) for kind, body in bodies if kind == rtnetlink.NEW_ROUTE)
        return [route for route in routes if route is not None]

    def add_neighbour(self, device: str, address: str, mac: str) -> None:
        """State a neighbour's MAC for good: no ARP crosses the links, where it would use up draws of the loss model."""
        fields = {"family": socket.AF_INET, "ifindex": self._index(device), "state": _PERMANENT}
        body = rtnetlink.packed(ndmsg(), fields, [("NDA_DST", address), ("NDA_LLADDR", mac)])
        self._do(f"note the neighbour {address} of {device}", rtnetlink.NEW_NEIGHBOUR, _NEW, body)

    def set_root_qdisc(self, device: str, kind: str, options: bytes) -> None:
        """Put a qdisc on a device in place of the one it has.

        CapabilityError when the kernel does not know the kind.
        """
        flags = rtnetlink.CREATE | rtnetlink.REPLACE
        self._qdisc(f"put the qdisc {kind} on {device}", flags, device, kind, options, without=f"sch_{kind}")

    def change_root_qdisc(self, device: str, kind: str, options: bytes) -> None:
        """Change the qdisc that a device has, and keep what waits in it. LabError when it has none of this kind."""
        self._qdisc(f"change the qdisc {kind} on {device}", 0, device, kind, options)

    def _qdisc(
        self, attempt: str, flags: int, device: str, kind: str, options: bytes, without: str | None = None
    ) -> None:
        fields = {"index": self._index(device), "parent": rtnetlink.ROOT}
        body = rtnetlink.packed(rtnetlink.QdiscRequest(), fields, [("TCA_KIND", kind), ("TCA_OPTIONS", options)])
        self._do(attempt, rtnetlink.NEW_QDISC, flags, body, without)

    def root_qdiscs(self) -> dict[str, Qdisc]:
        """List the root qdisc of every device that has one."""
        bodies = self._dump(rtnetlink.GET_QDISC, bytes(rtnetlink.QDISC.size), "read the qdiscs back")
        qdiscs = [rtnetlink.read_qdisc(body) for kind, body in bodies if kind == rtnetlink.NEW_QDISC]
        if not {index for index, _, _ in qdiscs} <= set(self._indices.values()):
            self.devices()
        names = {number: name for name, number in self._indices.items()}
        return {names[index]: qdisc for index, root, qdisc in qdiscs if root and index in names}

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

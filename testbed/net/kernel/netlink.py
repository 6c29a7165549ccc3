"""Configure one network namespace through a netlink socket inside it: devices, addresses, routes, neighbours, qdiscs.

pyroute2 packs the requests and rtnetlink.py reads the responses; this module defines requests, sends them in batches,
and reports refusals with reasons.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from testbed.closing import Closing
from testbed.errors import CapabilityError, LabError
from testbed.net.kernel import messages, rtnetlink
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.packing import ifaddrmsg, ifinfmsg, ndmsg, rtmsg
from testbed.net.kernel.rtnetlink import HeldRoute, NetworkDevice, Qdisc

_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
_AT_ONCE = 64  # a socket's receive buffer always holds this many acknowledgements
_LARGEST_ANSWER = 1 << 17
_NEW = rtnetlink.CREATE | rtnetlink.EXCLUSIVE
_SKIP_STATISTICS = 8
_PERMANENT, _ONLINK = 0x80, 4
_BY_ADMINISTRATOR, _UNICAST, _SCOPE_LINK, _SCOPE_GLOBAL = 4, 1, 253, 0


def dump_answers(sock: socket.socket, sequence: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield (type, flags, body) of each response to a dump request, including DONE; skip responses to earlier
    requests.
    """
    while True:
        for kind, flags, number, body in messages.split_messages(sock.recv(_LARGEST_ANSWER)):
            if number == sequence:
                yield kind, flags, body
                if kind == messages.DONE:
                    return


_LEVELS = 2


def _handle_of(level: int) -> int:
    """Return the handle of the qdisc at a level behind the root; its only class is that plus 1."""
    return 0x20000 + level * 0x10000


class _Step(NamedTuple):
    """A request and its purpose."""

    attempt: str
    kind: int
    flags: int
    body: bytes
    without: str | None = None
    """The feature that this kernel lacks if it returns ENOENT; None: something else is missing."""


class Netlink(Closing):
    """One namespace's network configuration; a context manager. LabError names the step that failed.

    Inside `with netlink.batch():` steps are queued, and sent together at its end.
    """

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._indices: dict[str, int] = {}
        self._waiting: list[_Step] | None = None
        self._sequence = 0
        try:
            with namespace.entered():  # a socket keeps its namespace
                self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        except OSError as error:
            raise LabError(f"{namespace.name}: cannot open a netlink socket: {error.strerror}") from None
        self._socket.bind((0, 0))
        self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)  # the kernel's explanation of an error

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Send the steps inside together, in order: one system call for up to 64.

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
                if number:  # the first one: later failures may be consequences
                    raise self._error(step, number, told)

    def _acknowledgements(self, first: int, count: int) -> list[tuple[int, str]]:
        """Collect (errno, kernel's explanation) of `count` requests with sequence numbers from `first` on."""
        answers: dict[int, tuple[int, str]] = {}
        while len(answers) < count:
            for kind, flags, sequence, body in messages.split_messages(self._socket.recv(_LARGEST_ANSWER)):
                if kind == messages.ERROR and first <= sequence < first + count:
                    answers[sequence] = messages.read_error(body, flags)
        return [answers[first + i] for i in range(count)]

    def _error(self, step: _Step, number: int, told: str) -> LabError | CapabilityError:
        name, why = self.namespace.name, f"{os.strerror(number)}{f' ({told})' if told else ''}"
        if number in (errno.EPERM, errno.EACCES):
            return CapabilityError(f"{name}: not permitted to {step.attempt}; run as root (sudo .venv/bin/testbed ...)")
        if number == errno.EOPNOTSUPP:
            return CapabilityError(f"{name}: this kernel cannot {step.attempt}: {why}")
        if number == errno.ENOENT and step.without:
            return CapabilityError(f"this kernel has no {step.without} ({name}: cannot {step.attempt})")
        return LabError(f"{name}: cannot {step.attempt}: {why}")

    def _dump(self, kind: int, body: bytes, attempt: str) -> list[tuple[int, bytes]]:
        """Return every (type, body) of the kernel's list."""
        self._sequence += 1
        self._socket.send(messages.frame(kind, messages.REQUEST | messages.DUMP, self._sequence, body))
        listed: list[tuple[int, bytes]] = []
        for answer, flags, content in dump_answers(self._socket, self._sequence):
            if answer == messages.ERROR:
                raise self._error(_Step(attempt, kind, 0, body), *messages.read_error(content, flags))
            if flags & messages.DUMP_INTERRUPTED:
                raise LabError(
                    f"{self.namespace.name}: cannot {attempt}: another process changed it at the same time; try again"
                )
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
        """Create a veth cable into another namespace; both ends are still down."""
        far = [("IFLA_IFNAME", peer_device), ("IFLA_ADDRESS", peer_mac), ("IFLA_MTU", mtu), ("IFLA_NET_NS_FD", peer.fd)]
        kind = [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", {"attrs": [("VETH_INFO_PEER", {"attrs": far})]})]
        near = [("IFLA_IFNAME", device), ("IFLA_ADDRESS", mac), ("IFLA_MTU", mtu), ("IFLA_LINKINFO", {"attrs": kind})]
        attempt = f"create a veth cable {device} to {peer_device} in {peer.name}"
        self._do(attempt, rtnetlink.NEW_LINK, _NEW, rtnetlink.packed(ifinfmsg(), {}, near))

    def set_up(self, device: str, *, mtu: int | None = None, queue_packets: int | None = None) -> None:
        """Set a device up."""
        fields = {"index": self._index(device), "flags": rtnetlink.UP, "change": rtnetlink.UP}
        asked = {"IFLA_MTU": mtu, "IFLA_TXQLEN": queue_packets}
        stated = [(name, value) for name, value in asked.items() if value is not None]
        self._do(f"set {device} up", rtnetlink.NEW_LINK, 0, rtnetlink.packed(ifinfmsg(), fields, stated))

    def add_address(self, device: str, address: str) -> None:
        """Add an address to a device, without a subnet (/32)."""
        fields = {"family": socket.AF_INET, "prefixlen": 32, "index": self._index(device)}
        body = rtnetlink.packed(ifaddrmsg(), fields, [("IFA_ADDRESS", address), ("IFA_LOCAL", address)])
        self._do(f"add the address {address} to {device}", rtnetlink.NEW_ADDRESS, _NEW, body)

    def add_route(
        self,
        destination: str,
        device: str,
        *,
        via: str | None,
        source: str | None,
        congestion_control: str | None = None,
    ) -> None:
        """Route `destination` ("default" or a prefix) through a device: to the neighbour `via`, or directly.

        `congestion_control`: default of TCP connections on this route.
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
        """Set a neighbour's MAC permanently, so that no ARP crosses the links and consumes draws of the loss model."""
        fields = {"family": socket.AF_INET, "ifindex": self._index(device), "state": _PERMANENT}
        body = rtnetlink.packed(ndmsg(), fields, [("NDA_DST", address), ("NDA_LLADDR", mac)])
        self._do(f"add the neighbour {address} of {device}", rtnetlink.NEW_NEIGHBOUR, _NEW, body)

    def set_root_qdisc(self, device: str, kind: str, options: bytes, *, sizes: bytes = b"") -> None:
        """Replace a device's qdisc. `sizes`: TCA_STAB, how packets are counted.

        CapabilityError when the kernel lacks that kind.
        """
        flags = rtnetlink.CREATE | rtnetlink.REPLACE
        place = {"parent": rtnetlink.ROOT}
        self._qdisc("set the qdisc", flags, device, kind, place, options, without=f"sch_{kind}", sizes=sizes)

    def change_root_qdisc(self, device: str, kind: str, options: bytes, *, sizes: bytes = b"") -> None:
        """Change a device's qdisc, keeping its queue; `sizes` as in `set_root_qdisc`. LabError when it has no qdisc of
        this kind.
        """
        self._qdisc("change the qdisc", 0, device, kind, {"parent": rtnetlink.ROOT}, options, sizes=sizes)

    def add_qdisc(self, device: str, level: int, kind: str, options: bytes, *, of_class: bytes = b"") -> None:
        """Add a qdisc behind the root (level 0) or behind the one of the level before, with its class, if it needs one.

        CapabilityError when the kernel lacks that kind.
        """
        place = self._place(device, level)
        self._qdisc("add the qdisc", _NEW, device, kind, place, options, without=f"sch_{kind}")
        if of_class:
            self._class(_NEW, device, level, kind, of_class)

    def remove_qdisc(self, device: str, level: int, kind: str) -> None:
        """Remove a qdisc behind the root, with what it holds and all behind it. LabError when there is none."""
        place = self._place(device, level)
        self._qdisc("remove the qdisc", 0, device, kind, place, b"", message=rtnetlink.DELETE_QDISC)

    def change_qdisc(self, device: str, level: int, kind: str, options: bytes, *, of_class: bytes = b"") -> None:
        """Change a qdisc behind the root, or its class if it has one, keeping its queue. LabError when there is none of
        this kind.
        """
        if of_class:
            self._class(0, device, level, kind, of_class)
        else:
            self._qdisc("change the qdisc", 0, device, kind, self._place(device, level), options)

    def _place(self, device: str, level: int) -> dict[str, int]:
        """Return parent and handle of the qdisc at a level behind the root."""
        above = next(qdisc.handle for qdisc in self._qdiscs(device) if qdisc.parent == rtnetlink.ROOT)
        return {"parent": _handle_of(level - 1) + 1 if level else above | 1, "handle": _handle_of(level)}

    def _class(self, flags: int, device: str, level: int, kind: str, options: bytes) -> None:
        place = {"parent": _handle_of(level), "handle": _handle_of(level) + 1}
        self._qdisc("set the class of", flags, device, kind, place, options, message=rtnetlink.NEW_CLASS)

    def _qdisc(
        self,
        attempt: str,
        flags: int,
        device: str,
        kind: str,
        place: dict[str, int],
        options: bytes,
        *,
        without: str | None = None,
        sizes: bytes = b"",
        message: int = rtnetlink.NEW_QDISC,
    ) -> None:
        stated = [("TCA_KIND", kind), ("TCA_OPTIONS", options), *([("TCA_STAB", sizes)] if sizes else [])]
        body = rtnetlink.packed(rtnetlink.QdiscRequest(), {"index": self._index(device), **place}, stated)
        self._do(f"{attempt} {kind} on {device}", message, flags, body, without)

    def root_qdiscs(self) -> dict[str, Qdisc]:
        """List the root qdisc of every device that has one."""
        qdiscs = [qdisc for qdisc in self._all_qdiscs() if qdisc.parent == rtnetlink.ROOT]
        if not {qdisc.device for qdisc in qdiscs} <= set(self._indices.values()):
            self.devices()
        names = {number: name for name, number in self._indices.items()}
        return {names[qdisc.device]: qdisc for qdisc in qdiscs if qdisc.device in names}

    def qdisc_chain(self, device: str) -> list[Qdisc]:
        """List the root qdisc of a device and those of `add_qdisc`, by level; empty without a root."""
        handles = [_handle_of(level) for level in range(_LEVELS)]
        qdiscs = self._qdiscs(device)
        root = [qdisc for qdisc in qdiscs if qdisc.parent == rtnetlink.ROOT]
        return root + sorted((q for q in qdiscs if q.handle in handles), key=lambda qdisc: qdisc.handle)

    def class_options(self, device: str) -> bytes:
        """Return TCA_OPTIONS of the only class behind a device's root."""
        question = rtnetlink.QDISC.pack(0, self._index(device), 0, 0, 0)
        bodies = self._dump(rtnetlink.GET_CLASS, question, "read the classes back")
        held = [rtnetlink.read_qdisc(body) for kind, body in bodies if kind == rtnetlink.NEW_CLASS]
        return next((item.options for item in held if item.handle == _handle_of(0) + 1), b"")

    def _qdiscs(self, device: str) -> list[Qdisc]:
        return [qdisc for qdisc in self._all_qdiscs() if qdisc.device == self._index(device)]

    def _all_qdiscs(self) -> list[Qdisc]:
        bodies = self._dump(rtnetlink.GET_QDISC, bytes(rtnetlink.QDISC.size), "read the qdiscs back")
        return [rtnetlink.read_qdisc(body) for kind, body in bodies if kind == rtnetlink.NEW_QDISC]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

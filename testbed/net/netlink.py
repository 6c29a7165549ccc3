"""Devices, addresses, routes, neighbours and qdiscs of one network namespace, through one netlink socket opened inside it.

The only user of pyroute2. It does without pyroute2's own netem (its `rate` is refused by the kernel in 0.9.7, half of the
attributes are missing): the options of a qdisc pass through here as bytes, made and understood by qdisc.py.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

from pyroute2 import IPRoute
from pyroute2.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST, nlmsg
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.rtnl import RTM_NEWQDISC
from pyroute2.netlink.rtnl.tcmsg import tcmsg

from testbed.errors import CapabilityError, LabError
from testbed.net.namespace import Namespace

_ROOT = 0xFFFFFFFF
_PERMANENT = 0x80
_ONLINK = 4
_SCOPE_LINK = 253


class _QdiscMessage(nlmsg):  # type: ignore[misc]  # pyroute2 is untyped
    """A qdisc message (struct tcmsg) whose options stay bytes. Statistics are not read here."""

    prefix = "TCA_"
    fields = tcmsg.fields
    nla_map = (("TCA_UNSPEC", "none"), ("TCA_KIND", "asciiz"), ("TCA_OPTIONS", "cdata"))


class Device(NamedTuple):
    """A device as the kernel says it is."""

    number: int
    """The kernel's index of it."""
    name: str
    mac: str | None
    mtu: int
    queue_packets: int
    up: bool


class Qdisc(NamedTuple):
    """The root qdisc of a device as the kernel says it is."""

    kind: str
    options: bytes


class Netlink:
    """One namespace's network configuration; a context manager that closes its socket. LabError names the step that failed."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._indices: dict[str, int] = {}
        with namespace.entered():  # a socket stays in its namespace; pyroute2's own way there is to fork
            self._socket = IPRoute()
        self._socket.asyncore.register_policy(RTM_NEWQDISC, _QdiscMessage)

    @contextmanager
    def _step(self, attempt: str) -> Iterator[None]:
        try:
            yield
        except NetlinkError as error:
            if error.code in (errno.EPERM, errno.EACCES):
                raise CapabilityError(
                    f"{self.namespace.name}: not permitted to {attempt}; run as root (sudo python -m testbed ...)"
                ) from None
            if error.code == errno.EOPNOTSUPP:
                raise CapabilityError(f"{self.namespace.name}: this kernel cannot {attempt}: {error}") from None
            raise LabError(f"{self.namespace.name}: cannot {attempt}: {error}") from error

    def devices(self) -> dict[str, Device]:
        """Every device by name."""
        with self._step("list the devices"):
            found = [
                Device(
                    number=message["index"],
                    name=message.get_attr("IFLA_IFNAME"),
                    mac=message.get_attr("IFLA_ADDRESS"),
                    mtu=message.get_attr("IFLA_MTU"),
                    queue_packets=message.get_attr("IFLA_TXQLEN"),
                    up=message["state"] == "up",
                )
                for message in self._socket.get_links()
            ]
        self._indices = {device.name: device.number for device in found}
        return {device.name: device for device in found}

    def _index(self, device: str) -> int:
        if device not in self._indices:
            self.devices()
        if device not in self._indices:
            raise LabError(f"{self.namespace.name}: there is no device {device}; it has: {', '.join(self._indices)}")
        return self._indices[device]

    def add_veth(self, device: str, mac: str, mtu: int, peer: Namespace, peer_device: str, peer_mac: str) -> None:
        """Lay a veth cable from here into another namespace; both ends are still down."""
        with self._step(f"lay a veth cable {device} to {peer_device} in {peer.name}"):
            self._socket.link(
                "add",
                kind="veth",
                ifname=device,
                address=mac,
                mtu=mtu,
                peer={"ifname": peer_device, "address": peer_mac, "mtu": mtu, "net_ns_fd": peer.fd},
            )

    def set_up(self, device: str, *, mtu: int | None = None, queue_packets: int | None = None) -> None:
        """Switch a device on."""
        options: dict[str, Any] = {"state": "up"}
        if mtu is not None:
            options["mtu"] = mtu
        if queue_packets is not None:
            options["txqlen"] = queue_packets
        with self._step(f"switch {device} on"):
            self._socket.link("set", index=self._index(device), **options)

    def add_address(self, device: str, address: str) -> None:
        """Give a device an address of its own, without a subnet around it (/32)."""
        with self._step(f"give {device} the address {address}"):
            self._socket.addr("add", index=self._index(device), address=address, prefixlen=32)

    def add_route(self, destination: str, device: str, *, via: str | None, source: str | None) -> None:
        """Route `destination` ("default" or a prefix) through a device: to the neighbour `via`, or straight out of the device."""
        options: dict[str, Any] = {"family": socket.AF_INET, "dst": destination, "oif": self._index(device)}
        options |= {"gateway": via, "flags": _ONLINK} if via else {"scope": _SCOPE_LINK}
        if source:
            options["prefsrc"] = source
        with self._step(f"route {destination} through {device}" + (f" to {via}" if via else "")):
            self._socket.route("add", **options)

    def add_neighbour(self, device: str, address: str, mac: str) -> None:
        """State a neighbour's MAC for good: no ARP crosses the links, where it would use up draws of the loss model."""
        with self._step(f"note the neighbour {address} of {device}"):
            self._socket.neigh("add", ifindex=self._index(device), dst=address, lladdr=mac, state=_PERMANENT)

    def set_root_qdisc(self, device: str, kind: str, options: bytes) -> None:
        """Put a qdisc on a device in place of the one it has.

        CapabilityError when the kernel does not know the kind.
        """
        request = _QdiscMessage()
        request.update({"index": self._index(device), "parent": _ROOT})
        request["attrs"] = [("TCA_KIND", kind), ("TCA_OPTIONS", options)]
        request["header"]["type"] = RTM_NEWQDISC
        request["header"]["flags"] = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE
        with self._step(f"put the qdisc {kind} on {device}"):
            try:
                self._socket.nlm_request_batch([request])
            except NetlinkError as error:
                if error.code != errno.ENOENT:
                    raise
                raise CapabilityError(f"this kernel has no sch_{kind} (it was refused on {device})") from None

    def root_qdiscs(self) -> dict[str, Qdisc]:
        """The root qdisc of every device that has one."""
        with self._step("read the qdiscs back"):
            found = tuple(self._socket.get_qdiscs())
        if not {message["index"] for message in found} <= set(self._indices.values()):
            self.devices()
        names = {number: name for name, number in self._indices.items()}
        return {
            names[message["index"]]: Qdisc(message.get_attr("TCA_KIND"), bytes(message.get_attr("TCA_OPTIONS") or b""))
            for message in found
            if message["parent"] == _ROOT and message["index"] in names
        }

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Netlink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

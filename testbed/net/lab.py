"""A lab: the namespaces, links and shapers of one star, made from a plan, read back, and gone when it is closed.

topology.py decides what there is; netlink, sysctl, offloads, netem and the relay make each part; certify.py measures the links.
Nothing here has a name outside this process: when it dies, however it dies, the kernel takes everything away.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

from pydantic import Field

from testbed.errors import ShapingError
from testbed.net import netem, offloads, sysctl
from testbed.net.certify import ProbeLink, certify
from testbed.net.elements import Cable, Place, Plug, Tun
from testbed.net.namespace import Namespace
from testbed.net.netlink import Netlink
from testbed.net.qdisc import ETHERNET_HEADER_BYTES
from testbed.net.relay import Port, Relay
from testbed.net.relay.tun import QUEUE_PACKETS, open_tun
from testbed.net.topology import HUB, HUB_ADDRESS, HUB_TUN, MAX_NODES, NODE_DEVICE, gateway_name, hub_device, node_address, star
from testbed.records import Certificate, LabRecord, LinkRecord
from testbed.spec import Engine, Frozen, LinkProfile

_FIFO_OPTIONS = struct.pack("=I", QUEUE_PACKETS)


class LabSpec(Frozen):
    """What a lab is asked to be."""

    topology: Literal["star"]
    profile: LinkProfile
    nodes: int = Field(ge=1, le=MAX_NODES)
    engine: Engine
    engine_reason: str
    """Why this engine: see `capabilities.resolve_engine`."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One stage's place in the lab."""

    index: int
    name: str
    address: str
    """IPv4, reached from the hub and from every other node."""
    device: str
    """The access link's device inside `namespace`."""
    namespace: Namespace


class Lab:
    """A star that stands until it is closed; a context manager. From the main thread only, like `Relay` and `Namespace.popen`."""

    nodes: tuple[Node, ...]
    hub: Namespace
    record: LabRecord
    """The lab as the kernel says it is."""

    def __init__(self, spec: LabSpec) -> None:
        """Build it. Where a step fails, everything made before it is undone.

        LabError names the step, ShapingError what was asked and found, CapabilityError what this machine lacks.
        """
        started = time.monotonic()
        self.spec = spec
        self._plan = star(spec.profile, spec.nodes, spec.engine)
        self._relay: Relay | None = None
        with ExitStack() as stack:
            self._namespaces = {place.name: stack.enter_context(Namespace(place.name)) for place in self._plan.places}
            with ExitStack() as sockets:
                netlinks = {name: sockets.enter_context(Netlink(space)) for name, space in self._namespaces.items()}
                settings = self._build(netlinks, stack)
            self.hub = self._namespaces[HUB]
            self.nodes = tuple(
                Node(index=index, name=name, address=node_address(index), device=NODE_DEVICE, namespace=self._namespaces[name])
                for index, name in enumerate(self._plan.nodes)
            )
            self.record = LabRecord(
                topology=spec.topology,
                engine=spec.engine,
                engine_reason=spec.engine_reason,
                build_seconds=time.monotonic() - started,
                links=tuple(self._link_record(node, settings) for node in self.nodes),
            )
            self._stack = stack.pop_all()

    def _build(self, netlinks: Mapping[str, Netlink], stack: ExitStack) -> dict[str, dict[str, Any]]:
        """Everything inside the namespaces, in the order in which one thing needs another; what each namespace then holds."""
        plan = self._plan
        # First: a device takes over its namespace's defaults when it is made.
        settings: dict[str, dict[str, Any]] = self._set_sysctls()
        for cable in plan.cables:
            self._lay(cable, netlinks)
        descriptors = {tun.place: self._make_tun(tun, stack) for tun in plan.tuns}
        for place in plan.places:
            settings[place.name]["devices"] = self._configure(place, netlinks[place.name])
        if plan.tuns:
            self._relay = stack.enter_context(Relay(self._ports(plan.tuns, descriptors)))
        for shaper in plan.shapers:
            held = netem.apply(netlinks[shaper.place], shaper.device, shaper.plan, link=f"{shaper.link} {shaper.direction}")
            settings[shaper.place]["devices"][shaper.device]["qdisc"] = held.describe()
        return settings

    def _set_sysctls(self) -> dict[str, dict[str, Any]]:
        found = {}
        with sysctl.congestion_control_allowed(self.spec.profile.congestion_control):
            for place in self._plan.places:
                with self._namespaces[place.name].entered():
                    values = sysctl.without_ipv6() | sysctl.apply(place.sysctls)
                    if place.congestion_control is not None:
                        values |= sysctl.set_congestion_control(place.congestion_control)
                found[place.name] = {"sysctls": values}
        return found

    def _lay(self, cable: Cable, netlinks: Mapping[str, Netlink]) -> None:
        near, far = cable.near, cable.far
        netlinks[near.place].add_veth(near.device, near.mac, self._plan.mtu, self._namespaces[far.place], far.device, far.mac)

    def _make_tun(self, tun: Tun, stack: ExitStack) -> int:
        with self._namespaces[tun.place].entered():
            descriptor = open_tun(tun.device)
        stack.callback(os.close, descriptor)
        return descriptor

    def _ports(self, tuns: Sequence[Tun], descriptors: Mapping[str, int]) -> list[Port]:
        overhead = ETHERNET_HEADER_BYTES if self.spec.profile.layer == "ethernet" else 0
        return [
            Port(
                name=tun.place,
                address=tun.address,
                tun_fd=descriptors[tun.place],
                up=tun.up,
                down=tun.down,
                overhead_bytes=overhead,
            )
            for tun in tuns
        ]

    def _configure(self, place: Place, netlink: Netlink) -> dict[str, dict[str, Any]]:
        """Switch a namespace's devices on, address and route them; what they are, by name, as read back."""
        plan = self._plan
        tuns = [tun.device for tun in plan.tuns if tun.place == place.name]
        plugs = [plug for cable in plan.cables for plug in (cable.near, cable.far) if plug.place == place.name]
        devices = [*tuns, *(plug.device for plug in plugs)]
        with self._namespaces[place.name].entered():
            off = {device: offloads.switch_off(device) for device in devices}
        netlink.set_up("lo")
        for device in devices:
            netlink.set_up(device, mtu=plan.mtu)
        for device in tuns:  # not the machine's default qdisc, which may drop early or pace
            netlink.set_root_qdisc(device, "pfifo", _FIFO_OPTIONS)
        for device, address in place.addresses:
            netlink.add_address(device, address)
        for neighbour in place.neighbours:
            netlink.add_neighbour(neighbour.device, neighbour.address, neighbour.mac)
        for route in place.routes:
            netlink.add_route(route.destination, route.device, via=route.via, source=route.source)
        return self._read_back(place, netlink, tuns, plugs, off)

    def _read_back(
        self, place: Place, netlink: Netlink, tuns: Sequence[str], plugs: Sequence[Plug], off: Mapping[str, Mapping[str, bool]]
    ) -> dict[str, dict[str, Any]]:
        """The devices as the kernel says they are. ShapingError where that is not what was asked."""
        devices, qdiscs = netlink.devices(), netlink.root_qdiscs()
        wanted: dict[str, tuple[str | None, str, bytes]] = {plug.device: (plug.mac, "noqueue", b"") for plug in plugs}
        wanted |= dict.fromkeys(tuns, (None, "pfifo", _FIFO_OPTIONS))
        found = {}
        for name, (mac, kind, options) in wanted.items():
            device, held = devices[name], qdiscs.get(name)
            asked = (self._plan.mtu, mac, True, (kind, options))
            if (device.mtu, device.mac, device.up, held) != asked:
                raise ShapingError(f"{place.name}: asked for {name} with {asked}, the kernel has {device} and {held}")
            found[name] = {
                "mtu": device.mtu,
                "queue_packets": device.queue_packets,
                "offloads_off": " ".join(off[name]),
                "qdisc": {"kind": kind, "limit_packets": QUEUE_PACKETS} if kind == "pfifo" else {"kind": kind},
            }
        return found

    def _link_record(self, node: Node, settings: Mapping[str, dict[str, Any]]) -> LinkRecord:
        hub = settings[HUB]
        hub_devices = {name: held for name, held in hub["devices"].items() if name in (hub_device(node.index), HUB_TUN)}
        parts: dict[str, Any] = {"node": settings[node.name], "hub": {**hub, "devices": hub_devices}}
        if (gateway := gateway_name(node.index)) in settings:
            parts["gateway"] = settings[gateway]
        if self._relay is not None:
            process = {key: value for key, value in self._relay.settings.items() if key != "ports"}
            parts["relay"] = {**process, "port": self._relay.settings["ports"][node.name]}
        return LinkRecord(
            node=node.name,
            address=node.address,
            device=node.device,
            shaper=self._plan.shaper,
            overhead_bytes=self._plan.overhead_bytes,
            settings=parts,
        )

    def check(self) -> None:
        """That the lab still stands: LabError when the relay process has died."""
        if self._relay is not None:
            self._relay.counters()

    def counters(self) -> dict[str, dict[str, Any]] | None:
        """The relay's own counters (see `Relay.counters`), or None where no relay runs. LabError when it has died."""
        return None if self._relay is None else self._relay.counters()

    def certify(self, form: Literal["quick", "full"], message_bytes: Sequence[int]) -> Certificate:
        """Measure every access link with messages of these sizes; once more, where that fails.

        What failed the first time stands in the certificate. ShapingError when a shaper is not what it was.
        """
        started, taken_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        self.check()
        for shaper in self._plan.shapers:
            with Netlink(self._namespaces[shaper.place]) as netlink:
                netem.check(netlink, shaper.device, shaper.plan, link=f"{shaper.link} {shaper.direction}")
        links = [
            ProbeLink(
                name=node.name,
                node=node.namespace,
                hub=self.hub,
                node_address=node.address,
                hub_address=HUB_ADDRESS,
                profile=self.spec.profile,
            )
            for node in self.nodes
        ]
        measurements = certify(links, form=form, message_bytes=message_bytes, relay=self._relay)
        if rejected := tuple(one for one in measurements if one.verdict == "FAIL"):
            measurements = certify(links, form=form, message_bytes=message_bytes, relay=self._relay)
        return Certificate(
            form=form,
            engine=self.spec.engine,
            taken_at=taken_at,
            seconds=time.monotonic() - started,
            measurements=measurements,
            rejected=rejected,
        )

    def close(self) -> None:
        """Take it down. What still runs inside a namespace keeps that namespace, but not the links."""
        self._stack.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

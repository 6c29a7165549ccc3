"""Build a plan: namespaces, cables, TUN devices, addresses, routes, shapers and the relay.

Each is read back and compared with the request.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

from testbed.errors import LabError, ShapingError
from testbed.net.kernel import shaping, sysctl
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Netlink
from testbed.net.kernel.offloads import Offloads
from testbed.net.kernel.rtnetlink import STATE_UP, NetworkDevice
from testbed.net.lab_plan import LabPlan, Link, NamespacePlan, Plug
from testbed.net.relay.client import Relay
from testbed.net.relay.tun import QUEUE_PACKETS, open_tun
from testbed.records import LinkRecord

_CARRIER_S = 5.0
_FIFO_OPTIONS = struct.pack("=I", QUEUE_PACKETS)

Settings = dict[str, dict[str, Any]]
"""Settings of each namespace, by name: `sysctls` and `devices`."""


class Built(NamedTuple):
    """The parts of a lab after `build_lab`."""

    namespaces: dict[str, Namespace]
    relay: Relay | None
    settings: Settings

    def record(self, link: Link) -> LinkRecord:
        """Describe a link from the state of kernel and relay."""
        parts: dict[str, Any] = {}
        for side, end in (("near", link.near), ("far", link.far)):
            held = self.settings[end.namespace]
            parts[side] = {
                **held,
                "devices": {name: what for name, what in held["devices"].items() if name == end.device},
            }
        if link.gateway is not None:
            parts["gateway"] = self.settings[link.gateway]
        if self.relay is not None:
            process = {key: value for key, value in self.relay.settings.items() if key != "ports"}
            ports = self.relay.settings["ports"]
            pipes = {way: ports[meter.where][meter.what] for way, meter in link.meters.items() if meter.kind == "port"}
            parts["relay"] = {**process, **pipes}
        return LinkRecord(
            name=link.name,
            profile=link.profile.name,
            near=link.near.namespace,
            far=link.far.namespace,
            near_address=link.near.address,
            far_address=link.far.address,
            shaper=link.shaper,
            settings=parts,
        )


def build_lab(plan: LabPlan, stack: ExitStack) -> Built:
    """Build everything; clean-up actions are left on the stack, even if a step fails.

    LabError names the step, ShapingError the request and the result, CapabilityError the missing capability.
    """
    namespaces = {wanted.name: stack.enter_context(Namespace(wanted.name)) for wanted in plan.namespaces}
    with ExitStack() as sockets:
        netlinks = {name: sockets.enter_context(Netlink(namespace)) for name, namespace in namespaces.items()}
        return _Builder(plan, namespaces, netlinks, stack).build()


class _Builder:
    def __init__(
        self, plan: LabPlan, namespaces: dict[str, Namespace], netlinks: Mapping[str, Netlink], stack: ExitStack
    ) -> None:
        self._plan, self._namespaces, self._netlinks, self._stack = plan, namespaces, netlinks, stack
        self._offloads = Offloads()
        names = {wanted.name: number for number, wanted in enumerate(plan.namespaces)}
        self._tuns: dict[str, list[str]] = {name: [] for name in names}
        self._plugs: dict[str, list[Plug]] = {name: [] for name in names}
        self._first_up: dict[str, list[str]] = {name: [] for name in names}
        """The end of each cable that goes up while the other end is still down."""
        for tun in plan.tuns:
            self._tuns[tun.namespace].append(tun.device)
        for cable in plan.cables:
            for plug in (cable.near, cable.far):
                self._plugs[plug.namespace].append(plug)
            first = min((cable.near, cable.far), key=lambda plug: names[plug.namespace])
            self._first_up[first.namespace].append(first.device)

    def build(self) -> Built:
        """Build the parts in order of their dependencies."""
        plan, relay = self._plan, None
        settings = self._set_sysctls()  # first: a new device inherits its namespace's defaults
        for cable in plan.cables:
            near, far = cable.near, cable.far
            self._netlinks[near.namespace].add_veth(
                near.device, near.mac, plan.mtu, self._namespaces[far.namespace], far.device, far.mac
            )
        descriptors = self._make_tuns()
        offloads = {wanted.name: self._configure(wanted) for wanted in plan.namespaces}
        for wanted in plan.namespaces:
            settings[wanted.name]["devices"] = self._read_back(wanted, offloads[wanted.name])
        if plan.tuns:
            relay = self._stack.enter_context(Relay(plan.tuns, descriptors))
        for shaped in plan.shaped:
            netlink = self._netlinks[shaped.namespace]
            held = shaping.apply_shaping(netlink, shaped.device, shaped.plan(), link=shaped.label)
            settings[shaped.namespace]["devices"][shaped.device]["qdisc"] = held.describe()
        return Built(self._namespaces, relay, settings)

    def _set_sysctls(self) -> Settings:
        settings: Settings = {}
        for algorithm in sorted({link.profile.congestion_control for link in self._plan.links}):
            sysctl.require_congestion_control(algorithm)
        for wanted in self._plan.namespaces:
            with self._namespaces[wanted.name].entered():
                held = sysctl.switch_ipv6_off() | sysctl.set_parameters(wanted.sysctls)
                settings[wanted.name] = {"sysctls": held}
        return settings

    def _make_tuns(self) -> list[int]:
        """Make the TUN devices; returns their descriptors, in the order of the plan."""
        descriptors: list[int] = []
        self._stack.callback(_close_at_once, descriptors)
        for tun in self._plan.tuns:
            with self._namespaces[tun.namespace].entered():
                descriptors.append(open_tun(tun.device))
        return descriptors

    def _configure(self, wanted: NamespacePlan) -> dict[str, dict[str, bool]]:
        """Set a namespace's devices up, address and route them; returns their offloads as read back, by device."""
        netlink, tuns, plugs = self._netlinks[wanted.name], self._tuns[wanted.name], self._plugs[wanted.name]
        devices = [*tuns, *(plug.device for plug in plugs)]
        with self._namespaces[wanted.name].entered():
            offloads = {device: self._offloads.switch_off(device) for device in devices}
        with netlink.batch():
            netlink.set_up("lo")
            for plug in plugs:
                netlink.set_up(plug.device, mtu=self._plan.mtu)
            for device in tuns:
                netlink.set_up(device, mtu=self._plan.mtu, queue_packets=QUEUE_PACKETS)
                # Replaces the machine's default qdisc, which may drop early or pace.
                netlink.set_root_qdisc(device, "pfifo", _FIFO_OPTIONS)
            for device, address in wanted.addresses:
                netlink.add_address(device, address)
            for neighbour in wanted.neighbours:
                netlink.add_neighbour(neighbour.device, neighbour.address, neighbour.mac)
            for route in wanted.routes:
                netlink.add_route(
                    route.destination,
                    route.device,
                    via=route.via,
                    source=route.source,
                    congestion_control=route.congestion_control,
                )
        return offloads

    def _read_back(
        self, wanted: NamespacePlan, offloads: Mapping[str, Mapping[str, bool]]
    ) -> dict[str, dict[str, Any]]:
        """Read back the devices from the kernel, by name. ShapingError where they differ from the request."""
        netlink = self._netlinks[wanted.name]
        devices = _with_carriers(netlink, self._first_up[wanted.name])
        qdiscs, algorithms = netlink.root_qdiscs(), _congestion_controls(wanted, netlink)
        # A cable's queue is never used.
        asked = {
            plug.device: (plug.mac, devices[plug.device].queue_packets, "noqueue", b"")
            for plug in self._plugs[wanted.name]
        } | dict.fromkeys(self._tuns[wanted.name], (None, QUEUE_PACKETS, "pfifo", _FIFO_OPTIONS))
        described = {}
        for name, (mac, queue_packets, kind, options) in asked.items():
            device, qdisc = devices[name], qdiscs.get(name)
            state = (self._plan.mtu, queue_packets, mac, True, kind, options)
            held_qdisc = (qdisc.kind, qdisc.options) if qdisc else ("no qdisc", b"")
            held = (device.mtu, device.queue_packets, device.mac, device.up, *held_qdisc)
            if held != state:
                raise ShapingError(
                    f"{wanted.name}: {name}: asked for {_described(state)}, the kernel has {_described(held)}"
                )
            described[name] = {
                "mtu": device.mtu,
                "queue_packets": device.queue_packets,
                "offloads_off": " ".join(offloads[name]),
                "qdisc": {"kind": kind, "limit_packets": QUEUE_PACKETS} if kind == "pfifo" else {"kind": kind},
            }
            if device.number in algorithms:
                described[name]["congestion_control"] = algorithms[device.number]
        return described


def _with_carriers(netlink: Netlink, first_up: Sequence[str]) -> dict[str, NetworkDevice]:
    """List the devices, once the kernel has noticed that the peers of `first_up` are up too.

    Before that, it drops packets from them. It notices immediately, but in another thread. (An end that went up after
    its peer can send at once, although its reported state may lag by a second.)
    """
    deadline = time.monotonic() + _CARRIER_S
    while True:
        devices = netlink.devices()
        waiting = [name for name in first_up if devices[name].state != STATE_UP]
        if not waiting:
            return devices
        if time.monotonic() > deadline:
            raise LabError(
                f"{netlink.namespace.name}: {', '.join(waiting)}: no carrier {_CARRIER_S:.0f} s after both ends went up"
            )
        time.sleep(0.001)


def _close_at_once(descriptors: Sequence[int]) -> None:
    """Close all concurrently: the kernel waits about 17 ms for each device to be unused, and so only once."""
    with ThreadPoolExecutor(max(1, len(descriptors))) as pool:
        pool.map(os.close, descriptors)


def _described(state: tuple[int, int, str | None, bool, str, bytes]) -> str:
    mtu, queue_packets, mac, up, kind, options = state
    qdisc = f"{kind} {options.hex()}".strip()
    return f"MTU {mtu}, queue {queue_packets}, {mac or 'no MAC'}, {'up' if up else 'down'}, qdisc {qdisc}"


def _congestion_controls(wanted: NamespacePlan, netlink: Netlink) -> dict[int, str]:
    """Read back the congestion control of each device's routes, by index. ShapingError where it differs from the
    request.
    """
    asked = {route.destination: route.congestion_control for route in wanted.routes}
    routes = {route.destination: route for route in netlink.routes()}
    held = {
        destination: routes[destination].congestion_control if destination in routes else None for destination in asked
    }
    if held != asked:
        raise ShapingError(
            f"{wanted.name}: asked for routes with the congestion controls {asked}, the kernel has {held}"
        )
    return {routes[destination].device: algorithm for destination, algorithm in asked.items() if algorithm}

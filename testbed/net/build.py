"""Make what a plan says: namespaces, cables, TUN devices, addresses, routes, shapers, the relay; each read back and compared."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from testbed.errors import LabError, ShapingError
from testbed.net.elements import Cable, Place, Plan, Plug, Tun
from testbed.net.kernel import netem, sysctl
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Device, Netlink
from testbed.net.kernel.offloads import Offloads
from testbed.net.kernel.rtnetlink import STATE_UP
from testbed.net.relay import Port, Relay
from testbed.net.relay.tun import QUEUE_PACKETS, open_tun

_CARRIER_S = 5.0
_FIFO_OPTIONS = struct.pack("=I", QUEUE_PACKETS)

Settings = dict[str, dict[str, Any]]
"""What each namespace holds, by its name: `sysctls` and `devices`."""


class Built(NamedTuple):
    """What stands after `build`."""

    namespaces: dict[str, Namespace]
    relay: Relay | None
    settings: Settings


def build(plan: Plan, stack: ExitStack) -> Built:
    """Make everything; what has to be undone is left on the stack, also where a step fails.

    LabError names the step, ShapingError what was asked and found, CapabilityError what this machine lacks.
    """
    namespaces = {place.name: stack.enter_context(Namespace(place.name)) for place in plan.places}
    with ExitStack() as sockets:
        netlinks = {name: sockets.enter_context(Netlink(space)) for name, space in namespaces.items()}
        return _Builder(plan, namespaces, netlinks, stack).build()


class _Builder:
    def __init__(
        self, plan: Plan, namespaces: dict[str, Namespace], netlinks: Mapping[str, Netlink], stack: ExitStack
    ) -> None:
        self._plan, self._namespaces, self._netlinks, self._stack = plan, namespaces, netlinks, stack
        self._offloads = Offloads()
        self._tuns: dict[str, list[Tun]] = {place.name: [] for place in plan.places}
        self._plugs: dict[str, list[Plug]] = {place.name: [] for place in plan.places}
        self._first_up: dict[str, list[str]] = {place.name: [] for place in plan.places}
        """The end of each cable that is switched on while its other end is still down."""
        order = {place.name: number for number, place in enumerate(plan.places)}
        for tun in plan.tuns:
            self._tuns[tun.place].append(tun)
        for cable in plan.cables:
            for plug in (cable.near, cable.far):
                self._plugs[plug.place].append(plug)
            first = min((cable.near, cable.far), key=lambda plug: order[plug.place])
            self._first_up[first.place].append(first.device)

    def build(self) -> Built:
        """In the order in which one thing needs another."""
        plan, relay = self._plan, None
        settings = self._set_sysctls()  # first: a device takes over its namespace's defaults when it is made
        for cable in plan.cables:
            self._lay(cable)
        descriptors = self._make_tuns()
        off = {place.name: self._configure(place) for place in plan.places}
        for place in plan.places:
            settings[place.name]["devices"] = self._read_back(place, off[place.name])
        if plan.tuns:
            relay = self._stack.enter_context(Relay(_ports(plan.tuns, descriptors)))
        for shaper in plan.shapers:
            link = f"{shaper.link} {shaper.direction}"
            held = netem.apply(self._netlinks[shaper.place], shaper.device, shaper.plan, link=link)
            settings[shaper.place]["devices"][shaper.device]["qdisc"] = held.describe()
        return Built(self._namespaces, relay, settings)

    def _set_sysctls(self) -> Settings:
        found: Settings = {}
        for algorithm in sorted({link.profile.congestion_control for link in self._plan.links}):
            sysctl.require_congestion_control(algorithm)
        for place in self._plan.places:
            with self._namespaces[place.name].entered():
                found[place.name] = {"sysctls": sysctl.without_ipv6() | sysctl.apply(place.sysctls)}
        return found

    def _lay(self, cable: Cable) -> None:
        near, far = cable.near, cable.far
        self._netlinks[near.place].add_veth(
            near.device, near.mac, self._plan.mtu, self._namespaces[far.place], far.device, far.mac
        )

    def _make_tuns(self) -> dict[str, int]:
        """The descriptors of the TUN devices, by the names of the relay's ports."""
        found: dict[str, int] = {}
        self._stack.callback(lambda: _close_at_once(list(found.values())))
        for tun in self._plan.tuns:
            with self._namespaces[tun.place].entered():
                found[tun.name] = open_tun(tun.device)
        return found

    def _configure(self, place: Place) -> dict[str, dict[str, bool]]:
        """Switch a namespace's devices on, address and route them; their offloads, by device, as read back."""
        netlink = self._netlinks[place.name]
        tuns = [tun.device for tun in self._tuns[place.name]]
        plugs = self._plugs[place.name]
        devices = [*tuns, *(plug.device for plug in plugs)]
        with self._namespaces[place.name].entered():
            off = {device: self._offloads.switch_off(device) for device in devices}
        with netlink.batch():
            netlink.set_up("lo")
            for plug in plugs:
                netlink.set_up(plug.device, mtu=self._plan.mtu)
            for device in tuns:
                netlink.set_up(device, mtu=self._plan.mtu, queue_packets=QUEUE_PACKETS)
                # Not the machine's default qdisc, which may drop early or pace.
                netlink.set_root_qdisc(device, "pfifo", _FIFO_OPTIONS)
            for device, address in place.addresses:
                netlink.add_address(device, address)
            for neighbour in place.neighbours:
                netlink.add_neighbour(neighbour.device, neighbour.address, neighbour.mac)
            for route in place.routes:
                netlink.add_route(
                    route.destination,
                    route.device,
                    via=route.via,
                    source=route.source,
                    congestion_control=route.congestion_control,
                )
        return off

    def _read_back(self, place: Place, off: Mapping[str, Mapping[str, bool]]) -> dict[str, dict[str, Any]]:
        """The devices as the kernel says they are, by name. ShapingError where that is not what was asked."""
        netlink, plugs = self._netlinks[place.name], self._plugs[place.name]
        tuns = [tun.device for tun in self._tuns[place.name]]
        devices = _with_carriers(netlink, self._first_up[place.name])
        qdiscs, algorithms = netlink.root_qdiscs(), _congestion_controls(place, netlink)
        # The queue of a cable is not used: nothing waits on it.
        wanted = {plug.device: (plug.mac, devices[plug.device].queue_packets, "noqueue", b"") for plug in plugs}
        asked_tun = (None, QUEUE_PACKETS, "pfifo", _FIFO_OPTIONS)
        read = {}
        for name, (mac, queue_packets, kind, options) in [*wanted.items(), *((tun, asked_tun) for tun in tuns)]:
            device, held = devices[name], qdiscs.get(name)
            asked = (self._plan.mtu, queue_packets, mac, True, kind, options)
            qdisc = (held.kind, held.options) if held else ("no qdisc", b"")
            found = (device.mtu, device.queue_packets, device.mac, device.up, *qdisc)
            if found != asked:
                raise ShapingError(
                    f"{place.name}: {name}: asked for {_described(asked)}, the kernel has {_described(found)}"
                )
            read[name] = {
                "mtu": device.mtu,
                "queue_packets": device.queue_packets,
                "offloads_off": " ".join(off[name]),
                "qdisc": {"kind": kind, "limit_packets": QUEUE_PACKETS} if kind == "pfifo" else {"kind": kind},
            }
            if device.number in algorithms:
                read[name]["congestion_control"] = algorithms[device.number]
        return read


def _with_carriers(netlink: Netlink, first_up: Sequence[str]) -> dict[str, Device]:
    """The devices, once the kernel has noticed that the other ends of these are up too: until then it drops what they send.

    It does so at once, but in a thread of its own. (An end that went up after its other end sends from the start, although its
    state may be told a second later.)
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
    """The kernel waits about 17 ms for each device to be out of use; together they wait only once."""
    threads = [threading.Thread(target=os.close, args=(descriptor,)) for descriptor in descriptors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _described(state: tuple[int, int, str | None, bool, str, bytes]) -> str:
    mtu, queue_packets, mac, up, kind, options = state
    held = f"{kind} {options.hex()}".strip()
    return f"MTU {mtu}, queue {queue_packets}, {mac or 'no MAC'}, {'up' if up else 'down'}, qdisc {held}"


def _congestion_controls(place: Place, netlink: Netlink) -> dict[int, str]:
    """What connections over each device use, by its index, as read back. ShapingError where that is not what was asked."""
    asked = {route.destination: route.congestion_control for route in place.routes}
    held = {route.destination: route for route in netlink.routes()}
    found = {
        destination: held[destination].congestion_control if destination in held else None for destination in asked
    }
    if found != asked:
        raise ShapingError(
            f"{place.name}: asked for routes with the congestion controls {asked}, the kernel has {found}"
        )
    return {held[destination].device: algorithm for destination, algorithm in asked.items() if algorithm}


def _ports(tuns: Sequence[Tun], descriptors: Mapping[str, int]) -> list[Port]:
    return [
        Port(
            name=tun.name,
            address=tun.address,
            tun_fd=descriptors[tun.name],
            up=tun.up,
            down=tun.down,
            overhead_bytes=tun.overhead_bytes,
        )
        for tun in tuns
    ]

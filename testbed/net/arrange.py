"""What a link needs under either engine: namespaces, cables, routes, shapers. Pure; topology.py says which links there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.errors import SpecError
from testbed.net.elements import (
    Cable,
    End,
    Link,
    Meter,
    Neighbour,
    Place,
    Plan,
    Plug,
    Role,
    Route,
    Shaper,
    Tun,
)
from testbed.net.kernel import qdisc
from testbed.net.kernel.qdisc import ETHERNET_HEADER_BYTES
from testbed.net.relay import asked
from testbed.profiles import LinkProfile, Pipe
from testbed.spec import Engine, Topology, link_count

_NEXT_SEED = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: seeds of neighbouring links lie far apart
_SOCKET_BUFFERS = "4096 131072 33554432"
"""Least, first and largest, in bytes: 32 MiB lets one connection fill 1 Gbit/s at 100 ms, and is the same on every machine."""


def with_own_seed(pipe: Pipe, link: int, direction: LinkDirection) -> Pipe:
    """The profile's pipe with a seed of the link's and the direction's own, or all would lose the same packets. The first link's
    `up` has the profile's.
    """
    return pipe.model_copy(
        update={"seed": (pipe.seed + (2 * link + LINK_DIRECTIONS.index(direction)) * _NEXT_SEED) % 2**63}
    )


def base_sysctls(*, forward: bool) -> dict[str, str]:
    """Of every namespace."""
    return {
        "net.ipv4.conf.all.rp_filter": "0",
        "net.ipv4.conf.default.rp_filter": "0",
        "net.ipv4.ip_forward": "1" if forward else "0",
    }


def tcp_sysctls(profile: LinkProfile) -> dict[str, str]:
    """Of every namespace where TCP connections end: nothing that changes a measured number is left to the machine's defaults."""
    return {
        "net.ipv4.tcp_slow_start_after_idle": "1" if profile.slow_start_after_idle else "0",
        "net.ipv4.tcp_no_metrics_save": "1",  # else a connection starts with what an earlier one learned
        "net.ipv4.tcp_rmem": _SOCKET_BUFFERS,
        "net.ipv4.tcp_wmem": _SOCKET_BUFFERS,
        "net.ipv4.tcp_timestamps": "1",  # 12 bytes of each packet
        "net.ipv4.tcp_sack": "1",
        "net.ipv4.tcp_window_scaling": "1",
        "net.ipv4.tcp_ecn": "0",
        "net.ipv4.tcp_mtu_probing": "0",
    }


def one_a_link(profiles: Sequence[LinkProfile], topology: Topology, nodes: int) -> tuple[LinkProfile, ...]:
    """The profile of every link. SpecError where their number does not fit, or they disagree in what a whole lab has once."""
    count = link_count(topology, nodes)
    if len(profiles) not in (1, count):
        raise SpecError(
            f"{len(profiles)} profiles for a {topology} of {nodes} nodes, which has {count} links; "
            "state one for all of them, or one a link"
        )
    for what in ("mtu", "slow_start_after_idle"):
        found = {profile.name: getattr(profile, what) for profile in profiles}
        if len(set(found.values())) > 1:
            stated = ", ".join(f"{name} has {value}" for name, value in found.items())
            raise SpecError(f"the links of one lab must agree in {what}, which a node has once: {stated}")
    return tuple(profiles) if len(profiles) == count else tuple(profiles) * count


def _mac(link: int, end: int) -> str:
    """A locally administered address; `end`: 0 near, 1 gateway's near side, 2 gateway's far side, 3 far."""
    return f"02:77:00:00:{link:02x}:{end:02x}"


@dataclass
class _Room:
    """A namespace being furnished."""

    role: Role
    addresses: list[tuple[str, str]] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    neighbours: list[Neighbour] = field(default_factory=list)


class Draft:
    """A plan being drawn. Namespaces first, then the links between them."""

    def __init__(self, profiles: Sequence[LinkProfile], engine: Engine) -> None:
        """`profiles`: one a link. Where the relay carries any link it carries all, also the unshaped ones, so that every node's
        device counts the same; a lab without any shaped link is cables only, under either engine.
        """
        self._profiles = tuple(profiles)
        shaped = any(profile.shaped for profile in profiles)
        self.by_relay = shaped and engine == "relay"
        self._rooms: dict[str, _Room] = {}
        self._links: list[Link] = []
        self._cables: list[Cable] = []
        self._tuns: list[Tun] = []
        self._shapers: list[Shaper] = []

    def place(self, name: str, role: Role) -> None:
        """A namespace. TCP connections end in all but gateways."""
        self._rooms[name] = _Room(role)

    def address(self, end: End, *, device: str | None = None) -> None:
        """Give a place its address, on the device unless another one (lo) is named."""
        self._rooms[end.place].addresses.append((device or end.device, end.address))

    def route(self, end: End, destination: str, *, profile: LinkProfile | None, via: str | None = None) -> None:
        """Route out of an end's device. `profile`: of the link, for the congestion control; None where no connection ends."""
        algorithm = profile.congestion_control if profile else None
        self._rooms[end.place].routes.append(
            Route(destination=destination, device=end.device, via=via, source=end.address, congestion_control=algorithm)
        )

    def tun(self, name: str, end: End, up: Pipe | None, down: Pipe | None, overhead_bytes: int) -> None:
        """A port of the relay. SpecError, before anything is started, for a pipe that it cannot carry out."""
        for pipe in (up, down):
            asked(pipe)
        self._tuns.append(
            Tun(
                name=name,
                place=end.place,
                device=end.device,
                address=end.address,
                up=up,
                down=down,
                overhead_bytes=overhead_bytes,
            )
        )

    def carried(self, name: str, near: End, far: End, meters: dict[LinkDirection, Meter]) -> None:
        """A link through the relay, whose ports and routes are stated apart."""
        self._add(name, near, far, "relay", None, meters)

    def cabled(self, name: str, near: End, far: End, *, near_to: str, gateway: str, gateway_address: str) -> None:
        """A link of cables: through a gateway that shapes it with netem, or straight where nothing is shaped.

        `near_to`: what the near end, and the gateway, send over this link: 'default' or a prefix.
        """
        number = len(self._links)
        profile = self._profiles[number]
        macs = [_mac(number, end) for end in range(4)]
        near_plug = Plug(place=near.place, device=near.device, mac=macs[0])
        far_plug = Plug(place=far.place, device=far.device, mac=macs[3])
        if not profile.shaped:
            self._cables.append(Cable(near=far_plug, far=near_plug))
            self._hop(near, near_to, profile, far.address, macs[3])
            self._hop(far, f"{near.address}/32", profile, near.address, macs[0])
            self._add(
                name, near, far, "none", None,
                {"up": Meter("received", far.place, far.device), "down": Meter("sent", far.place, far.device)},
            )  # fmt: skip
            return
        self.place(gateway, "gateway")
        to_near, to_far = End(gateway, gateway_address, "to-near"), End(gateway, gateway_address, "to-far")
        self.address(to_near, device="lo")
        self._cables += [
            Cable(near=Plug(place=gateway, device=to_near.device, mac=macs[1]), far=near_plug),
            Cable(near=Plug(place=gateway, device=to_far.device, mac=macs[2]), far=far_plug),
        ]
        self._hop(near, near_to, profile, gateway_address, macs[1])
        self._hop(to_far, near_to, None, far.address, macs[3])
        self._hop(to_near, f"{near.address}/32", None, near.address, macs[0])
        self._hop(far, f"{near.address}/32", profile, gateway_address, macs[2])
        meters = {
            "up": self._shape(name, "up", to_far, number) or Meter("received", far.place, far.device),
            "down": self._shape(name, "down", to_near, number) or Meter("received", near.place, near.device),
        }
        self._add(name, near, far, "netem", gateway, meters)  # type: ignore[arg-type]

    def _hop(self, here: End, destination: str, profile: LinkProfile | None, address: str, mac: str) -> None:
        """Reach `destination` through the neighbour with this address at the other end of the cable."""
        straight = destination == f"{address}/32"
        self.route(here, destination, profile=profile, via=None if straight else address)
        self._rooms[here.place].neighbours.append(Neighbour(device=here.device, address=address, mac=mac))

    def _shape(self, link: str, direction: LinkDirection, out: End, number: int) -> Meter | None:
        profile = self._profiles[number]
        if (asked := profile.pipe(direction)) is None:
            return None
        pipe = with_own_seed(asked, number, direction)
        plan = qdisc.plan(pipe, mtu=profile.mtu, layer=profile.layer)
        self._shapers.append(
            Shaper(link=link, direction=direction, place=out.place, device=out.device, pipe=pipe, plan=plan)
        )  # fmt: skip
        return Meter("qdisc", out.place, out.device)

    def _add(
        self,
        name: str,
        near: End,
        far: End,
        shaper: Literal["netem", "relay", "none"],
        gateway: str | None,
        meters: dict[LinkDirection, Meter],
    ) -> None:
        profile = self._profiles[len(self._links)]
        self._links.append(
            Link(name=name, profile=profile, near=near, far=far, shaper=shaper, gateway=gateway, meters=meters)
        )

    def plan(self) -> Plan:
        """The finished plan."""
        return Plan(
            mtu=self._profiles[0].mtu,
            overhead_bytes=0 if self.by_relay else ETHERNET_HEADER_BYTES,
            nodes=tuple(name for name, room in self._rooms.items() if room.role == "node"),
            links=tuple(self._links),
            places=tuple(self._furnished(name, room) for name, room in self._rooms.items()),
            cables=tuple(self._cables),
            tuns=tuple(self._tuns),
            shapers=tuple(self._shapers),
        )

    def _furnished(self, name: str, room: _Room) -> Place:
        forward = room.role in ("hub", "gateway") and not (self.by_relay and room.role == "hub")
        return Place(
            name=name,
            role=room.role,
            addresses=tuple(room.addresses),
            routes=tuple(room.routes),
            neighbours=tuple(room.neighbours),
            sysctls=base_sysctls(forward=forward) | (tcp_sysctls(self._profiles[0]) if room.role != "gateway" else {}),
        )

"""Plans of the two topologies: which namespaces, links and addresses a star or a line has.

Pure; build.py makes what they say.

star    node-0 --- wan0 [access link node-0] hub           node i: 10.77.<i+1>.2, hub: 10.77.0.1
        node-1 --- wan0 [access link node-1] hub           every pair of nodes is two links apart

line    node-0 next0 --- [boundary-0] --- prev0 node-1 next0 --- [boundary-1] --- prev0 node-2
        boundary b: 10.78.<b>.1 at node b, 10.78.<b>.2 at node b+1; only neighbours reach each other

Every link is shaped both ways. Engine netem leads it through a gateway namespace of its own, and shapes what leaves the
gateway: `up` on its far side, `down` on its near side. (On the sender's own device TCP small queues would keep the
buffer empty.) Engine relay gives each end of a link a TUN device (the hub has one for all its links) and leaves shaping
to the relay process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from testbed.directions import LinkDirection
from testbed.errors import SpecError
from testbed.net.kernel.netem_plan import ETHERNET_HEADER_BYTES
from testbed.net.plan import (
    Cable,
    End,
    LabPlan,
    Link,
    Meter,
    NamespacePlan,
    Neighbour,
    Plug,
    Role,
    Route,
    ShapedDevice,
    Tun,
    base_sysctls,
    profiles_of_links,
    tcp_sysctls,
    with_own_seed,
)
from testbed.net.relay.client import refuse_unsupported
from testbed.profiles import LinkProfile, Pipe
from testbed.spec import Engine, Topology

HUB = "hub"
HUB_ADDRESS = "10.77.0.1"
MAX_NODES = 254

_STAR_NETWORK = "10.77.0.0/16"
_HUB_TUN = "hub0"
_NODE_DEVICE, _NEXT, _PREVIOUS = "wan0", "next0", "prev0"


def node_name(index: int) -> str:
    """Name the namespace of a node; in a star also its link."""
    return f"node-{index}"


def plan_lab(topology: Topology, profiles: Sequence[LinkProfile], nodes: int, engine: Engine) -> LabPlan:
    """Plan a star or a line, with one profile for all links or one per link: by node in a star, by boundary in a line.

    SpecError for what the topology or the engine cannot carry out.
    """
    least = 1 if topology == "star" else 2
    if not least <= nodes <= MAX_NODES:
        raise SpecError(f"a {topology} has {least} to {MAX_NODES} nodes, asked for {nodes}")
    draft = _Draft(profiles_of_links(profiles, topology, nodes), engine)
    (_draw_star if topology == "star" else _draw_line)(draft, nodes)
    return draft.finished()


def _draw_star(draft: _Draft, nodes: int) -> None:
    draft.add_namespace(HUB, "hub")
    names = [node_name(i) for i in range(nodes)]
    for name in names:
        draft.add_namespace(name, "node")
    near = [End(name, f"10.77.{i + 1}.2", _NODE_DEVICE) for i, name in enumerate(names)]
    for end in near:
        draft.address(end)
    if not draft.by_relay:
        draft.address(End(HUB, HUB_ADDRESS, "lo"))
        for i, end in enumerate(near):
            far = End(HUB, HUB_ADDRESS, f"link{i}")
            draft.add_cabled_link(
                end.namespace, end, far, near_to="default", gateway=f"gateway-{i}", gateway_address=f"10.77.{i + 1}.1"
            )
        return
    hub = End(HUB, HUB_ADDRESS, _HUB_TUN)
    draft.address(hub)
    draft.route(hub, _STAR_NETWORK, profile=draft.profiles[0])  # probes that end there choose for themselves
    draft.add_tun(HUB, hub, None, None, 0)
    for end, profile in zip(near, draft.profiles, strict=True):
        port = end.namespace
        draft.route(end, "default", profile=profile)
        # The relay draws the losses of each port from a stream of its own: no seed of its own is needed here.
        draft.add_tun(port, end, profile.up, profile.down, profile.overhead_bytes)
        draft.add_link(port, end, hub, "relay", {"up": Meter("port", port, "up"), "down": Meter("port", port, "down")})


def _draw_line(draft: _Draft, nodes: int) -> None:
    for i in range(nodes):
        draft.add_namespace(node_name(i), "node")
    for i, profile in enumerate(draft.profiles):
        name = f"boundary-{i}"
        near, far = End(node_name(i), f"10.78.{i}.1", _NEXT), End(node_name(i + 1), f"10.78.{i}.2", _PREVIOUS)
        draft.address(near)
        draft.address(far)
        if not draft.by_relay:
            gateway, gateway_address = f"gateway-{i}", f"10.78.{i}.3"
            draft.add_cabled_link(
                name, near, far, near_to=f"{far.address}/32", gateway=gateway, gateway_address=gateway_address
            )
            continue
        near_port, far_port = f"{name}-near", f"{name}-far"
        for port, here, there, pipe in ((near_port, near, far, profile.up), (far_port, far, near, profile.down)):
            draft.route(here, f"{there.address}/32", profile=profile)
            draft.add_tun(port, here, pipe, None, profile.overhead_bytes)
        draft.add_link(
            name, near, far, "relay", {"up": Meter("port", near_port, "up"), "down": Meter("port", far_port, "up")}
        )


def _mac(link: int, end: int) -> str:
    """Return a locally administered address; `end`: 0 near, 1 gateway's near side, 2 gateway's far side, 3 far."""
    return f"02:77:00:00:{link:02x}:{end:02x}"


class _Draft:
    """A plan being drawn: namespaces first, then the links between them."""

    def __init__(self, profiles: tuple[LinkProfile, ...], engine: Engine) -> None:
        """`profiles`: one per link.

        Where the relay carries any link it carries all, also the unshaped ones, so that every node's device counts the
        same. A lab without any shaped link is cables only, under either engine.
        """
        self.profiles = profiles
        self.by_relay = engine == "relay" and any(profile.shaped for profile in profiles)
        self._namespaces: dict[str, NamespacePlan] = {}
        self._links: list[Link] = []
        self._cables: list[Cable] = []
        self._tuns: list[Tun] = []
        self._shaped: list[ShapedDevice] = []

    def add_namespace(self, name: str, role: Role) -> None:
        """Add a namespace. TCP connections end in every one but gateways."""
        forward = role == "gateway" or (role == "hub" and not self.by_relay)
        tcp = tcp_sysctls(self.profiles[0]) if role != "gateway" else {}
        self._namespaces[name] = NamespacePlan(name=name, role=role, sysctls=base_sysctls(forward=forward) | tcp)

    def address(self, end: End) -> None:
        """Give a namespace the end's address, on the end's device."""
        self._namespaces[end.namespace].addresses.append((end.device, end.address))

    def route(self, end: End, destination: str, *, profile: LinkProfile | None, via: str | None = None) -> None:
        """Route out of an end's device. `profile` gives the congestion control; None where no connection ends."""
        algorithm = profile.congestion_control if profile else None
        self._namespaces[end.namespace].routes.append(
            Route(destination=destination, device=end.device, via=via, source=end.address, congestion_control=algorithm)
        )

    def add_tun(self, port: str, end: End, up: Pipe | None, down: Pipe | None, overhead_bytes: int) -> None:
        """Make an end a port of the relay. SpecError for a pipe that the relay cannot carry out."""
        for pipe in (up, down):
            refuse_unsupported(pipe)
        self._tuns.append(Tun(name=port, **end._asdict(), up=up, down=down, overhead_bytes=overhead_bytes))

    def add_link(
        self,
        name: str,
        near: End,
        far: End,
        shaper: Literal["netem", "relay", "none"],
        meters: dict[LinkDirection, Meter],
        gateway: str | None = None,
    ) -> None:
        """Name the link that the next profile describes. Its devices and routes are stated apart."""
        profile = self.profiles[len(self._links)]
        self._links.append(
            Link(name=name, profile=profile, near=near, far=far, shaper=shaper, gateway=gateway, meters=meters)
        )

    def add_cabled_link(
        self, name: str, near: End, far: End, *, near_to: str, gateway: str, gateway_address: str
    ) -> None:
        """Lay a link of cables: through a gateway that shapes it with netem, or straight where nothing is shaped.

        `near_to`: what the near end, and the gateway, send over this link: 'default' or a prefix.
        """
        number = len(self._links)
        profile = self.profiles[number]
        macs = [_mac(number, end) for end in range(4)]
        near_plug = Plug(namespace=near.namespace, device=near.device, mac=macs[0])
        far_plug = Plug(namespace=far.namespace, device=far.device, mac=macs[3])
        if not profile.shaped:
            self._cables.append(Cable(near=far_plug, far=near_plug))
            self._hop(near, near_to, profile, far.address, macs[3])
            self._hop(far, f"{near.address}/32", profile, near.address, macs[0])
            up, down = Meter("received", far.namespace, far.device), Meter("sent", far.namespace, far.device)
            self.add_link(name, near, far, "none", {"up": up, "down": down})
            return
        self.add_namespace(gateway, "gateway")
        to_near, to_far = End(gateway, gateway_address, "to-near"), End(gateway, gateway_address, "to-far")
        self.address(to_near._replace(device="lo"))
        self._cables += [
            Cable(near=Plug(namespace=gateway, device=to_near.device, mac=macs[1]), far=near_plug),
            Cable(near=Plug(namespace=gateway, device=to_far.device, mac=macs[2]), far=far_plug),
        ]
        self._hop(near, near_to, profile, gateway_address, macs[1])
        self._hop(to_far, near_to, None, far.address, macs[3])
        self._hop(to_near, f"{near.address}/32", None, near.address, macs[0])
        self._hop(far, f"{near.address}/32", profile, gateway_address, macs[2])
        up = self._shape(name, "up", to_far) or Meter("received", far.namespace, far.device)
        down = self._shape(name, "down", to_near) or Meter("received", near.namespace, near.device)
        self.add_link(name, near, far, "netem", {"up": up, "down": down}, gateway)

    def _hop(self, here: End, destination: str, profile: LinkProfile | None, address: str, mac: str) -> None:
        """Reach `destination` through the neighbour with this address at the other end of the cable."""
        straight = destination == f"{address}/32"
        self.route(here, destination, profile=profile, via=None if straight else address)
        self._namespaces[here.namespace].neighbours.append(Neighbour(device=here.device, address=address, mac=mac))

    def _shape(self, link: str, direction: LinkDirection, out: End) -> Meter | None:
        """Shape what leaves a gateway; None where that direction of the link is unshaped."""
        number = len(self._links)
        profile = self.profiles[number]
        if (stated := profile.pipe(direction)) is None:
            return None
        shaped = ShapedDevice(
            link=link,
            direction=direction,
            namespace=out.namespace,
            device=out.device,
            pipe=with_own_seed(stated, number, direction),
            mtu=profile.mtu,
            layer=profile.layer,
        )
        shaped.plan()  # refuses what netem cannot carry out
        self._shaped.append(shaped)
        return Meter("qdisc", out.namespace, out.device)

    def finished(self) -> LabPlan:
        """Return everything that was drawn, as a plan."""
        return LabPlan(
            mtu=self.profiles[0].mtu,
            overhead_bytes=0 if self.by_relay else ETHERNET_HEADER_BYTES,
            nodes=tuple(name for name, space in self._namespaces.items() if space.role == "node"),
            links=tuple(self._links),
            namespaces=tuple(self._namespaces.values()),
            cables=tuple(self._cables),
            tuns=tuple(self._tuns),
            shaped=tuple(self._shaped),
        )

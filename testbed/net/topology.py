"""Plans of the two topologies: namespaces, links and addresses of a star or a line.

Pure; build.py builds them.

star    node-0 --- wan0 [access link node-0] hub           node i: 10.77.<i+1>.2, hub: 10.77.0.1
        node-1 --- wan0 [access link node-1] hub           every pair of nodes is two links apart

        In a site, far ends are the site's router, whose own link is the last: site s: 10.78.<s>.2.
        node-0 --- wan0 [access link node-0] router-0 [link site-0] hub
        A machine for background flows is behind the near side of a link: home-i: 10.79.<i>.2. Under netem, a router
        joins it and the node, if the near end is not a router already.

line    node-0 next0 --- [boundary-0] --- prev0 node-1 next0 --- [boundary-1] --- prev0 node-2
        boundary b: 10.78.<b>.1 at node b, 10.78.<b>.2 at node b+1; only neighbours reach each other

Every link is shaped in both directions. Engine netem routes it through its own gateway namespace, and shapes the egress
of the gateway: `up` on its far side, `down` on its near side. (On the sender's own device TCP small queues would keep
the buffer empty.) Engine relay uses a TUN device at each end of a link (hub and routers have one for all their links)
and leaves shaping to the relay process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from testbed.directions import LinkDirection
from testbed.errors import SpecError
from testbed.net.kernel.netem_plan import ETHERNET_HEADER_BYTES
from testbed.net.lab_plan import (
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
from testbed.spec import Engine, RtoMaxMs, Sites, SiteSpec, Topology, link_names, sites_fault

HUB = "hub"
HUB_ADDRESS = "10.77.0.1"
MAX_NODES = 254

_STAR_NETWORK, _SITE_NETWORK, _HOME_NETWORK = "10.77.0.0/16", "10.78.0.0/16", "10.79.0.0/16"
_HUB_TUN = "hub0"
_NODE_DEVICE, _NEXT, _PREVIOUS = "wan0", "next0", "prev0"


def node_name(index: int) -> str:
    """Return the name of a node's namespace; in a star also of its link."""
    return f"node-{index}"


def plan_lab(
    topology: Topology,
    profiles: Sequence[LinkProfile],
    nodes: int,
    engine: Engine,
    sites: Sites = None,
    tcp_rto_max_ms: RtoMaxMs = None,
) -> LabPlan:
    """Plan a star or a line, with one profile for all links or one per link: by node in a star, by boundary in a line.

    SpecError for a lab that topology or engine cannot implement.
    """
    least = 1 if topology == "star" else 2
    more = f" and {len(sites)} sites, which count too" if sites else ""
    if not least <= nodes <= MAX_NODES - len(sites or ()):
        raise SpecError(f"a {topology} has {least} to {MAX_NODES} nodes, asked for {nodes}{more}")
    if fault := sites_fault(topology, nodes, sites):
        raise SpecError(fault)
    if topology == "line" and any(profile.background is not None for profile in profiles):
        raise SpecError("background flows run between a node's home and the hub of a star; set topology = 'star'")
    draft = _Draft(profiles_of_links(profiles, topology, nodes, sites), engine, tcp_rto_max_ms)
    if topology == "star":
        _draw_star(draft, nodes, sites or ())
    else:
        _draw_line(draft, nodes)
    return draft.finished()


def _draw_star(draft: _Draft, nodes: int, sites: Sequence[SiteSpec]) -> None:
    names = link_names("star", nodes, tuple(sites))
    inside = {node: nodes + number for number, site in enumerate(sites) for node in site.nodes}
    hub = End(HUB, HUB_ADDRESS, _HUB_TUN if draft.by_relay else "lo")
    near = [End(node_name(i), f"10.77.{i + 1}.2", _NODE_DEVICE) for i in range(nodes)]
    shared = _HUB_TUN if draft.by_relay else _NODE_DEVICE
    near += [End(f"router-{name}", f"10.78.{i}.2", shared) for i, name in enumerate(names[nodes:])]
    draft.add_namespace(HUB, "hub")
    for number, end in enumerate(near):
        draft.add_namespace(end.namespace, "node" if number < nodes else "router")
        draft.address(end if number < nodes or draft.by_relay else end._replace(device="lo"))
    draft.address(hub)
    homes: dict[int, End] = {}
    for number, profile in enumerate(draft.profiles):
        if profile.background is not None:
            homes[number] = End(f"home-{names[number]}", f"10.79.{number}.2", _NODE_DEVICE)
            draft.add_namespace(homes[number].namespace, "home")
            draft.address(homes[number])
    if draft.by_relay:
        draft.add_tun(HUB, hub, None, None, 0)
        for end in (hub, *near[nodes:]):
            draft.route(end, _STAR_NETWORK, profile=draft.profiles[0])  # probes that end there choose their own
            if homes:
                draft.route(end, _HOME_NETWORK, profile=None)  # so do background flows
        if sites:
            draft.route(hub, _SITE_NETWORK, profile=draft.profiles[0])
    for number, (name, end, profile) in enumerate(zip(names, near, draft.profiles, strict=True)):
        above = inside.get(number) if number < nodes else None
        far = hub if above is None else near[above]
        # Behind an unshaped link of its own, a node has the TCP settings of its site.
        transport = profile if profile.shaped or above is None else draft.profiles[above]
        if draft.by_relay:
            draft.route(end, "default", profile=transport)
            # The relay draws the losses of each port from a separate stream, so links need no separate seeds.
            draft.add_tun(
                name, end, profile.up, profile.down, profile.overhead_bytes, None if above is None else names[above]
            )
            meters: dict[LinkDirection, Meter] = {"up": Meter("port", name, "up"), "down": Meter("port", name, "down")}
            draft.add_link(name, end, far, "relay", meters, home=homes.get(number))
            continue
        entry = end
        behind: dict[str, LinkProfile | None] = {
            near[node].address: transport for node in (sites[number - nodes].nodes if number >= nodes else ())
        }
        home = homes.get(number)
        if home is not None:
            if number < nodes:
                entry = End(f"router-{name}", f"10.79.{number}.1", _NODE_DEVICE)
                draft.add_namespace(entry.namespace, "router")
                draft.address(entry._replace(device="lo"))
                draft.add_cable(end, entry._replace(device="node0"), (4, 5), transport)
                behind[end.address] = transport
            draft.add_cable(home, entry._replace(device="home0"), (6, 7), None)
            behind[home.address] = None
        draft.add_cabled_link(
            name,
            entry,
            far._replace(device=f"link{number}"),
            near_to="default",
            gateway=f"gateway-{number}",
            gateway_address=f"10.77.{number + 1}.1" if number < nodes else f"10.78.{number - nodes}.1",
            transport=transport,
            behind=behind,
            home=home,
            end=end,
        )
    for number, end in homes.items() if draft.by_relay else ():
        draft.route(end, "default", profile=None)
        draft.add_tun(end.namespace, end, None, None, draft.profiles[number].overhead_bytes, names[number])


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
    """Return a locally administered address; `end`: 0 near, 1 gateway's near side, 2 gateway's far side, 3 far; 4 to 7
    of cables between the near end, its router and its home.
    """
    return f"02:77:00:00:{link:02x}:{end:02x}"


class _Draft:
    """A plan being drawn: namespaces first, then the links between them."""

    def __init__(self, profiles: tuple[LinkProfile, ...], engine: Engine, tcp_rto_max_ms: RtoMaxMs) -> None:
        """`profiles`: one per link.

        If the relay carries any link, it carries all, even unshaped ones, so that all nodes' devices count alike. A lab
        without shaped links consists of cables only, under either engine.
        """
        self.profiles, self._tcp_rto_max_ms = profiles, tcp_rto_max_ms
        self.by_relay = engine == "relay" and any(profile.shaped for profile in profiles)
        self._namespaces: dict[str, NamespacePlan] = {}
        self._links: list[Link] = []
        self._cables: list[Cable] = []
        self._tuns: list[Tun] = []
        self._shaped: list[ShapedDevice] = []

    def add_namespace(self, name: str, role: Role) -> None:
        """Add a namespace. TCP connections end in every one but gateways."""
        forward = role == "gateway" or (role in ("hub", "router") and not self.by_relay)
        tcp = tcp_sysctls(self.profiles[0], self._tcp_rto_max_ms) if role != "gateway" else {}
        self._namespaces[name] = NamespacePlan(name=name, role=role, sysctls=base_sysctls(forward=forward) | tcp)

    def address(self, end: End) -> None:
        """Add the end's address to its namespace, on the end's device."""
        self._namespaces[end.namespace].addresses.append((end.device, end.address))

    def route(self, end: End, destination: str, *, profile: LinkProfile | None, via: str | None = None) -> None:
        """Add a route out of an end's device. `profile` has the congestion control; None where no connection ends."""
        algorithm = profile.congestion_control if profile else None
        self._namespaces[end.namespace].routes.append(
            Route(destination=destination, device=end.device, via=via, source=end.address, congestion_control=algorithm)
        )

    def add_tun(
        self, port: str, end: End, up: Pipe | None, down: Pipe | None, overhead_bytes: int, behind: str | None = None
    ) -> None:
        """Make an end a port of the relay, possibly behind another one's pipes. SpecError for a pipe that the relay
        cannot implement.
        """
        for pipe in (up, down):
            refuse_unsupported(pipe)
        self._tuns.append(
            Tun(name=port, **end._asdict(), up=up, down=down, overhead_bytes=overhead_bytes, behind=behind)
        )

    def add_link(
        self,
        name: str,
        near: End,
        far: End,
        shaper: Literal["netem", "relay", "none"],
        meters: dict[LinkDirection, Meter],
        gateway: str | None = None,
        home: End | None = None,
    ) -> None:
        """Add a link with the next profile. Its devices and routes are added separately."""
        profile = self.profiles[len(self._links)]
        self._links.append(
            Link(
                name=name, profile=profile, near=near, far=far, shaper=shaper, gateway=gateway, meters=meters, home=home
            )
        )

    def add_cabled_link(
        self,
        name: str,
        near: End,
        far: End,
        *,
        near_to: str,
        gateway: str,
        gateway_address: str,
        transport: LinkProfile | None = None,
        behind: Mapping[str, LinkProfile | None] = MappingProxyType({}),
        home: End | None = None,
        end: End | None = None,
    ) -> None:
        """Add a cabled link: through a gateway that shapes it with netem, or directly if unshaped.

        `near_to`: destination that the near end and the gateway route over this link: 'default' or a prefix.
        `transport`: the profile with the near end's congestion control; None: the link's. `behind`: addresses that the
        near end forwards to, and the profile with the congestion control of connections to them. `end`: what the link's
        record calls its near end, if that is behind `near`.
        """
        number = len(self._links)
        profile = self.profiles[number]
        if not profile.shaped:
            self.add_cable(near, far, (0, 3), profile, near_to, transport)
            for address, other in behind.items():
                self.route(far, f"{address}/32", profile=other, via=near.address)
            up, down = Meter("received", far.namespace, far.device), Meter("sent", far.namespace, far.device)
            self.add_link(name, end or near, far, "none", {"up": up, "down": down}, home=home)
            return
        macs = [_mac(number, plug) for plug in range(4)]
        near_plug = Plug(namespace=near.namespace, device=near.device, mac=macs[0])
        far_plug = Plug(namespace=far.namespace, device=far.device, mac=macs[3])
        self.add_namespace(gateway, "gateway")
        to_near, to_far = End(gateway, gateway_address, "to-near"), End(gateway, gateway_address, "to-far")
        self.address(to_near._replace(device="lo"))
        self._cables += [
            Cable(near=Plug(namespace=gateway, device=to_near.device, mac=macs[1]), far=near_plug),
            Cable(near=Plug(namespace=gateway, device=to_far.device, mac=macs[2]), far=far_plug),
        ]
        self._hop(near, near_to, transport or profile, gateway_address, macs[1])
        self._hop(to_far, near_to, None, far.address, macs[3])
        self._hop(to_near, f"{near.address}/32", None, near.address, macs[0])
        self._hop(far, f"{near.address}/32", profile, gateway_address, macs[2])
        for address, other in behind.items():
            self.route(to_near, f"{address}/32", profile=None, via=near.address)
            self.route(far, f"{address}/32", profile=other, via=gateway_address)
        up = self._shape(name, "up", to_far) or Meter("received", far.namespace, far.device)
        down = self._shape(name, "down", to_near) or Meter("received", near.namespace, near.device)
        self.add_link(name, end or near, far, "netem", {"up": up, "down": down}, gateway, home)

    def add_cable(
        self,
        near: End,
        far: End,
        numbers: tuple[int, int],
        profile: LinkProfile | None,
        near_to: str = "default",
        transport: LinkProfile | None = None,
    ) -> None:
        """Join two ends directly; `numbers`: of their MACs in the next link. `transport`: as of `add_cabled_link`."""
        macs = [_mac(len(self._links), number) for number in numbers]
        near_plug = Plug(namespace=near.namespace, device=near.device, mac=macs[0])
        far_plug = Plug(namespace=far.namespace, device=far.device, mac=macs[1])
        self._cables.append(Cable(near=far_plug, far=near_plug))
        self._hop(near, near_to, transport or profile, far.address, macs[1])
        self._hop(far, f"{near.address}/32", profile, near.address, macs[0])

    def _hop(self, here: End, destination: str, profile: LinkProfile | None, address: str, mac: str) -> None:
        """Add a route to `destination` through the neighbour with this address at the other end of the cable."""
        straight = destination == f"{address}/32"
        self.route(here, destination, profile=profile, via=None if straight else address)
        self._namespaces[here.namespace].neighbours.append(Neighbour(device=here.device, address=address, mac=mac))

    def _shape(self, link: str, direction: LinkDirection, out: End) -> Meter | None:
        """Shape the egress of a gateway; None if that direction of the link is unshaped."""
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
        shaped.plan()  # refuses pipes that netem cannot implement
        self._shaped.append(shaped)
        return Meter("qdisc", out.namespace, out.device)

    def finished(self) -> LabPlan:
        """Return the finished plan."""
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

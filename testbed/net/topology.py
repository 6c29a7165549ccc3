"""The two topologies as plans: which namespaces, links and addresses a lab is made of. Pure; lab.py obeys a plan.

star    node-0 --- wan0 [access link node-0] hub           node i: 10.77.<i+1>.2, hub: 10.77.0.1
        node-1 --- wan0 [access link node-1] hub           every pair of nodes is two links apart

line    node-0 next0 --- [boundary-0] --- prev0 node-1 next0 --- [boundary-1] --- prev0 node-2
        boundary b: 10.78.<b>.1 at node b, 10.78.<b>.2 at node b+1; only neighbours reach each other

Every link is shaped both ways. Engine netem lays it through a gateway namespace of its own, and shapes what leaves the gateway:
`up` on its far side, `down` on its near side. (On the sender's own device TCP small queues would keep the buffer empty.)
Engine relay gives each end of a link a TUN device (the hub has one for all) and leaves shaping to the relay process.
"""

from __future__ import annotations

from collections.abc import Sequence

from testbed.errors import SpecError
from testbed.net.arrange import Draft, one_a_link
from testbed.net.elements import End, Meter, Plan
from testbed.profiles import LinkProfile
from testbed.spec import Engine

HUB = "hub"
HUB_ADDRESS = "10.77.0.1"
MAX_NODES = 254

_STAR_NETWORK = "10.77.0.0/16"
_HUB_TUN = "hub0"
_NODE_DEVICE, _NEXT, _PREVIOUS = "wan0", "next0", "prev0"


def node_name(index: int) -> str:
    """The namespace of a node; in a star also the name of its link."""
    return f"node-{index}"


def boundary_name(index: int) -> str:
    """The link between node `index` and the next one of a line."""
    return f"boundary-{index}"


def gateway_name(link: int) -> str:
    """The namespace in the middle of a link."""
    return f"gateway-{link}"


def star(profiles: Sequence[LinkProfile], nodes: int, engine: Engine) -> Plan:
    """Plan a star of access links, with one profile for all or one a node. SpecError for what cannot be carried out."""
    _refuse_too_many("star", nodes, least=1)
    each = one_a_link(profiles, "star", nodes)
    draft = Draft(each, engine)
    draft.place(HUB, "hub")
    names = [node_name(i) for i in range(nodes)]
    for name in names:
        draft.place(name, "node")
    near = [End(name, f"10.77.{i + 1}.2", _NODE_DEVICE) for i, name in enumerate(names)]
    for end in near:
        draft.address(end)
    if not draft.by_relay:
        draft.address(End(HUB, HUB_ADDRESS, "lo"))
        for i, end in enumerate(near):
            far = End(HUB, HUB_ADDRESS, f"link{i}")
            draft.cabled(
                end.place, end, far, near_to="default", gateway=gateway_name(i), gateway_address=f"10.77.{i + 1}.1"
            )
        return draft.plan()
    hub = End(HUB, HUB_ADDRESS, _HUB_TUN)
    draft.address(hub)
    draft.route(hub, _STAR_NETWORK, profile=each[0])  # probes that end there choose for themselves
    draft.tun(HUB, hub, None, None, 0)
    for end, profile in zip(near, each, strict=True):
        draft.route(end, "default", profile=profile)
        # The relay draws the losses of each port from a stream of its own: no seed of its own is needed here.
        draft.tun(end.place, end, profile.up, profile.down, profile.overhead_bytes)
        draft.carried(
            end.place, end, hub, {"up": Meter("port", end.place, "up"), "down": Meter("port", end.place, "down")}
        )
    return draft.plan()


def line(profiles: Sequence[LinkProfile], nodes: int, engine: Engine) -> Plan:
    """Plan a line: a link between each node and the next, one profile for all or one a boundary. Errors as in `star`."""
    _refuse_too_many("line", nodes, least=2)
    each = one_a_link(profiles, "line", nodes)
    draft = Draft(each, engine)
    for i in range(nodes):
        draft.place(node_name(i), "node")
    for i, profile in enumerate(each):
        name = boundary_name(i)
        near, far = End(node_name(i), f"10.78.{i}.1", _NEXT), End(node_name(i + 1), f"10.78.{i}.2", _PREVIOUS)
        draft.address(near)
        draft.address(far)
        if not draft.by_relay:
            to_far = f"{far.address}/32"
            draft.cabled(name, near, far, near_to=to_far, gateway=gateway_name(i), gateway_address=f"10.78.{i}.3")
            continue
        ports = [(f"{name}-near", near, far, profile.up), (f"{name}-far", far, near, profile.down)]
        for port, here, there, pipe in ports:
            draft.route(here, f"{there.address}/32", profile=profile)
            draft.tun(port, here, pipe, None, profile.overhead_bytes)
        draft.carried(
            name, near, far, {"up": Meter("port", ports[0][0], "up"), "down": Meter("port", ports[1][0], "up")}
        )
    return draft.plan()


def _refuse_too_many(topology: str, nodes: int, *, least: int) -> None:
    if not least <= nodes <= MAX_NODES:
        raise SpecError(f"a {topology} has {least} to {MAX_NODES} nodes, asked for {nodes}")

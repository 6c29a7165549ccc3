"""The star as a plan: which namespaces, cables, addresses, routes and shapers a lab is made of. Pure; lab.py obeys it.

    node-0 --- wan0 [access link, shaped both ways] hub          node i: 10.77.<i+1>.2, hub: 10.77.0.1
    node-1 --- wan0 [access link, shaped both ways] hub

Engine netem lays each access link through a gateway namespace of its own, and shapes what leaves the gateway: `up` on its side
towards the hub, `down` on its side towards the node. (On the sender's own device TCP small queues would keep the buffer empty.)
Engine relay gives every node, and the hub, a TUN device and leaves routing and shaping to the relay process. An unshaped link is
a cable straight from the node to the hub under either engine.
"""

from __future__ import annotations

from typing import Literal

from testbed.errors import SpecError
from testbed.net import qdisc
from testbed.net.elements import Cable, Neighbour, Place, Plug, Role, Route, Shaper, Star, Tun
from testbed.net.qdisc import ETHERNET_HEADER_BYTES
from testbed.spec import Engine, LinkProfile, Pipe

HUB = "hub"
HUB_ADDRESS = "10.77.0.1"
NODE_DEVICE = "wan0"
HUB_TUN = "hub0"
MAX_NODES = 254

_NETWORK = "10.77.0.0/16"
_NEXT_SEED = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: seeds of neighbouring links lie far apart

_SOCKET_BUFFERS = "4096 131072 33554432"
"""Least, first and largest, in bytes: 32 MiB lets one connection fill 1 Gbit/s at 100 ms, and is the same on every machine."""


def node_name(index: int) -> str:
    """The namespace of a node, and the name of its link."""
    return f"node-{index}"


def gateway_name(index: int) -> str:
    """The namespace between a node and the hub."""
    return f"gateway-{index}"


def hub_device(index: int) -> str:
    """The hub's end of a cabled access link."""
    return f"link{index}"


def node_address(index: int) -> str:
    """The IPv4 address of a node."""
    return f"10.77.{index + 1}.2"


def _gateway_address(index: int) -> str:
    return f"10.77.{index + 1}.1"


def _mac(index: int, end: int) -> str:
    """A locally administered address; `end`: 0 node, 1 gateway's node side, 2 gateway's hub side, 3 hub."""
    return f"02:77:00:00:{index:02x}:{end:02x}"


def with_own_seed(pipe: Pipe | None, index: int) -> Pipe | None:
    """The profile's pipe with a seed of the node's own, or every link would lose the same packets. Node 0 has the profile's."""
    return pipe and pipe.model_copy(update={"seed": (pipe.seed + index * _NEXT_SEED) % 2**63})


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


def star(profile: LinkProfile, nodes: int, engine: Engine) -> Star:
    """Plan a star of `nodes` access links with one profile. SpecError for a profile that the engine cannot carry out."""
    if not 1 <= nodes <= MAX_NODES:
        raise SpecError(f"a star has 1 to {MAX_NODES} nodes, asked for {nodes}")
    if not profile.shaped:
        return _unshaped(profile, nodes)
    return _netem(profile, nodes) if engine == "netem" else _relay(profile, nodes)


def _place(
    name: str,
    role: Role,
    profile: LinkProfile,
    *,
    addresses: list[tuple[str, str]],
    routes: list[Route],
    neighbours: list[Neighbour],
    forward: bool = False,
) -> Place:
    ends_tcp = role != "gateway"
    return Place(
        name=name,
        role=role,
        addresses=tuple(addresses),
        routes=tuple(routes),
        neighbours=tuple(neighbours),
        sysctls=base_sysctls(forward=forward) | (tcp_sysctls(profile) if ends_tcp else {}),
        congestion_control=profile.congestion_control if ends_tcp else None,
    )


def _cabled_node(profile: LinkProfile, index: int, via: str, via_mac: str) -> Place:
    return _place(
        node_name(index),
        "node",
        profile,
        addresses=[(NODE_DEVICE, node_address(index))],
        routes=[Route(destination="default", device=NODE_DEVICE, via=via, source=node_address(index))],
        neighbours=[Neighbour(device=NODE_DEVICE, address=via, mac=via_mac)],
    )


def _cabled_hub(profile: LinkProfile, next_hops: list[tuple[str, str]]) -> Place:
    """`next_hops`: address and MAC at the other end of `link<i>`."""
    return _place(
        HUB,
        "hub",
        profile,
        addresses=[("lo", HUB_ADDRESS)],
        routes=[
            Route(destination=f"{node_address(i)}/32", device=hub_device(i), via=address, source=HUB_ADDRESS)
            for i, (address, _) in enumerate(next_hops)
        ],
        neighbours=[Neighbour(device=hub_device(i), address=address, mac=mac) for i, (address, mac) in enumerate(next_hops)],
        forward=True,
    )


def _unshaped(profile: LinkProfile, nodes: int) -> Star:
    return Star(
        shaper="none",
        mtu=profile.mtu,
        overhead_bytes=ETHERNET_HEADER_BYTES,
        nodes=tuple(node_name(i) for i in range(nodes)),
        places=(
            _cabled_hub(profile, [(node_address(i), _mac(i, 0)) for i in range(nodes)]),
            *(_cabled_node(profile, i, HUB_ADDRESS, _mac(i, 3)) for i in range(nodes)),
        ),
        cables=tuple(
            Cable(
                near=Plug(place=HUB, device=hub_device(i), mac=_mac(i, 3)),
                far=Plug(place=node_name(i), device=NODE_DEVICE, mac=_mac(i, 0)),
            )
            for i in range(nodes)
        ),
        tuns=(),
        shapers=(),
    )


def _netem(profile: LinkProfile, nodes: int) -> Star:
    gateways, cables, shapers = [], [], []
    for i in range(nodes):
        gateway, node, address = gateway_name(i), node_name(i), _gateway_address(i)
        gateways.append(
            _place(
                gateway,
                "gateway",
                profile,
                addresses=[("lo", address)],
                routes=[
                    Route(destination="default", device="to-hub", via=HUB_ADDRESS, source=address),
                    Route(destination=f"{node_address(i)}/32", device="to-node", source=address),
                ],
                neighbours=[
                    Neighbour(device="to-hub", address=HUB_ADDRESS, mac=_mac(i, 3)),
                    Neighbour(device="to-node", address=node_address(i), mac=_mac(i, 0)),
                ],
                forward=True,
            )
        )
        cables += [
            Cable(
                near=Plug(place=gateway, device="to-node", mac=_mac(i, 1)),
                far=Plug(place=node, device=NODE_DEVICE, mac=_mac(i, 0)),
            ),
            Cable(
                near=Plug(place=gateway, device="to-hub", mac=_mac(i, 2)),
                far=Plug(place=HUB, device=hub_device(i), mac=_mac(i, 3)),
            ),
        ]
        sides: tuple[tuple[Literal["up", "down"], Pipe | None, str], ...] = (
            ("up", with_own_seed(profile.up, i), "to-hub"),
            ("down", with_own_seed(profile.down, i), "to-node"),
        )
        for direction, pipe, device in sides:
            if pipe is not None:
                plan = qdisc.plan(pipe, mtu=profile.mtu, layer=profile.layer)
                shapers.append(Shaper(link=node, direction=direction, place=gateway, device=device, plan=plan))
    return Star(
        shaper="netem",
        mtu=profile.mtu,
        overhead_bytes=ETHERNET_HEADER_BYTES,
        nodes=tuple(node_name(i) for i in range(nodes)),
        places=(
            _cabled_hub(profile, [(_gateway_address(i), _mac(i, 2)) for i in range(nodes)]),
            *gateways,
            *(_cabled_node(profile, i, _gateway_address(i), _mac(i, 1)) for i in range(nodes)),
        ),
        cables=tuple(cables),
        tuns=(),
        shapers=tuple(shapers),
    )


def _relay(profile: LinkProfile, nodes: int) -> Star:
    tuns = [Tun(place=HUB, device=HUB_TUN, address=HUB_ADDRESS, up=None, down=None)]
    for i in range(nodes):  # the relay draws the losses of each port from a stream of its own: no own seed is needed
        tuns.append(Tun(place=node_name(i), device=NODE_DEVICE, address=node_address(i), up=profile.up, down=profile.down))
    places = []
    for tun in tuns:
        destination = _NETWORK if tun.place == HUB else "default"
        places.append(
            _place(
                tun.place,
                "hub" if tun.place == HUB else "node",
                profile,
                addresses=[(tun.device, tun.address)],
                routes=[Route(destination=destination, device=tun.device, source=tun.address)],
                neighbours=[],
            )
        )
    return Star(
        shaper="relay",
        mtu=profile.mtu,
        overhead_bytes=0,
        nodes=tuple(node_name(i) for i in range(nodes)),
        places=tuple(places),
        cables=(),
        tuns=tuple(tuns),
        shapers=(),
    )

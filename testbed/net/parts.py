"""The parts of a standing lab that others use: its nodes and its links, and what lab.json says of each link."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from testbed.net.build import Built
from testbed.net.elements import Link, Plan
from testbed.net.kernel.namespace import Namespace
from testbed.profiles import LinkProfile
from testbed.records import LinkRecord


@dataclass(frozen=True, kw_only=True)
class Node:
    """One stage's place in the lab."""

    index: int
    name: str
    address: str
    """IPv4. In a star every other node reaches it, in a line the node before (the first node: the one after)."""
    devices: tuple[str, ...]
    """The ends of its links inside `namespace`; in a line the one to the previous node first."""
    namespace: Namespace


@dataclass(frozen=True, kw_only=True)
class LabLink:
    """One shaped link. `up` leads from the near end to the far end."""

    name: str
    """`node-i` in a star, where the far end is the hub; `boundary-i` in a line, from node i to node i+1."""
    profile: LinkProfile
    near: Namespace
    near_name: str
    near_address: str
    near_device: str
    far: Namespace
    far_name: str
    far_address: str
    far_device: str


def nodes_of(plan: Plan, namespaces: Mapping[str, Namespace]) -> tuple[Node, ...]:
    """The nodes in their order."""
    addresses = {place.name: place.addresses for place in plan.places}
    return tuple(
        Node(
            index=index,
            name=name,
            # The first: of the link to the node before, as topology.py states them in the order of the links.
            address=addresses[name][0][1],
            devices=tuple(device for device, _ in addresses[name]),
            namespace=namespaces[name],
        )
        for index, name in enumerate(plan.nodes)
    )


def link_of(link: Link, namespaces: Mapping[str, Namespace]) -> LabLink:
    """A planned link with the namespaces at its ends."""
    near, far = link.near, link.far
    return LabLink(
        name=link.name,
        profile=link.profile,
        near=namespaces[near.place],
        near_name=near.place,
        near_address=near.address,
        near_device=near.device,
        far=namespaces[far.place],
        far_name=far.place,
        far_address=far.address,
        far_device=far.device,
    )


def record_of(link: Link, built: Built) -> LinkRecord:
    """A link as the kernel and the relay say it is."""
    parts: dict[str, Any] = {}
    for side, end in (("near", link.near), ("far", link.far)):
        held = built.settings[end.place]
        parts[side] = {**held, "devices": {name: what for name, what in held["devices"].items() if name == end.device}}
    if link.gateway is not None:
        parts["gateway"] = built.settings[link.gateway]
    if built.relay is not None:
        process = {key: value for key, value in built.relay.settings.items() if key != "ports"}
        ports = built.relay.settings["ports"]
        parts["relay"] = {
            **process,
            **{way: ports[meter.place][meter.what] for way, meter in link.meters.items() if meter.kind == "port"},
        }
    return LinkRecord(
        name=link.name,
        profile=link.profile.name,
        near=link.near.place,
        far=link.far.place,
        near_address=link.near.address,
        far_address=link.far.address,
        shaper=link.shaper,
        settings=parts,
    )

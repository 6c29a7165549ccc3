"""The parts that a lab is planned with: frozen records, pure. topology.py arranges them, lab.py makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from testbed.directions import LinkDirection
from testbed.net.kernel.qdisc import NetemPlan
from testbed.profiles import LinkProfile, Pipe

Role = Literal["node", "gateway", "hub"]


@dataclass(frozen=True, kw_only=True)
class Route:
    """Out of a device: to the neighbour `via`, or without it straight onto the link."""

    destination: str
    """'default' or a prefix."""
    device: str
    via: str | None = None
    source: str | None = None
    congestion_control: str | None = None
    """Of TCP connections that take this route; None where none begin or end."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """An address on a cable, with the MAC stated for good."""

    device: str
    address: str
    mac: str


@dataclass(frozen=True, kw_only=True)
class Place:
    """One namespace and what is set inside it."""

    name: str
    role: Role
    addresses: tuple[tuple[str, str], ...]
    """(device, address): each address stands alone, without a subnet."""
    routes: tuple[Route, ...]
    neighbours: tuple[Neighbour, ...]
    sysctls: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Plug:
    """One end of a cable."""

    place: str
    device: str
    mac: str


@dataclass(frozen=True, kw_only=True)
class Cable:
    """A veth pair between two namespaces."""

    near: Plug
    far: Plug


@dataclass(frozen=True, kw_only=True)
class Tun:
    """A TUN device and the pipes between it and the relay's switch. `name` is the relay's for this port."""

    name: str
    place: str
    device: str
    address: str
    up: Pipe | None
    """Away from the device."""
    down: Pipe | None
    overhead_bytes: int
    """What the pipes' rate counts on top of each IP packet."""


@dataclass(frozen=True, kw_only=True)
class Shaper:
    """A netem on the device of a gateway."""

    link: str
    direction: LinkDirection
    place: str
    device: str
    pipe: Pipe
    plan: NetemPlan


class End(NamedTuple):
    """Where a link ends."""

    place: str
    address: str
    device: str


class Meter(NamedTuple):
    """Where one direction of a link is counted."""

    kind: Literal["qdisc", "port", "sent", "received"]
    """A netem; a direction of a relay's port; what a device has sent or received, where nothing is shaped."""
    place: str
    """The namespace; for a port, the port's name."""
    what: str
    """The device; for a port, its direction."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link of the lab. `up` leads from the near end, a node, to the far end: the hub, or the next node of a line."""

    name: str
    profile: LinkProfile
    near: End
    far: End
    shaper: Literal["netem", "relay", "none"]
    gateway: str | None
    """The namespace between the ends, where there is one."""
    meters: Mapping[LinkDirection, Meter]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a lab is made of."""

    mtu: int
    overhead_bytes: int
    """What the nodes' devices count on top of each IP packet."""
    nodes: tuple[str, ...]
    links: tuple[Link, ...]
    places: tuple[Place, ...]
    cables: tuple[Cable, ...]
    tuns: tuple[Tun, ...]
    shapers: tuple[Shaper, ...]

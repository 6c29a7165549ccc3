"""The parts that a topology is planned with: frozen records, pure. topology.py arranges them, lab.py makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from testbed.net.qdisc import NetemPlan
from testbed.spec import Pipe

Role = Literal["node", "gateway", "hub"]


@dataclass(frozen=True, kw_only=True)
class Route:
    """Out of a device: to the neighbour `via`, or without it straight onto the link."""

    destination: str
    """'default' or a prefix."""
    device: str
    via: str | None = None
    source: str | None = None


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
    congestion_control: str | None
    """None where no TCP connection ends."""


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
    """A TUN device and the pipes between it and the relay's switch."""

    place: str
    device: str
    address: str
    up: Pipe | None
    down: Pipe | None


@dataclass(frozen=True, kw_only=True)
class Shaper:
    """A netem on the device of a gateway."""

    link: str
    direction: Literal["up", "down"]
    place: str
    device: str
    plan: NetemPlan


@dataclass(frozen=True, kw_only=True)
class Star:
    """Everything that a lab is made of."""

    shaper: Literal["netem", "relay", "none"]
    mtu: int
    overhead_bytes: int
    """What `wan0` counts on top of each IP packet."""
    nodes: tuple[str, ...]
    places: tuple[Place, ...]
    cables: tuple[Cable, ...]
    tuns: tuple[Tun, ...]
    shapers: tuple[Shaper, ...]

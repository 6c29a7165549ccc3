"""What a lab is made of, as frozen records: namespaces, cables, TUN devices, shaped devices, links and where they are
counted.

Pure. topology.py draws a plan, build.py makes what it says, and lab.py owns what was made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.errors import SpecError
from testbed.net.kernel.netem_plan import NetemPlan, plan_netem
from testbed.net.relay.client import RelayPort
from testbed.profiles import LinkProfile, Pipe
from testbed.profiles.timeline import TimelineStep
from testbed.spec import Topology, link_count

Role = Literal["node", "gateway", "hub"]

_NEXT_SEED = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: seeds of neighbouring links lie far apart
_SOCKET_BUFFERS = "4096 131072 33554432"
"""Least, first and largest, in bytes, the same on every machine: 32 MiB let a connection fill 1 Gbit/s at 100 ms."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """A route out of a device: to the neighbour `via`, or without one straight onto the link."""

    destination: str
    """'default' or a prefix."""
    device: str
    via: str | None = None
    source: str | None = None
    congestion_control: str | None = None
    """What TCP connections that take this route use; None where no connection begins or ends."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """An address at the other end of a cable. Its MAC is stated for good, so that nothing asks for it by ARP."""

    device: str
    address: str
    mac: str


@dataclass(frozen=True, kw_only=True)
class NamespacePlan:
    """One network namespace and what is set inside it."""

    name: str
    role: Role
    sysctls: Mapping[str, str]
    addresses: list[tuple[str, str]] = field(default_factory=list)
    """(device, address): each address stands alone, without a subnet."""
    routes: list[Route] = field(default_factory=list)
    neighbours: list[Neighbour] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Plug:
    """One end of a cable."""

    namespace: str
    device: str
    mac: str


@dataclass(frozen=True, kw_only=True)
class Cable:
    """A veth pair between two namespaces."""

    near: Plug
    far: Plug


@dataclass(frozen=True, kw_only=True)
class Tun(RelayPort):
    """A TUN device, and what the relay does with it."""

    namespace: str
    device: str


@dataclass(frozen=True, kw_only=True)
class ShapedDevice:
    """A gateway's device whose outgoing packets netem shapes: one direction of one link."""

    link: str
    direction: LinkDirection
    namespace: str
    device: str
    pipe: Pipe
    """What is asked for, with the seed of this link and direction."""
    mtu: int
    layer: Literal["ip", "ethernet"]

    def plan(self, step: TimelineStep | None = None) -> NetemPlan:
        """Return what netem holds: the pipe's own constant numbers, or one step of it. Errors as in `plan_netem`."""
        return plan_netem(self.pipe, mtu=self.mtu, layer=self.layer, step=step)

    @property
    def label(self) -> str:
        """The link and the direction, for messages."""
        return f"{self.link} {self.direction}"


class End(NamedTuple):
    """Where a link ends."""

    namespace: str
    address: str
    device: str


class Meter(NamedTuple):
    """Where one direction of a link is counted."""

    kind: Literal["qdisc", "port", "sent", "received"]
    """A netem; a direction of a relay's port; what a device has sent or received, where nothing is shaped."""
    where: str
    """The namespace; for a port, the port's name."""
    what: str
    """The device; for a port, its direction."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link of a lab. `up` leads from the near end, a node, to the far end: the hub, or the next node of a line."""

    name: str
    """`node-i` in a star, where the far end is the hub; `boundary-i` in a line, from node i to node i+1."""
    profile: LinkProfile
    near: End
    far: End
    shaper: Literal["netem", "relay", "none"]
    gateway: str | None
    """The namespace between the ends, where there is one."""
    meters: Mapping[LinkDirection, Meter]


@dataclass(frozen=True, kw_only=True)
class LabPlan:
    """Everything that a lab is made of."""

    mtu: int
    overhead_bytes: int
    """What the nodes' devices count on top of each IP packet."""
    nodes: tuple[str, ...]
    links: tuple[Link, ...]
    namespaces: tuple[NamespacePlan, ...]
    cables: tuple[Cable, ...]
    tuns: tuple[Tun, ...]
    shaped: tuple[ShapedDevice, ...]


def profiles_of_links(profiles: Sequence[LinkProfile], topology: Topology, nodes: int) -> tuple[LinkProfile, ...]:
    """Return one profile for each link, from one for all or one per link.

    SpecError where their number does not fit, or where they disagree in what a node has only once.
    """
    count = link_count(topology, nodes)
    if len(profiles) not in (1, count):
        raise SpecError(
            f"{len(profiles)} profiles for a {topology} of {nodes} nodes, which has {count} links; "
            "state one for all of them, or one per link"
        )
    for what in ("mtu", "slow_start_after_idle"):
        values = {profile.name: getattr(profile, what) for profile in profiles}
        if len(set(values.values())) > 1:
            stated = ", ".join(f"{name} has {value}" for name, value in values.items())
            raise SpecError(f"the links of one lab must agree in {what}, which a node has once: {stated}")
    return tuple(profiles) if len(profiles) == count else tuple(profiles) * count


def with_own_seed(pipe: Pipe, link: int, direction: LinkDirection) -> Pipe:
    """Give a profile's pipe a seed of this link and direction, or all of them would lose the same packets.

    `up` of the first link keeps the profile's seed.
    """
    offset = (2 * link + LINK_DIRECTIONS.index(direction)) * _NEXT_SEED
    return pipe.model_copy(update={"seed": (pipe.seed + offset) % 2**63})


def base_sysctls(*, forward: bool) -> dict[str, str]:
    """Return the kernel parameters of every namespace; `forward` where packets pass through it."""
    return {
        "net.ipv4.conf.all.rp_filter": "0",
        "net.ipv4.conf.default.rp_filter": "0",
        "net.ipv4.ip_forward": "1" if forward else "0",
    }


def tcp_sysctls(profile: LinkProfile) -> dict[str, str]:
    """Return the kernel parameters of a namespace in which TCP connections end.

    Nothing that changes a measured number is left to the machine's defaults.
    """
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

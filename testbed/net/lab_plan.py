"""The parts of a lab as frozen records: namespaces, cables, TUN devices, shaped devices, links and meters.

Pure. topology.py makes a plan, build.py builds it, and lab.py owns the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.errors import SpecError
from testbed.net.kernel.queue_plan import Shaping, plan_shaping
from testbed.net.relay.client import RelayPort
from testbed.profiles import LinkProfile, Pipe
from testbed.profiles.timeline import TimelineStep
from testbed.spec import RtoMaxMs, Sites, Topology, link_count

Role = Literal["node", "gateway", "hub", "router", "home"]
"""A router joins the nodes of a site, or a node and its home: the machine that sends and receives background flows."""

_NEXT_SEED = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the seeds of neighbouring links
_SOCKET_BUFFERS = "4096 131072 33554432"
"""Minimum, initial and maximum, in bytes, equal on every machine: 32 MiB suffice for 1 Gbit/s at 100 ms."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """A route out of a device: to the neighbour `via`, or without one directly onto the link."""

    destination: str
    """'default' or a prefix."""
    device: str
    via: str | None = None
    source: str | None = None
    congestion_control: str | None = None
    """Congestion control of TCP connections on this route; None where no connection starts or ends."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """An address at the other end of a cable. Its MAC is permanent, so that there is no ARP."""

    device: str
    address: str
    mac: str


@dataclass(frozen=True, kw_only=True)
class NamespacePlan:
    """One network namespace and its settings."""

    name: str
    role: Role
    sysctls: Mapping[str, str]
    addresses: list[tuple[str, str]] = field(default_factory=list)
    """(device, address): each address is without a subnet."""
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
    """A TUN device, and the relay's pipes for it."""

    namespace: str
    device: str


@dataclass(frozen=True, kw_only=True)
class ShapedDevice:
    """A gateway's device with qdiscs on its egress: one direction of one link."""

    link: str
    direction: LinkDirection
    namespace: str
    device: str
    pipe: Pipe
    """The requested pipe, with the seed of this link and direction."""
    mtu: int
    layer: Literal["ip", "ethernet"]

    def plan(self, step: TimelineStep | None = None) -> Shaping:
        """Return the plan for the pipe's constant values, or for one step of it. Errors as for `plan_netem`."""
        return plan_shaping(self.pipe, mtu=self.mtu, layer=self.layer, step=step)

    @property
    def label(self) -> str:
        """Link and direction, for messages."""
        return f"{self.link} {self.direction}"


class End(NamedTuple):
    """An end of a link."""

    namespace: str
    address: str
    device: str


class Meter(NamedTuple):
    """The counter of one direction of a link."""

    kind: Literal["qdisc", "port", "sent", "received"]
    """The qdiscs of a device; a direction of a relay's port; or a device's sent or received bytes, if unshaped."""
    where: str
    """The namespace; for a port, the port's name."""
    what: str
    """The device; for a port, its direction."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One link of a lab. `up` leads from the near end, a node or a site's router, to the far end: the hub, a site's
    router, or the next node of a line.
    """

    name: str
    """`node-i` in a star, where the far end is the hub or the router of its site; `site-i` from there to the hub;
    `boundary-i` in a line, from node i to node i+1."""
    profile: LinkProfile
    near: End
    far: End
    shaper: Literal["netem", "relay", "none"]
    gateway: str | None
    """The namespace between the ends, where there is one."""
    meters: Mapping[LinkDirection, Meter]
    home: End | None = None
    """A machine behind the near end's side of this link, for background flows to and from `far`; None without any."""


@dataclass(frozen=True, kw_only=True)
class LabPlan:
    """All parts of a lab."""

    mtu: int
    overhead_bytes: int
    """Bytes that the nodes' devices count in addition to each IP packet."""
    nodes: tuple[str, ...]
    links: tuple[Link, ...]
    namespaces: tuple[NamespacePlan, ...]
    cables: tuple[Cable, ...]
    tuns: tuple[Tun, ...]
    shaped: tuple[ShapedDevice, ...]


def profiles_of_links(
    profiles: Sequence[LinkProfile], topology: Topology, nodes: int, sites: Sites = None
) -> tuple[LinkProfile, ...]:
    """Return one profile for each link, from one for all or one per link; then those of the sites.

    SpecError for a wrong number of profiles, or for conflicting values of a per-node setting.
    """
    count = link_count(topology, nodes)
    if len(profiles) not in (1, count):
        raise SpecError(
            f"{len(profiles)} profiles for a {topology} of {nodes} nodes, which has {count} links; give one for all, "
            "or one per link"
        )
    shared = [site.profile for site in sites or ()]
    for what in ("mtu", "slow_start_after_idle"):
        values = {profile.name: getattr(profile, what) for profile in (*profiles, *shared)}
        if len(set(values.values())) > 1:
            stated = ", ".join(f"{name} has {value}" for name, value in values.items())
            raise SpecError(f"the links of one lab must agree in {what}, which is a setting of the node: {stated}")
    return (*(profiles if len(profiles) == count else tuple(profiles) * count), *shared)


def with_own_seed(pipe: Pipe, link: int, direction: LinkDirection) -> Pipe:
    """Return a profile's pipe with a seed for this link and direction; otherwise all would lose the same packets.

    `up` of the first link keeps the profile's seed.
    """
    offset = (2 * link + LINK_DIRECTIONS.index(direction)) * _NEXT_SEED
    return pipe.model_copy(update={"seed": (pipe.seed + offset) % 2**63})


def base_sysctls(*, forward: bool) -> dict[str, str]:
    """Return the kernel parameters of every namespace; `forward` if packets pass through it."""
    return {
        "net.ipv4.conf.all.rp_filter": "0",
        "net.ipv4.conf.default.rp_filter": "0",
        "net.ipv4.ip_forward": "1" if forward else "0",
    }


def tcp_sysctls(profile: LinkProfile, rto_max_ms: RtoMaxMs = None) -> dict[str, str]:
    """Return the kernel parameters of a namespace with TCP endpoints.

    No setting that affects measurements is left to the machine's defaults.
    """
    return {
        "net.ipv4.tcp_slow_start_after_idle": "1" if profile.slow_start_after_idle else "0",
        "net.ipv4.tcp_no_metrics_save": "1",  # otherwise connections reuse metrics of earlier ones
        "net.ipv4.tcp_rmem": _SOCKET_BUFFERS,
        "net.ipv4.tcp_wmem": _SOCKET_BUFFERS,
        "net.ipv4.tcp_timestamps": "1",  # 12 bytes of each packet
        "net.ipv4.tcp_sack": "1",
        "net.ipv4.tcp_window_scaling": "1",
        "net.ipv4.tcp_ecn": "0",
        "net.ipv4.tcp_mtu_probing": "0",
    } | ({} if rto_max_ms is None else _retransmission(rto_max_ms))


def _retransmission(rto_max_ms: int) -> dict[str, str]:
    """Limit TCP's timer, and let TCP give up no earlier than by default: it counts attempts, and 15 take 925 s."""
    retries = min(255, 15 + 925_000 // rto_max_ms)
    return {"net.ipv4.tcp_rto_max_ms": str(rto_max_ms), "net.ipv4.tcp_retries2": str(retries)}

"""The plans of both topologies: laws that hold for every mixture of profiles, engine and number of nodes."""

from __future__ import annotations

import itertools

import pytest

from testbed import profiles, spec
from testbed.directions import LINK_DIRECTIONS
from testbed.errors import SpecError
from testbed.net.lab_plan import LabPlan, Plug
from testbed.net.topology import MAX_NODES, plan_lab
from testbed.profiles import LinkProfile, Slot

MIXTURES = {
    "one": ("cable",),
    "lossy": ("lossy-80mbps",),
    "unshaped": ("datacenter",),
    "mixed": ("cable", "datacenter", "lossy-80mbps"),
}
SHAPES: tuple[spec.Topology, ...] = ("star", "line")


def _profiles(names: tuple[str, ...], links: int) -> list[LinkProfile]:
    if len(names) == 1:
        return [profiles.load_profile(names[0])]
    return [_agreeing(name) for name, _ in zip(itertools.cycle(names), range(links), strict=False)]


def _agreeing(name: str) -> LinkProfile:
    return profiles.load_profile(name).model_copy(update={"mtu": 1500, "slow_start_after_idle": False})


SITES = (((0, 2), "cable"), ((3,), "lossy-80mbps, background=1 cubic up"))
CASES: list[tuple[spec.Topology, str, spec.Engine, int]] = [
    (shape, mixture, engine, nodes)
    for shape in SHAPES
    for mixture in MIXTURES
    for engine in ("netem", "relay")
    for nodes in (2, 4, 40)
]
SITED = [(mixture, engine) for mixture in (*MIXTURES, "shared") for engine in ("netem", "relay")]


def _sited(mixture: str, engine: spec.Engine) -> LabPlan:
    """A star of five nodes in two sites, some of them with background flows."""
    return plan_lab("star", _sited_profiles(mixture), 5, engine, _sites())


def _sited_profiles(mixture: str) -> list[LinkProfile]:
    if mixture != "shared":
        return _profiles(MIXTURES[mixture], 5)
    return [_agreeing(name) for name in ("cable, background=web down + call up", *("datacenter", "cable") * 2)]


def _sites() -> tuple[spec.SiteSpec, ...]:
    return tuple(spec.SiteSpec(nodes=nodes, profile=_agreeing(name)) for nodes, name in SITES)


@pytest.fixture(params=CASES + SITED, ids=lambda case: "-".join(map(str, case)))
def case(request: pytest.FixtureRequest) -> tuple[str, LabPlan]:
    if len(request.param) == 2:
        return "star", _sited(*request.param)
    shape, mixture, engine, nodes = request.param
    return shape, plan_lab(shape, _profiles(MIXTURES[mixture], nodes - (shape == "line")), nodes, engine)


def _plugs(plan: LabPlan) -> list[Plug]:
    return [plug for cable in plan.cables for plug in (cable.near, cable.far)]


def _other_end(plan: LabPlan, space: str, device: str) -> Plug:
    for cable in plan.cables:
        for here, there in ((cable.near, cable.far), (cable.far, cable.near)):
            if (here.namespace, here.device) == (space, device):
                return there
    raise AssertionError(f"no cable at {device} of {space}")


def test_names_and_addresses_are_unique(case: tuple[str, LabPlan]) -> None:
    _, plan = case
    names = [space.name for space in plan.namespaces]
    addresses = [address for space in plan.namespaces for _, address in space.addresses]
    macs = [plug.mac for plug in _plugs(plan)]
    devices = [(plug.namespace, plug.device) for plug in _plugs(plan)] + [
        (tun.namespace, tun.device) for tun in plan.tuns
    ]
    for column in (
        names,
        addresses,
        macs,
        devices,
        [tun.name for tun in plan.tuns],
        [link.name for link in plan.links],
    ):
        assert len(set(column)) == len(column)
    assert all(len(device) <= 15 for _, device in devices)


def test_every_end_of_a_link_has_its_address(case: tuple[str, LabPlan]) -> None:
    _, plan = case
    held = {space.name: {address: device for device, address in space.addresses} for space in plan.namespaces}
    for link in plan.links:
        for end in (link.near, link.far):
            assert held[end.namespace][end.address] in (end.device, "lo")


def test_every_next_hop_is_the_other_end_of_its_cable(case: tuple[str, LabPlan]) -> None:
    _, plan = case
    for space in plan.namespaces:
        stated = {(n.device, n.address): n.mac for n in space.neighbours}
        for (device, address), mac in stated.items():
            other = _other_end(plan, space.name, device)
            assert other.mac == mac
            assert address in [a for p in plan.namespaces if p.name == other.namespace for _, a in p.addresses]
        for route in space.routes:
            if route.via is not None:
                assert (route.device, route.via) in stated


def test_no_shaper_sits_on_a_device_of_a_sender(case: tuple[str, LabPlan]) -> None:
    _, plan = case
    roles = {space.name: space.role for space in plan.namespaces}
    assert all(roles[shaped.namespace] == "gateway" for shaped in plan.shaped)


def test_every_asked_direction_is_shaped_once_and_counted_where_it_is_shaped(case: tuple[str, LabPlan]) -> None:
    _, plan = case
    by_qdisc = {(s.link, s.direction): (s.namespace, s.device) for s in plan.shaped}
    assert len(by_qdisc) == len(plan.shaped)
    ports = {tun.name: tun for tun in plan.tuns}
    for link in plan.links:
        for way in LINK_DIRECTIONS:
            meter, asked = link.meters[way], link.profile.pipe(way)
            if link.shaper == "relay":
                assert meter.kind == "port"
                port = ports[meter.where]
                assert (port.up if meter.what == "up" else port.down) == asked
                assert (
                    port.namespace
                    == (link.near if way == "up" or port.namespace == link.near.namespace else link.far).namespace
                )
            elif asked is not None:
                assert (meter.kind, (meter.where, meter.what)) == ("qdisc", by_qdisc.pop((link.name, way)))
            else:
                assert meter.kind in ("sent", "received")
    assert not by_qdisc


def test_the_transport_is_stated_wherever_connections_end(case: tuple[str, LabPlan]) -> None:
    _, plan = case
    for space in plan.namespaces:
        assert ("net.ipv4.tcp_slow_start_after_idle" in space.sysctls) == (space.role != "gateway")
        homes = {address for s in plan.namespaces if s.role == "home" for _, address in s.addresses}
        for route in space.routes:
            chosen = space.role in ("gateway", "home") or route.destination.partition("/")[0] in {*homes, "10.79.0.0"}
            assert (route.congestion_control is None) == chosen  # the flows of a home choose their own


@pytest.mark.parametrize("engine", ["netem", "relay"])
@pytest.mark.parametrize("shape", ["star", "line"])
def test_an_unshaped_profile_needs_neither_gateway_nor_relay(shape: spec.Topology, engine: spec.Engine) -> None:
    plan = plan_lab(shape, [profiles.load_profile("datacenter")], 3, engine)
    assert {link.shaper for link in plan.links} == {"none"}
    assert not plan.shaped
    assert not plan.tuns
    assert {space.role for space in plan.namespaces} == {"hub", "node"} - ({"hub"} if shape == "line" else set())


def test_an_unshaped_direction_of_a_shaped_link_has_no_shaper() -> None:
    profile = profiles.load_profile("cable").model_copy(update={"down": None})
    assert {s.direction for s in plan_lab("star", [profile], 2, "netem").shaped} == {"up"}
    assert all(tun.down is None for tun in plan_lab("star", [profile], 2, "relay").tuns)


@pytest.mark.parametrize("shape", ["star", "line"])
def test_links_and_directions_draw_their_losses_from_different_seeds(shape: spec.Topology) -> None:
    """Also where a profile gives both directions the same."""
    profile = profiles.load_profile("lossy-80mbps")
    same = profile.model_copy(update={"down": profile.up})
    plan = plan_lab(shape, [same], MAX_NODES, "netem")
    seeds = [shaped.pipe.seed for shaped in plan.shaped]
    assert len(set(seeds)) == len(seeds)
    assert seeds[0] == profile.up.seed


@pytest.mark.parametrize(("shape", "nodes"), [("star", 0), ("line", 1), ("star", 255), ("line", 255)])
def test_no_or_too_many_nodes_are_refused(shape: spec.Topology, nodes: int) -> None:
    with pytest.raises(SpecError, match=rf"a {shape} has \d to 254 nodes, asked for {nodes}"):
        plan_lab(shape, [profiles.load_profile("cable")], nodes, "netem")


def test_a_wrong_number_of_profiles_is_refused() -> None:
    cable = profiles.load_profile("cable")
    with pytest.raises(SpecError, match="2 profiles for a line of 4 nodes, which has 3 links"):
        plan_lab("line", [cable, cable], 4, "relay")


@pytest.mark.parametrize("what", [{"mtu": 1400}, {"slow_start_after_idle": True}])
def test_links_that_disagree_in_what_a_node_has_once_are_refused(what: dict[str, object]) -> None:
    cable = _agreeing("cable")
    (name,) = what
    with pytest.raises(SpecError, match=rf"must agree in {name}.*cable has .*, other has "):
        plan_lab("star", [cable, cable.model_copy(update={"name": "other", **what})], 2, "netem")


def test_a_pipe_that_the_relay_cannot_carry_out_is_refused_by_the_plan() -> None:
    profile = profiles.load_profile("cable")
    slot = Slot(wait_ns=1_000_000, wait_max_ns=2_000_000, packets=10, max_bytes=0)
    slotted = profile.model_copy(update={"up": profile.up.model_copy(update={"slot": slot})})
    for shape, nodes in (("star", 1), ("line", 2)):
        assert plan_lab(shape, [slotted], nodes, "netem").shaped
        with pytest.raises(SpecError, match="only engine netem implements slot"):
            plan_lab(shape, [slotted], nodes, "relay")


def _crossed(plan: LabPlan, source: str, target: str) -> list[tuple[str, str]]:
    """The shaped links and directions that a packet crosses under netem, as routes and cables lead it."""
    spaces = {space.name: space for space in plan.namespaces}
    shaped = {(device.namespace, device.device): (device.link, device.direction) for device in plan.shaped}
    here, address, crossed = source, spaces[target].addresses[0][1], []
    while here != target:
        stated = {route.destination: route for route in spaces[here].routes}
        route = stated.get(f"{address}/32") or stated["default"]
        if (passed := shaped.get((here, route.device))) is not None:
            crossed.append(passed)
        here = _other_end(plan, here, route.device).namespace
        assert len(crossed) < 9
    return crossed


@pytest.mark.parametrize("mixture", [mixture for mixture, engine in SITED if engine == "netem"])
def test_packets_cross_the_links_that_the_formula_says(mixture: str) -> None:
    plan, sites = _sited(mixture, "netem"), _sites()
    names = spec.link_names("star", 5, sites)
    profiles_of = [link.profile for link in plan.links]
    assert [link.name for link in plan.links] == list(names)
    for source, target in itertools.permutations(range(5), 2):
        path = spec.link_path("star", 5, sites, source, target)
        expected = [(names[link], way) for link, way in path if profiles_of[link].pipe(way) is not None]
        assert _crossed(plan, f"node-{source}", f"node-{target}") == expected
    for link in plan.links:
        assert (link.home is not None) == (link.profile.background is not None)
        if link.home is not None:
            ways = [way for way in LINK_DIRECTIONS if link.profile.pipe(way)]
            pairs = {"up": (link.home.namespace, link.far.namespace), "down": (link.far.namespace, link.home.namespace)}
            for way in ways:
                assert _crossed(plan, *pairs[way]) == [(link.name, way)]


@pytest.mark.parametrize("mixture", [mixture for mixture, engine in SITED if engine == "relay"])
def test_ports_of_the_relay_are_behind_each_other_as_the_formula_says(mixture: str) -> None:
    plan, sites = _sited(mixture, "relay"), _sites()
    names = spec.link_names("star", 5, sites)
    behind = {tun.name: tun.behind for tun in plan.tuns}

    def above(port: str | None) -> list[str]:
        return [] if port is None else [port, *above(behind[port])]

    for source, target in itertools.permutations(range(5), 2):
        here, there = (above(f"node-{node}") for node in (source, target))
        path = [(port, "up") for port in here if port not in there]
        path += [(port, "down") for port in reversed(there) if port not in here]
        assert path == [(names[link], way) for link, way in spec.link_path("star", 5, sites, source, target)]
    homes = {link.home.namespace: link.name for link in plan.links if link.home}
    assert {name: behind[name] for name in homes} == homes


@pytest.mark.parametrize(
    ("topology", "sites", "says"),
    [
        ("line", [(0,)], "star"),
        ("star", [], "at least one"),
        ("star", [(0, 9)], "node 9"),
        ("star", [(0,), (1, 0)], "twice"),
    ],
)
def test_sites_that_make_no_lab_are_refused(topology: spec.Topology, sites: list[tuple[int, ...]], says: str) -> None:
    cable = profiles.load_profile("cable")
    specs = tuple(spec.SiteSpec(nodes=nodes, profile=cable) for nodes in sites)
    with pytest.raises(SpecError, match=says):
        plan_lab(topology, [cable], 3, "netem", specs)


def test_background_flows_need_a_star() -> None:
    with pytest.raises(SpecError, match="star"):
        plan_lab("line", [profiles.load_profile("cable, background=1 cubic up")], 2, "netem")

"""The plan of a star: laws that hold for every profile, engine and number of nodes."""

from __future__ import annotations

import ipaddress

import pytest

from testbed import spec
from testbed.errors import SpecError
from testbed.net import topology
from testbed.net.elements import Plug, Star

CASES = [(name, engine, nodes) for name in sorted(spec.profile_files()) for engine in ("netem", "relay") for nodes in (1, 3, 40)]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def star(request: pytest.FixtureRequest) -> Star:
    name, engine, nodes = request.param
    return topology.star(spec.load_profile(name), nodes, engine)


def _plugs(star: Star) -> list[Plug]:
    return [plug for cable in star.cables for plug in (cable.near, cable.far)]


def _other_end(star: Star, place: str, device: str) -> Plug:
    for cable in star.cables:
        for here, there in ((cable.near, cable.far), (cable.far, cable.near)):
            if (here.place, here.device) == (place, device):
                return there
    raise AssertionError(f"no cable at {device} of {place}")


def test_names_and_addresses_are_unique(star: Star) -> None:
    names = [place.name for place in star.places]
    addresses = [address for place in star.places for _, address in place.addresses]
    macs = [plug.mac for plug in _plugs(star)]
    devices = [(plug.place, plug.device) for plug in _plugs(star)] + [(tun.place, tun.device) for tun in star.tuns]
    for column in (names, addresses, macs, devices):
        assert len(set(column)) == len(column)
    assert all(len(device) <= 15 for _, device in devices)


def test_every_node_and_the_hub_have_their_address(star: Star) -> None:
    held = {place.name: [address for _, address in place.addresses] for place in star.places}
    assert held[topology.HUB] == [topology.HUB_ADDRESS]
    for index, node in enumerate(star.nodes):
        assert held[node] == [topology.node_address(index)]


def test_every_next_hop_is_the_other_end_of_its_cable(star: Star) -> None:
    for place in star.places:
        stated = {(n.device, n.address): n.mac for n in place.neighbours}
        for (device, address), mac in stated.items():
            other = _other_end(star, place.name, device)
            assert other.mac == mac
            assert address in [a for p in star.places if p.name == other.place for _, a in p.addresses]
        for route in place.routes:
            if route.via is not None:
                assert (route.device, route.via) in stated


def test_packets_find_their_way_between_any_two_nodes_and_the_hub(star: Star) -> None:
    """Follow the routes: node, gateway (if any), hub, gateway, node. TUN devices lead to the relay, which knows every address."""
    places = {place.name: place for place in star.places}
    owners = {address: place.name for place in star.places for _, address in place.addresses}
    ends = [topology.HUB, *star.nodes[:3], star.nodes[-1]]
    for start in ends:
        for end in ends:
            target, here, hops = places[end].addresses[0][1], start, 0
            while here != end:
                assert hops < 6, f"{start} to {end} goes round"
                assert here == start or places[here].sysctls["net.ipv4.ip_forward"] == "1"
                matching = [r for r in places[here].routes if r.destination == "default" or _within(target, r.destination)]
                route = max(
                    matching, key=lambda r: 0 if r.destination == "default" else ipaddress.ip_network(r.destination).prefixlen
                )
                cabled = any((plug.place, plug.device) == (here, route.device) for plug in _plugs(star))
                here = _other_end(star, here, route.device).place if cabled else owners[target]
                hops += 1


def _within(address: str, destination: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(destination)


def test_no_shaper_sits_on_a_device_of_a_sender(star: Star) -> None:
    roles = {place.name: place.role for place in star.places}
    assert all(roles[shaper.place] == "gateway" for shaper in star.shapers)


def test_tcp_settings_are_stated_wherever_connections_end(star: Star) -> None:
    for place in star.places:
        stated = place.congestion_control is not None and "net.ipv4.tcp_slow_start_after_idle" in place.sysctls
        assert stated == (place.role != "gateway")


@pytest.mark.parametrize("engine", ["netem", "relay"])
def test_an_unshaped_profile_needs_neither_gateway_nor_relay(engine: spec.Engine) -> None:
    star = topology.star(spec.load_profile("datacenter"), 3, engine)
    assert star.shaper == "none"
    assert not star.shapers
    assert not star.tuns
    assert {place.role for place in star.places} == {"hub", "node"}


def test_each_direction_of_each_link_is_shaped_once() -> None:
    star = topology.star(spec.load_profile("cable"), 4, "netem")
    assert sorted((s.link, s.direction) for s in star.shapers) == sorted((n, d) for n in star.nodes for d in ("up", "down"))
    assert len({(s.place, s.device) for s in star.shapers}) == len(star.shapers)


def test_an_unshaped_direction_of_a_shaped_link_has_no_shaper() -> None:
    profile = spec.load_profile("cable").model_copy(update={"down": None})
    assert {s.direction for s in topology.star(profile, 2, "netem").shapers} == {"up"}
    assert all(tun.down is None for tun in topology.star(profile, 2, "relay").tuns)


def test_links_with_losses_draw_them_from_different_seeds() -> None:
    profile = spec.load_profile("lossy-80mbps")
    star = topology.star(profile, topology.MAX_NODES, "netem")
    seeds = [shaper.plan.seed for shaper in star.shapers]
    assert len(set(seeds)) == len(seeds)
    assert profile.up is not None
    assert profile.down is not None
    assert seeds[:2] == [profile.up.seed, profile.down.seed]


@pytest.mark.parametrize("nodes", [0, topology.MAX_NODES + 1])
def test_a_star_of_no_or_too_many_nodes_is_refused(nodes: int) -> None:
    with pytest.raises(SpecError, match="nodes"):
        topology.star(spec.load_profile("cable"), nodes, "netem")

"""A lab end to end: packets flow, the record says what the kernel has, links change, counters count."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time

import pytest

from testbed import profiles, spec
from testbed.counters import DeviceCounters
from testbed.directions import LINK_DIRECTIONS
from testbed.errors import ShapingError, SpecError, UnknownNameError
from testbed.net import build, topology
from testbed.net.kernel import sysctl
from testbed.net.kernel.netlink import Netlink
from testbed.net.kernel.queue_plan import plan_shaping
from testbed.net.lab import Lab, LabSpec
from testbed.net.lab_plan import End, Link
from testbed.net.relay.client import pipe_table
from testbed.profiles import LinkProfile
from testbed.records import Measurement
from tests.labs import CASES, SHAPES, lab_spec, on_a_virtual_clock


def _round_trip_s(lab: Lab, here: End, there: End, size: int = 100, times: int = 5, *, below_s: float = 0.0) -> float:
    """The shortest of several, through an echo on UDP; none after one that took less than `below_s`."""
    address = there.address
    with lab.namespaces[here.namespace].entered():
        asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with lab.namespaces[there.namespace].entered():
        answering = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with asking, answering:
        answering.bind((address, 9))
        asking.settimeout(60)
        answering.settimeout(60)
        found = []
        for _ in range(times):
            start = time.monotonic()
            asking.sendto(bytes(size), (address, 9))
            content, peer = answering.recvfrom(65536)
            answering.sendto(content, peer)
            assert asking.recv(65536) == bytes(size)
            found.append(time.monotonic() - start)
            if found[-1] < below_s:
                break
    return min(found)


def _is_faster(lab: Lab, here: End, there: End, than_s: float) -> bool:
    """Whether one of a few round trips takes less; a machine that is busy makes some late, not all."""
    return _round_trip_s(lab, here, there, times=50, below_s=than_s) < than_s


def _delay_s(profile: LinkProfile) -> float:
    return sum(pipe.delay_ns for pipe in (profile.up, profile.down) if pipe) / 1e9


@SHAPES
@CASES
def test_every_link_delays_as_its_own_profile_says(shape: str, names: tuple[str, ...], engine: spec.Engine) -> None:
    with Lab(lab_spec(names, engine, shape)) as lab:
        assert [link.profile.name for link in lab.links] == [names[i % len(names)] for i in range(len(lab.links))]
        for link in lab.links:
            for here, there in ((link.near, link.far), (link.far, link.near)):
                assert _round_trip_s(lab, here, there) >= _delay_s(link.profile)
                assert _is_faster(lab, here, there, _delay_s(link.profile) + 0.05)
        if shape == "star":
            first, last = lab.links[0], lab.links[-1]
            both = _delay_s(first.profile) + _delay_s(last.profile)
            assert _round_trip_s(lab, first.near, last.near) >= both
            assert _is_faster(lab, first.near, last.near, both + 0.05)


@CASES
def test_a_site_adds_its_link_to_the_way_out_and_nothing_to_the_way_inside(
    names: tuple[str, ...], engine: spec.Engine
) -> None:
    shared = profiles.load_profile("link(50Mbit, 20ms)")
    asked = lab_spec(names, engine, nodes=4 if len(names) == 1 else 3)
    sites = (spec.SiteSpec(nodes=(0, 1), profile=shared),)
    with Lab(asked.model_copy(update={"sites": sites})) as lab:
        assert [link.name for link in lab.links][-1] == "site-0"
        first, second, third, site = *lab.links[:3], lab.links[-1]
        assert (site.near.namespace, site.far.namespace) == (first.far.namespace, "hub")
        apart, inside = (_delay_s(first.profile) + _delay_s(other.profile) for other in (third, second))
        for here, there, delay_s in (
            (site.near, site.far, 0.04),
            (first.near, first.far, _delay_s(first.profile)),
            (first.near, third.near, apart + 0.04),
            (third.near, first.near, apart + 0.04),
            (first.near, second.near, inside),
        ):
            assert _round_trip_s(lab, here, there) >= delay_s
            assert _is_faster(lab, here, there, delay_s + 0.05)
        counted = lab.counters()["site-0"]
        assert counted["up"].packets
        assert {link.name: link.shaper for link in lab.record.links}["site-0"] == engine


@SHAPES
@CASES
def test_packets_on_the_wire_are_real(shape: str, names: tuple[str, ...], engine: spec.Engine) -> None:
    """A sniffer at the receiver of a TCP stream sees no packet larger than the MTU, and no bytes but the stream's."""
    with Lab(
        lab_spec(names, engine, shape, nodes=2, mtu=1400) if len(names) == 1 else lab_spec(names, engine, mtu=1400)
    ) as lab:
        sender, receiver = lab.nodes[:2]
        with receiver.namespace.entered():
            sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))  # ETH_P_ALL
            listening = socket.create_server((receiver.address, 9))
        with sniffer, listening, sender.namespace.entered():
            sniffer.bind((receiver.devices[0], 3))
            sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_000_000)
            with socket.create_connection((receiver.address, 9)) as out, listening.accept()[0] as into:
                writer = threading.Thread(target=out.sendall, args=(bytes(300_000),))
                writer.start()
                left = 300_000
                while left:
                    left -= len(into.recv(65536))
                writer.join()
            sniffer.setblocking(False)
            sizes, protocols = [], set()
            while True:
                try:
                    packet, origin = sniffer.recvfrom(70_000)
                except BlockingIOError:
                    break
                sizes.append(len(packet))
                protocols.add((origin[1], packet[9]))
    assert max(sizes) == 1400
    assert protocols == {(0x0800, socket.IPPROTO_TCP)}  # neither ARP nor IPv6


def _algorithms(lab: Lab, link: Link, port: int) -> tuple[str, str]:
    """What the two ends of a connection over a link use, when neither program asks for any."""
    with lab.namespaces[link.far.namespace].entered():
        listening = socket.create_server((link.far.address, port))
    with (
        listening,
        lab.namespaces[link.near.namespace].entered(),
        socket.create_connection((link.far.address, port)) as out,
        listening.accept()[0] as into,
    ):
        found = [
            end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()
            for end in (out, into)
        ]
    return found[0], found[1]


@SHAPES
@CASES
def test_the_record_says_what_is_there(shape: str, names: tuple[str, ...], engine: spec.Engine) -> None:
    with Lab(lab_spec(names, engine, shape, congestion_control="reno", slow_start_after_idle=True)) as lab:
        assert (lab.record.engine, lab.record.topology, lab.record.played_at_ns) == (engine, shape, None)
        for node in lab.nodes:
            with node.namespace.entered():
                assert sysctl.read_parameter("net.ipv4.tcp_slow_start_after_idle") == "1"
            with Netlink(node.namespace) as netlink:
                found = netlink.devices()
                assert {(found[device].mtu, found[device].up) for device in node.devices} == {(1500, True)}
        for link, held in zip(lab.links, lab.record.links, strict=True):
            assert (held.name, held.profile) == (link.name, link.profile.name)
            assert (held.near, held.near_address) == (link.near.namespace, link.near.address)
            assert (held.far, held.far_address) == (link.far.namespace, link.far.address)
            for side, end in (("near", link.near), ("far", link.far)):
                with lab.namespaces[end.namespace].entered():
                    assert held.settings[side]["sysctls"] == {
                        name: sysctl.read_parameter(name) for name in held.settings[side]["sysctls"]
                    }
            assert held.settings["near"]["devices"][link.near.device]["congestion_control"] == "reno"
            assert _algorithms(lab, link, 9) == ("reno", "reno")
        assert type(lab.record).model_validate_json(lab.record.model_dump_json()) == lab.record


@pytest.mark.parametrize(
    "engine",
    [pytest.param("relay", marks=pytest.mark.root), pytest.param("netem", marks=pytest.mark.netem)],
)
@pytest.mark.parametrize("slow_start", [False, True])
def test_every_shipped_profile_stands_and_is_held_as_it_says(engine: spec.Engine, slow_start: bool) -> None:
    """All of them are the links of one lab, but for those that differ in what is one setting for all."""
    shipped = [profiles.load_profile(name) for name in sorted(profiles.profile_files())]
    each = tuple(profile for profile in shipped if profile.slow_start_after_idle == slow_start)
    wanted = LabSpec(topology="star", profiles=each, nodes=len(each), engine=engine, engine_reason="a test")
    with Lab(wanted) as lab:
        record = lab.record
        links = lab.links
    assert [held.profile for held in record.links] == [profile.name for profile in each]
    for profile, held, link in zip(each, record.links, links, strict=True):
        assert link.profile == profile
        device = held.settings["near"]["devices"][link.near.device]
        assert (device["mtu"], device["congestion_control"]) == (profile.mtu, profile.congestion_control)
        assert held.shaper == engine or not profile.shaped
        for direction in LINK_DIRECTIONS:
            pipe = profile.pipe(direction)
            if engine == "relay":
                port, asked = held.settings["relay"][direction], json.loads(json.dumps(pipe_table(pipe)))
                if pipe:
                    asked |= {"overhead_bytes": profile.overhead_bytes, "seed": port["seed"]}
                assert port == asked
            elif pipe:
                plan = plan_shaping(pipe, mtu=profile.mtu, layer=profile.layer).describe()
                qdiscs = [what["qdisc"] for what in held.settings["gateway"]["devices"].values() if "qdisc" in what]
                assert {**plan, "seed": 0} in [{**one, "seed": 0} for one in qdiscs]


@pytest.mark.root
def test_each_link_of_a_line_has_its_own_congestion_control() -> None:
    made = lab_spec(("datacenter", "datacenter"), "relay", "line")
    pairs = zip(made.profiles, ("reno", "cubic"), strict=True)
    each = tuple(profile.model_copy(update={"congestion_control": name}) for profile, name in pairs)
    with Lab(made.model_copy(update={"profiles": each})) as lab:
        assert [_algorithms(lab, link, 9) for link in lab.links] == [("reno", "reno"), ("cubic", "cubic")]


@pytest.mark.root
def test_building_changes_no_setting_of_the_machine() -> None:
    names = ("net.ipv4.tcp_allowed_congestion_control", "net.ipv4.tcp_congestion_control", "net.ipv4.ip_forward")
    before = [sysctl.read_parameter(name) for name in names]
    with Lab(lab_spec(("cable",), "relay", congestion_control="reno")):
        assert [sysctl.read_parameter(name) for name in names] == before


@CASES
def test_device_counters_count_ip_packets_under_every_engine(names: tuple[str, ...], engine: spec.Engine) -> None:
    with Lab(lab_spec(names, engine)) as lab:
        link = lab.links[0]
        near = lab.namespaces[link.near.namespace]
        with near.entered(), DeviceCounters((link.near.device,), lab.record.overhead_bytes) as counters:
            _round_trip_s(lab, link.near, link.far, size=1000)
            found = counters.read()
    assert (found.sent_packets, found.sent_bytes) == (5, 5 * 1028)
    assert (found.received_packets, found.received_bytes) == (5, 5 * 1028)


@SHAPES
@CASES
def test_link_counters_count_what_crosses_each_link_each_way(
    shape: str, names: tuple[str, ...], engine: spec.Engine
) -> None:
    with Lab(lab_spec(names, engine, shape)) as lab:
        for link in lab.links:
            with lab.namespaces[link.near.namespace].entered(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
                for _ in range(3):
                    out.sendto(bytes(972), (link.far.address, 10))
            _round_trip_s(lab, link.near, link.far, size=72, times=4)
        found = lab.counters()
    assert list(found) == [link.name for link in lab.links]
    for both in found.values():
        # Each of the three is answered by ICMP: port unreachable, cut to 576 bytes.
        refused = 3 * (20 + 8 + 20 + 8 + 548)
        assert (both["up"].packets, both["up"].bytes) == (7, 3 * 1000 + 4 * 100)
        assert 4 <= both["down"].packets <= 7
        assert 4 * 100 <= both["down"].bytes <= 4 * 100 + refused
        assert all(way.dropped_buffer == 0 and not way.dropped_loss for way in both.values())


@SHAPES
@CASES
def test_a_link_is_changed_while_it_stands_and_held_again(
    shape: str, names: tuple[str, ...], engine: spec.Engine
) -> None:
    with Lab(lab_spec(names, engine, shape)) as lab:
        link = lab.links[0]
        if link.profile.up is None:
            plain = lab_spec(("cable",), engine).profiles[0].up
            assert plain is not None
            with pytest.raises(SpecError, match="was built unshaped"):
                lab.change(link.name, "up", plain)
            return
        longer = link.profile.up.model_copy(update={"delay_ns": link.profile.up.delay_ns + 100_000_000})
        lab.change(link.name, "up", longer)
        assert _round_trip_s(lab, link.near, link.far, times=2) >= _delay_s(link.profile) + 0.1
        others = [other for other in lab.links if other.name != link.name]
        assert all(_is_faster(lab, o.near, o.far, _delay_s(o.profile) + 0.1) for o in others)
        lab.hold()
        assert _is_faster(lab, link.near, link.far, _delay_s(link.profile) + 0.1)


@pytest.mark.root
def test_an_unknown_link_is_named_with_those_that_there_are() -> None:
    with Lab(lab_spec(("cable",), "relay", nodes=2)) as lab:
        pipe = lab.links[0].profile.up
        assert pipe is not None
        with pytest.raises(UnknownNameError, match=r"no link 'node-7'.*Known: node-0, node-1"):
            lab.change("node-7", "up", pipe)


@CASES
def test_play_is_noted_in_the_record(names: tuple[str, ...], engine: spec.Engine) -> None:
    with Lab(lab_spec(names, engine)) as lab:
        before = time.monotonic_ns()
        started = lab.play()
        assert before <= started <= time.monotonic_ns()
        assert lab.record.played_at_ns == started
        lab.hold()
        lab.check()


@pytest.mark.root
def test_a_device_that_is_not_as_asked_stops_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_FIFO_OPTIONS", struct.pack("=I", 77))
    monkeypatch.setattr(Netlink, "set_root_qdisc", lambda *arguments: None)
    with pytest.raises(ShapingError, match=r"hub: hub0: asked for .*qdisc pfifo 4d000000, the kernel has MTU 1500"):
        Lab(lab_spec(("consumer-80mbps",), "relay"))


@pytest.mark.root
def test_a_route_without_its_congestion_control_stops_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Netlink.add_route

    def plain(
        self: Netlink, destination: str, device: str, *, via: str | None, source: str | None, **_: object
    ) -> None:
        original(self, destination, device, via=via, source=source)

    monkeypatch.setattr(Netlink, "add_route", plain)
    with pytest.raises(ShapingError, match=r"asked for routes with the congestion controls .*the kernel has .*None"):
        Lab(lab_spec(("datacenter",), "relay"))


@pytest.mark.netem
def test_a_shaper_that_was_changed_is_found_before_it_is_certified() -> None:
    with Lab(lab_spec(("consumer-80mbps",), "netem", nodes=1)) as lab:
        with Netlink(lab.namespaces["gateway-0"]) as netlink:
            netlink.set_root_qdisc("to-far", "pfifo", struct.pack("=I", 5))
        with pytest.raises(ShapingError, match="node-0 up: requested netem on to-far, the kernel has pfifo"):
            lab.certify("quick", [1000])


@SHAPES
@CASES
def test_a_certificate_covers_every_link_and_knows_its_engine(
    shape: str, names: tuple[str, ...], engine: spec.Engine
) -> None:
    if on_a_virtual_clock() and "datacenter" in names:
        pytest.skip("the probe of an unshaped link's rate would never end")
    with Lab(lab_spec(names, engine, shape, nodes=3 if len(names) > 1 else 2)) as lab:
        certificate = lab.certify("quick", [20_000])
    assert (certificate.form, certificate.engine) == ("quick", engine)
    assert {link.name for link in lab.links} <= {measurement.link for measurement in certificate.measurements}
    assert certificate.seconds > 0


@pytest.mark.root
@pytest.mark.parametrize(
    ("outcomes", "verdict", "rejected"),
    [(["PASS"], "PASS", 0), (["FAIL", "PASS"], "PASS", 1), (["FAIL", "FAIL"], "FAIL", 1)],
)
def test_a_failed_certificate_is_tried_once_more_and_says_so(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[str], verdict: str, rejected: int
) -> None:
    def measure(*_: object, **__: object) -> tuple[Measurement, ...]:
        found = Measurement(
            link="node-0", direction="up", quantity="rate", detail="", unit="bit/s", expected=1.0, measured=1.0,
            tolerance=0.1, samples=1, verdict=left.pop(0), note="",
        )  # fmt: skip
        return (found,)

    left = list(outcomes)
    monkeypatch.setattr("testbed.net.lab.certify", measure)
    with Lab(lab_spec(("datacenter",), "relay", nodes=1)) as lab:
        certificate = lab.certify("quick", (1000,))
    assert (certificate.verdict, len(certificate.rejected), left) == (verdict, rejected, [])


@pytest.mark.root
@pytest.mark.parametrize("engine", ["relay", pytest.param("netem", marks=pytest.mark.netem)])
@SHAPES
def test_thirty_two_nodes_stand_and_reach_their_neighbours(shape: str, engine: spec.Engine) -> None:
    with Lab(lab_spec(("consumer-80mbps",), engine, shape, nodes=32)) as lab:
        link = lab.links[-1]
        assert len(lab.nodes) == 32
        assert _round_trip_s(lab, link.near, link.far) >= _delay_s(link.profile)
        assert topology.node_name(31) == lab.nodes[-1].name
        before = time.process_time()
        for _ in range(10):
            found = lab.counters()
        assert time.process_time() - before < 0.5  # seconds of a processor, for a second of counting
    assert len(found) == len(lab.links)

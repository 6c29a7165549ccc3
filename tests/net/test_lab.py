"""A lab end to end: packets flow, the record says what the kernel has, and nothing is left of it, also when it fails half-way."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from testbed import spec
from testbed.counters import DeviceCounters
from testbed.errors import CapabilityError, LabError, ShapingError
from testbed.net import lab as lab_module
from testbed.net import sysctl, topology
from testbed.net.lab import Lab, LabSpec
from testbed.net.namespace import Namespace
from testbed.net.netlink import Netlink
from testbed.records import Measurement

ENGINES = [
    pytest.param("consumer-80mbps", "relay", id="relay", marks=pytest.mark.root),
    pytest.param("consumer-80mbps", "netem", id="netem", marks=pytest.mark.netem),
    pytest.param("datacenter", "relay", id="unshaped", marks=pytest.mark.root),
]
CASES = pytest.mark.parametrize(("profile", "engine"), ENGINES)


def _spec(profile: str, engine: spec.Engine, nodes: int = 3, **changes: object) -> LabSpec:
    changed = spec.load_profile(profile).model_copy(update=changes)
    return LabSpec(topology="star", profile=changed, nodes=nodes, engine=engine, engine_reason="test")


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _round_trip_s(here: Namespace, there: Namespace, address: str, size: int = 100) -> float:
    """The shortest of five, through an echo on UDP."""
    with here.entered():
        asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with there.entered():
        answering = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with asking, answering:
        answering.bind((address, 9))
        asking.settimeout(5)
        answering.settimeout(5)
        times = []
        for _ in range(5):
            start = time.monotonic()
            asking.sendto(bytes(size), (address, 9))
            content, peer = answering.recvfrom(65536)
            answering.sendto(content, peer)
            assert asking.recv(65536) == bytes(size)
            times.append(time.monotonic() - start)
    return min(times)


@CASES
def test_every_pair_is_one_or_two_links_apart(profile: str, engine: spec.Engine) -> None:
    with Lab(_spec(profile, engine)) as lab:
        first, _, last = lab.nodes
        pipe = lab.spec.profile.up
        link_s = 2 * pipe.delay_ns / 1e9 if pipe else 0.0
        for here, there, address, links in (
            (first.namespace, lab.hub, topology.HUB_ADDRESS, 1),
            (lab.hub, last.namespace, last.address, 1),
            (first.namespace, last.namespace, last.address, 2),
            (last.namespace, first.namespace, first.address, 2),
        ):
            found = _round_trip_s(here, there, address)
            assert links * link_s <= found < links * link_s + 0.05


@CASES
def test_packets_on_the_wire_are_real(profile: str, engine: spec.Engine) -> None:
    """A sniffer at the receiver of a TCP stream sees no packet larger than the MTU, and no byte but those of the stream's."""
    with Lab(_spec(profile, engine, nodes=2, mtu=1400)) as lab:
        sender, receiver = lab.nodes
        with receiver.namespace.entered():
            sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))  # ETH_P_ALL
            listening = socket.create_server((receiver.address, 9))
        with sniffer, listening, sender.namespace.entered():
            sniffer.bind((receiver.device, 3))
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


@CASES
def test_the_record_says_what_is_there(profile: str, engine: spec.Engine) -> None:
    with Lab(_spec(profile, engine, congestion_control="reno", slow_start_after_idle=True)) as lab:
        assert lab.record.engine == engine
        for node, link in zip(lab.nodes, lab.record.links, strict=True):
            assert (link.node, link.address, link.device) == (node.name, node.address, node.device)
            assert link.shaper == ("none" if profile == "datacenter" else engine)
            with node.namespace.entered():
                assert link.settings["node"]["sysctls"] == {name: sysctl.read(name) for name in link.settings["node"]["sysctls"]}
                assert sysctl.read("net.ipv4.tcp_congestion_control") == "reno"
                assert sysctl.read("net.ipv4.tcp_slow_start_after_idle") == "1"
                with socket.socket() as sock:
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0] == b"reno"
            with Netlink(node.namespace) as netlink:
                device = netlink.devices()[node.device]
                assert (device.mtu, device.up) == (lab.spec.profile.mtu, True)
        assert type(lab.record).model_validate_json(lab.record.model_dump_json()) == lab.record


@CASES
def test_counters_count_ip_packets_under_every_engine(profile: str, engine: spec.Engine) -> None:
    with Lab(_spec(profile, engine, nodes=1)) as lab:
        (node,) = lab.nodes
        with node.namespace.entered(), DeviceCounters(node.device, lab.record.links[0].overhead_bytes) as counters:
            _round_trip_s(node.namespace, lab.hub, topology.HUB_ADDRESS, size=1000)
            found = counters.read()
    assert (found.sent_packets, found.sent_bytes) == (5, 5 * 1028)
    assert (found.received_packets, found.received_bytes) == (5, 5 * 1028)


@CASES
def test_closing_leaves_nothing(profile: str, engine: spec.Engine) -> None:
    for _ in range(2):  # the first time, libraries open descriptors of their own
        before = _descriptors()
        with Lab(_spec(profile, engine)):
            assert _descriptors() > before
    assert _descriptors() == before


@CASES
@pytest.mark.parametrize("step", ["_set_sysctls", "_lay", "_make_tun", "_configure", "_ports", "_link_record"])
def test_a_failure_half_way_leaves_nothing(profile: str, engine: spec.Engine, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    original = getattr(Lab, step)

    def fails_the_second_time(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2 or step in ("_set_sysctls", "_ports"):
            raise LabError("on purpose")
        return original(*arguments, **options)

    with Lab(_spec(profile, engine)):
        pass
    monkeypatch.setattr(Lab, step, fails_the_second_time)
    before = _descriptors()
    try:
        Lab(_spec(profile, engine)).close()
    except LabError as error:
        assert str(error) == "on purpose"  # noqa: PT017  # not every shape of lab takes every step
    assert _descriptors() == before


@pytest.mark.root
def test_a_dead_relay_is_noticed() -> None:
    with Lab(_spec("consumer-80mbps", "relay")) as lab:
        lab.check()
        assert lab._relay is not None
        os.kill(lab._relay.pid, signal.SIGKILL)
        with pytest.raises(LabError, match="relay"):
            lab.check()


@pytest.mark.root
def test_no_relay_runs_where_nothing_is_shaped() -> None:
    with Lab(_spec("datacenter", "relay")) as lab:
        lab.check()
        assert lab.counters() is None


@pytest.mark.root
def test_a_device_that_is_not_as_asked_stops_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_module, "_FIFO_OPTIONS", struct.pack("=I", 77))
    monkeypatch.setattr(Netlink, "set_root_qdisc", lambda *arguments: None)
    with pytest.raises(ShapingError, match=r"hub: asked for hub0 .*pfifo.*the kernel has"):
        Lab(_spec("consumer-80mbps", "relay"))


@pytest.mark.root
def test_a_congestion_control_that_the_kernel_lacks_is_named() -> None:
    with pytest.raises(CapabilityError, match="nonesuch"):
        Lab(_spec("datacenter", "relay", congestion_control="nonesuch"))


@pytest.mark.netem
def test_a_shaper_that_was_changed_is_found_before_it_is_certified() -> None:
    with Lab(_spec("consumer-80mbps", "netem", nodes=1)) as lab:
        with Netlink(lab._namespaces["gateway-0"]) as netlink:
            netlink.set_root_qdisc("to-hub", "pfifo", struct.pack("=I", 5))
        with pytest.raises(ShapingError, match="node-0 up: asked for netem on to-hub, the kernel has pfifo"):
            lab.certify("quick", [1000])


@CASES
def test_a_certificate_covers_every_link_and_knows_its_engine(profile: str, engine: spec.Engine) -> None:
    with Lab(_spec(profile, engine, nodes=2)) as lab:
        certificate = lab.certify("quick", [20_000])
    assert (certificate.form, certificate.engine) == ("quick", engine)
    assert {node.name for node in lab.nodes} <= {measurement.link for measurement in certificate.measurements}
    assert certificate.seconds > 0


@pytest.mark.root
def test_a_killed_controller_takes_its_relay_with_it() -> None:
    program = (
        "import json, sys, time\n"
        "from testbed.net.lab import Lab, LabSpec\n"
        "lab = Lab(LabSpec.model_validate_json(sys.argv[1]))\n"
        "print(lab._relay.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    spec_text = _spec("consumer-80mbps", "relay").model_dump_json()
    with subprocess.Popen(
        [sys.executable, "-c", program, spec_text], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as controller:
        assert controller.stdout is not None
        relay = Path("/proc") / controller.stdout.readline().decode().strip() / "cmdline"
        assert b"testbed.net.relay" in relay.read_bytes()
        controller.kill()
    deadline = time.monotonic() + 2
    while relay.exists() and relay.read_bytes() and time.monotonic() < deadline:  # a zombie has no command line
        time.sleep(0.02)
    assert not relay.exists() or not relay.read_bytes()


@pytest.mark.root
@pytest.mark.parametrize(
    ("outcomes", "verdict", "rejected"), [(["PASS"], "PASS", 0), (["FAIL", "PASS"], "PASS", 1), (["FAIL", "FAIL"], "FAIL", 1)]
)
def test_a_failed_certificate_is_tried_once_more_and_says_so(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[str], verdict: str, rejected: int
) -> None:
    def measure(*_: object, **__: object) -> tuple[Measurement, ...]:
        found = Measurement(
            link="node-0", direction="up", quantity="rate", detail="", unit="bit/s", expected=1.0, measured=1.0, tolerance=0.1,
            samples=1, verdict=left.pop(0), note="",
        )  # fmt: skip
        return (found,)

    left = list(outcomes)
    monkeypatch.setattr("testbed.net.lab.certify", measure)
    with Lab(_spec("datacenter", "relay", nodes=1)) as lab:
        certificate = lab.certify("quick", (1000,))
    assert (certificate.verdict, len(certificate.rejected), left) == (verdict, rejected, [])

"""Captures: the file format against scapy and tcpdump, the ring on a real device, and what a capture says of a link."""

import socket
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, UDP
from scapy.layers.l2 import Ether
from scapy.utils import rdpcap

from testbed.errors import LabError, SpecError
from testbed.net.capture.capture import Capture, CapturePoint
from testbed.net.capture.pcapng import INBOUND, LINKTYPE_ETHERNET, LINKTYPE_RAW, OUTBOUND, PcapngWriter
from testbed.net.capture.ring import KEPT_BYTES
from testbed.net.capture.transits import transits
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Netlink
from testbed.net.lab import Lab, LabSpec
from tests.net.test_judge import pipe, profile

START_NS = 1_700_000_000_123_456_789


@given(st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 1400)), max_size=10))
def test_what_is_written_is_what_scapy_reads(tmp_path_factory, packets):
    path = tmp_path_factory.mktemp("pcapng") / "a.pcapng"
    with path.open("wb") as file:
        writer = PcapngWriter(file, "a test")
        plain = writer.interface("a near wan0", LINKTYPE_RAW, KEPT_BYTES)
        framed = writer.interface("a far hub0", LINKTYPE_ETHERNET, KEPT_BYTES)
        for after, payload_bytes in packets:
            packet = IP(src="10.0.0.1", dst="10.0.0.2") / UDP(sport=1, dport=2) / bytes(payload_bytes)
            for number, content in ((plain, bytes(packet)), (framed, bytes(Ether() / packet))):
                writer.packet(number, START_NS + after, content[:KEPT_BYTES], len(content), OUTBOUND)
        writer.statistics(plain, START_NS, len(packets), 0)
    if not packets:
        return
    found = rdpcap(str(path))
    assert len(found) == 2 * len(packets)
    for (after, payload_bytes), (one, other) in zip(packets, zip(found[::2], found[1::2], strict=True), strict=True):
        assert (one.wirelen, other.wirelen) == (28 + payload_bytes, 42 + payload_bytes)
        assert round(one.time * 10**9) == START_NS + after
        assert UDP in one
        assert UDP in other


def written(path, packets, *, link_type=LINKTYPE_RAW):
    """A capture of (interface, nanoseconds, packet)."""
    with path.open("wb") as file:
        writer = PcapngWriter(file, "a test")
        numbers = {
            name: writer.interface(name, link_type, KEPT_BYTES)
            for name in dict.fromkeys(name for name, _, _ in packets)
        }
        for name, at_ns, packet in packets:
            content = bytes(packet)
            writer.packet(numbers[name], START_NS + at_ns, content[:KEPT_BYTES], len(content), INBOUND)
    return path


def ping(sequence, source="10.77.1.2", target="10.77.0.1", ttl=64):
    return IP(src=source, dst=target, id=sequence, ttl=ttl) / ICMP(id=1, seq=sequence)


def test_packets_are_matched_from_end_to_end_although_a_router_counts_their_hops_down(tmp_path):
    near, far = "node-0 near wan0", "node-0 far hub0"
    packets = []
    for n in range(10):
        packets.append((near, n * 1000, ping(n)))
        if n != 3:  # lost on the way
            packets.append((far, n * 1000 + 5_000_000 + n, ping(n, ttl=62)))
        packets.append((far, 10**9 + n, ping(n, "10.77.0.1", "10.77.1.2")))
        packets.append((near, 10**9 + n + 7_000_000, ping(n, "10.77.0.1", "10.77.1.2", ttl=62)))
    up, down = transits(written(tmp_path / "a.pcapng", packets))
    assert (up.name, up.sent, up.arrived) == ("node-0 up", 10, 9)
    assert (down.name, down.sent, down.arrived) == ("node-0 down", 10, 10)
    assert up.transit_ms[1] == pytest.approx(5, rel=0.001)
    assert down.transit_ms[1] == pytest.approx(7, rel=0.001)


def send(namespace, count, payload_bytes=500):
    with namespace.entered(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for n in range(count):
            sender.sendto(n.to_bytes(4, "big").ljust(payload_bytes, b"."), ("127.0.0.1", 9))


@pytest.mark.root
def test_every_packet_of_a_device_is_kept_with_its_length_and_its_first_bytes(tmp_path):
    path = tmp_path / "a.pcapng"
    before = set(Path("/proc/self/fd").iterdir())
    with Namespace("a") as space:
        with Netlink(space) as netlink:
            netlink.set_up("lo")
        with Capture(path, [CapturePoint("a near lo", space.fd, "lo")]) as capture:
            send(space, 500)
        assert "0 lost" in capture.story
    found = [packet for packet in rdpcap(str(path)) if UDP in packet and packet[UDP].dport == 9]
    numbers = [int.from_bytes(bytes(packet[UDP].payload)[:4], "big") for packet in found]
    assert set(numbers) == set(range(500))
    assert {packet.wirelen for packet in found} == {14 + 28 + 500}
    assert {len(bytes(packet)) for packet in found} == {KEPT_BYTES}
    assert all(one.time <= other.time for one, other in pairwise(found))
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.root
def test_a_capture_that_cannot_be_made_says_why_and_leaves_nothing_open(tmp_path):
    before = set(Path("/proc/self/fd").iterdir())
    with Namespace("a") as space, pytest.raises(LabError, match=r"cannot capture into .*No such device"):
        Capture(tmp_path / "a.pcapng", [CapturePoint("a near gone0", space.fd, "gone0")])
    with Namespace("a") as space, pytest.raises(SpecError, match="cannot write the capture"):
        Capture(tmp_path / "no" / "folder", [CapturePoint("a near lo", space.fd, "lo")])
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.root
def test_a_certificate_with_a_capture_shows_the_delay_of_its_link(tmp_path):
    path = tmp_path / "a.pcapng"
    link = profile(up=pipe(delay_ns=30_000_000), down=pipe(delay_ns=10_000_000))
    with Lab(LabSpec(topology="star", profiles=(link,), nodes=1, engine="relay", engine_reason="a test")) as lab:
        certificate = lab.certify("quick", [20_000], path)
    (host,) = (m for m in certificate.measurements if m.link == "host")
    assert "lost by the capture itself" in host.note
    up, down = transits(path)
    assert up.transit_ms[0] == pytest.approx(30, abs=3)
    assert down.transit_ms[0] == pytest.approx(10, abs=3)
    assert up.sent >= up.arrived > 1000

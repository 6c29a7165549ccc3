"""sch_netem through our own bytes: what the kernel then holds, what tc makes of the same numbers, and what packets feel."""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator

import pytest

from testbed import spec
from testbed.errors import CapabilityError, ShapingError
from testbed.net import netem, qdisc
from testbed.net.lab import Lab, LabSpec
from testbed.net.namespace import Namespace
from testbed.net.netlink import Netlink
from testbed.net.qdisc import NetemPlan
from testbed.spec import LinkProfile, Pipe

PIPE = Pipe(rate_bps=80_000_000, delay_ns=10_000_000, buffer_bytes=1_000_000, loss=0, seed=1)
PLAN = qdisc.plan(PIPE, mtu=1500, layer="ip")


@pytest.fixture
def netlink() -> Iterator[Netlink]:
    """The two ends `x` and `y` of a cable inside one namespace."""
    with Namespace("bench") as namespace, Netlink(namespace) as opened:
        opened.add_veth("x", "02:77:00:00:00:00", 1500, namespace, "y", "02:77:00:00:00:01")
        yield opened


@pytest.mark.netem
@pytest.mark.parametrize(
    "pipe",
    [
        PIPE,
        PIPE.model_copy(update={"loss": 0.001, "seed": 2**63 - 1}),
        PIPE.model_copy(update={"rate_bps": 8_000, "delay_ns": 0}),
        PIPE.model_copy(update={"rate_bps": 100_000_000_000, "delay_ns": 10_000_000_000}),  # needs the 64-bit rate
        PIPE.model_copy(update={"delay_ns": 1}),
    ],
    ids=["plain", "loss", "slowest", "fastest", "one-nanosecond"],
)
@pytest.mark.parametrize("layer", ["ip", "ethernet"])
def test_the_kernel_holds_what_was_asked(netlink: Netlink, pipe: Pipe, layer: str) -> None:
    plan = qdisc.plan(pipe, mtu=1500, layer=layer)
    assert netem.apply(netlink, "x", plan, link="bench") == plan


@pytest.mark.netem
def test_a_second_plan_leaves_nothing_of_the_first(netlink: Netlink) -> None:
    lossy = qdisc.plan(PIPE.model_copy(update={"loss": 0.5, "rate_bps": 40_000_000_000}), mtu=1500, layer="ethernet")
    for plan in (lossy, PLAN, lossy):
        assert netem.apply(netlink, "x", plan, link="bench") == plan


@pytest.mark.netem
def test_another_plan_or_none_in_the_kernel_is_found_out(netlink: Netlink) -> None:
    netem.apply(netlink, "x", PLAN, link="bench up")
    with pytest.raises(ShapingError, match=r"bench up: asked for .*limit_packets=5.*the kernel has .*limit_packets=7"):
        netem.check(netlink, "x", PLAN._replace(limit_packets=5), link="bench up")
    netlink.set_root_qdisc("x", "pfifo", struct.pack("=I", 10))
    with pytest.raises(ShapingError, match="pfifo"):
        netem.check(netlink, "x", PLAN, link="bench up")


@pytest.mark.root
def test_a_kernel_without_the_qdisc_says_what_to_do(netlink: Netlink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netem, "KIND", "nonesuch")
    with pytest.raises(CapabilityError, match=r"bench: this kernel has no sch_nonesuch.*--engine relay.*testbed vm"):
        netem.apply(netlink, "x", PLAN, link="bench")


def _without_seed(options: bytes) -> bytes:
    """tc knows no `seed` before 2023; the kernel then draws one, and dumps it."""
    kept, at = options[:24], 24
    while at < len(options):
        length, kind = struct.unpack_from("=HH", options, at)
        padded = length + -length % 4
        kept += b"" if kind == 14 else options[at : at + padded]
        at += padded
    return kept


@pytest.mark.netem
@pytest.mark.skipif(shutil.which("tc") is None, reason="compares with tc, which is not installed (apt-get install iproute2)")
@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (PLAN, "delay 10ms rate 80mbit -14"),
        (PLAN._replace(packet_overhead=0, loss_u32=round(0.02 * (2**32 - 1)), seed=3), "delay 10ms loss 2% rate 80mbit"),
        (PLAN._replace(rate_bytes=5_000_000_000, latency_ns=1_600_000), "delay 1.6ms rate 40gbit -14"),  # tc rounds to 64 ns
    ],
    ids=["ip", "ethernet-loss", "rate64"],
)
def test_the_kernel_holds_the_same_bytes_as_after_tc(netlink: Netlink, plan: NetemPlan, words: str) -> None:
    netem.apply(netlink, "x", plan, link="bench")
    with netlink.namespace.entered():
        subprocess.run(f"tc qdisc add dev y root netem limit {plan.limit_packets} {words}".split(), check=True)
    held = netlink.root_qdiscs()
    assert _without_seed(held["x"].options) == _without_seed(held["y"].options)


def _profile(pipe: Pipe) -> LinkProfile:
    return spec.load_profile("consumer-80mbps").model_copy(update={"up": pipe, "down": pipe.model_copy(update={"loss": 0.0})})


def _lab(profile: LinkProfile) -> Lab:
    return Lab(LabSpec(topology="star", profile=profile, nodes=1, engine="netem", engine_reason="test"))


def _sockets(lab: Lab) -> tuple[socket.socket, socket.socket]:
    with lab.nodes[0].namespace.entered():
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with lab.hub.entered():
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_000_000)
    receiver.bind(("10.77.0.1", 9))
    receiver.settimeout(5)
    return sender, receiver


@pytest.mark.netem
def test_delay_and_rate_act_on_packets() -> None:
    with _lab(_profile(PIPE.model_copy(update={"rate_bps": 8_000_000, "delay_ns": 20_000_000}))) as lab:
        sender, receiver = _sockets(lab)
        with sender, receiver:
            start = time.monotonic()
            sender.sendto(bytes(72), ("10.77.0.1", 9))  # 100 bytes of IP: 0.1 ms on the wire
            receiver.recv(2000)
            alone = time.monotonic() - start
            start = time.monotonic()
            for _ in range(100):
                sender.sendto(bytes(972), ("10.77.0.1", 9))  # 1000 bytes of IP: 1 ms each
            for _ in range(100):
                receiver.recv(2000)
            train = time.monotonic() - start
    assert 0.0201 <= alone < 0.2  # never early; how late depends on the machine
    assert 0.120 <= train < 0.4


@pytest.mark.netem
def test_the_queue_drops_its_tail_at_the_limit() -> None:
    pipe = PIPE.model_copy(update={"rate_bps": 8_000, "delay_ns": 0, "buffer_bytes": 15_000})
    with _lab(_profile(pipe)) as lab:
        sender, receiver = _sockets(lab)
        with sender, receiver:
            for number in range(100):
                sender.sendto(struct.pack("=I", number), ("10.77.0.1", 9))  # 32 bytes of IP: 32 ms each at 8 kbit/s
            limit = lab.record.links[0].settings["gateway"]["devices"]["to-hub"]["qdisc"]["limit_packets"]
            arrived = [struct.unpack("=I", receiver.recv(99))[0] for _ in range(limit)]
            receiver.settimeout(0.3)
            with pytest.raises(TimeoutError):
                receiver.recv(99)
    assert arrived[:-1] == list(range(limit - 1))
    assert arrived[-1] < limit + 3  # one may have left the queue while the rest was still being sent


def _lost(pipe: Pipe) -> set[int]:
    with _lab(_profile(pipe)) as lab:
        sender, receiver = _sockets(lab)
        with sender, receiver:
            for number in range(1000):
                sender.sendto(struct.pack("=I", number), ("10.77.0.1", 9))
            arrived = set()
            with contextlib.suppress(TimeoutError):
                receiver.settimeout(0.5)
                while True:
                    arrived.add(struct.unpack("=I", receiver.recv(99))[0])
    return set(range(1000)) - arrived


@pytest.mark.netem
def test_the_same_seed_loses_the_same_packets() -> None:
    pipe = PIPE.model_copy(update={"loss": 0.05, "buffer_bytes": 10_000_000})
    first, again, other = _lost(pipe), _lost(pipe), _lost(pipe.model_copy(update={"seed": 99}))
    assert first == again
    assert first != other
    assert 10 < len(first) < 120  # 50 expected; six standard deviations are 41

"""sch_netem through our own bytes: what the kernel then holds, what tc makes of the same numbers, what packets feel."""

from __future__ import annotations

import itertools
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from testbed.errors import CapabilityError, ShapingError
from testbed.net.kernel import netem, shaping, sysctl
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netem_plan import NetemPlan, plan_netem, share_u32
from testbed.net.kernel.netlink import Netlink
from testbed.net.kernel.queue_plan import Shaping, plan_shaping
from testbed.profiles import Bernoulli, GilbertElliott, Pipe, Slot
from tests.net.test_qdisc import PIPE, changed

BURSTS = GilbertElliott(enter_bad=0.02, leave_bad=0.25, lost_in_bad=1, lost_in_good=0)
TICK_S = 1e-5
"""More than the virtual clock's 256 ns and what a date as a float is short of."""
SLOT = Slot(wait_ns=20_000_000, wait_max_ns=20_000_000, packets=5, max_bytes=0)


def planned(**update: Any) -> NetemPlan:
    return plan_netem(changed(**update), mtu=1500, layer="ip")


PLAN = planned()
EVERYTHING = planned(
    loss=GilbertElliott(enter_bad=0.01, leave_bad=0.1, lost_in_bad=0.7, lost_in_good=0.001),
    jitter_ns=3_000_000,
    reorder=0.25,
    duplicate=0.01,
    slot=Slot(wait_ns=800_000, wait_max_ns=10_000_000, packets=32, max_bytes=65_536),
)


class Bench:
    """A cable inside one namespace, from `x`, where netem stands, to `y`; packets of ours go from one to the other."""

    port = 9

    def __init__(self, netlink: Netlink, sender: socket.socket, receiver: socket.socket) -> None:
        self.netlink, self.sender, self.receiver = netlink, sender, receiver

    def send(self, count: int, size: int = 4) -> None:
        """So many datagrams with their numbers."""
        for number in range(count):
            self.sender.sendto(struct.pack("=I", number) + bytes(size - 4), ("10.9.0.2", self.port))

    def arrivals(self) -> tuple[list[int], list[float]]:
        """The numbers and the times (the kernel's, in s) of all that arrive until netem is empty."""
        deadline = time.monotonic() + 30
        while shaping.read_counters(self.netlink, "x").backlog_bytes:
            assert time.monotonic() < deadline, "netem does not get empty"
            time.sleep(0.005)
        numbers, times = [], []
        while True:
            try:
                content, ancillary, _, _ = self.receiver.recvmsg(2048, 64)
            except BlockingIOError:
                return numbers, times
            seconds, nanoseconds = struct.unpack("=qq", ancillary[0][2])
            numbers.append(struct.unpack_from("=I", content)[0])
            times.append(seconds + nanoseconds / 1e9)


_SO_RCVBUFFORCE, _SO_SNDBUFFORCE, _SO_TIMESTAMPNS = 33, 32, 35


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Namespace("near") as near, Namespace("far") as far, Netlink(near) as netlink, Netlink(far) as other:
        for space in (near, far):
            with space.entered():
                sysctl.switch_ipv6_off()  # its own packets would use up draws
        netlink.add_veth("x", "02:77:00:00:00:00", 1500, far, "y", "02:77:00:00:00:01")
        for end, device, address, peer, mac in (
            (netlink, "x", "10.9.0.1", "10.9.0.2", "02:77:00:00:00:01"),
            (other, "y", "10.9.0.2", "10.9.0.1", "02:77:00:00:00:00"),
        ):
            end.set_up(device)
            end.add_address(device, address)
            end.add_route(f"{peer}/32", device, via=None, source=None)
            end.add_neighbour(device, peer, mac)
        with near.entered():
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with far.entered():
            receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        with sender, receiver:
            sender.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 1 << 28)
            receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 28)
            receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            receiver.bind(("10.9.0.2", Bench.port))
            yield Bench(netlink, sender, receiver)


@pytest.fixture
def netlink() -> Iterator[Netlink]:
    """The two ends `x` and `y` of a cable inside one namespace, without addresses."""
    with Namespace("bench") as namespace, Netlink(namespace) as opened:
        opened.add_veth("x", "02:77:00:00:00:00", 1500, namespace, "y", "02:77:00:00:00:01")
        yield opened


PIPES = {
    "plain": PIPE,
    "loss": changed(loss=Bernoulli(probability=0.001), seed=2**63 - 1),
    "slowest": changed(rate_bps=8_000, delay_ns=0),
    "fastest": changed(rate_bps=100_000_000_000, delay_ns=10_000_000_000),  # needs the 64-bit rate
    "one-nanosecond": changed(delay_ns=1),
    "bursts": changed(loss=BURSTS),
    "jitter": changed(delay_ns=3 * 10**9, jitter_ns=2**31 - 1),
    "reorder": changed(reorder=0.3, delay_ns=0),  # tc asks for a delay then, the kernel does not
    "duplicate": changed(duplicate=1),
    "slot": changed(slot=SLOT),
}


@pytest.mark.netem
@pytest.mark.parametrize("pipe", PIPES.values(), ids=PIPES)
@pytest.mark.parametrize("layer", ["ip", "ethernet"])
def test_the_kernel_holds_what_was_asked(netlink: Netlink, pipe: Pipe, layer: str) -> None:
    plan = plan_netem(pipe, mtu=1500, layer=layer)
    assert netem.apply_plan(netlink, "x", plan, link="bench") == plan


@pytest.mark.netem
@pytest.mark.parametrize("put", [netem.apply_plan, netem.change_plan])
def test_a_second_plan_leaves_nothing_of_the_first(netlink: Netlink, put: Any) -> None:
    netem.apply_plan(netlink, "x", PLAN, link="bench")
    lossy = planned(loss=Bernoulli(probability=0.5), rate_bps=40_000_000_000)
    for plan in (EVERYTHING, PLAN, lossy, EVERYTHING, lossy._replace(seed=2), PLAN):
        assert put(netlink, "x", plan, link="bench") == plan


@pytest.mark.netem
def test_another_plan_or_none_in_the_kernel_is_found_out(netlink: Netlink) -> None:
    netem.apply_plan(netlink, "x", PLAN, link="bench up")
    with pytest.raises(ShapingError, match=r"bench up: requested .*limit_packets=5.*the kernel has .*limit_packets=7"):
        netem.check_plan(netlink, "x", PLAN._replace(limit_packets=5), link="bench up")
    netlink.set_root_qdisc("x", "pfifo", struct.pack("=I", 10))
    with pytest.raises(ShapingError, match="pfifo"):
        netem.check_plan(netlink, "x", PLAN, link="bench up")
    with pytest.raises(ShapingError, match="bench up: requested netem on x, the kernel has pfifo"):
        netem.change_plan(netlink, "x", PLAN, link="bench up")
    assert netlink.root_qdiscs()["x"].kind == "pfifo"
    with pytest.raises(ShapingError, match="pfifo"):
        shaping.read_counters(netlink, "x")


def shaped(queue: str, layer: Literal["ip", "ethernet"] = "ip", **update: Any) -> Shaping:
    return plan_shaping(changed(queue=queue, **update), mtu=1500, layer=layer)


QUEUES = ["fifo", "fq_codel", "cake", "red"]


@pytest.mark.netem
@pytest.mark.parametrize("layer", ["ip", "ethernet"])
@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("rate_bps", [8_000, 10_000_000, 100_000_000_000])
def test_a_queue_behind_netem_is_held_as_asked(
    netlink: Netlink, queue: str, layer: Literal["ip", "ethernet"], rate_bps: int
) -> None:
    plan, other = (shaped(queue, layer, rate_bps=rate) for rate in (rate_bps, 4_000_000))
    netem.apply_plan(netlink, "x", plan.netem, link="bench", sizes=plan.sizes)
    with pytest.raises(ShapingError, match=r"behind netem on x, the kernel has \[\]"):
        shaping.check_shaping(netlink, "x", plan, link="bench")
    assert shaping.apply_shaping(netlink, "x", plan, link="bench") == plan
    with pytest.raises(ShapingError, match=f"bench: x: requested {other.children[0].kind}"):
        shaping.check_shaping(netlink, "x", other._replace(netem=plan.netem), link="bench")
    assert shaping.change_shaping(netlink, "x", plan, other, link="bench") == other
    assert shaping.change_shaping(netlink, "x", None, plan, link="bench") == plan


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_what_waits_leaves_at_the_rate_of_now(bench: Bench) -> None:
    """1,000 bytes of IP take 1 ms, after a change 10 ms, then 1 ms again; each packet is behind its delay."""
    fast, slow = (shaped("fifo", rate_bps=rate, delay_ns=20_000_000) for rate in (8_000_000, 800_000))
    late_s = 1.5e-3  # a full packet's time
    slow = slow._replace(netem=fast.netem)
    shaping.apply_shaping(bench.netlink, "x", fast, link="bench")
    began = time.time()
    bench.send(30, size=1000 - 28)
    time.sleep(0.02 + late_s + 0.0095)
    shaping.change_shaping(bench.netlink, "x", fast, slow, link="bench")
    time.sleep(0.1)
    shaping.change_shaping(bench.netlink, "x", slow, fast, link="bench")
    time.sleep(0.1)
    numbers, times = bench.arrivals()
    assert numbers == list(range(30))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] - began == pytest.approx(0.02 + late_s, abs=2e-4)
    assert gaps[:8] == pytest.approx([1e-3] * 8, abs=TICK_S)
    assert gaps[11:18] == pytest.approx([1e-2] * 7, abs=TICK_S)
    assert gaps[-8:] == pytest.approx([1e-3] * 8, abs=TICK_S)
    carried = shaping.read_counters(bench.netlink, "x")
    assert (carried.packets, carried.bytes, carried.dropped_buffer) == (30, 30_000, 0)


@pytest.mark.root
def test_a_kernel_without_the_qdisc_says_what_to_do(netlink: Netlink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netem, "KIND", "nonesuch")
    with pytest.raises(CapabilityError, match=r"bench: this kernel has no sch_nonesuch.*--engine relay.*testbed vm"):
        netem.apply_plan(netlink, "x", PLAN, link="bench")


def _without_seed(options: bytes) -> bytes:
    """Where no seed is asked for the kernel draws one, and dumps it."""
    kept, at = options[:24], 24
    while at < len(options):
        length, kind = struct.unpack_from("=HH", options, at)
        padded = length + -length % 4
        kept += b"" if kind == 14 else options[at : at + padded]
        at += padded
    return kept


def _tc(netlink: Netlink, verb: str, plan: NetemPlan, words: str) -> None:
    """Let tc do it; skip what this tc has no word for."""
    command = f"tc qdisc {verb} dev y root netem limit {plan.limit_packets} {words}".split()
    with netlink.namespace.entered():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if unknown := re.search(r'What is "(\w+)"', done.stderr):
        pytest.skip(f"this tc has no word {unknown[1]}")
    assert done.returncode == 0, done.stderr


_BASE = "delay 10ms rate 80mbit -14"
_TC = {  # tc rounds a delay to 64 ns
    "ip": (PLAN, _BASE),
    "ethernet-loss": (
        PLAN._replace(packet_overhead=0, loss_u32=share_u32(0.02), seed=3),
        "delay 10ms loss 2% rate 80mbit",
    ),
    "rate64": (PLAN._replace(rate_bytes=5_000_000_000, latency_ns=1_600_000), "delay 1.6ms rate 40gbit -14"),
    "seed": (PLAN._replace(loss_u32=share_u32(0.02), seed=2**63 - 1), f"{_BASE} loss 2% seed {2**63 - 1}"),
    "everything": (
        EVERYTHING,
        "delay 10ms 3ms rate 80mbit -14 loss gemodel 1% 10% 70% 0.1% reorder 25% duplicate 1% "
        "slot 800us 10ms packets 32 bytes 64k",
    ),
}


@pytest.mark.netem
@pytest.mark.skipif(
    shutil.which("tc") is None, reason="compares with tc, which is not installed (apt-get install iproute2)"
)
@pytest.mark.parametrize("case", _TC)
@pytest.mark.parametrize("verb", ["add", "change"])
def test_the_kernel_holds_the_same_bytes_as_after_tc(netlink: Netlink, case: str, verb: str) -> None:
    plan, words = _TC[case]
    netem.apply_plan(netlink, "x", PLAN if verb == "change" else plan, link="bench")
    if verb == "change":
        netem.change_plan(netlink, "x", plan, link="bench")
        _tc(netlink, "add", PLAN, _BASE)
    _tc(netlink, verb, plan, words)
    held = netlink.root_qdiscs()
    x, y = held["x"].options, held["y"].options
    assert (x, y) == (x, x) if case == "seed" else _without_seed(x) == _without_seed(y)


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_delay_and_rate_act_on_packets(bench: Bench) -> None:
    netem.apply_plan(bench.netlink, "x", planned(rate_bps=8_000_000, delay_ns=20_000_000), link="bench")
    start = time.time()
    bench.send(1, 72)  # 100 bytes of IP: 0.1 ms on the wire
    _, (alone,) = bench.arrivals()
    assert alone - start == pytest.approx(0.0201, abs=TICK_S)
    start = time.time()
    bench.send(100, 972)  # 1000 bytes of IP: 1 ms each
    numbers, times = bench.arrivals()
    assert numbers == list(range(100))
    assert times[-1] - start == pytest.approx(0.120, abs=TICK_S)
    carried = shaping.read_counters(bench.netlink, "x")
    assert (carried.packets, carried.bytes) == (101, 100 + 100 * 1000)
    assert (carried.dropped_buffer, carried.dropped_loss, carried.backlog_bytes) == (0, None, 0)


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_the_queue_drops_its_tail_at_the_limit_and_not_before(bench: Bench) -> None:
    """What is under way counts too: 100 Mbit/s over 1 s and the buffer hold 9,000 packets."""
    plan = planned(rate_bps=100_000_000, delay_ns=1_000_000_000, buffer_bytes=1_000_000)
    assert plan.limit_packets == 9_000 + 1
    netem.apply_plan(bench.netlink, "x", plan, link="bench")
    bench.send(plan.limit_packets + 100)
    held = shaping.read_counters(bench.netlink, "x")
    assert (held.packets, held.dropped_buffer, held.backlog_bytes) == (0, 100, plan.limit_packets * 32)
    assert bench.arrivals()[0] == list(range(plan.limit_packets))


def _lost(bench: Bench, pipe: Pipe, count: int) -> list[int]:
    """Which of so many packets do not arrive."""
    netem.apply_plan(bench.netlink, "x", plan_netem(pipe, mtu=1500, layer="ip"), link="bench")
    bench.send(count)
    arrived = set(bench.arrivals()[0])
    return [number for number in range(count) if number not in arrived]


_ROOMY = {"rate_bps": 1_000_000_000, "delay_ns": 1_000_000, "buffer_bytes": 10**9}


@pytest.mark.netem
@pytest.mark.parametrize("loss", [Bernoulli(probability=0.05), BURSTS], ids=["bernoulli", "bursts"])
def test_the_same_seed_loses_the_same_packets(bench: Bench, loss: Any) -> None:
    pipe = changed(loss=loss, **_ROOMY)
    first, again = _lost(bench, pipe, 2000), _lost(bench, pipe, 2000)
    other = _lost(bench, pipe.model_copy(update={"seed": 99}), 2000)
    assert first
    assert first == again
    assert first != other


@pytest.mark.netem
@pytest.mark.parametrize(
    "loss",
    [
        Bernoulli(probability=0.05),
        BURSTS,
        GilbertElliott(enter_bad=0.05, leave_bad=0.3, lost_in_bad=0.8, lost_in_good=0.01),
    ],
    ids=["bernoulli", "whole-bursts", "four-numbers"],
)
def test_share_and_bursts_of_the_lost_packets_are_the_models(bench: Bench, loss: Any) -> None:
    """Of 60,000 packets, in 800 bursts or more. The seed is stated, so that this comes out the same every time."""
    count = 60_000
    lost = _lost(bench, changed(loss=loss, **_ROOMY), count)
    bursts = 1 + sum(later != earlier + 1 for earlier, later in itertools.pairwise(lost))
    assert bursts > 800
    assert len(lost) / count == pytest.approx(loss.mean, rel=0.1)
    assert len(lost) / bursts == pytest.approx(loss.mean_burst, rel=0.1)


@pytest.mark.netem
def test_a_change_goes_on_with_the_draws_and_does_not_repeat_them(bench: Bench) -> None:
    """A schedule with ten changes a second would else lose the same few packets after each of them, or never one."""
    loss = Bernoulli(probability=0.05)
    whole = _lost(bench, changed(loss=loss, **_ROOMY), 2000)
    netem.apply_plan(bench.netlink, "x", planned(loss=loss, **_ROOMY), link="bench")
    found = []
    for part in range(4):
        netem.change_plan(
            bench.netlink, "x", planned(loss=loss, **{**_ROOMY, "rate_bps": 8_000_000 * (part + 1)}), link="bench"
        )
        bench.send(500)
        arrived = set(bench.arrivals()[0])
        found += [500 * part + number for number in range(500) if number not in arrived]
    assert found == whole


@pytest.mark.netem
def test_a_slot_lets_a_few_packets_through_and_then_waits(bench: Bench) -> None:
    netem.apply_plan(bench.netlink, "x", planned(slot=SLOT), link="bench")
    bench.send(50)
    numbers, times = bench.arrivals()
    assert numbers == list(range(50))
    assert all(later - earlier >= 0.0199 for earlier, later in zip(times, times[5:], strict=False))


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_a_live_change_loses_nothing_that_waits(bench: Bench) -> None:
    """300 packets of 1 ms each wait while rate, delay and losses change six times; all arrive, in order."""
    netem.apply_plan(bench.netlink, "x", planned(rate_bps=8_000_000), link="bench")
    bench.send(300, 972)
    for rate in (4_000_000, 8_000_000, 80_000_000, 8_000, 40_000_000, 8_000_000):
        plan = planned(rate_bps=rate, delay_ns=rate, loss=Bernoulli(probability=0.5))
        assert netem.change_plan(bench.netlink, "x", plan, link="bench") == plan
        time.sleep(0.02)
    assert bench.arrivals()[0] == list(range(300))
    assert shaping.read_counters(bench.netlink, "x").dropped_buffer == 0

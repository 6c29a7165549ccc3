"""The relay process on packet sockets, which read and write like TUN devices without privilege; and on real devices."""

import contextlib
import os
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from testbed.errors import LabError, SpecError
from testbed.net.kernel.namespace import Namespace
from testbed.net.relay import wire
from testbed.net.relay.client import Relay, RelayPort, lateness_percentile
from testbed.net.relay.tun import open_tun
from testbed.profiles import Bernoulli, Change, GilbertElliott, Pipe, RateTrace, Schedule, Slot, rate_trace

REPOSITORY = Path(__file__).resolve().parents[2]


def pipe(*, rate_bps=10**8, delay_ns=0, buffer_bytes=10**6, loss=0.0, **others):
    model = (Bernoulli(probability=loss) if loss else None) if isinstance(loss, float) else loss
    return Pipe.plain(rate_bps=rate_bps, delay_ns=delay_ns, buffer_bytes=buffer_bytes, loss=model, **others)


def packet(target, number, length=100):
    """An IPv4 packet to 10.77.<target>.2 as far as the relay looks at it, numbered."""
    return struct.pack(">B15x4sI", 0x45, socket.inet_aton(f"10.77.{target}.2"), number).ljust(length, b"\0")


def number(content):
    return struct.unpack_from(">I", content, 20)[0]


class Star:
    """A relay with one socket pair a port; `ends[k]` is what port k's device would be to its network."""

    def __init__(self, stack, pipes, overhead_bytes=0, behind=()):
        self.ends, ports, descriptors = [], [], []
        for index, (up, down) in enumerate(pipes):
            ours, its = (stack.enter_context(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            its.setblocking(False)
            ours.settimeout(20)
            self.ends.append(ours)
            descriptors.append(its.fileno())
            ports.append(
                RelayPort(
                    name=f"port{index}",
                    address=f"10.77.{index}.2",
                    up=up,
                    down=down,
                    overhead_bytes=overhead_bytes,
                    behind=dict(behind).get(f"port{index}"),
                )
            )
        self.relay = stack.enter_context(Relay(ports, descriptors))

    def settled(self, port, way, packets):
        """The counters, once so many packets have been offered to a direction."""
        deadline = time.monotonic() + 20
        while (found := self.relay.counters())[port][way]["packets_in"] < packets and time.monotonic() < deadline:
            time.sleep(0.01)
        return found


@pytest.fixture
def star():
    with contextlib.ExitStack() as stack:
        yield lambda *pipes, **options: Star(stack, pipes, **options)


def test_a_packet_goes_where_it_is_addressed_and_arrives_unchanged(star):
    lab = star((None, None), (pipe(), pipe()), (pipe(), None))
    for source, target in ((0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 2)):
        sent = packet(target, 7, 1500)
        lab.ends[source].send(sent)
        assert lab.ends[target].recv(2000) == sent


def test_no_packet_is_early_over_both_pipes(star):
    up, down = pipe(rate_bps=2 * 10**6, delay_ns=20_000_000), pipe(rate_bps=10**6, delay_ns=30_000_000)
    lab = star((None, None), (up, None), (None, down))
    start = time.monotonic_ns()
    for n in range(5):
        lab.ends[1].send(packet(2, n, 1000))
    for n in range(5):
        assert number(lab.ends[2].recv(2000)) == n
        # The first bytes through the fast pipe, then all through the slow one: 4 ms and 8 ms a packet.
        assert time.monotonic_ns() - start >= 50_000_000 + 4_000_000 + 8_000_000 * (n + 1)


def test_behind_a_port_packets_pass_its_pipes_too_unless_they_stay_behind_it(star):
    """Ports 1 and 2 are behind port 3, port 4 behind port 5; port 0 is the hub."""
    slow, fast = pipe(rate_bps=10**6, delay_ns=30_000_000), pipe(rate_bps=10**7, delay_ns=5_000_000)
    pipes = [(None, None), (fast, fast), (None, None), (slow, slow), (fast, fast), (fast, fast)]
    lab = star(*pipes, behind={"port1": "port3", "port2": "port3", "port4": "port5"}.items())
    packet_ns = {id(slow): 8_000_000, id(fast): 800_000}
    paths = {
        (1, 4): [(1, "up"), (3, "up"), (5, "down"), (4, "down")],
        (2, 4): [(2, "up"), (3, "up"), (5, "down"), (4, "down")],
        (4, 2): [(4, "up"), (5, "up"), (3, "down"), (2, "down")],
        (1, 2): [(1, "up"), (2, "down")],
        (2, 1): [(2, "up"), (1, "down")],
        (1, 3): [(1, "up")],
        (3, 1): [(1, "down")],
        (2, 0): [(2, "up"), (3, "up"), (0, "down")],
        (0, 2): [(0, "up"), (3, "down"), (2, "down")],
    }
    for (source, target), path in paths.items():
        before = lab.relay.counters()
        start = time.monotonic_ns()
        lab.ends[source].send(packet(target, 7, 1000))
        assert number(lab.ends[target].recv(2000)) == 7
        took_ns = time.monotonic_ns() - start
        chosen = [pipes[port][way == "down"] for port, way in path]
        assert took_ns >= sum(each.delay_ns + packet_ns[id(each)] for each in chosen if each)
        after = lab.relay.counters()
        passed = {
            (port, way)
            for port in range(len(pipes))
            for way in ("up", "down")
            if after[f"port{port}"][way]["packets_in"] > before[f"port{port}"][way]["packets_in"]
        }
        assert passed == set(path)


def test_what_cannot_be_delivered_is_counted(star):
    lab = star((None, None), (None, None))
    lab.ends[0].send(b"\x60" + bytes(39))
    lab.ends[0].send(packet(9, 0))
    lab.ends[0].send(packet(1, 1))
    assert number(lab.ends[1].recv(2000)) == 1
    assert lab.relay.counters()["process"]["undeliverable_packets"] == 2


def test_the_same_seed_loses_the_same_packets_and_directions_differ():
    def survivors(stack):
        lab = Star(stack, [(None, None), (pipe(loss=0.3, seed=11), pipe(loss=0.3, seed=11))])
        found = []
        for source, target, name, way in ((1, 0, "port1", "up"), (0, 1, "port1", "down")):
            for n in range(100):
                lab.ends[source].send(packet(target, n))
            out = lab.settled(name, way, 100)[name][way]
            assert out["packets_out"] + out["dropped_loss"] == 100
            found.append([number(lab.ends[target].recv(2000)) for _ in range(out["packets_out"])])
        return found

    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        one, other = survivors(first), survivors(second)
    assert one == other
    assert one[0] != one[1]


def test_copies_and_bursts_of_loss_close_the_books(star):
    bursts = GilbertElliott(enter_bad=0.2, leave_bad=0.3, lost_in_bad=1, lost_in_good=0)
    lab = star((None, None), (pipe(loss=bursts, duplicate=0.3), None))
    for n in range(200):
        lab.ends[1].send(packet(0, n))
    up = lab.settled("port1", "up", 200)["port1"]["up"]
    assert up["dropped_loss"] > 0
    assert up["duplicated"] > 0
    assert up["packets_out"] == 200 + up["duplicated"] - up["dropped_loss"]
    arrived = [number(lab.ends[0].recv(2000)) for _ in range(up["packets_out"])]
    assert arrived == sorted(arrived)
    assert len(arrived) - len(set(arrived)) <= up["duplicated"]


def exchange_ns(lab, length=100):
    start = time.monotonic_ns()
    lab.ends[1].send(packet(0, 0, length))
    lab.ends[0].recv(2000)
    return time.monotonic_ns() - start


def is_faster(lab, than_ns):
    """Whether one of a few exchanges takes less; a machine that is busy makes some late, not all."""
    return any(exchange_ns(lab) < than_ns for _ in range(50))


def test_a_schedule_plays_from_its_start_until_it_is_held(star):
    change = Change(at_ns=0, rate_bps=10**8, delay_ns=60_000_000, jitter_ns=0, loss=None)
    lab = star((None, None), (pipe(schedule=Schedule(changes=(change,), repeat_ns=None)), None))
    assert is_faster(lab, 60_000_000)
    lab.relay.play(time.monotonic_ns())
    assert exchange_ns(lab) >= 60_000_000
    lab.relay.hold()
    time.sleep(0.1)  # order is kept: behind what is under way
    assert is_faster(lab, 60_000_000)


def test_a_change_is_for_the_next_packet_and_keeps_what_is_under_way(star):
    lab = star((None, None), (pipe(delay_ns=500_000_000), None))
    start = time.monotonic_ns()
    lab.ends[1].send(packet(0, 1))
    lab.settled("port1", "up", 1)
    lab.relay.change("port1", "up", pipe(delay_ns=0))
    lab.ends[1].send(packet(0, 2))
    assert [number(lab.ends[0].recv(2000)) for _ in range(2)] == [1, 2]
    assert time.monotonic_ns() - start >= 500_000_000
    assert is_faster(lab, 80_000_000)
    before = lab.relay.counters()["port1"]["up"]["packets_in"]
    lab.relay.change("port1", "up", pipe(delay_ns=90_000_000))
    assert exchange_ns(lab) >= 90_000_000
    assert lab.relay.settings["ports"]["port1"]["up"]["delay_ns"] == 90_000_000
    assert lab.relay.counters()["port1"]["up"]["packets_in"] == before + 1


def test_both_sides_mean_the_same_by_an_opportunity():
    assert wire.OPPORTUNITY_BYTES == rate_trace.OPPORTUNITY_BYTES  # twice: the relay does without pydantic


def test_a_trace_is_followed_packet_by_packet(star, tmp_path):
    (tmp_path / "slow.trace").write_text("40\n80\n200\n")
    times, digest = rate_trace.read_trace(tmp_path / "slow.trace")
    slow = RateTrace(file="slow.trace", digest=digest, length_ms=200, opportunities=len(times), loop=True, offset_ms=0)
    lab = star((None, None), (pipe(trace=slow), None))
    begin = time.monotonic_ns()
    lab.relay.play(begin)
    for n in range(4):
        lab.ends[1].send(packet(0, n, 1500))
    for wait_ms in (40, 80, 200, 240):
        lab.ends[0].recv(2000)
        assert time.monotonic_ns() - begin >= wait_ms * 1_000_000


@pytest.mark.parametrize("live", [False, True])
def test_slots_are_refused_before_anything_starts(star, live):
    slotted = pipe(slot=Slot(wait_ns=1, wait_max_ns=1, packets=1, max_bytes=0))
    with pytest.raises(SpecError, match="only engine netem"):
        star((None, None), (None, None)).relay.change("port1", "up", slotted) if live else star((slotted, None))


def test_a_starved_relay_shows_in_its_lateness(star):
    """SIGSTOP is what a busy machine does to the relay: what was to leave meanwhile is late, and says so."""
    lab = star((None, None), (pipe(delay_ns=100_000_000), None))
    before = lab.settled("port1", "up", 0)["process"]["lateness"]
    for n in range(20):
        lab.ends[1].send(packet(0, n))
    lab.settled("port1", "up", 20)
    os.kill(lab.relay.pid, signal.SIGSTOP)
    time.sleep(0.2)
    os.kill(lab.relay.pid, signal.SIGCONT)
    for _ in range(20):
        lab.ends[0].recv(2000)
    after = lab.relay.counters()["process"]["lateness"]
    between = [late - early for early, late in zip(before, after, strict=True)]
    assert sum(between) == 20
    assert lateness_percentile(between, 0.5) > 10_000  # us, of about 100 ms


def test_a_relay_that_cannot_start_says_why():
    with pytest.raises(LabError, match="illegal IP address"):
        Relay([RelayPort(name="a", address="nowhere", up=None, down=None, overhead_bytes=0)], [0])


def test_the_relay_ends_when_it_is_closed():
    with Relay([], []) as relay:
        assert Path(f"/proc/{relay.pid}").exists()
    assert not Path(f"/proc/{relay.pid}").exists()


def test_a_percentile_lies_in_its_bucket():
    buckets = [10, 0, 0, 80, 10]  # under 1 us, 4 to 8 us, 8 to 16 us
    assert 0 < lateness_percentile(buckets, 0.05) < 1
    assert 4 <= lateness_percentile(buckets, 0.5) <= 8
    assert 8 <= lateness_percentile(buckets, 0.99) <= 16
    assert lateness_percentile(buckets, 0.95) <= lateness_percentile(buckets, 0.99)
    assert lateness_percentile([0, 0], 0.5) is None


@pytest.mark.root
def test_a_tun_device_lives_as_long_as_its_descriptor():
    def devices():
        return [line.split(":")[0].strip() for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]]

    with Namespace("tun test") as namespace, namespace.entered():
        fd = open_tun("wan0")
        assert "wan0" in devices()
        with pytest.raises(BlockingIOError):
            os.read(fd, 2000)
        with pytest.raises(LabError, match="wan0"):
            open_tun("wan0")
        os.close(fd)
        assert "wan0" not in devices()

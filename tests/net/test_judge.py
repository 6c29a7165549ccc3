"""Judging readings: an exact link passes, a link that is another than the one asked for fails where it differs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.directions import LINK_DIRECTIONS
from testbed.net.certificate import expect
from testbed.net.certificate.judge import judge_still, judge_varying
from testbed.net.certificate.verdict import CONTENTION, Fitness, Lateness
from testbed.net.probe.patterns import order_of
from testbed.net.probe.readings import BulkTransfer, PacketTrain, Readings, TimedMessage
from testbed.net.relay.loss import loss_model
from testbed.profiles import Bernoulli, Change, GilbertElliott, LinkProfile, Pipe, Schedule
from testbed.profiles.timeline import timeline

BURSTY = GilbertElliott(enter_bad=0.01, leave_bad=0.2, lost_in_bad=0.8, lost_in_good=0.0)


def pipe(**changes):
    return Pipe.plain(**{"rate_bps": 20_000_000, "delay_ns": 25_000_000, "buffer_bytes": 200_000, **changes})


def profile(*, up="pipe", down="pipe", **changes):
    fields = {
        "name": "test",
        "summary": "a link of the tests",
        "source": "none",
        "layer": "ip",
        "mtu": 1500,
        "congestion_control": "reno",
        "slow_start_after_idle": False,
        "up": pipe() if up == "pipe" else up,
        "down": pipe() if down == "pipe" else down,
    }
    return LinkProfile(**{**fields, **changes})


PIPES = st.builds(
    pipe, rate_bps=st.integers(10**6, 10**9), delay_ns=st.integers(0, 10**8), buffer_bytes=st.integers(1500, 10**8)
)
PROFILES = st.builds(
    profile,
    up=PIPES,
    down=PIPES,
    layer=st.sampled_from(["ip", "ethernet"]),
)


def lost_by(loss, count, rng):
    """The numbers of the packets that a loss model drops."""
    model = loss_model(loss and loss.model_dump(), rng.getrandbits(63), 0)
    return {number for number in range(count) if model and model.lost(number)}


def arrivals(line, count, rng):
    """The numbers of `count` packets in the order in which a link delivers them."""
    lost = lost_by(line.loss, count, rng)
    order = []
    for number in range(count):
        if number in lost:
            continue
        place = max(0, len(order) - 3) if rng.random() < line.reorder else len(order)
        order[place:place] = [number] * (2 if rng.random() < line.duplicate else 1)
    return order


def train(link, way, rng, *, count, packet_bytes=60, transits=300):
    line = link.pipe(way)
    order = order_of(numbers := arrivals(line, count, rng), count)
    plain = expect.delay_ms(link, line, packet_bytes) * 1e6
    return PacketTrain(
        way=way,
        packet_bytes=packet_bytes,
        sent=count,
        offer_ns=count * 100_000,
        arrived=len(numbers),
        counted=len(numbers) - 1,
        span_ns=count * 100_000,
        lost=order.lost,
        bursts=order.bursts,
        overtakers=len(order.overtakers),
        copies=order.copies,
        transit_ns=[round(plain + rng.uniform(-line.jitter_ns, line.jitter_ns)) for _ in range(transits)],
    )


def overload(link, way):
    line = link.pipe(way)
    packet_ns = expect.serialisation_ns(line, link.mtu + link.overhead_bytes)
    full_ns = expect.delay_ms(link, line, link.mtu) * 1e6 + line.buffer_ns
    return PacketTrain(
        way=way,
        packet_bytes=link.mtu,
        sent=1200,
        offer_ns=round(1000 * packet_ns),
        arrived=1001,
        counted=1000,
        span_ns=round(1000 * packet_ns),
        lost=199,
        bursts=20,
        transit_ns=[round(full_ns - packet_ns * (n % 5) / 10) for n in range(100)],
    )


def shown_by(link, *, seed=1, packets=20_000, **changes):
    """What an exact link of this profile would show."""
    rng = random.Random(seed)
    shaped = [way for way in LINK_DIRECTIONS if link.pipe(way)]
    jitter_ns = [link.pipe(way).jitter_ns for way in shaped]
    fields = {
        "link": "node-0",
        "scheduling": "SCHED_FIFO",
        "rtt_ns": [
            round(expect.rtt_ms(link, 84) * 1e6 + sum(rng.uniform(-j, j) for j in jitter_ns)) for _ in range(100)
        ],
        "echoes": 100,
        "echo_bytes": 84,
        "full_packet_passed": True,
        "bigger_packet_refused": True,
        "packet_payload_bytes": 1448,
        "window_bytes": {"up": 10**9, "down": 10**9},
        "messages": [
            TimedMessage(
                way=way,
                size=size,
                elapsed_ns=round(expect.message_ms(link, link.pipe(way), size, 1448) * 1e6) if way in shaped else 10**6,
                retransmits=0,
            )
            for way in LINK_DIRECTIONS
            for size in (65_536, 262_144, 1 << 22)
        ],
        "light": [train(link, way, rng, count=packets) for way in shaped],
        "spaced": [train(link, way, rng, count=500, transits=500) for way in shaped if link.pipe(way).jitter_ns],
        "overload": [overload(link, way) for way in shaped],
        "bulk": [
            BulkTransfer(
                way=way,
                size=round(expect.goodput_bps(link, link.pipe(way), 1448) * 3 / 8) if way in shaped else 10**9,
                span_ns=3 * 10**9,
                retransmits=0,
            )
            for way in LINK_DIRECTIONS
        ],
    }
    return Readings(**{**fields, **changes})


CALM = Lateness(0.01, 0.5, 1000)


def fitness(relay=CALM, probe=CALM, stolen=0.0):
    return Fitness(relay=relay, probe=probe, stolen=stolen, busy=0.3)


SELDOM_LATE, LATE = Lateness(0.1, 8.2, 1000), Lateness(5.0, 16.4, 1000)


def judged(link, readings, host=None):
    return list(judge_still(link, readings, host or fitness()))


def failed(link, readings):
    return {(m.quantity, m.direction) for m in judged(link, readings) if m.verdict == "FAIL"}


EVERYTHING = {"rtt", "delay", "jitter", "loss", "reordered", "duplicated", "rate", "queue", "message", "goodput"}


@settings(deadline=None, max_examples=25)
@given(PROFILES)
def test_an_exact_link_passes_in_every_quantity(link):
    found = judged(link, shown_by(link, packets=300))
    assert {m.quantity for m in found} == EVERYTHING
    assert [m.note for m in found if m.verdict == "FAIL"] == []


RICH = [
    {"loss": Bernoulli(probability=0.01)},
    {"loss": BURSTY},
    {"jitter_ns": 5_000_000},
    {"reorder": 0.02},
    {"duplicate": 0.02},
    {"loss": BURSTY, "jitter_ns": 20_000_000, "reorder": 0.01, "duplicate": 0.01},
]


@pytest.mark.slow
@pytest.mark.parametrize("effects", RICH)
def test_an_exact_link_with_effects_passes_whatever_the_dice(effects):
    link = profile(up=pipe(**effects))
    refused = [seed for seed in range(20) if failed(link, shown_by(link, seed=seed))]
    assert len(refused) <= 1  # each quantity refuses one good link in a thousand


@pytest.mark.parametrize(
    ("asked", "instead", "where"),
    [
        ({}, {"rate_bps": 19_400_000}, {"rate", "goodput"}),
        ({}, {"rate_bps": 20_600_000}, {"rate", "goodput"}),
        ({}, {"delay_ns": 26_000_000}, {"delay", "rtt"}),
        ({}, {"delay_ns": 24_000_000}, {"delay", "rtt"}),
        ({}, {"buffer_bytes": 100_000}, {"queue"}),
        ({}, {"buffer_bytes": 400_000}, {"queue"}),
        ({}, {"loss": Bernoulli(probability=0.001)}, {"loss"}),
        ({"loss": Bernoulli(probability=0.01)}, {"loss": Bernoulli(probability=0.02)}, {"loss"}),
        ({"loss": Bernoulli(probability=0.01)}, {}, {"loss"}),
        ({"loss": BURSTY}, {"loss": Bernoulli(probability=BURSTY.mean)}, {"burst"}),
        ({}, {"jitter_ns": 2_000_000}, {"jitter"}),
        ({"jitter_ns": 5_000_000}, {}, {"jitter"}),
        ({"jitter_ns": 5_000_000}, {"jitter_ns": 10_000_000}, {"jitter"}),
        ({}, {"reorder": 0.01}, {"reordered"}),
        ({"reorder": 0.05}, {}, {"reordered"}),
        ({}, {"duplicate": 0.01}, {"duplicated"}),
        ({"duplicate": 0.05}, {"duplicate": 0.1}, {"duplicated"}),
    ],
)
def test_another_link_than_asked_fails_where_it_differs_and_in_that_direction_only(asked, instead, where):
    wanted, found = profile(up=pipe(**asked)), profile(up=pipe(**instead))
    readings = shown_by(found)
    if "jitter_ns" in asked and not readings.spaced:
        readings.spaced = [train(found, "up", random.Random(1), count=500, transits=500)]
    if (
        "jitter_ns" in instead and "jitter_ns" not in asked
    ):  # then the probe sends no spaced train: the light one shows it
        readings.light[0].transit_ns = readings.spaced[0].transit_ns
    wrong = failed(wanted, readings)
    assert where <= {quantity for quantity, _ in wrong}
    assert all(direction in ("up", "both") for _, direction in wrong)


def test_swapped_delays_are_found_although_the_round_trip_is_right():
    wanted = profile(up=pipe(delay_ns=10_000_000), down=pipe(delay_ns=40_000_000))
    found = profile(up=pipe(delay_ns=40_000_000), down=pipe(delay_ns=10_000_000))
    wrong = failed(wanted, shown_by(found))
    assert {("delay", "up"), ("delay", "down")} <= wrong
    assert ("rtt", "both") not in wrong


def test_a_token_bucket_of_a_second_passes_as_goodput_and_fails_as_a_link_for_messages():
    link = profile()
    readings = shown_by(link)
    for message in readings.messages:  # a bucket filled in the pause lets them through at the speed of the host
        message.elapsed_ns = link.up.delay_ns + message.size * 8
    found = judged(link, readings)
    assert {m.verdict for m in found if m.quantity == "goodput"} == {"PASS"}
    assert {m.verdict for m in found if m.quantity == "message"} == {"FAIL"}


@settings(deadline=None, max_examples=25)
@given(PROFILES, PROFILES)
def test_every_verdict_follows_from_the_numbers_shown(asked, found):
    for m in judged(asked, shown_by(found, packets=300)):
        if m.tolerance is not None and not m.note.startswith("nothing was dropped"):
            assert (m.verdict == "PASS") == (abs(m.measured - m.expected) <= m.tolerance)
        assert (m.verdict == "PASS") or m.note


def test_a_queue_that_never_drops_fails():
    link = profile()
    readings = shown_by(link)
    for one in readings.overload:
        one.lost = 0
    assert failed(link, readings) == {("queue", "up"), ("queue", "down")}


def slowed(link):
    readings = shown_by(link)
    for one in readings.overload:
        one.span_ns = round(one.span_ns * 1.5)
    return readings


@pytest.mark.parametrize(
    "host",
    [
        fitness(relay=SELDOM_LATE),
        fitness(relay=LATE),
        fitness(probe=LATE),
        fitness(relay=None, probe=LATE),
        fitness(stolen=0.2),
    ],
)
def test_an_unfit_host_is_named_as_the_cause_of_what_is_off_and_of_nothing_else(host):
    link = profile()
    found = judged(link, slowed(link), host)
    assert all((CONTENTION in m.note) == (m.verdict == "FAIL") for m in found)
    assert any(m.verdict == "FAIL" for m in found)
    assert all(CONTENTION not in m.note for m in judged(link, shown_by(link), host))
    assert all(CONTENTION not in m.note for m in judged(link, slowed(link)))


def test_a_late_relay_fails_by_itself_and_a_late_probe_does_not():
    (relay, host) = fitness(relay=LATE, probe=LATE).measurements()
    assert (relay.link, relay.verdict) == ("relay", "FAIL")
    assert CONTENTION in relay.note
    assert (host.link, host.verdict, host.expected) == ("host", "PASS", None)


def test_what_is_unshaped_is_information():
    link = profile(up=None, down=None)
    found = judged(link, shown_by(link))
    assert {m.quantity for m in found} == {"rtt", "message", "goodput"}
    assert all((m.verdict, m.expected, m.tolerance, m.note) == ("PASS", None, None, "unshaped") for m in found)


@pytest.mark.parametrize(
    "link",
    [
        profile(up=pipe(loss=Bernoulli(probability=0.01))),
        profile(down=pipe(reorder=0.01)),
        profile(up=pipe(duplicate=0.01)),
        profile(down=pipe(jitter_ns=5_000_000, jitter_reorders=True)),
        profile(slow_start_after_idle=True, congestion_control="cubic"),
        profile(up=pipe(buffer_bytes=50_000), down=pipe(buffer_bytes=50_000)),
    ],
)
def test_message_times_that_tcp_decides_are_information(link):
    readings = shown_by(link)
    for message in readings.messages:
        message.elapsed_ns *= 3
    found = [m for m in judged(link, readings) if m.quantity == "message"]
    assert all(m.verdict == "PASS" and m.tolerance is None and "information" in m.note for m in found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rtt_ns": []}, "nothing arrived"),
        ({"rtt_ns": [], "faults": {"echo": "Network is unreachable"}}, "Network is unreachable"),
        ({"rtt_ns": [50_067_200] * 95}, "5 of 100 echoes were lost"),
        ({"full_packet_passed": False}, "MTU, 1500 bytes"),
        ({"bigger_packet_refused": False}, "1501 bytes was not refused"),
        ({"messages": [], "faults": {"stream": "no route"}}, "no route"),
        ({"overload": [], "faults": {"datagrams": "no buffer"}}, "no buffer"),
        ({"light": [], "faults": {"datagrams": "no such device"}}, "no such device"),
        ({"faults": {"echo": "no socket"}}, "no socket"),  # after the echoes
        ({"faults": {"stream": "timed out"}}, "timed out"),  # after the first messages
        ({"bulk": [BulkTransfer(way="up", size=10**6, span_ns=0, retransmits=0)]}, "nothing arrived"),
    ],
)
def test_a_fault_fails_the_certificate_and_says_what_it_was(changes, words):
    link = profile()
    assert any(words in m.note for m in judged(link, shown_by(link, **changes)) if m.verdict == "FAIL")


@pytest.mark.parametrize(("lost", "verdict"), [(0, "PASS"), (2, "PASS"), (40, "FAIL")])
def test_packets_too_few_to_tell_a_loss_from_none_are_information(lost, verdict):
    link = profile(up=pipe(loss=Bernoulli(probability=0.001)))
    readings = shown_by(link, packets=2_500)
    for shown in readings.light:
        shown.lost = lost if shown.way == "up" else 0
    (found,) = (m for m in judged(link, readings) if m.quantity == "loss" and m.direction == "up")
    assert found.verdict == verdict
    assert (found.tolerance is None) == ("2500 packets are too few for 0.1 %" in found.note) == (verdict == "PASS")


def test_a_probe_that_could_not_offer_enough_does_not_blame_the_link():
    link = profile()
    readings = shown_by(link)
    for one in readings.overload:
        one.span_ns, one.offer_ns = one.span_ns * 2, one.offer_ns * 2
    (up, down) = (m for m in judged(link, readings) if m.quantity == "rate")
    assert up.verdict == down.verdict == "FAIL"
    assert "could offer only" in up.note
    assert CONTENTION in up.note


def test_a_small_window_explains_a_slow_message():
    link = profile()
    readings = shown_by(link, window_bytes={"up": 1000, "down": 1000})
    for message in readings.messages:
        message.elapsed_ns *= 2
    assert all(
        "congestion window stayed at 1000 bytes" in m.note for m in judged(link, readings) if m.quantity == "message"
    )


VARYING = Schedule(
    changes=tuple(
        Change(at_ns=at * 10**9, rate_bps=rate * 10**6, delay_ns=10**7, jitter_ns=0, loss=None)
        for at, rate in ((2, 5), (4, 40))
    ),
    repeat_ns=6 * 10**9,
)


@pytest.mark.parametrize(("share", "verdict"), [(1.0, "PASS"), (1.01, "PASS"), (0.97, "FAIL"), (1.03, "FAIL")])
def test_a_varying_link_must_carry_what_its_timeline_holds(share, verdict):
    link = profile(up=pipe(schedule=VARYING))
    started, begin, end = 10**12, 10**12 + 700_000_000, 10**12 + 11_300_000_000
    shape = timeline(link.up)
    carried = shape.bits_between(begin - started - shape.at(begin - started).delay_ns, end - started - 10**7) / (
        1500 * 8
    )
    count = round(carried * share)
    shown = PacketTrain(way="up", packet_bytes=1500, arrived=count, counted=count, span_ns=end - begin, end_ns=end)
    readings = Readings(link="node-0", scheduling="SCHED_FIFO", followed=[shown])
    (found,) = judge_varying(link, readings, fitness(), started)
    assert (found.quantity, found.verdict) == ("schedule", verdict)


# ------------------------------------------------------------------ expect
@given(st.integers(1, 100_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 5))
def test_the_interval_holds_what_was_counted(counted, deviations):
    count, samples = counted
    low, high = expect.wilson_interval(count, samples, deviations)
    assert 0 <= low <= count / samples + 1e-12
    assert count / samples - 1e-12 <= high <= 1
    wider = expect.wilson_interval(count, samples, deviations + 1)
    assert wider[0] <= low + 1e-12
    assert wider[1] >= high - 1e-12


@pytest.mark.slow
def test_bursty_loss_varies_as_much_more_as_is_said():
    rng, count = random.Random(5), 4000
    shares = [len(lost_by(BURSTY, count, rng)) / count for _ in range(300)]
    mean = sum(shares) / len(shares)
    variance = sum((share - mean) ** 2 for share in shares) / (len(shares) - 1)
    binomial = BURSTY.mean * (1 - BURSTY.mean) / count
    assert mean == pytest.approx(BURSTY.mean, rel=0.05)
    assert variance / binomial == pytest.approx(expect.inflation(BURSTY), rel=0.3)
    assert expect.inflation(Bernoulli(probability=0.1)) == expect.inflation(None) == 1


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Bernoulli(probability=0.02), BURSTY])
def test_so_many_packets_show_the_loss_to_a_tenth(loss):
    count = round(expect.packets_for_a_tenth(loss))
    found = [len(lost_by(loss, count, random.Random(seed))) / count for seed in range(30)]
    assert sum(abs(share / loss.mean - 1) <= 0.1 for share in found) >= 24  # 95 % of them, expected


@given(st.integers(0, 10**7), st.integers(20, 400), st.integers(0, 2**31))
def test_the_spread_of_uniform_draws_is_their_jitter(jitter_ns, count, seed):
    rng = random.Random(seed)
    draws = [round(rng.uniform(-jitter_ns, jitter_ns)) for _ in range(count)]
    # Five deviations, for hypothesis looks for the worst.
    assert (
        abs(expect.spread(draws) - jitter_ns)
        <= 5 / 3.3 * expect.spread_deviation(jitter_ns, count) + 0.06 * jitter_ns + 2
    )


@given(PROFILES, st.integers(1, 10**7), st.integers(1, 10**7))
def test_a_bigger_message_takes_longer_and_no_less_than_its_payload(link, size, more):
    small = expect.message_ms(link, link.up, size, 1448)
    assert small >= (size * 8e9 / link.up.rate_bps + link.up.delay_ns) / 1e6
    assert expect.message_ms(link, link.up, size + more, 1448) > small

"""Judging readings, and certifying real links. Accuracy is what a certificate judges; the bounds here are wide."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.net.certify import ProbeLink, certify, plan
from testbed.net.judge import (
    CONTENTION,
    Judge,
    Lateness,
    expected_goodput_bps,
    expected_message_ms,
    expected_rtt_ms,
    wilson_interval,
)
from testbed.net.lab import Lab, LabSpec
from testbed.net.namespace import Namespace
from testbed.net.probe import WAYS, Bulk, Message, Readings, Train
from testbed.spec import LinkProfile, Pipe


def pipe(**changes):
    return Pipe(**{"rate_bps": 20_000_000, "delay_ns": 5_000_000, "buffer_bytes": 200_000, "loss": 0.0, "seed": 1, **changes})


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


PROFILES = st.builds(
    profile,
    up=st.builds(pipe, rate_bps=st.integers(10**6, 10**9), delay_ns=st.integers(0, 10**8)),
    down=st.builds(pipe, rate_bps=st.integers(10**6, 10**9), delay_ns=st.integers(0, 10**8)),
    layer=st.sampled_from(["ip", "ethernet"]),
)


def train(way, span_ns, offer_ns):
    return Train(way=way, sent=1051, offer_ns=round(offer_ns), received=1001, span_ns=round(span_ns))


def ideal(link, *, stretch=1.0, size=100_000, **changes):
    """What a link that is exact, or `stretch` times slower, would show."""
    packet = (1500 + (14 if link.layer == "ethernet" else 0)) * 8
    pipes = {"up": link.up, "down": link.down}
    fields = {
        "link": "node-0",
        "scheduling": "SCHED_FIFO",
        "rtt_ns": [round(expected_rtt_ms(link, 84) * 1e6 * stretch)] * 20,
        "echoes": 20,
        "echo_bytes": 84,
        "full_packet_passed": True,
        "bigger_packet_refused": True,
        "packet_payload_bytes": 1448,
        "window_bytes": {"up": 10**9, "down": 10**9},
        "messages": [
            Message(
                way=way,
                size=size,
                elapsed_ns=round(expected_message_ms(link, pipes[way], size, 1448) * 1e6 * stretch),
                retransmits=0,
            )
            for way in WAYS
        ],
        "rate": [
            train(way, 1000 * packet * 1e9 / pipes[way].rate_bps * stretch, 1000 * packet * 1e9 / pipes[way].rate_bps)
            for way in WAYS
        ],
        "loss": [Train(way=way, sent=1000, offer_ns=10**9, received=1000, span_ns=10**9) for way in WAYS],
        "bulk": [
            Bulk(
                way=way,
                size=round(expected_goodput_bps(link, pipes[way], 1448) * 3 / 8),
                span_ns=round(3 * 10**9 * stretch),
                retransmits=0,
            )
            for way in WAYS
        ],
    }
    return Readings(**{**fields, **changes})


PROMPT, SELDOM_LATE, LATE = Lateness(0.01, 0.5, 1000), Lateness(0.1, 8.2, 1000), Lateness(5.0, 16.4, 1000)


def judged(link, readings, lateness=PROMPT):
    return list(Judge(link, readings, lateness).measurements())


@given(PROFILES)
def test_an_exact_link_passes_in_every_quantity(link):
    found = judged(link, ideal(link))
    assert {m.quantity for m in found} == {"rtt", "rate", "message", "goodput", "loss"}
    assert [m.note for m in found if m.verdict == "FAIL"] == []


@given(PROFILES, st.floats(1.2, 5))
def test_a_slow_link_fails_where_it_is_slow(link, stretch):
    verdicts = {m.quantity: m.verdict for m in judged(link, ideal(link, stretch=stretch))}
    assert verdicts["rate"] == verdicts["goodput"] == "FAIL"
    assert verdicts["loss"] == "PASS"


@given(PROFILES, st.floats(0.2, 0.9))
def test_a_link_that_is_too_fast_fails_too(link, stretch):
    assert {m.verdict for m in judged(link, ideal(link, stretch=stretch)) if m.quantity in ("rate", "goodput")} == {"FAIL"}


@given(PROFILES)
def test_every_verdict_follows_from_the_numbers_shown(link):
    for m in judged(link, ideal(link, stretch=1.02)):
        assert (m.verdict == "PASS") == (abs(m.measured - m.expected) <= m.tolerance)
        assert (m.verdict == "PASS") or m.note


@pytest.mark.parametrize("lateness", [SELDOM_LATE, LATE])
def test_a_late_relay_is_named_as_the_cause_of_what_was_slow_only(lateness):
    link = profile()
    slow = judged(link, ideal(link, stretch=2), lateness)
    assert all((CONTENTION in m.note) == (m.verdict == "FAIL") for m in slow)
    assert any(m.verdict == "FAIL" for m in slow)
    assert all(CONTENTION not in m.note for m in judged(link, ideal(link), lateness))


@pytest.mark.parametrize("lateness", [None, PROMPT])
def test_a_prompt_relay_is_not_blamed(lateness):
    link = profile()
    assert all(CONTENTION not in m.note for m in judged(link, ideal(link, stretch=2), lateness))


def test_what_is_unshaped_is_information():
    link = profile(up=None, down=None)
    readings = ideal(profile(), rate=[], loss=[])
    found = judged(link, readings)
    assert found
    assert all((m.verdict, m.expected, m.tolerance, m.note) == ("PASS", None, None, "unshaped") for m in found)
    assert {m.quantity for m in found} == {"rtt", "message", "goodput"}


@pytest.mark.parametrize(
    "link",
    [profile(up=pipe(loss=0.01), down=pipe(loss=0.01)), profile(slow_start_after_idle=True, congestion_control="cubic")],
)
def test_message_times_that_tcp_decides_are_information(link):
    found = [m for m in judged(link, ideal(link, stretch=2)) if m.quantity == "message"]
    assert all(m.verdict == "PASS" and m.tolerance is None and "information" in m.note for m in found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rtt_ns": []}, "nothing arrived"),
        ({"rtt_ns": [], "faults": {"echo": "Network is unreachable"}}, "Network is unreachable"),
        ({"rtt_ns": [10_067_200] * 15}, "5 of 20 echoes were lost"),
        ({"full_packet_passed": False}, "1500 bytes, was not answered"),
        ({"bigger_packet_refused": False}, "1501 bytes was not refused"),
        ({"messages": [], "faults": {"stream": "no route"}}, "no route"),
        ({"rate": [], "faults": {"datagrams": "no buffer"}}, "no buffer"),
        ({"loss": [Train(way="up", sent=1000, offer_ns=1, received=999, span_ns=1)]}, "1 of 1000 lost"),
    ],
)
def test_a_fault_fails_the_certificate_and_says_what_it_was(changes, words):
    link = profile()
    assert any(words in m.note for m in judged(link, ideal(link, **changes)) if m.verdict == "FAIL")


def test_a_probe_that_could_not_offer_enough_does_not_blame_the_link():
    link = profile()
    weak = [train(way, 700_000_000, 700_000_000) for way in WAYS]
    (up, down) = (m for m in judged(link, ideal(link, rate=weak)) if m.quantity == "rate")
    assert up.verdict == down.verdict == "FAIL"
    assert "could offer only" in up.note
    assert CONTENTION in up.note


def test_a_small_window_explains_a_slow_message():
    link = profile()
    readings = ideal(link, stretch=2, window_bytes={"up": 1000, "down": 1000})
    assert all("congestion window stayed at 1000 bytes" in m.note for m in judged(link, readings) if m.quantity == "message")


@given(st.integers(1, 100_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.floats(0.5, 5))
def test_the_interval_holds_what_was_counted(counted, deviations):
    count, samples = counted
    low, high = wilson_interval(count, samples, deviations)
    assert 0 <= low <= count / samples + 1e-12
    assert count / samples - 1e-12 <= high <= 1
    wider = wilson_interval(count, samples, deviations + 1)
    assert wider[0] <= low + 1e-12
    assert wider[1] >= high - 1e-12


@given(PROFILES, st.integers(1, 10**7), st.integers(1, 10**7))
def test_a_bigger_message_takes_longer_and_no_less_than_its_payload(link, size, more):
    small = expected_message_ms(link, link.up, size, 1448)
    assert small >= (size * 8e9 / link.up.rate_bps + link.up.delay_ns) / 1e6
    assert expected_message_ms(link, link.up, size + more, 1448) > small


def test_a_message_is_cut_to_what_the_link_can_carry_in_time():
    slow = profile(up=pipe(rate_bps=1_000_000), down=pipe(rate_bps=10**9))

    class Space:
        fd = 0

    link = ProbeLink(name="n", node=Space(), hub=Space(), node_address="a", hub_address="b", profile=slow)
    job = plan(link, "quick", (4 << 20, 1000, 4 << 20))
    assert [sizes["down"] for sizes in job.messages] == [1000, 4 << 20]
    assert job.messages[0]["up"] == 1000
    assert 1000 < job.messages[1]["up"] < 4 << 20


def test_every_form_is_measured_with_more_effort_than_the_one_before():
    class Space:
        fd = 0

    link = ProbeLink(name="n", node=Space(), hub=Space(), node_address="a", hub_address="b", profile=profile())
    quick, full = (plan(link, form, [1000]) for form in ("quick", "full"))
    assert quick.echoes >= 20
    assert (full.echoes, full.repeats, full.rate_s, full.idle_s) > (quick.echoes, quick.repeats, quick.rate_s, quick.idle_s)
    assert full.loss_s > 0
    assert full.bulk_s >= 3


def lab(link, engine="relay", nodes=2):
    return Lab(LabSpec(topology="star", profile=link, nodes=nodes, engine=engine, engine_reason="a test asked for it"))


def near(measurement, share, *, slack=0.0):
    assert measurement.measured == pytest.approx(measurement.expected, rel=share, abs=slack), measurement


def check_links(found, names, quantities):
    assert {(m.link, m.quantity) for m in found if m.link != "relay"} == {
        (name, quantity) for name in names for quantity in quantities
    }
    for m in found:
        if m.quantity == "rtt":
            near(m, 0.2, slack=5)
        elif m.quantity == "rate":
            near(m, 0.2)
        elif m.quantity == "message":
            near(m, 1.0, slack=50)


@pytest.mark.root
@pytest.mark.parametrize("layer", ["ip", "ethernet"])
def test_a_relayed_link_is_measured_in_every_quantity(layer):
    with lab(profile(layer=layer)) as built:
        found = built.certify("quick", [20_000]).measurements
        names = [node.name for node in built.nodes]
    check_links(found, names, {"rtt", "rate", "message"})
    (late,) = (m for m in found if m.quantity == "lateness")
    assert late.samples > 0


@pytest.mark.netem
def test_a_netem_link_is_measured_in_every_quantity():
    with lab(profile(), engine="netem") as built:
        found = built.certify("quick", [20_000]).measurements
        names = [node.name for node in built.nodes]
    check_links(found, names, {"rtt", "rate", "message"})
    assert all(m.quantity != "lateness" for m in found)


@pytest.mark.root
def test_a_lossy_link_shows_its_loss_and_one_way_links_only_one_shaped_direction():
    lossy = profile(up=pipe(loss=0.2), down=None)
    with lab(lossy, nodes=1) as built:
        found = built.certify("quick", [2_000]).measurements
    (rate,) = (m for m in found if m.quantity == "rate")
    assert rate.direction == "up"
    near(rate, 0.2)
    assert {m.verdict for m in found if m.quantity == "message"} == {"PASS"}


@pytest.mark.root
def test_an_unshaped_link_passes_with_information():
    with lab(profile(up=None, down=None), nodes=1) as built:
        found = built.certify("quick", [20_000]).measurements
    assert {m.quantity for m in found} == {"rtt", "message", "goodput"}
    assert all(m.verdict == "PASS" and m.expected is None and m.measured > 0 for m in found)


@pytest.mark.root
def test_a_link_that_is_not_there_fails_in_every_quantity_says_why_and_leaves_nothing_open():
    before = set(Path("/proc/self/fd").iterdir())
    with Namespace("node") as node, Namespace("hub") as hub:
        link = ProbeLink(name="gone", node=node, hub=hub, node_address="10.77.1.2", hub_address="10.77.0.1", profile=profile())
        found = certify([link], form="quick", message_bytes=[1000])
    assert {m.quantity for m in found} == {"rtt", "rate", "message"}
    assert all(m.verdict == "FAIL" and m.measured is None and m.note not in ("", "nothing arrived") for m in found)
    assert set(Path("/proc/self/fd").iterdir()) == before

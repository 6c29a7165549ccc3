"""Planning a certificate and certifying real links: exactly on the virtual clock, by laws alone on the real one."""

from pathlib import Path

import pytest

from testbed.directions import LINK_DIRECTIONS
from testbed.net.certificate.certify import certify
from testbed.net.certificate.effort import plan
from testbed.net.kernel.namespace import Namespace
from testbed.net.lab import Lab, LabSpec
from testbed.net.lab_plan import End, Link
from testbed.profiles import Bernoulli, Change, Schedule, load_profile, profile_files
from testbed.records import BOUND
from testbed.sweep.bounded_steps import reference_step
from tests.net.test_judge import BURSTY, pipe, profile

MOVING = {"rtt", "delay", "jitter", "loss", "reordered", "duplicated", "rate", "queue", "message"}


class _Space:
    fd = 0


NEAR, FAR = End("node-0", "10.77.1.2", "wan0"), End("hub", "10.77.0.1", "hub0")
SPACES = {"node-0": _Space(), "hub": _Space()}


def link_of(wanted, name="n"):
    return Link(name=name, profile=wanted, near=NEAR, far=FAR, shaper="relay", gateway=None, meters={})


def test_a_message_is_cut_to_what_the_link_can_carry_in_time():
    slow = profile(up=pipe(rate_bps=1_000_000), down=pipe(rate_bps=10**9))
    job = plan(link_of(slow), SPACES, "quick", (4 << 20, 1000, 4 << 20, 2000))
    assert [sizes["down"] for sizes in job.messages] == [1000, 2000, 4 << 20]
    assert [sizes["up"] for sizes in job.messages][:2] == [1000, 2000]
    assert 2000 < job.messages[2]["up"] < 4 << 20


def test_a_message_is_cut_further_where_loss_holds_tcp_back():
    clean, lossy = (profile(up=pipe(loss=loss)) for loss in (None, Bernoulli(probability=0.05)))
    most = [plan(link_of(wanted), SPACES, "quick", [4 << 20]).messages[0]["up"] for wanted in (clean, lossy)]
    assert most[1] < most[0] / 2


def test_the_full_form_spends_more_than_the_quick_one():
    quick, full = (plan(link_of(profile(up=pipe(jitter_ns=10**6))), SPACES, form, [1000]) for form in ("quick", "full"))
    for effort in ("echoes", "repeats", "idle_s", "light_s", "spaced_s", "rate_s", "bulk_s"):
        assert getattr(full, effort) > getattr(quick, effort)


def test_rare_loss_and_bursts_are_given_more_packets_within_a_bound():
    spent = [
        plan(link_of(profile(up=pipe(loss=loss))), SPACES, "full", [1]).light_s
        for loss in (
            None,
            Bernoulli(probability=0.1),
            Bernoulli(probability=0.01),
            BURSTY,
            Bernoulli(probability=0.0001),
        )
    ]
    assert spent == sorted(spent)
    assert spent[0] < spent[2] < spent[-1] <= 10


def test_jitter_sets_echoes_apart_and_their_number_bounded():
    calm, shaky = (plan(link_of(profile(up=pipe(jitter_ns=j))), SPACES, "quick", [1]) for j in (0, 25_000_000))
    assert shaky.echo_spacing_ns >= 2 * 25_000_000
    assert shaky.echoes * shaky.echo_spacing_ns <= 10**9
    assert 0 < shaky.echoes < calm.echoes
    assert calm.spaced_s == 0 < shaky.spaced_s


def test_where_a_limit_counts_packets_no_more_small_ones_are_under_way_than_it_holds():
    far = profile(up=pipe(rate_bps=10**7, delay_ns=3 * 10**8, buffer_bytes=15_000))
    held = (10**7 * 0.3 / 8 + 15_000) / 1500
    assert plan(link_of(far), SPACES, "full", [1], "netem").up.light_pps * 0.3 < held
    assert plan(link_of(far), SPACES, "full", [1], "relay").up.light_pps * 0.3 > held


@pytest.mark.parametrize("form", ["quick", "full"])
@pytest.mark.parametrize("name", sorted(profile_files()))
def test_every_shipped_profile_gets_a_plan_within_reason(name, form):
    wanted = load_profile(name)
    job = plan(link_of(wanted), SPACES, form, [1000, 256 << 10, 4 << 20])
    assert job.echoes >= 8
    for way in LINK_DIRECTIONS:
        if shape := job.shape(way):
            assert shape.light_pps * job.light_s >= 50
            assert shape.peak_bps >= shape.rate_bps or wanted.varies
    assert job.light_s + job.spaced_s + job.rate_s + job.bulk_s <= (2 if form == "quick" else 25)


# ------------------------------------------------------------------ real links
MESSAGE_BYTES = 64 << 10


def lab(link, engine="relay", nodes=1):
    return Lab(
        LabSpec(topology="star", profiles=(link,), nodes=nodes, engine=engine, engine_reason="a test asked for it")
    )


def is_near(measurement, share, *, slack=0.0):
    return measurement.measured == pytest.approx(measurement.expected, rel=share, abs=slack)


def deviations(certificate, bounds):
    """The measurements that differ from what is expected by more than the share that is given for their quantity."""
    return [m for m in certificate.measurements if m.quantity in bounds and not is_near(m, bounds[m.quantity])]


def check_quantities(found, names):
    assert {(m.link, m.quantity) for m in found if m.link not in ("relay", "host")} == {
        (name, quantity) for name in names for quantity in MOVING
    }


@pytest.mark.root
@pytest.mark.parametrize("layer", ["ip", "ethernet"])
def test_a_relayed_link_is_measured_in_every_quantity(layer):
    """On the real clock, so by how much they differ says how busy this machine is; the bound says so too."""
    with lab(profile(layer=layer), nodes=2) as built:
        certificate = built.certify("quick", [20_000], step=reference_step(profile(), "relay", MESSAGE_BYTES))
        names = [node.name for node in built.nodes]
    found = certificate.measurements
    check_quantities(found, names)
    for m in found:
        assert m.samples > 0
        assert m.measured is None or m.measured >= 0
        assert m.bound is None or 0 <= m.bound <= certificate.bound + 1e-9
    assert [m.link for m in found if m.quantity == "lateness"].count("relay") == 1
    if certificate.verdict == "PASS":
        assert 0 <= certificate.bound < BOUND
    else:
        assert certificate.bound >= BOUND or any(m.verdict == "FAIL" for m in found)


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_a_netem_link_is_measured_in_every_quantity_and_is_what_was_asked():
    with lab(profile(), engine="netem", nodes=2) as built:
        step = reference_step(profile(), "netem", MESSAGE_BYTES)
        certificate = built.certify("quick", [20_000], step=step)
        names = [node.name for node in built.nodes]
    check_quantities(certificate.measurements, names)
    assert all(m.link != "relay" for m in certificate.measurements)
    shares = {"rtt": 0.01, "delay": 0.01, "rate": 0.01, "queue": 0.05, "message": 0.01, "duplicated": 0}
    assert not deviations(certificate, shares)
    assert certificate.verdict == "PASS"
    assert 0 <= certificate.bound < BOUND
    assert all(m.bound is None or m.bound <= certificate.bound + 1e-9 for m in certificate.measurements)


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_effects_are_found_in_the_direction_that_has_them():
    rich = profile(up=pipe(loss=BURSTY, jitter_ns=5_000_000, reorder=0.05, duplicate=0.05), down=None)
    with lab(rich, engine="netem") as built:
        certificate = built.certify("quick", [2_000])
    assert not deviations(certificate, {"burst": 1.0, "jitter": 0.6, "reordered": 0.6, "duplicated": 0.6})
    by = {m.quantity: m for m in certificate.measurements}
    assert 0 < by["loss"].measured < 3 * BURSTY.mean
    found = certificate.measurements
    assert {m.direction for m in found if m.quantity in ("rate", "loss", "burst")} == {"up"}
    assert {m.verdict for m in found if m.quantity == "message"} == {"PASS"}


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_a_varying_link_is_followed_in_the_full_form_and_held_again_afterwards():
    faster = Change(at_ns=2 * 10**9, rate_bps=40_000_000, delay_ns=25_000_000, jitter_ns=0, loss=None)
    wanted = profile(up=pipe(schedule=Schedule(changes=(faster,), repeat_ns=4 * 10**9)))
    with lab(wanted, engine="netem") as built:
        certificate = built.certify("full", [20_000])
    (followed,) = (m for m in certificate.measurements if m.quantity == "schedule")
    assert followed.direction == "up"
    assert is_near(followed, 0.05)


@pytest.mark.root
def test_a_link_that_is_not_there_fails_in_every_quantity_says_why_and_leaves_nothing_open():
    before = set(Path("/proc/self/fd").iterdir())
    with Namespace("near") as one, Namespace("far") as other:
        found = certify([link_of(profile(), "gone")], {"node-0": one, "hub": other}, form="quick", message_bytes=[1000])
    found = [m for m in found if m.link == "gone"]
    assert {m.quantity for m in found} == MOVING
    assert all(m.verdict == "FAIL" and m.measured is None and m.note not in ("", "nothing arrived") for m in found)
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.netem
@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    "instead",
    [
        {"rate_bps": 18_500_000},
        {"delay_ns": 30_000_000},
        {"loss": Bernoulli(probability=0.02)},
        {"jitter_ns": 10_000_000},
        {"reorder": 0.1},
    ],
    ids=lambda instead: next(iter(instead)),
)
def test_a_link_that_was_built_wrong_moves_a_step_by_more(instead):
    with lab(profile(), engine="netem") as built:
        built.change("node-0", "up", pipe(**instead))
        certificate = built.certify("quick", [MESSAGE_BYTES], step=reference_step(profile(), "netem", MESSAGE_BYTES))
    assert certificate.verdict == "FAIL"
    assert certificate.bound is None or certificate.bound > BOUND
    failed = [m for m in certificate.measurements if m.verdict == "FAIL"]
    assert {m.direction for m in failed} <= {"up", "both"}
    assert any(m.direction == "up" for m in failed)

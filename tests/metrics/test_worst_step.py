"""The worst step of a run is told where it is much worse than the median, with what the links did and when it ended."""

from __future__ import annotations

import json
from typing import Any

import pytest

from testbed.metrics import align, summarise
from testbed.metrics.worst_step import MUCH_WORSE, describe_worst_step, worst_step
from testbed.profiles.link_profile import Change, LinkProfile, Schedule
from testbed.profiles.loss import Bernoulli, GilbertElliott, Loss
from testbed.records import LabRecord, LinkCounters, LinkTrouble, Sample, WorstStep
from testbed.spec import Cell
from tests.known import known
from tests.synthetic import Pipeline, cell, lab_record, pipe, profile, train

PLAYED_NS, RATE_BPS, COLLAPSED_BPS = 1_000_000_000, 40_000_000, 400_000
FROM_NS, UNTIL_NS = 900_000_000, 1_400_000_000


def a_link(*, disturbed: bool = True, **changes: Any) -> LinkProfile:
    """A link of 40 Mbit/s whose uplink, if `disturbed`, has other values for half a second; unstated ones stay."""
    stated = {"rate_bps": RATE_BPS, "delay_ns": 5_000_000, "jitter_ns": 0, "loss": None}
    times = (Change(at_ns=FROM_NS, **{**stated, **changes}), Change(at_ns=UNTIL_NS, **stated))
    schedule = Schedule(changes=times, repeat_ns=None) if disturbed else None
    return profile("home", pipe(RATE_BPS, 5_000_000, schedule), pipe(RATE_BPS, 5_000_000))


def run(links: tuple[LinkProfile, ...], **shape: Any) -> tuple[Cell, LabRecord, list[Any]]:
    what = cell("int8", links, steps=16, training={"evaluate_every": 0})
    made = Pipeline(links, played_at_ns=PLAYED_NS, **shape)
    if made.dilation > 1:
        what = what.model_copy(update={"compute": made.cell.compute})
    return what, lab_record(what, PLAYED_NS), align(train(made, what))


CALM, COLLAPSING = a_link(disturbed=False), a_link(rate_bps=COLLAPSED_BPS)


def test_a_collapse_is_told_with_its_time_its_link_and_its_end() -> None:
    what, lab, steps = run((CALM, COLLAPSING, CALM))
    worst = known(worst_step(what, lab, steps))
    assert worst.medians > MUCH_WORSE
    assert worst.at_s * 1e9 < UNTIL_NS
    assert (worst.at_s + worst.seconds) * 1e9 > FROM_NS
    assert worst.links == (LinkTrouble(link="node-1", direction="up", rate_bps=COLLAPSED_BPS),)
    # The next step is as all others: it begins where the worst ends.
    assert worst.recovered_s == pytest.approx(worst.seconds)
    assert next(step.seconds for step in steps if step.number == worst.step) == pytest.approx(worst.seconds)


def test_a_run_without_one_says_nothing_and_its_summary_reads_as_it_always_did() -> None:
    what, lab, steps = run((CALM, CALM, CALM))
    assert worst_step(what, lab, steps) is None
    stages = [[step.records[stage] for step in steps] for stage in range(3)]
    told = summarise(what, lab, None, stages, status="ok", error=None)
    assert "worst" not in json.loads(told.model_dump_json())
    assert summarise(what, lab, None, [[]] * 3, status="failed", error="killed").worst is None


@pytest.mark.parametrize(
    ("changes", "trouble"),
    [
        ({"delay_ns": 400_000_000}, {"delay_ns": 400_000_000}),
        ({"rate_bps": COLLAPSED_BPS, "loss": Bernoulli(probability=1)}, {"rate_bps": COLLAPSED_BPS, "loss": 1.0}),
    ],
)
def test_delay_and_loss_are_told_as_the_rate_is(changes: dict[str, Any], trouble: dict[str, Any]) -> None:
    what, lab, steps = run((CALM, a_link(**changes), CALM))
    assert known(worst_step(what, lab, steps)).links == (LinkTrouble(link="node-1", direction="up", **trouble),)


def test_where_it_does_not_end_before_the_run_does_that_is_said() -> None:
    what, lab, steps = run((CALM, COLLAPSING, CALM))
    slow = known(worst_step(what, lab, steps)).step
    until = [step for step in steps if step.number <= slow]
    worst = known(worst_step(what, lab, until))
    assert worst.recovered_s is None
    assert "no later step as before" in describe_worst_step(worst)


@pytest.mark.slow
def test_it_is_told_in_the_time_of_the_emulated_world() -> None:
    """A dilated lab is slower by the factor, and so are the links' times."""
    slower = 4
    plain = run((CALM, COLLAPSING, CALM), paced=True)
    dilated = run((CALM, COLLAPSING, CALM), paced=True, dilation=slower)
    assert dilated[0].links[1].up != plain[0].links[1].up
    for ours, theirs in zip(*(known(worst_step(*each)).model_dump().items() for each in (dilated, plain)), strict=True):
        assert ours[0] == theirs[0]
        if isinstance(ours[1], float):
            assert ours[1] == pytest.approx(theirs[1], rel=0.02), ours[0]
        elif ours[0] != "links":
            assert ours[1] == theirs[1], ours[0]
    assert known(worst_step(*dilated)).links[0].rate_bps == pytest.approx(COLLAPSED_BPS, rel=0.01)


def test_dropped_packets_are_those_of_the_samples_around_it() -> None:
    what, lab, steps = run((CALM, COLLAPSING, CALM))
    worst = known(worst_step(what, lab, steps))
    begin_ns = PLAYED_NS + round(worst.at_s * 1e9)
    end_ns = begin_ns + round(worst.seconds * 1e9)

    def sample(at_ns: int, dropped: int) -> Sample:
        counts = LinkCounters(packets=9, bytes=9, dropped_buffer=dropped, dropped_loss=2 * dropped, backlog_bytes=0)
        return Sample(at_ns=at_ns, links={"node-1": {"up": counts, "down": counts}}, sockets=())

    around = [sample(begin_ns - 10**9, 1), sample(begin_ns - 1, 3), sample(begin_ns + 1, 4), sample(end_ns + 1, 10)]
    told = known(worst_step(what, lab, steps, [*around, sample(end_ns + 10**9, 50)]))
    assert {(each.direction, each.dropped_packets) for each in told.links} == {("up", 3 * 7), ("down", 3 * 7)}
    calm = known(worst_step(what, lab, steps, [sample(at.at_ns, 5) for at in around]))
    assert calm.links == worst.links


def test_the_words_have_all_that_is_known() -> None:
    worst = WorstStep(
        step=12,
        at_s=10.2,
        seconds=17.02,
        medians=51.4,
        retransmitted_bytes=123_000,
        links=(LinkTrouble(link="node-0", direction="up", rate_bps=100_000, loss=1, dropped_packets=7),),
        recovered_s=18.3,
    )
    said = describe_worst_step(worst)
    for part in (
        "step 12",
        "17 s",
        "51.4 times",
        "10.2 s",
        "node-0 up",
        "100 kbit/s",
        "loss up to 100%",
        "dropped: 7",
        "18.3 s",
    ):
        assert part in said, said
    assert "123 kB sent again" in said


@pytest.mark.parametrize("loss", [Bernoulli(probability=1), None])
def test_an_outage_carries_nothing(loss: Loss | None) -> None:
    """And so does the loss of all packets in bursts that never end."""
    from testbed.profiles.timeline import timeline

    link = a_link(loss=loss)
    up = known(link.up)
    carried = timeline(up).bits_between(FROM_NS, UNTIL_NS)
    assert carried == (0 if loss else RATE_BPS * (UNTIL_NS - FROM_NS) / 1e9)
    assert Bernoulli(probability=1).mean_burst == float("inf")
    assert GilbertElliott(enter_bad=1, leave_bad=1e-9, lost_in_bad=1, lost_in_good=0).mean > 0.99

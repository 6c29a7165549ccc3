"""Pipelines within replicas and data parallel across them: one of the two alone is what it was, and bytes add up."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.devices.flops import parameters
from testbed.errors import SpecError, UnknownNameError
from testbed.metrics.links import AlonePipes, Pipes
from testbed.player.split import step_split
from testbed.predict.data_parallel_shapes import DataParallelShape
from testbed.predict.hybrid_shapes import HybridShape, access_links, resolve_hybrid
from testbed.predict.scenarios import Scenario, Sites, load_scenarios
from testbed.profiles import load_profile
from testbed.trace.check import check_trace
from testbed.trace.format import RECEIVE, Trace
from testbed.trace.played import NodeCounters
from testbed.trace.simulate import ideal_steps_ns
from testbed.trace.synthetic import pipeline_trace
from testbed.workloads.models import model_size
from tests.trace.made_traces import played_over, sent_bytes

JOB: dict[str, Any] = {
    "parallelism": "hybrid",
    "scenario": "community",
    "model": "gpt2",
    "precision": "bf16",
    "sequence_length": 128,
    "sequences": 1,
    "replicas": [1, 1, 3, 2],
    "microbatches": [4, 4, 2, 3],
    "codec": "int8",
    "local_steps": 2,
    "bits": 8,
}
WAYS = [
    {},
    {"exchange": "all-to-all"},
    {"replicas": [5], "microbatches": 4},
    {"scenario": "organisational", "replicas": [4, 2, 2, 4], "microbatches": 2},
    {"scenario": "organisational", "replicas": [1] * 6, "microbatches": 1},
    {"scenario": "organisational", "replicas": [3, 6], "microbatches": 2, "exchange": "all-to-all", "answer_bits": 16},
    {"staleness": 1},
    {"exchange": "all-to-all", "staleness": 2, "local_steps": 1},
    {"scenario": "organisational", "replicas": [1] * 6, "microbatches": 1, "staleness": 1},
    {"rounds": [{}, {"away": [0, 3]}, {"away": [1], "returning": [3, 0]}]},
    {"exchange": "all-to-all", "rounds": [{"away": [2]}, {"returning": [2]}]},
    {
        "scenario": "organisational",
        "replicas": [1, 1, 6, 4],
        "rounds": [{"away": [0]}, {"returning": [0], "away": [2]}],
    },
]
FORWARD, BACKWARD, UPDATE, SIZE = 7_000_000, 11_000_000, 3_000_000, 700_000
LINK = load_profile("link(50Mbit, 10ms, buffer=60s)")


def shape_of(replicas: tuple[int, ...], *, star: bool, local_steps: int = 1) -> HybridShape:
    """Every device at a site of its own, all alike; each sends SIZE bytes in an exchange, where there is one."""
    count = sum(replicas)
    exchanged: list[tuple[int, int, int]] = []
    if star:
        exchanged = [(device, count, SIZE) for device in range(count)] + [(count, d, SIZE) for d in range(count)]
    elif len(replicas) > 1:
        exchanged = [(d, (d + further) % count, SIZE) for further in range(1, count) for d in range(count)]
    return HybridShape(
        sites=tuple(range(count)),
        replicas=replicas,
        microbatches=(4,) * len(replicas),
        schedule="1f1b",
        in_flight=replicas,
        local_steps=local_steps,
        forward_ns=(FORWARD,) * count,
        backward_ns=(BACKWARD,) * count,
        update_ns=(UPDATE,) * count,
        crossing_bytes=(300_000, 200_000),
        site_bytes=(300_000, 200_000),
        within_bps=(0,) * count,
        star=star,
        exchanged=tuple(exchanged),
        tokens=1,
    )


def total_ns(trace: Trace, steps: int) -> int:
    check_trace(trace, "it")
    return sum(ideal_steps_ns(trace, Pipes("star", [LINK], len(trace.nodes)), steps))


@pytest.mark.parametrize("local_steps", [1, 3])
def test_one_replica_is_the_pipeline(local_steps: int) -> None:
    batches = 2 * local_steps
    pipeline = pipeline_trace(
        stages=4,
        microbatches=4,
        steps=batches,
        message_bytes=(300_000, 200_000),
        forward_ns=FORWARD,
        backward_ns=BACKWARD,
        update_ns=UPDATE,
    )
    shape = shape_of((4,), star=False, local_steps=local_steps)
    assert total_ns(shape.trace(2), 2) == total_ns(pipeline, batches)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("star", [True, False])
def test_whole_replicas_are_data_parallel(star: bool, staleness: int) -> None:
    data = DataParallelShape(
        workers=3,
        exchange="star" if star else "all-to-all",
        staleness=staleness,
        compute_ns=2 * (4 * (FORWARD + BACKWARD) + UPDATE),
        message_bytes=(SIZE, SIZE),
        tokens=1,
    )
    shape = shape_of((1, 1, 1), star=star, local_steps=2).model_copy(update={"staleness": staleness})
    assert shape.payload_bytes == data.payload_bytes
    assert shape.least_steps == (data.least_steps if staleness else 3)
    steps = 9 if staleness else 3
    assert total_ns(shape.trace(steps), steps) == total_ns(data.trace(steps), steps)


@pytest.mark.parametrize("exchange", ["star", "all-to-all"])
@pytest.mark.parametrize("replicas", [[4, 4], [1] * 6])
def test_an_exchange_that_is_shorter_than_the_batches_is_hidden_behind_them(replicas: list[int], exchange: str) -> None:
    """Among clusters, whose links carry nothing else; those that hold the same hear of it from the first."""
    job = JOB | {"scenario": "organisational", "replicas": replicas, "microbatches": 8, "exchange": exchange}
    job |= {"compute": 40.0, "local_steps": 4, "bits": 1}
    links = [load_profile(link) for link in access_links(job, "it")]

    def cycle_ns(**changes: Any) -> float:
        shape = resolve_hybrid(job | changes, "it")
        steps = 20 if shape.staleness else 3
        spans = ideal_steps_ns(shape.trace(steps), Pipes("star", links, shape.nodes), steps)
        return shape.steady_ns(spans if shape.staleness else spans[-1:])

    batches = resolve_hybrid(job, "it").model_copy(update={"exchanged": (), "passed_on": ()})
    alone_ns = batches.steady_ns(ideal_steps_ns(batches.trace(3), Pipes("star", links, batches.nodes), 3)[-1:])
    assert cycle_ns() > 1.05 * alone_ns
    assert cycle_ns(staleness=1) == pytest.approx(alone_ns, rel=0.01)
    # One that is longer is not: it then decides how long a step takes.
    assert cycle_ns(staleness=1, bits=32) > 1.5 * alone_ns


@pytest.mark.parametrize("change", WAYS)
def test_bytes_add_up_and_nothing_is_faster_than_the_floor(change: dict[str, Any]) -> None:
    shape = resolve_hybrid(JOB | change, "it")
    links = [load_profile(link) for link in access_links(JOB | change, "it")]
    period = shape.period or 12
    steps = 1 + 2 * period
    trace = shape.trace(steps)
    check_trace(trace, "it")
    assert len(trace.nodes) == shape.nodes == len(links)
    sent = sum(sent_bytes(trace)) - sum(sent_bytes(shape.trace(1)))
    assert sent // (2 * period) == shape.payload_bytes
    over = [
        ideal_steps_ns(trace, each, steps)
        for each in (AlonePipes("star", links, shape.nodes), Pipes("star", links, shape.nodes), None)
    ]
    assert sum(over[0]) <= sum(over[1])
    piped_s, unlinked_s = (shape.steady_ns(each[-period:]) / 1e9 for each in over[1:])
    assert unlinked_s <= shape.formula_s("star", links) <= piped_s * 1.001


@pytest.mark.parametrize("exchange", ["star", "all-to-all"])
def test_a_replica_sends_each_parameter_once_to_whoever_holds_it(exchange: str) -> None:
    shape = resolve_hybrid(JOB | {"exchange": exchange}, "it")
    count = parameters(model_size("gpt2"), range(12))  # a byte each: bits = 8
    for own in shape.devices():
        sent = sum(size for sender, receiver, size in shape.exchanged if sender in own)
        got = sum(size for sender, receiver, size in shape.exchanged if receiver in own)
        assert sent == got == count * (1 if exchange == "star" else 3)


def test_an_answer_crosses_a_site_s_link_once_for_devices_that_hold_the_same() -> None:
    shape = resolve_hybrid(JOB | WAYS[4], "it")
    assert [receiver for sender, receiver, _ in shape.exchanged if sender == 6] == [0, 4]
    assert [pair[:2] for pair in shape.passed_on] == [(0, 1), (0, 2), (0, 3), (4, 5)]


def test_a_pipeline_at_one_site_puts_nothing_on_its_link() -> None:
    shape = resolve_hybrid(JOB | {"scenario": "organisational", "replicas": [4], "microbatches": 2}, "it")
    assert (shape.nodes, shape.payload_bytes) == (1, 0)
    slower = shape.model_copy(update={"within_bps": (1_000_000,)})
    times = [ideal_steps_ns(each.trace(3), None)[-1] for each in (shape, slower)]
    bits = 8 * sum(shape.site_bytes)
    assert times[1] - times[0] > 3 * bits * 1000  # ns: to the last stage and back


def test_a_round_in_which_nobody_is_away_is_any_step() -> None:
    for change in WAYS[:6]:
        shape, rounds = (resolve_hybrid(JOB | change | more, "it") for more in ({}, {"rounds": [{}, {}]}))
        assert rounds.trace(3, 4) == shape.trace(3, 4)
        assert rounds.columns() == shape.columns()
        assert (rounds.payload_bytes, rounds.tokens) == (shape.payload_bytes, shape.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, 3, 4])
@pytest.mark.parametrize("proved", [None, 1, 2])
def test_the_time_and_bytes_of_a_step_leave_no_round_out(rounds: int, proved: int | None) -> None:
    """However many steps were played, though the first is dropped, and though those at the end are alike."""
    shape = resolve_hybrid(JOB | {"rounds": [{"away": [3]}, {"returning": [3]}, {}, {}][:rounds]}, "it")
    whole_ns = ideal_steps_ns(shape.trace(1 + rounds), None, 1 + rounds)[1:]
    assert len(set(whole_ns)) == 2
    for steps in range(shape.least_steps, 3 * rounds + 2):
        trace = shape.trace(steps)
        sent = [sum(sent_bytes(shape.trace(1 + step))) for step in range(steps)]
        counters = [(NodeCounters(each, 0, 0, 0), *[NodeCounters(0, 0, 0, 0)] * (shape.nodes - 1)) for each in sent]
        steady = None if proved is None else (steps - proved, proved)
        split = step_split(trace, played_over(trace, steady=steady, counters=counters), shape.period or 1)
        assert shape.steady_ns(split.steps_ns) == pytest.approx(sum(whole_ns) / rounds, rel=1e-6)
        assert split.sent_bytes == pytest.approx(shape.payload_bytes, abs=1)


@pytest.mark.parametrize("exchange", ["star", "all-to-all"])
def test_whoever_is_away_does_nothing_and_the_others_are_a_job_without_it(exchange: str) -> None:
    job = JOB | {"exchange": exchange, "scenario": "organisational", "site_codec": "int8"}
    shape = resolve_hybrid(job | {"rounds": [{"away": [0, 2]}]}, "it")
    trace = shape.trace(3)
    gone = {device for replica in (0, 2) for device in shape.devices()[replica]}
    for number, lane in enumerate(trace.lanes[: len(shape.sites)]):
        assert bool(len(lane)) == (number not in gone)
    (held,) = shape.rounds
    assert not gone & {device for each in (*held.exchanged, *held.passed_on) for device in each[:2]}
    whole = resolve_hybrid(job, "it")
    assert shape.tokens == whole.tokens * (4 + 3) // (4 + 4 + 2 + 3)
    got = {receiver for _, receiver, _ in (*held.exchanged, *held.passed_on)} - {len(shape.sites)}
    assert got == set(range(len(shape.sites))) - gone


@pytest.mark.parametrize("exchange", ["star", "all-to-all"])
def test_a_step_without_the_last_replicas_is_that_of_a_job_that_never_had_them(exchange: str) -> None:
    without = resolve_hybrid(JOB | {"exchange": exchange, "rounds": [{"away": [2, 3]}]}, "it")
    never = resolve_hybrid(JOB | {"exchange": exchange, "replicas": [1, 1], "microbatches": 4}, "it")
    assert (without.payload_bytes, without.tokens) == (never.payload_bytes, never.tokens)
    assert total_ns(without.trace(3), 3) == total_ns(never.trace(3), 3)


@pytest.mark.parametrize("exchange", ["star", "all-to-all"])
def test_who_returns_gets_its_share_of_the_weights_before_it_computes(exchange: str) -> None:
    shape = resolve_hybrid(
        JOB | {"exchange": exchange, "rounds": [{"away": [2]}, {"returning": [2], "away": [0]}]}, "it"
    )
    (before, now), count = shape.rounds, parameters(model_size("gpt2"), range(12))
    assert before.restored == ()
    assert {receiver for _, receiver, _ in now.restored} == set(shape.devices()[2])
    assert sum(size for _, _, size in now.restored) == 2 * count  # bf16
    assert {shape.site_of(sender) for sender, _, _ in now.restored} <= {
        shape.site_of(5),
        shape.site_of(6),
        shape.nodes - 1,
    }
    trace = shape.trace(2)
    lane = trace.lanes[shape.devices()[2][0]]
    assert lane.kind[0] == RECEIVE
    assert sum(sent_bytes(trace)) == 2 * shape.payload_bytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"staleness": 1, "rounds": [{"away": [2]}]}, "remove rounds"),
        ({"staleness": 1, "replicas": [5], "microbatches": 4}, "set it to 0"),
        ({"rounds": [{"away": [4]}]}, "no replica 4"),
        ({"rounds": [{"away": [1], "returning": [1]}]}, "replica 1 cannot be both"),
        ({"rounds": [{"away": [0, 1, 2, 3]}]}, "let at least one take part"),
        ({"rounds": [{"returning": [0, 1, 2, 3]}], "exchange": "all-to-all"}, "no other node has the weights"),
        ({"rounds": [{"returning": [0]}], "replicas": [5], "microbatches": 4}, "no other node has the weights"),
        ({"replicas": [11]}, "has only 10 devices"),
        ({"microbatches": [1, 2]}, "state one number, or 4"),
        ({"bits": None}, "bits per parameter"),
        ({"scenario": "village"}, "village"),
        ({"codec": "zstd"}, "zstd"),
        ({"replicas": [13]}, "13"),
        ({"stages": 2}, "stages"),
    ],
)
def test_what_makes_no_job_is_refused_with_its_place(change: dict[str, Any], said: str) -> None:
    with pytest.raises((SpecError, UnknownNameError), match=said):
        resolve_hybrid(JOB | change, "it")


def test_every_scenario_has_links_and_makes_a_job() -> None:
    for name, scenario in load_scenarios().items():
        devices = sum(sites.count * sites.devices for sites in scenario.sites)
        job = JOB | {"scenario": name, "replicas": [1] * devices, "microbatches": 1}
        shape = resolve_hybrid(job, "it")
        assert shape.nodes == len(access_links(job, "it")) == sum(sites.count for sites in scenario.sites) + 1
        assert all(load_profile(link).up for link in access_links(job, "it"))


def test_devices_of_a_site_need_a_rate_between_them() -> None:
    sites = Sites(device="a100", devices=2, link="cable")
    with pytest.raises(SpecError, match="within"):
        Scenario(summary="", source="", server="cable", sites=(sites,)).devices()

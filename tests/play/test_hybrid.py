"""Pipelines within replicas and data parallel across them: one of the two alone is what it was, and bytes add up."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.devices.flops import parameters
from testbed.errors import SpecError, UnknownNameError
from testbed.play.check import check_trace
from testbed.play.data_parallel import DataParallelShape
from testbed.play.hybrid import HybridShape, access_links, resolve_hybrid
from testbed.play.ideal import AlonePipes, Pipes, ideal_steps_ns
from testbed.play.scenarios import Scenario, Sites, load_scenarios
from testbed.play.synthetic import pipeline_trace
from testbed.play.trace import SEND, Trace
from testbed.profiles import load_profile
from testbed.workloads.models import model_size

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


def sent_bytes(trace: Trace) -> int:
    return sum(value for lane in trace.lanes for kind, value in zip(lane.kind, lane.value, strict=True) if kind == SEND)


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


@pytest.mark.parametrize("star", [True, False])
def test_whole_replicas_are_data_parallel(star: bool) -> None:
    data = DataParallelShape(
        workers=3,
        exchange="star" if star else "all-to-all",
        staleness=0,
        compute_ns=2 * (4 * (FORWARD + BACKWARD) + UPDATE),
        message_bytes=(SIZE, SIZE),
        tokens=1,
    )
    shape = shape_of((1, 1, 1), star=star, local_steps=2)
    assert shape.payload_bytes == data.payload_bytes
    assert total_ns(shape.trace(3), 3) == total_ns(data.trace(3), 3)


@pytest.mark.parametrize("change", WAYS)
def test_bytes_add_up_and_nothing_is_faster_than_the_floor(change: dict[str, Any]) -> None:
    shape = resolve_hybrid(JOB | change, "it")
    links = [load_profile(link) for link in access_links(JOB | change, "it")]
    trace = shape.trace(3)
    check_trace(trace, "it")
    assert len(trace.nodes) == shape.nodes == len(links)
    assert sent_bytes(trace) == 3 * shape.payload_bytes
    alone = sum(ideal_steps_ns(trace, AlonePipes("star", links, shape.nodes)))
    assert alone <= sum(ideal_steps_ns(trace, Pipes("star", links, shape.nodes)))
    step_s = ideal_steps_ns(trace, Pipes("star", links, shape.nodes))[-1] / 1e9
    assert ideal_steps_ns(trace, None)[-1] / 1e9 <= shape.formula_s("star", links) <= step_s * 1.001


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"replicas": [11]}, "has 10 devices"),
        ({"microbatches": [1, 2]}, "4 replicas need one number each"),
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
    devices = Scenario(
        summary="",
        source="",
        server="cable",
        sites=(Sites(count=2, device="t4", link="dsl"), sites.model_copy(update={"within": "1Gbit"})),
    ).devices()
    assert [(each.site, each.device, each.within_bps) for each in devices] == [
        (0, "t4", 0),
        (1, "t4", 0),
        (2, "a100", 10**9),
        (2, "a100", 10**9),
    ]

"""Trained data parallel cells as traces: what was counted is what is sent, and a step takes what arithmetic says."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.metrics.steps import align, over_cycles
from testbed.metrics.summary import summarise
from testbed.play import replicas
from testbed.play.check import check_trace
from testbed.play.data_parallel import DataParallelShape
from testbed.play.ideal import Pipes
from testbed.play.played import NodeCounters, Played
from testbed.play.trace import SEND, Trace
from testbed.play.unlinked import Links, play_unlinked
from testbed.profiles import load_profile
from testbed.records import StepRecord
from testbed.spec import Cell, Exchange, OuterSpec, Paced
from tests.small_replicas import EXCHANGES, SPARSE, a_recipe, trained

STREAMING = {
    "outer": {"learning_rate": 0.4, "momentum": 0.9, "nesterov": True},
    "local_steps": 2,
    "streaming": {"fragments": 3},
}
FORWARD_NS, BACKWARD_NS, UPDATE_NS = 10_000_000, 20_000_000, 1_000_000


def a_cell(exchange: Exchange, codec: str = "fp32", **recipe: Any) -> tuple[Cell, list[list[StepRecord]]]:
    """A played cell, and a training of its recipe."""
    asked = a_recipe(exchange, codec, **recipe)
    cell = Cell(
        codec=asked.codec,
        profiles=(load_profile("link(10Mbit, 30ms, buffer=60s)"),),
        topology="star",
        engine="netem",
        compute=Paced(forward_ns=(FORWARD_NS,), backward_ns=(BACKWARD_NS,), update_ns=UPDATE_NS, source="stated"),
        timing="played",
        clock="virtual",
        codec_cost="zero",
        workload=asked.workload,
        pipeline=asked.pipeline,
        data=asked.data,
        optimiser=asked.optimiser,
        training=asked.training,
    )
    return cell, trained(asked).records


def played_of(trace: Trace, links: Links | None = None) -> Played:
    """What a player would write over links that are a formula."""
    counters = [tuple(NodeCounters(0, 0, 0, 0) for _ in trace.nodes)] * trace.steps
    return Played("virtual", trace.steps, None, play_unlinked(trace, None, links), counters, [()] * trace.steps, 0)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("staleness", "more"), [(0, {}), ((0, 2, 1), {}), ((0, 2, 1), STREAMING)])
def test_what_was_counted_is_sent_and_received_once(exchange: Exchange, staleness: int, more: dict[str, Any]) -> None:
    codec = "bf16" if exchange == "all-reduce" else SPARSE
    cell, training = a_cell(exchange, codec, workers=3, shares=(2, 1, 1), staleness=staleness, evaluate_every=2, **more)
    trace = replicas.trace_of(cell, training)
    check_trace(trace, "it")
    assert trace.nodes == cell.node_names
    played = replicas.records_of(cell, trace, played_of(trace), training)
    for node, (records, before) in enumerate(zip(played, training, strict=True)):
        counted = [frame.frame_bytes for record in before for frame in record.sent]
        sent = [
            value
            for lane in trace.lanes
            if lane.node == node
            for kind, value in zip(lane.kind, lane.value, strict=True)
            if kind == SEND
        ]
        assert sent == counted == [frame.frame_bytes for record in records for frame in record.sent]
        assert [(r.step, r.phase, r.loss) for r in records] == [(r.step, r.phase, r.loss) for r in before]
        for record in records:
            for action in record.actions:
                assert record.start_ns <= action.asked_ns <= action.input_ns <= action.computed_ns <= record.end_ns
            needed = [frame.last_byte_ns for frame in record.received]
            assert needed == sorted(needed)
            assert max(needed, default=0) <= record.end_ns


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_cycle_is_that_of_the_same_job_from_shapes(exchange: Exchange, staleness: int) -> None:
    steps = 24
    cell, training = a_cell(exchange, staleness=staleness, steps=steps)
    trace = replicas.trace_of(cell, training)
    links = Pipes(cell.topology, cell.links, cell.nodes)
    records = replicas.records_of(cell, trace, played_of(trace, links), training)
    summary = summarise(
        cell, None, None, records, status="ok", error=None, ideals_s=replicas.ideals_s(cell, trace), steady=(6, 1)
    )
    message = training[0][0].sent[0].frame_bytes * (cell.data.workers if exchange == "all-reduce" and cell.data else 1)
    shape = DataParallelShape(
        workers=4,
        exchange=exchange,
        staleness=staleness,
        compute_ns=FORWARD_NS + BACKWARD_NS + UPDATE_NS,
        message_bytes=(message, message),
        tokens=1,
    )
    formula_s = shape.formula_s("star", cell.profiles)
    assert summary.step_s == pytest.approx(formula_s, rel=0.25 if exchange == "all-to-all" else 0.05)
    if exchange == "all-to-all":
        assert summary.ideal_step_s is None  # of more than two
    else:
        assert summary.ideal_step_s == pytest.approx(summary.step_s, rel=1e-6)  # the links were the ideal's
    assert summary.split is not None
    assert summary.split.compute_s > 0
    assert summary.payload_bytes_per_step == sum(f.payload_bytes for node in training for f in node[0].sent)


def test_local_steps_take_their_own_time() -> None:
    outer = OuterSpec(learning_rate=1.0, momentum=0.0, nesterov=False)
    cell, training = a_cell("star", workers=2, local_steps=(3, 1), outer=outer)
    trace = replicas.trace_of(cell, training)
    steps = align(replicas.records_of(cell, trace, played_of(trace), training))
    local_ns = FORWARD_NS + BACKWARD_NS + UPDATE_NS
    assert {step.end_ns - step.begin_ns for step in steps if step.phase == "train"} == {3 * local_ns + UPDATE_NS}
    # Who is done early waits for the server's answer.
    early = [action for action in steps[0].records[1].actions if action.kind == "A"]
    assert [action.input_ns - action.asked_ns for action in early] == [2 * local_ns]


def test_values_that_come_in_cycles_count_by_their_cycle() -> None:
    assert over_cycles([1, 2, 3], 1) == [1, 2, 3]
    assert over_cycles([1, 1, 4, 1, 1, 4], 3) == [2.0] * 6
    assert over_cycles([1, 3, 2, 4, 9], 2) == [2.0, 2.0, 5.0, 5.0, 5.0]
    assert over_cycles([5, 7], 4) == [6.0, 6.0]
    assert over_cycles([], 4) == []

"""The steps that links of data parallel training are judged by: as asked they move nothing, and what is slower does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from testbed.metrics.ideal import recorded_steps_s
from testbed.metrics.links import Pipes
from testbed.metrics.wires import WireDeviation
from testbed.records import MessageCosts, ReplicaCosts, StepRecord, WorkerMaths
from testbed.replay import workers
from testbed.replay.worker_steps import replica_step, stated_replica_step
from testbed.replay.workers import NodeTimes, node_times
from testbed.spec import RINGS, ArrivalsSpec, Calibrated, Cell, Exchange, OuterSpec
from testbed.sweep.bounded_steps import expected_messages, expected_step
from testbed.trace.simulate import ideal_steps_ns
from tests.replay.test_replica_traces import a_cell, played_records
from tests.small_replicas import BACKWARD_NS, EXCHANGES, FORWARD_NS, SPARSE, UPDATE_NS
from tests.synthetic import lasting

ALL = [(link, way) for link in range(5) for way in ("up", "down")]


def ran(
    cell: Cell, training: list[list[StepRecord]], times: Sequence[NodeTimes] | None = None
) -> list[list[StepRecord]]:
    """The records of a run over links that are formulas."""
    return played_records(cell, training, Pipes(cell.topology, cell.links, cell.nodes), times)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("staleness", [0, 2])
def test_as_asked_they_take_what_pipes_say_and_a_slower_link_moves_them(exchange: Exchange, staleness: int) -> None:
    cell, training = a_cell(exchange, staleness=staleness, steps=12)
    trace = workers.job_of(cell, training).trace()
    pipes = ideal_steps_ns(trace, Pipes(cell.topology, cell.links, cell.nodes), trace.steps)
    ideals_s = recorded_steps_s(cell, ran(cell, training), None)
    # A trace's step ends when its ring lane has ended it, too; a worker's without waiting for that.
    settled = slice(None) if exchange not in RINGS or not staleness else slice(6, 9)
    assert ideals_s[settled] == [ns / 1e9 for ns in pipes[settled]]
    step = replica_step(cell, ran(cell, training), None)
    assert step.moved(dict.fromkeys(ALL, WireDeviation())) == pytest.approx(0, abs=1e-6)
    slower, slowest, late = (
        step.moved(dict.fromkeys(ALL, deviation))
        for deviation in (WireDeviation(rate=0.9), WireDeviation(rate=0.5), WireDeviation(delay_ns=20e6))
    )
    assert 0 < slower < slowest < 1.01
    # Workers that are two steps ahead do not wait for a delay that fits into two steps.
    assert late > 0.1 or staleness


def test_a_step_that_nobody_has_run_is_that_of_the_run_with_such_messages() -> None:
    cell, training = a_cell("star", workers=2, staleness=(0, 1), steps=12)
    own = replica_step(cell, ran(cell, training), None)
    stated = stated_replica_step(cell, [records[0].sent[0].frame_bytes for records in training], "it")
    assert stated.seconds == pytest.approx(own.seconds, rel=0.02)
    assert expected_step(cell).seconds > stated.seconds  # of a larger model than the one that was trained
    assert len(expected_messages(cell)) == 1


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_what_this_machine_took_is_part_of_a_runs_step(exchange: Exchange) -> None:
    paced, training = a_cell(exchange, workers=2, steps=12)
    maths = WorkerMaths(
        local_step=lasting(FORWARD_NS + BACKWARD_NS - 1000), close=lasting(1000), update=lasting(UPDATE_NS)
    )
    messages = MessageCosts(encode=(lasting(300_000),), decode=(lasting(200_000),))
    costs = ReplicaCosts(workers=(maths,) * 2, messages=(messages,) * paced.nodes)
    calibrated = paced.model_copy(update={"compute": Calibrated()})
    coded = calibrated.model_copy(update={"codec_cost": "host"})
    stated, *measured = (
        replica_step(cell, ran(cell, training, None if cell is paced else node_times(cell, costs)), None)
        for cell in (paced, calibrated, coded)
    )
    late = dict.fromkeys(ALL, WireDeviation(delay_ns=1e6))
    for step, more in zip(measured, (False, True), strict=True):
        assert (step.seconds > stated.seconds + 1e-6) is more
        assert (step.moved(late) < stated.moved(late) * (1 - 1e-3)) is more
    assert measured[0].seconds == pytest.approx(stated.seconds)
    assert measured[0].moved(late) == pytest.approx(stated.moved(late))


def test_rounds_that_nobody_waits_for_are_judged_by_one_in_which_all_do() -> None:
    cell, training = a_cell("star", SPARSE, workers=2, steps=12)
    data: dict[str, Any] = {
        "arrivals": ArrivalsSpec(period_s=5.0),
        "outer": OuterSpec(learning_rate=1.0, momentum=0.0, nesterov=False),
        "staleness": (7,),
    }
    asynchronous = Cell.model_construct(**{**dict(cell), "data": cell.data.model_copy(update=data)})
    records = ran(cell, training)
    ours, theirs = (replica_step(each, records, None) for each in (asynchronous, cell))
    assert ours.seconds == pytest.approx(theirs.seconds, rel=0.1)
    assert replica_step(asynchronous, [[] for _ in training], None) is None

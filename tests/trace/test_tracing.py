"""What a job does becomes a trace, and what was played of it is what the job would have done at these times."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import pytest

from testbed.jobs.actions import Action, Decode, Encode, Job, Key, Sizes, Work
from testbed.jobs.data_parallel import DataParallelJob
from testbed.jobs.loop import Loop
from testbed.jobs.pipeline import PipelineJob, orders_of
from testbed.jobs.recorder import Named, Recorded, StepRecorder
from testbed.records import ReceivedRecord, SentRecord
from testbed.spec import Exchange, PipelineSpec
from testbed.trace.check import check_trace
from testbed.trace.format import RECEIVE, SEND, WAIT
from testbed.trace.simulate import simulate
from testbed.trace.tracing import TracedJob, retell
from tests.small_replicas import EXCHANGES

Frame = TypeVar("Frame", SentRecord, ReceivedRecord)

STEPS = 6


def cost(place: int, action: Action) -> int | None:
    """How long everything takes; sums and cuts are free."""
    match action:
        case Work(what, key):
            works = {"forward": 70, "backward": 110, "clip": 3, "update": 20, "local step": 400}
            return None if what not in works else works[what] + 10 * place + key.part
        case Encode(key):
            return 7 + place + key.step
        case Decode(messages):
            return 5 * len(messages) + place
    return None


def pipeline(stages: int, microbatches: int, *, blocking: bool = False) -> PipelineJob:
    spec = PipelineSpec(stages=stages, microbatches=microbatches, schedule="1f1b", in_flight=stages)
    return PipelineJob(orders_of(spec), STEPS, blocking)


def replicas(exchange: Exchange, staleness: int) -> DataParallelJob:
    return DataParallelJob(3, exchange, [staleness] * 3, [2, 1, 1], STEPS)


JOBS: list[Callable[[], Job]] = [
    lambda: pipeline(1, 2),
    lambda: pipeline(3, 4),
    *(
        lambda exchange=exchange, staleness=staleness: replicas(exchange, staleness)  # type: ignore[misc]
        for exchange, staleness in itertools.product(EXCHANGES, (0, 2))
    ),
]


def traced(job: Job) -> TracedJob:
    return TracedJob(job, [Sizes(lambda key: 100 + key.step)] * len(job.places), cost, named=named)


def named(key: Key) -> Named:
    return Named("forward" if key.what == "activation" else "backward", key.step * 100 + key.part)


def recorder(steps: list[list[Recorded]]) -> StepRecorder:
    return StepRecorder(lambda place, step: steps[place].append(step), named)


@pytest.mark.parametrize("make", JOBS)
def test_what_is_played_without_links_is_retold_as_the_job_runs_without_links(make: Callable[[], Job]) -> None:
    job = make()
    said: list[list[Recorded]] = [[] for _ in job.places]
    ran: list[list[Recorded]] = [[] for _ in job.places]
    it = traced(job)
    trace = it.trace()
    check_trace(trace, "it")
    retell(it, trace, simulate(trace), recorder(said))
    programs = [job.program(place) for place in range(len(job.places))]
    Loop(programs, it.nodes, cost=cost, observers=[recorder(ran)]).run()
    for steps in (*said, *ran):
        for step in steps:  # what has crossed a link of no length has no times of its own
            step.sent = [_untimed(frame) for frame in step.sent]
            step.received = [_untimed(frame) for frame in step.received]
    assert said == ran
    assert all(len(steps) == STEPS and all(step.actions for step in steps) for steps in said)


def _untimed(frame: Frame) -> Frame:
    return frame.model_copy(update={"first_byte_ns": 0, "last_byte_ns": 0})


def test_a_stage_that_blocks_waits_until_its_neighbour_has_the_message() -> None:
    trace = traced(pipeline(2, 2, blocking=True)).trace()
    check_trace(trace, "it")
    assert [lane.name for lane in trace.lanes] == ["compute", "compute", "from stage 1", "from stage 0"]
    for lane in trace.lanes[:2]:
        kinds = [operation.kind for operation in lane.operations(0)]
        assert RECEIVE not in kinds
        assert all(kinds[at + 1] == WAIT for at, kind in enumerate(kinds) if kind == SEND)

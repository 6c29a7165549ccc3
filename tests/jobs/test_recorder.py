"""What each place did in a step, from the actions of its program."""

from __future__ import annotations

import pytest

from testbed.errors import SpecError
from testbed.jobs.actions import Action, Begin, Decode, Encode, Key, Program, Receive, Send, Sizes, Work
from testbed.jobs.asynchronous import AsynchronousJob
from testbed.jobs.data_parallel import DataParallelJob
from testbed.jobs.loop import Loop
from testbed.jobs.pipeline import PipelineJob, orders_of
from testbed.jobs.recorder import Named, Recorded, StepRecorder
from testbed.message_key import Direction
from testbed.spec import PipelineSpec


def costs(node: int, action: Action) -> int | None:
    match action:
        case Work(what):
            return {"forward": 10, "backward": 20, "update": 5, "local step": 30}.get(what)
        case Encode():
            return 2
        case Decode():
            return 1
        case Receive():
            return None
    raise AssertionError(action)


def record(job: PipelineJob | DataParallelJob | AsynchronousJob) -> list[list[Recorded]]:
    recorded: list[list[Recorded]] = [[] for _ in job.places]

    def named(key: Key) -> Named:
        way: Direction = "forward" if key.what == "activation" else "backward"
        return Named(way, key.part, with_peer=False) if isinstance(job, PipelineJob) else Named(way, key.step)

    recorder = StepRecorder(lambda place, step: recorded[place].append(step), named, header_bytes=60)
    programs = [job.program(place) for place in range(len(job.places))]
    Loop(programs, [Sizes(lambda key: 100)] * len(programs), cost=costs, observers=[recorder]).run()
    return recorded


def pipeline(stages: int, microbatches: int, steps: int) -> PipelineJob:
    spec = PipelineSpec(stages=stages, microbatches=microbatches, schedule="1f1b", in_flight=stages)
    return PipelineJob(orders_of(spec), steps)


def test_a_stages_actions_follow_its_schedule_and_each_other() -> None:
    job = pipeline(3, 4, 2)
    for stage, steps in enumerate(record(job)):
        assert [step.step for step in steps] == [0, 1]
        now = 0
        for step in steps:
            assert [(action.kind, action.microbatch) for action in step.actions] == list(job.orders[stage])
            assert step.start_ns == now
            for action in step.actions:
                assert action.asked_ns == now
                assert action.asked_ns <= action.input_ns <= action.decoded_ns
                assert action.computed_ns - action.decoded_ns == {"F": 10, "B": 20}[action.kind]
                now = action.encoded_ns
            assert step.optimiser_start_ns == now
            assert step.synchronised_ns >= now
            now = step.end_ns
            assert now == step.synchronised_ns + 5


def test_both_ends_of_a_boundary_record_its_messages() -> None:
    first, middle, last = record(pipeline(3, 4, 1))
    assert [(sent.direction, sent.microbatch) for sent in first[0].sent] == [("forward", part) for part in range(4)]
    assert [came.microbatch for came in middle[0].received if came.direction == "forward"] == list(range(4))
    came = [frame.microbatch for frame in middle[0].received if frame.direction == "backward"]
    assert [sent.microbatch for sent in last[0].sent] == came == list(range(4))
    assert {(sent.payload_bytes, sent.frame_bytes) for sent in first[0].sent} == {(100, 160)}


def test_what_went_round_a_ring_belongs_to_the_step_that_sent_it_and_to_the_one_that_applied_it() -> None:
    job = DataParallelJob(3, "all-reduce", [1, 1, 1], [1, 1, 1], 4)
    for steps in record(job):
        assert [step.step for step in steps] == [0, 1, 2, 3]
        assert [{sent.microbatch for sent in step.sent} for step in steps] == [{0}, {1}, {2}, {3}]
        assert [len(step.sent) for step in steps] == [4, 4, 4, 4]
        assert [{came.microbatch for came in step.received} for step in steps] == [set(), {0}, {1}, {2, 3}]
        assert [action.microbatch for action in steps[3].actions if action.kind == "A"] == [2, 3]


def test_a_server_answers_what_it_has_summed() -> None:
    recorded = record(DataParallelJob(2, "star", [0, 0], [2, 1], 2))
    (action,) = recorded[2][0].actions
    assert (action.kind, action.input_ns, action.decoded_ns, action.encoded_ns) == ("A", 62, 64, 66)
    assert [sent.peer for sent in recorded[2][0].sent] == [0, 1]
    assert [action.kind for action in recorded[0][0].actions] == ["L", "L", "A"]


def test_an_asynchronous_workers_step_is_over_when_its_round_is_and_its_wait_belongs_to_the_next() -> None:
    recorded = record(AsynchronousJob([2, 1], 3, buffer=2, evaluate_every=1))
    server = [step for step in recorded[2] if step.phase == "train"]
    for worker, local_steps in ((0, 2), (1, 1)):
        assert [(step.step, step.phase) for step in recorded[worker]] == [
            (step.step, step.phase) for step in recorded[2]
        ]
        steps = [step for step in recorded[worker] if step.phase == "train"]
        begin_ns = answered_ns = 0
        for step, its_answer in zip(steps[:2], server, strict=False):
            first, *_ = local = step.actions
            assert [(action.kind, action.microbatch) for action in local] == [("L", step.step)] * local_steps
            assert (step.start_ns, first.asked_ns, first.input_ns) == (begin_ns, begin_ns, answered_ns)
            assert [action.computed_ns - action.decoded_ns for action in local] == [30] * local_steps
            assert len(step.sent) == len(step.received) == 1
            assert step.end_ns == local[-1].encoded_ns
            begin_ns, answered_ns = step.end_ns, its_answer.actions[0].encoded_ns


@pytest.mark.parametrize("begins", [False, True])
def test_work_before_input_needs_an_action_of_its_own(begins: bool) -> None:
    """Or it would count as waiting, and be missing in the ideal."""

    def asks() -> Program:
        yield Begin("F", 0)
        yield Work("forward", Key("forward", 0))
        yield Send((yield Encode(Key("question", 0))), 1)
        if begins:
            yield Begin("B", 0)
        yield Receive(Key("answer", 0), 1)

    def answers() -> Program:
        yield Receive(Key("question", 0), 0)
        yield Send((yield Encode(Key("answer", 0))), 0)

    recorder = StepRecorder(lambda place, step: None, lambda key: Named("forward", 0))
    loop = Loop([asks(), answers()], [Sizes(lambda key: 100)] * 2, cost=costs, observers=[recorder])
    if begins:
        loop.run()
        return
    with pytest.raises(SpecError, match=r"node 0 receives input \(Receive\) after work within its action F 0"):
        loop.run()

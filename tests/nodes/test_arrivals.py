"""Asynchronous rounds in one process: staleness never beyond its bound, and all workers at once are synchronous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from testbed.errors import CodecError, TransportError
from testbed.jobs.actions import Action, Begin, Collect
from testbed.jobs.asynchronous import AsynchronousJob, read_step
from testbed.jobs.loop import Loop
from testbed.jobs.recorder import Named, Recorded, StepRecorder
from testbed.nodes.arrivals import Rounds, Server, training_of
from testbed.studies.asynchronous_rounds import Formula, ServerStep, run_rounds
from tests.small_replicas import SPARSE, a_recipe, asynchronous_nodes, same, trained

OUTER = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
BYTES = 14_784
"""Of all parameters, fp32."""
PACE_NS = (1000, 2000, 5000)
LINKS = Formula(lambda sender, receiver, size, at_ns: at_ns + 10)


class Training(NamedTuple):
    server: Server
    workers: list[Rounds]


def events(
    steps: int, codec: str = "fp32", *, pace_ns: Sequence[int] = PACE_NS, **data: Any
) -> tuple[Training, list[ServerStep]]:
    recipe = a_recipe(
        "star", codec, workers=3, steps=steps, sgd=True, local_steps=2, outer=OUTER, shares=(2, 1, 1), **data
    )
    (server, workers), made = asynchronous_nodes(recipe), list[ServerStep]()

    def watch(step: ServerStep) -> bool:
        made.append(step)
        return len(made) < steps

    run_rounds(training_of(recipe).job(), server, workers, LINKS, watch, local_ns=pace_ns)
    return Training(server, workers), made


@pytest.mark.parametrize("arrivals", [{"buffer": 3}, {"buffer": 3, "grace_s": 1.0}, {"buffer": 1, "grace_s": 8e-6}])
@pytest.mark.parametrize("codec", ["fp32", SPARSE])
def test_a_buffer_or_a_window_for_all_workers_is_synchronous_to_the_last_bit(
    codec: str, arrivals: dict[str, Any]
) -> None:
    training, steps = events(4, codec, staleness=0, arrivals=arrivals)
    other = trained(
        a_recipe("star", codec, workers=3, steps=4, sgd=True, local_steps=2, outer=OUTER, shares=(2, 1, 1), staleness=0)
    )
    assert same([each.detach() for each in training.server.replica.parameters], other.weights())
    assert all(len(step.applied.used) == 3 for step in steps)
    assert {step.at_ns for step in steps} == {10 + 10_000 + number * 10_020 for number in range(4)}


def test_by_period_it_waits_for_nobody_and_refuses_what_is_too_old() -> None:
    """Rounds take 2, 4 and 10 microseconds, so they are applied 0, 1 and 2 steps late."""
    bound = 1
    training, steps = events(40, staleness=bound, arrivals={"period_s": 4e-6})
    used = [update for step in steps for update in step.applied.used]
    refused = [update for step in steps for update in step.applied.refused]
    assert [step.at_ns for step in steps] == [4000 * (number + 1) for number in range(40)]
    assert max(update.staleness for update in used) <= bound < min(update.staleness for update in refused)
    assert {update.worker for update in refused} == {2}
    made = [worker.made for worker in training.workers]
    assert sum(made) - len(used) - len(refused) <= 3  # what is under way at the end
    assert made[0] > made[1] > made[2]
    unbounded = events(40, staleness=100, arrivals={"period_s": 4e-6})[1]
    assert not any(step.applied.refused for step in unbounded)


def test_each_by_itself_sees_the_steps_of_the_others() -> None:
    _, steps = events(20, staleness=100, arrivals={"buffer": 1}, pace_ns=(1000, 1300, 7000))
    slow = [update.staleness for step in steps for update in step.applied.used if update.worker == 2]
    assert min(slow) > 7  # in a round of its the two others make twelve
    assert all(len(step.applied.answered) == 1 for step in steps)


@pytest.mark.parametrize(
    ("buffer", "grace_ns", "at_ns", "used"),
    [
        (1, 1999, 4009, [0]),
        (1, 2000, 4010, [0, 1]),
        (2, 5999, 10009, [0, 1]),
        (2, 6000, 10010, [0, 1, 2]),
        (2, 9999, 10010, [0, 1, 2]),  # it waits for nobody else
    ],
)
def test_a_quorum_waits_for_its_grace_to_the_nanosecond(
    buffer: int, grace_ns: int, at_ns: int, used: list[int]
) -> None:
    """The first messages arrive at 2010, 4010 and 10010."""
    for bound in (100, 0):
        both = [events(12, staleness=bound, arrivals={"buffer": buffer, "grace_s": grace_ns / 1e9}) for _ in range(2)]
        steps = both[0][1]
        assert steps == both[1][1]
        assert steps[0].at_ns == at_ns
        assert [update.worker for update in steps[0].applied.used] == used
        late = {update.worker for step in steps for update in step.applied.used if update.staleness}
        refused = {update.worker for step in steps for update in step.applied.refused}
        if len(used) == 3:
            assert not late | refused
        elif bound:  # who is late counts later
            assert 2 in late
            assert not refused
        else:
            assert 2 in refused
            assert not late


def test_a_window_in_which_nobody_arrives_changes_nothing_but_the_time() -> None:
    """Arrivals are 3 microseconds apart, or at the same nanosecond."""
    pace_ns = (3000, 3000, 6000)
    (alone, steps), (waiting, later) = (
        events(10, staleness=100, pace_ns=pace_ns, arrivals={"buffer": 1, **grace}) for grace in ({}, {"grace_s": 1e-9})
    )
    assert same(list(alone.server.replica.parameters), list(waiting.server.replica.parameters))
    assert [step.applied for step in steps] == [step.applied for step in later]
    assert [step.at_ns for step in steps] < [step.at_ns for step in later]


def test_an_answer_without_a_number_is_refused() -> None:
    with pytest.raises(CodecError, match="has 2 bytes"):
        read_step(b"ab")


def test_the_server_goes_on_until_all_workers_are_lost() -> None:
    """That it answers who is left is in test_live.py."""

    def lost(worker: int) -> TransportError:
        error = TransportError("it is gone")
        error.peer = worker
        return error

    server = AsynchronousJob([1, 1], steps=2, buffer=2).program(2)
    assert server.send(None) == Begin("A", 0)
    assert server.send(None) == Collect((0, 1), at_least=2)
    assert server.throw(lost(0)) == Collect((1,), at_least=1)
    with pytest.raises(TransportError, match="all workers are lost; the last one: it is gone"):
        server.throw(lost(1))


def test_a_goodbye_ends_the_round_under_way_and_those_that_were_skipped_are_recorded_as_empty() -> None:
    recipe = a_recipe("star", workers=3, steps=4, sgd=True, local_steps=2, outer=OUTER, staleness=9,
                      arrivals={"buffer": 1}, evaluate_every=2)  # fmt: skip
    recorded = [list[Recorded]() for _ in range(4)]
    recorder = StepRecorder(lambda place, step: recorded[place].append(step), lambda key: Named("backward", key.step))
    server, workers = asynchronous_nodes(recipe)
    job = training_of(recipe).job()

    def cost(node: int, action: Action) -> int | None:
        return PACE_NS[node] if action[0] == "local step" else None

    loop = Loop(
        [job.program(place) for place in range(4)], [*workers, server], cost=cost, links=LINKS, observers=[recorder]
    )
    assert loop.run() == ["steps"] * 4
    for steps in recorded:
        assert [(step.step, step.phase) for step in steps] == [
            (0, "train"), (1, "train"), (2, "evaluation"), (2, "train"), (3, "train"), (4, "evaluation")
        ]  # fmt: skip
    assert [len(step.received) for step in recorded[3]] == [1, 1, 0, 1, 1, 0]
    # Worker 0 is applied in the steps 0, 2 and 3, and worker 1 in step 1; worker 2 is too slow for any.
    rounds = [[(step.step, len(step.actions), len(step.sent)) for step in steps if step.actions] for steps in recorded]
    assert rounds[:3] == [[(0, 2, 1), (2, 2, 1)], [(1, 2, 1)], []]

"""When a pipeline evaluates and why it ends, told by its program alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from testbed.jobs.actions import Encoded, EndStep, Key, Message, Receive, Work
from testbed.jobs.loop import Loop
from testbed.jobs.pipeline import Ended, Evaluations, PipelineJob, orders_of
from testbed.message_key import Phase
from testbed.spec import PipelineSpec
from tests.jobs.recording import Recording

STAGES, MICROBATCHES, STEPS, BATCHES = 3, 2, 5, 2
ORDERS = orders_of(PipelineSpec(stages=STAGES, microbatches=MICROBATCHES, schedule="1f1b", in_flight=2))
Answer = bool | None
Phases = list[tuple[Phase, int]]


class Losses:
    """A node whose evaluations have given losses, at the last stage."""

    def __init__(self, losses: Sequence[float]) -> None:
        self._losses = iter(losses)

    def work(self, what: str, key: Key, value: Any) -> list[float]:
        if what != "loss" or key.phase != "evaluation":
            return []
        return list(itertools.islice(self._losses, 1))

    def encode(self, key: Key, value: Any) -> Encoded:
        return Encoded(b"")

    def decode(self, messages: Sequence[Message]) -> list[None]:
        return [None] * len(messages)


def run(
    plan: Evaluations | None,
    *,
    losses: Sequence[float] = (),
    goes_on: Callable[[int], Answer] = lambda number: True,
    first_step: int = 0,
) -> tuple[Ended, Phases, Recording]:
    """Run a pipeline of three; `goes_on` answers its steps and evaluations, by their number."""
    job, seen, asked = PipelineJob(ORDERS, STEPS, evaluations=plan), Recording(), [0] * STAGES

    def answer(place: int, step: int) -> Answer:
        asked[place] += 1
        return goes_on(asked[place])

    nodes = [Losses(()), Losses(()), Losses(losses)]
    programs = [job.program(place, first_step) for place in range(STAGES)]
    ended = Loop(programs, nodes, observers=[seen], goes_on=answer).run()
    assert len(set(ended)) == 1
    done = [(node, (action.phase, action.number)) for node, _, action, *_ in seen.of(EndStep)]
    ends = [[end for place, end in done if place == stage] for stage in range(STAGES)]
    assert ends[0] == ends[1] == ends[2]
    return ended[0], ends[0], seen


def train(*steps: int) -> Phases:
    return [("train", step) for step in steps]


def evaluation(done: int) -> Phases:
    return [("evaluation", done)]


def test_evaluations_come_when_asked_and_after_the_last_step() -> None:
    assert run(None)[:2] == ("steps", train(*range(5)))
    assert run(Evaluations(BATCHES))[:2] == ("steps", [*train(*range(5)), *evaluation(5)])
    every_two = [*train(0, 1), *evaluation(2), *train(2, 3), *evaluation(4), *train(4), *evaluation(5)]
    assert run(Evaluations(BATCHES, every=2))[:2] == ("steps", every_two)
    assert run(Evaluations(BATCHES, every=5))[:2] == ("steps", [*train(*range(5)), *evaluation(5)])


@pytest.mark.parametrize("first_step", [0, 3])
def test_no_two_batches_of_a_phase_have_the_same_key_wherever_it_begins(first_step: int) -> None:
    plan = Evaluations(BATCHES, every=2, phases=("evaluation", "uncompressed"))
    _, _, seen = run(plan, first_step=first_step)
    for phase in plan.phases:
        received = [action.key for node, _, action, *_ in seen.of(Receive) if node == 1]
        keys = [(key.step, key.part) for key in received if key.phase == phase]
        evaluations = range(3) if first_step == 0 else range(1, 3)
        steps = [number * BATCHES + batch for number in evaluations for batch in range(BATCHES)]
        assert keys == list(itertools.product(steps, range(MICROBATCHES)))
        worked = [action for node, _, action, *_ in seen.of(Work) if node == 0 and action.key.phase == phase]
        started = [action.key.step for action in worked if action.what == "start"]
        assert started == ([2, 4, 5] if first_step == 0 else [4, 5])


def test_a_target_ends_it_after_both_phases_of_the_first_evaluation_that_reaches_it() -> None:
    plan = Evaluations(BATCHES, every=1, phases=("evaluation", "uncompressed"), target_loss=2.0)
    ended, phases, _ = run(plan, losses=[3.0, 2.0, 1.0])
    assert ended == "target"
    assert phases == [
        *[*train(0), *evaluation(1), ("uncompressed", 1)],
        *[*train(1), *evaluation(2), ("uncompressed", 2)],
    ]
    assert run(plan, losses=[3.0] * 5)[0] == "steps"
    assert run(plan, losses=[3.0] * 4 + [2.0])[0] == "target", "in the last evaluation, too"
    assert run(plan)[0] == "steps", "without maths there is no loss"


def test_whose_time_is_spent_evaluates_and_ends() -> None:
    ended, phases, _ = run(Evaluations(BATCHES), goes_on=lambda number: None if number >= 3 else True)
    assert (ended, phases) == ("budget", [*train(0, 1, 2), *evaluation(3)])
    last, _, _ = run(Evaluations(BATCHES), goes_on=lambda number: None if number >= 5 else True)
    assert last == "steps"


@pytest.mark.parametrize(
    ("number", "ended", "phases"),
    [
        (1, "asked", train(0)),
        (2, "asked", train(0, 1)),
        (3, "asked", [*train(0, 1), *evaluation(2)]),
        (4, "asked", [*train(0, 1), *evaluation(2), ("uncompressed", 2)]),
    ],
)
def test_who_is_asked_to_end_ends_with_the_step_or_evaluation(number: int, ended: Ended, phases: Phases) -> None:
    plan = Evaluations(BATCHES, every=2, phases=("evaluation", "uncompressed"))
    assert run(plan, goes_on=lambda count: count < number)[:2] == (ended, phases)


def test_asked_in_the_last_evaluation_it_has_made_all_its_steps() -> None:
    plan = Evaluations(BATCHES, phases=("evaluation", "uncompressed"))
    assert run(plan, goes_on=lambda count: count < 6)[:2] == ("steps", [*train(*range(5)), *evaluation(5)])

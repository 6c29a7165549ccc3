"""Asynchronous rounds in one process: staleness never beyond its bound, and all workers at once are synchronous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from testbed.errors import CodecError
from testbed.replicas.arrivals import Rounds, Server, training_of
from testbed.replicas.events import Events, Step
from tests.small_replicas import SPARSE, Learner, a_recipe, same, trained

OUTER = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
BYTES = 14_784
"""Of all parameters, fp32."""
PACE_NS = (1000, 2000, 5000)


def events(
    steps: int, codec: str = "fp32", *, pace_ns: Sequence[int] = PACE_NS, **data: Any
) -> tuple[Events, list[Step]]:
    recipe = a_recipe(
        "star", codec, workers=3, steps=steps, sgd=True, local_steps=2, outer=OUTER, shares=(2, 1, 1), **data
    )
    assert recipe.data is not None
    assert recipe.data.arrivals is not None
    parts = recipe.data.parts
    workers = [Rounds(training_of(recipe), number, Learner(parts, number), codec) for number in range(3)]
    server = Server(training_of(recipe), Learner(parts, 0), [codec] * 3)
    training = Events(server, workers, recipe.data.arrivals, lambda a, b, size, at_ns: at_ns + 10, local_ns=pace_ns)
    return training, list(training.steps(steps))


@pytest.mark.parametrize("codec", ["fp32", SPARSE])
def test_a_buffer_of_all_workers_is_synchronous_to_the_last_bit(codec: str) -> None:
    training, steps = events(4, codec, staleness=0, arrivals={"buffer": 3})
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


def test_an_answer_without_a_number_is_refused() -> None:
    training, _ = events(2, staleness=1, arrivals={"buffer": 3})
    with pytest.raises(CodecError, match="begins with a number"):
        training.workers[0].answered(b"ab")
    assert not training.workers[0].answered(training.server.goodbye())
    assert training.workers[0].begins_with == 2

"""Train all workers of a recipe in one process, without a network: `python -m testbed.replicas.alone JOB.json`.

One event loop (`jobs.loop`) performs the programs of all workers and a star's server, each with what it has over links,
too. What crosses is bytes: every receiver decodes them with codecs of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import IO, Any, cast

from testbed.jobs.actions import Node
from testbed.jobs.decision import Decision
from testbed.jobs.loop import Loop, Observer
from testbed.jobs.pipeline import Ended
from testbed.jobs.recorder import Recorded, Recorder, Said
from testbed.message_key import Phase
from testbed.pipeline import alone, faults
from testbed.pipeline.alone import AloneJob, Report
from testbed.pipeline.frame import HEADER_BYTES
from testbed.pipeline.step_log import OnHostClock, Records
from testbed.records import TrainingRecord
from testbed.replicas.decision import training_job
from testbed.replicas.learners import learner_of
from testbed.replicas.worker import Learner
from testbed.replicas.worker_node import ExchangeNode, WorkerNode, named
from testbed.spec import Recipe


class _TogetherRecords:
    """The records of all places. The last one's say what all workers learned, so they are written last."""

    def __init__(self, nodes: Sequence[ExchangeNode], outputs: Sequence[IO[str]], report: Report) -> None:
        self._nodes, self._said = nodes, defaultdict[tuple[int, Phase], dict[int, Said]](dict)
        speakers: list[Any] = [_Speaker(self, place) for place in range(len(nodes))]
        self._records = Records(speakers, outputs, nodes[0].recipe.training.warmup_steps, report)
        self._ahead = [0] * (len(nodes) - 1)
        """By place: how many records it has for which the last one's are held back."""
        self._held = deque[Recorded]()

    def write(self, place: int, done: Recorded) -> None:
        """Write a place's record of a step or evaluation. All places have as many."""
        last = len(self._nodes) - 1
        # In the order of their senders: none comes before another where time stands still.
        done.received.sort(key=lambda frame: (frame.microbatch, frame.peer or 0))
        if place == last:
            self._held.append(done)
        else:
            self._records.write(place, done)
            self._ahead[place] += 1
        while self._held and all(self._ahead):
            self._ahead = [count - 1 for count in self._ahead]
            self._records.write(last, self._held.popleft())

    def said(self, place: int, step: int, phase: Phase) -> Said:
        """Return what a place says; the last one says the loss of all."""
        every, data = self._said[step, phase], self._nodes[place].data
        said = every[place] = self._nodes[place].said(step, phase)
        if place != len(self._nodes) - 1:
            return said
        del self._said[step, phase]
        losses = [every[worker].loss for worker in range(data.workers)]
        if phase != "train":
            return said._replace(loss=losses[-1], accuracy=every[data.workers - 1].accuracy)
        weighed = [weight * (loss or 0.0) for weight, loss in zip(data.weights, losses, strict=True)]
        return said._replace(loss=math.fsum(weighed))


class _Speaker:
    """One place, as `Records` asks it."""

    def __init__(self, records: _TogetherRecords, place: int) -> None:
        self._records, self._place = records, place

    def said(self, step: int, phase: Phase) -> Said:
        return self._records.said(self._place, step, phase)


def train_replicas(
    recipe: Recipe,
    learner: Callable[[int], Learner],
    outputs: Sequence[IO[str]],
    *,
    report: Report = lambda message: None,
    decisions: Sequence[Decision] = (),
    watch: Callable[[Sequence[WorkerNode]], Sequence[Observer]] = lambda workers: (),
) -> Ended:
    """Train and evaluate as a recipe says; returns why training ended. StageError, CodecError as they come.

    `learner` makes what a worker learns; records go to `outputs`, by place; `decisions` change the recipe's numbers
    while training lasts; `watch` makes more observers.
    """
    assert recipe.data is not None
    workers = [WorkerNode(recipe, number, learner(number)) for number in range(recipe.data.workers)]
    nodes: list[ExchangeNode] = [*workers]
    if recipe.data.exchange == "star":
        nodes.append(ExchangeNode(recipe, len(workers), workers[0].shapes))
    job = replace(training_job(recipe), decisions=decisions)
    recorder = Recorder(_TogetherRecords(nodes, outputs, report).write, named, HEADER_BYTES)
    observers = [OnHostClock(recorder), *watch(workers)]
    places: Sequence[Node] = nodes
    ended, *_ = Loop([job.program(place) for place in range(len(places))], places, observers=observers).run()
    return cast(Ended, ended)


# ---------------------------------------------------------------------- a training from end to end
def train_alone(job: AloneJob, report: Report) -> TrainingRecord:
    """Train a recipe and write its folder, whole or not at all. StageError, CodecError, UserError as they come."""
    recipe = job.recipe
    assert recipe.data is not None
    who = f"the {recipe.data.workers} workers"

    def train(outputs: Sequence[IO[str]]) -> Ended:
        def learner(number: int) -> Learner:
            return learner_of(recipe, number, vocabulary=job.vocabulary, tokens=job.tokens)

        try:
            return train_replicas(recipe, learner, outputs, report=report)
        except (MemoryError, RuntimeError, OSError) as error:
            if faults.is_out_of_memory(error):
                raise faults.out_of_memory(who, "while they trained", error) from error
            raise

    return alone.write_training(job, train)


def main() -> None:
    """Train what the file says, and print each step's message as a line of JSON."""
    alone.main(train_alone)


if __name__ == "__main__":
    main()

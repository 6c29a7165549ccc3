"""Data parallel training: the workers of a recipe and a star's server, in one process or over links.
`jobs.data_parallel` and `jobs.asynchronous` have their programs, `nodes.worker_node` and `nodes.arrivals` their
computation, encoding and decoding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from testbed.devices import flops
from testbed.jobs.actions import Job, Key, Node
from testbed.jobs.asynchronous import GOODBYE
from testbed.jobs.data_parallel import MESSAGES, DataParallelJob
from testbed.jobs.decision import Decision
from testbed.jobs.kind import Setting
from testbed.jobs.recorder import Named, Recorded, Said
from testbed.nodes.arrivals import Rounds, Server, training_of
from testbed.nodes.leader import Leader
from testbed.nodes.learners import learner_of
from testbed.nodes.pace import as_stated, coding_ns, worker_times
from testbed.nodes.worker import Learner
from testbed.nodes.worker_node import ExchangeNode, WorkerNode
from testbed.policies.deco import MOST_STALENESS
from testbed.runtime.ending import Announced, Ending
from testbed.runtime.gather import Gather
from testbed.runtime.pacing import Takes
from testbed.runtime.place_job import PlaceJob
from testbed.spec import Paced
from testbed.training.kinds import Measure, Training, durations_of

_FRAMES = 4
"""Unsent or unread messages allowed on one connection, in addition to the staleness."""
_PAIRS_APART = 32
"""In pairs, the most steps that a worker can be ahead of another, as each waits for its partner alone: 10 among 64."""
_MOST = 4
"""Maximum size of a payload, in multiples of its fp32 size."""


class ReplicasTraining(Training):
    """The training of workers that each hold the whole model."""

    names = (*MESSAGES, GOODBYE)

    def __init__(self, setting: Setting, decisions: Sequence[Decision] = ()) -> None:
        """`decisions` change the recipe's parameters during training."""
        super().__init__(setting)
        recipe = self.recipe
        assert recipe.data is not None
        self.data, training, first = recipe.data, recipe.training, as_stated(recipe)
        self._arrivals = None if self.data.arrivals is None else training_of(recipe)
        self._codecs = first.codecs
        self._synchronous = DataParallelJob(
            self.data.workers,
            self.data.exchange,
            first.staleness,
            first.local_steps,
            training.steps,
            aligned=self.data.aligned is not None,
            evaluate_every=training.evaluate_every,
            target_loss=training.target_loss,
            decisions=decisions,
        )
        self.job: Job = self._synchronous if self._arrivals is None else self._arrivals.job()
        self._shapes: Sequence[Sequence[int]] = ()

    def learner(self, number: int) -> Learner:
        """Make a worker's learner."""
        of = self.setting
        return learner_of(of.recipe, number, vocabulary=of.vocabulary, tokens=of.tokens, device=self.device)

    def load(self, place: int) -> Learner | None:
        """Make a worker's learner; a server needs it for the tensors' shapes, or to evaluate."""
        if place == self.data.workers and self._arrivals is None and self._shapes:
            return None
        learner = self.learner(min(place, self.data.workers - 1))
        self._shapes = [tuple(parameter.shape) for parameter in learner.parameters]
        return learner

    def node(self, place: int, loaded: Learner | None, measure: Measure | None = None) -> Node:
        """Make a place's node. SpecError for more fragments than the model has tensors."""
        server = place == self.data.workers
        if loaded is None or (server and self._arrivals is None):
            return ExchangeNode(self.recipe, place, self._shapes)
        if self._arrivals is None:
            return WorkerNode(self.recipe, place, loaded)
        if server:
            return Server(self._arrivals, loaded, self._codecs)
        return Rounds(self._arrivals, place, loaded, self._codecs[place])

    def named(self, key: Key) -> Named:
        """Return the name of a message in records: all have the same direction, and belong to a step."""
        return Named("backward", key.step)

    def settle(self, done: Sequence[tuple[Recorded, Said]]) -> Said:
        """The last place reports the overall loss: the mean over the batch, or the last worker's evaluation."""
        for recorded, _ in done:  # without time, places have no order
            recorded.received.sort(key=lambda frame: (frame.microbatch, frame.peer or 0))
        (last, said), workers = done[-1], [each for _, each in done[: self.data.workers]]
        if last.phase != "train":
            return said._replace(loss=workers[-1].loss, accuracy=workers[-1].accuracy)
        weighed = [weight * (each.loss or 0.0) for weight, each in zip(self.data.weights, workers, strict=True)]
        return said._replace(loss=math.fsum(weighed))

    # ------------------------------------------------------------------ over links
    @property
    def most_bytes(self) -> int:
        """The most bytes that a payload may have."""
        return _MOST * 4 * flops.whole_model(self.recipe.workload) + (1 << 20)

    @property
    def most_frames(self) -> int:
        """How many messages may wait unsent, or untaken, on one connection."""
        return max(*self.data.staleness, 0 if self.data.deco is None else MOST_STALENESS) + _FRAMES

    def job_of(self, job: PlaceJob) -> Job:
        """Return the job of a place's program. One place may be the leader."""
        if self._arrivals is not None:
            return self._arrivals.job(job.compute.dilation)
        if self.data.deco is None:
            return self.job
        leader = self.data.workers if self.data.exchange == "star" else 0
        raw_bytes = 4 * sum(map(math.prod, self._shapes))
        chooser = Leader.of(job, raw_bytes) if job.place == leader else None
        return replace(self._synchronous, leader=leader, chooser=chooser)

    def work_ns(self, job: PlaceJob) -> Callable[[str], int]:
        """Return a place's durations of work. A server sums in no time, and applies in the time of an update."""
        assert isinstance(job.compute, Paced)
        if job.place == self.data.workers:
            return durations_of(job.compute, apply=job.compute.update_ns)
        times = worker_times(job.compute, self.data, self.recipe.pipeline, job.place)
        takes_ns = {"local step": times.local_ns, "update": times.update_ns}
        return lambda what: takes_ns.get(what, 0)

    def codec_ns(self, job: PlaceJob) -> Takes:
        """Return a place's durations of encode and decode: as stated, or by the rule common to all trainings."""
        if job.coding is None:
            return super().codec_ns(job)
        return functools.partial(coding_ns, self.data, job.coding)

    def ending(self, job: PlaceJob, gather: Gather, asked: Callable[[], bool]) -> Ending:
        """All places end after the same step; asynchronous ones after the server step in which it is asked to stop."""
        if self._arrivals is not None:
            return Ending(asked if job.place == self.data.workers else lambda: False)
        furthest = _PAIRS_APART if self.data.exchange == "pairs" else self.most_frames - _FRAMES
        steps = self.recipe.training.steps
        return Announced(asked, gather, decides=job.place == 0, steps=steps, furthest=furthest)

    def misses_nobody(self, place: int) -> bool:
        """An asynchronous server tolerates lost workers."""
        return self._arrivals is not None and place == self.data.workers

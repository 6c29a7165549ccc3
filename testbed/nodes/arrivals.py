"""Asynchronous federated rounds: the server's updates and the workers' rounds.

Each worker runs at its own pace: it receives the server's weights, makes some local steps, and sends the resulting
change. The server applies arrived updates, once per period or once a number of them has arrived (`spec.ArrivalsSpec`),
and sends the new weights to their senders. A step is one update by the server, even if nothing arrived. The staleness
of a worker's update is the number of server steps since the weights that it started from. An update beyond its worker's
bound is discarded; its sender still receives the new weights.

`jobs.asynchronous` has the order of actions. Updates are applied in order of arrival, so results depend on the links,
which are a network or formulas for one (`studies.asynchronous_rounds`).

Sources: FedLuck, arXiv 2407.05125, github.com/Aegsteh-T/FedLuck_Euro_Par, AsyncServer.py (periods; a mean over arrivals
weighted by data shares); FedBuff, arXiv 2106.06639 (a buffer); FedAsync, arXiv 1903.03934 (one update at a time);
Decoupled DiLoCo, arXiv 2604.21428 (a quorum and a grace window).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from testbed.codecs.contract import Payload
from testbed.jobs.actions import Encoded, Key, Message
from testbed.jobs.asynchronous import AsynchronousJob
from testbed.jobs.recorder import Said
from testbed.message_key import Phase
from testbed.nodes.bucket import Bucket, weighted_sum
from testbed.nodes.optimise import learning_rate
from testbed.nodes.worker import Computed, Evaluated, Learner, Worker
from testbed.spec import DataParallelSpec, OptimiserSpec, Recipe
from testbed.workloads.models import validation_tokens


class RoundsTraining(NamedTuple):
    """Parameters that the server and its workers share."""

    data: DataParallelSpec
    """Has `arrivals` set."""
    optimiser: OptimiserSpec
    """Optimiser of the local steps."""
    steps: int
    """Steps of the server, which determine the learning rate."""
    seed: int
    evaluate_every: int = 0
    """See `spec.TrainingSpec`."""
    batch_tokens: int = 0
    """Tokens or images in a batch of all workers."""
    validation_tokens: int = 0

    def job(self, dilation: int = 1) -> AsynchronousJob:
        """Return the job, with its period and grace multiplied by `dilation`."""
        arrivals, workers = self.data.arrivals, range(self.data.workers)
        assert arrivals is not None
        return AsynchronousJob(
            [self.data.local_steps_of(worker) for worker in workers],
            self.steps,
            period_ns=None if arrivals.period_ns is None else arrivals.period_ns * dilation,
            buffer=arrivals.buffer,
            grace_ns=arrivals.grace_ns * dilation,
            evaluate_every=self.evaluate_every,
        )


def training_of(recipe: Recipe) -> RoundsTraining:
    """Return the shared parameters of a recipe."""
    assert recipe.data is not None
    training, workload = recipe.training, recipe.workload
    return RoundsTraining(
        recipe.data,
        recipe.optimiser,
        training.steps,
        training.seed,
        training.evaluate_every,
        workload.batch_tokens,
        validation_tokens(workload),
    )


class Update(NamedTuple):
    """A message that arrived from a worker."""

    worker: int
    staleness: int
    """Server steps since the weights that it started from."""


class Applied(NamedTuple):
    """The outcome of a server step."""

    step: int
    used: tuple[Update, ...]
    """Applied updates, by worker."""
    refused: tuple[Update, ...]
    """Discarded updates, beyond their staleness bound, by worker."""

    @property
    def answered(self) -> tuple[int, ...]:
        """The workers that receive new weights."""
        return tuple(sorted(update.worker for update in (*self.used, *self.refused)))


class Arrived(NamedTuple):
    """The content of a worker's message."""

    worker: int
    tensors: list[Tensor]


class Server:
    """The server's `jobs.actions.Node`: the weights, and a codec for each worker's messages."""

    def __init__(self, training: RoundsTraining, learner: Learner, codecs: Sequence[str]) -> None:
        """`learner` has the validation data and the model, initialised like all workers' models; `codecs` are by
        worker.
        """
        data, seed = training.data, training.seed
        assert data.answer is not None
        self._training = training
        self._bounds = [data.staleness_of(worker) for worker in range(data.workers)]
        self.replica = Worker(
            data.workers, learner, optimiser=training.optimiser, outer=data.outer, steps=training.steps
        )
        shapes = [tuple(parameter.shape) for parameter in self.replica.parameters]
        self._senders = [Bucket(shapes, codec, seed=seed, sender=worker) for worker, codec in enumerate(codecs)]
        self._answer = Bucket(shapes, data.answer, seed=seed, sender=data.workers)
        self._began = [0] * data.workers
        """The step whose weights each worker's current round started from."""
        self._applied: Applied | None = None
        self._evaluated: Evaluated | None = None

    @property
    def step(self) -> int:
        """Number of steps made so far."""
        return self.replica.applied

    def work(self, what: str, key: Key, value: Any) -> Any:
        """apply: make a step with the decoded updates; returns `Applied`. evaluate: returns `Evaluated`."""
        if what == "evaluate":
            self._evaluated = self.replica.evaluate()
            return self._evaluated
        assert what == "apply", what
        return self._apply(value)

    def encode(self, key: Key, value: Any) -> Encoded:
        """Return the message with the current weights. Raises the codec's CodecError."""
        weights = [parameter.detach() for parameter in self.replica.parameters]
        return Encoded(self._answer.encode(weights, key.step), self._answer.raw_bytes)

    def decode(self, messages: Sequence[Message]) -> list[Arrived]:
        """Return the workers' updates, discarded or not. Raises the codecs' CodecError."""
        return [
            Arrived(worker, self._senders[worker].decode(_payload(message), message.key.step))
            for message in messages
            for worker in [message.key.origin]
        ]

    def said(self, step: int, phase: Phase) -> Said:
        """Return the record's part of the step or evaluation that has just ended."""
        training, data, learned = self._training, self._training.data, 0
        if phase != "train":
            evaluated = self._evaluated
            assert evaluated is not None
            return Said(evaluated.loss, evaluated.accuracy, training.validation_tokens)
        assert self._applied is not None
        for worker, _ in self._applied.used:
            learned += data.local_steps_of(worker) * (data.parts[worker] * training.batch_tokens) // sum(data.parts)
        return Said(tokens=learned, learning_rate=learning_rate(training.optimiser, step, training.steps))

    def _apply(self, arrived: Sequence[Arrived]) -> Applied:
        """Make a step: subtract the mean of the arrived updates, weighted by the workers' shares of the data."""
        step, parts = self.step, self._training.data.parts
        updates = [Update(worker, step - self._began[worker]) for worker, _ in arrived]
        used = tuple(update for update in updates if update.staleness <= self._bounds[update.worker])
        if used:
            workers = [update.worker for update in used]
            all_parts = sum(parts[worker] for worker in workers)
            tensors = [tensors for worker, tensors in arrived if worker in workers]
            self.replica.receive(weighted_sum(tensors, [parts[worker] / all_parts for worker in workers]))
            self.replica.apply_until(step + 1)
        else:
            self.replica.resume(step + 1)
        for update in updates:
            self._began[update.worker] = self.step
        self._applied = Applied(step, used, tuple(update for update in updates if update not in used))
        return self._applied


class Rounds:
    """A worker's `jobs.actions.Node`."""

    def __init__(self, training: RoundsTraining, number: int, learner: Learner, codec: str) -> None:
        data, seed = training.data, training.seed
        assert data.answer is not None
        self._training = training
        self.replica = Worker(number, learner, optimiser=training.optimiser, outer=data.outer, steps=training.steps)
        self.local_steps = data.local_steps_of(number)
        shapes = [tuple(parameter.shape) for parameter in self.replica.parameters]
        self._bucket = Bucket(shapes, codec, seed=seed, sender=number)
        self._answer = Bucket(shapes, data.answer, seed=seed, sender=data.workers)
        self.made = 0
        """Number of rounds so far."""
        self._computed: Computed | None = None
        self._learned: dict[int, Computed] = {}
        """The worker's results, by the server step that applied or discarded them."""

    def work(self, what: str, key: Key, value: Any) -> Any:
        """local step: the last one of a round returns the tensors to send. resume: continue from the server's weights.
        StageError for a loss or gradient that is NaN or infinite.
        """
        if what == "resume":
            assert self._computed is not None
            self._learned[key.step - 1] = self._computed
            return self.replica.resume(key.step, value[0])
        assert what == "local step", what
        if not key.part:
            self.replica.begin()
        self.replica.local_step(self.replica.applied)
        if key.part + 1 < self.local_steps:
            return None
        self._computed = self.replica.close(self.replica.applied)
        return self._computed.tensors

    def encode(self, key: Key, value: Any) -> Encoded:
        """Return the payload of a round's message. Raises the codec's CodecError."""
        self.made += 1
        return Encoded(self._bucket.encode(value, key.step), self._bucket.raw_bytes)

    def decode(self, messages: Sequence[Message]) -> list[list[Tensor]]:
        """Return the server's weights. Raises the codec's CodecError."""
        return [self._answer.decode(_payload(message), message.key.step) for message in messages]

    def said(self, step: int, phase: Phase) -> Said:
        """Return the record's part of one of the server's steps, or of an evaluation."""
        training = self._training
        if phase != "train":
            return Said(tokens=training.validation_tokens)
        tokens, rate = max(training.data.local_steps) * training.batch_tokens, training.optimiser
        said = Said(tokens=tokens, learning_rate=learning_rate(rate, step, training.steps))
        learned = self._learned.pop(step, None)
        return said if learned is None else said._replace(loss=learned.loss, gradient_norm=learned.norm)


def _payload(message: Message) -> Payload:
    assert isinstance(message.payload, bytes | memoryview)
    return message.payload

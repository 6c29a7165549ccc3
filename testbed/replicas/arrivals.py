"""Asynchronous federated rounds: what a server does with what arrives, and what a worker does in a round.

Each worker goes on at its own pace: it takes the server's weights, some local steps, and sends what these changed. The
server applies what has arrived, every so often or as soon as so many have (`spec.ArrivalsSpec`), and answers each of
them with the new weights. A step is one application; steps in which nothing arrived count too. An update's staleness is
how many steps the server made since the weights that it began with. One beyond its worker's bound is refused: its
sender gets new weights like the others, and what it sent is lost.

Who calls these, in which order, decides the maths: a network (`asynchronous`), or formulas for one (`events`).

Sources: FedLuck, arXiv 2407.05125, github.com/Aegsteh-T/FedLuck_Euro_Par, AsyncServer.py (periods; the mean over the
arrivals is weighted by data shares); FedBuff, arXiv 2106.06639 (a buffer); FedAsync, arXiv 1903.03934 (each by itself).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from testbed.codecs.contract import Payload
from testbed.errors import CodecError
from testbed.replicas.bucket import Bucket
from testbed.replicas.worker import Computed, Learner, Worker
from testbed.spec import DataParallelSpec, OptimiserSpec, Recipe

_HEAD = struct.Struct("<I")


class Training(NamedTuple):
    """What a server and its workers know alike."""

    data: DataParallelSpec
    """With `arrivals`."""
    optimiser: OptimiserSpec
    """Of local steps."""
    steps: int
    """Of the server: the learning rate follows from it."""
    seed: int


def training_of(recipe: Recipe) -> Training:
    """Return what a recipe says of it."""
    assert recipe.data is not None
    return Training(recipe.data, recipe.optimiser, recipe.training.steps, recipe.training.seed)


class Update(NamedTuple):
    """A worker's message that has arrived."""

    worker: int
    staleness: int
    """Steps that the server made since the weights that it began with."""


class Applied(NamedTuple):
    """What a step of the server came to."""

    step: int
    used: tuple[Update, ...]
    """By worker."""
    refused: tuple[Update, ...]
    """Those beyond their bound, by worker."""

    @property
    def answered(self) -> tuple[int, ...]:
        """Whom new weights go to."""
        return tuple(sorted(update.worker for update in (*self.used, *self.refused)))


class Server:
    """The server's weights, and what has arrived since it last changed them."""

    def __init__(self, training: Training, learner: Learner, codecs: Sequence[str]) -> None:
        """`learner` has the model, which begins as all workers' do, and the validation data; `codecs` by worker."""
        data, seed = training.data, training.seed
        assert data.answer is not None
        self._bounds = [data.staleness_of(worker) for worker in range(data.workers)]
        self._parts = data.parts
        self.replica = Worker(
            data.workers, learner, optimiser=training.optimiser, outer=data.outer, steps=training.steps
        )
        shapes = [tuple(parameter.shape) for parameter in self.replica.parameters]
        self._senders = [Bucket(shapes, codec, seed=seed, sender=worker) for worker, codec in enumerate(codecs)]
        self._answer = Bucket(shapes, data.answer, seed=seed, sender=data.workers)
        self._began = [0] * data.workers
        """The step whose weights each worker's round began with."""
        self._arrived: dict[int, list[Tensor]] = {}
        self._weights: bytes | None = None

    @property
    def step(self) -> int:
        """Steps made so far."""
        return self.replica.applied

    @property
    def waiting(self) -> Collection[int]:
        """The workers whose messages have arrived and wait to be applied."""
        return self._arrived.keys()

    @property
    def raw_bytes(self) -> int:
        """All weights as fp32."""
        return self._answer.raw_bytes

    def arrived(self, worker: int, number: int, payload: Payload) -> None:
        """Take a worker's message of its round of that number. CodecError as from its codec."""
        assert worker not in self._arrived, "a worker waits for its answer before it goes on"
        self._arrived[worker] = self._senders[worker].decode(payload, number)

    def apply(self) -> Applied:
        """Make a step: subtract the mean of what arrived, weighted by the workers' shares of the data."""
        step = self.step
        updates = [Update(worker, step - self._began[worker]) for worker in sorted(self._arrived)]
        used = tuple(update for update in updates if update.staleness <= self._bounds[update.worker])
        total: list[Tensor] = []
        parts = sum(self._parts[update.worker] for update in used)
        for worker, _ in used:
            weighed = [value.mul_(self._parts[worker] / parts) for value in self._arrived[worker]]
            total = [before.add_(value) for before, value in zip(total, weighed, strict=True)] if total else weighed
        if used:
            self.replica.receive(total)
            self.replica.apply_until(step + 1)
        else:
            self.replica.resume(step + 1)
        self._weights = None
        for update in updates:
            self._began[update.worker] = self.step
        self._arrived.clear()
        return Applied(step, used, tuple(update for update in updates if update not in used))

    def answer(self) -> bytes:
        """Return the message with the weights as they are, for whoever has been heard in the last step."""
        if self._weights is None:
            weights = [parameter.detach() for parameter in self.replica.parameters]
            self._weights = _HEAD.pack(self.step) + self._answer.encode(weights, self.step)
        return self._weights

    def goodbye(self) -> bytes:
        """Return the message that ends a worker's training."""
        return _HEAD.pack(self.step)


class Rounds:
    """One worker's rounds."""

    def __init__(self, training: Training, number: int, learner: Learner, codec: str) -> None:
        data, seed = training.data, training.seed
        assert data.answer is not None
        self.replica = Worker(number, learner, optimiser=training.optimiser, outer=data.outer, steps=training.steps)
        self.local_steps = data.local_steps_of(number)
        shapes = [tuple(parameter.shape) for parameter in self.replica.parameters]
        self._bucket = Bucket(shapes, codec, seed=seed, sender=number)
        self._answer = Bucket(shapes, data.answer, seed=seed, sender=data.workers)
        self.made = 0
        """Rounds so far."""

    @property
    def raw_bytes(self) -> int:
        """All tensors as fp32."""
        return self._bucket.raw_bytes

    @property
    def begins_with(self) -> int:
        """The server's step whose weights it has."""
        return self.replica.applied

    def make(self) -> tuple[Computed, bytes]:
        """Take the local steps; returns what they computed, and the round's message. StageError, CodecError as they
        come.
        """
        computed = self.replica.compute(self.begins_with, staleness=0, local_steps=self.local_steps)
        payload = self._bucket.encode(computed.tensors, self.made)
        self.made += 1
        return computed, payload

    def answered(self, message: Payload) -> bool:
        """Go on from the server's weights; False where training has ended. CodecError for anything else."""
        view = memoryview(message)
        if view.nbytes < _HEAD.size:
            raise CodecError(f"a server's answer has {view.nbytes} bytes and begins with a number of {_HEAD.size}")
        (step,) = _HEAD.unpack(view[: _HEAD.size])
        if view.nbytes == _HEAD.size:
            self.replica.resume(step)
            return False
        self.replica.resume(step, self._answer.decode(view[_HEAD.size :], step))
        return True

"""What the places of data parallel training have (`jobs.data_parallel`), wherever that runs: a worker its replica, and
each the codecs of the messages that it makes and takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from testbed.codecs.contract import Payload
from testbed.jobs.actions import Encoded, Key, Message
from testbed.jobs.decision import Decision, Decisions
from testbed.jobs.recorder import Said
from testbed.message_key import Phase
from testbed.pipeline import faults
from testbed.pipeline.optimise import learning_rate
from testbed.replicas.bucket import Bucket
from testbed.replicas.exchange import Tensors, weighted_sum
from testbed.replicas.fragments import fragment_shapes, in_turn, ring_parts
from testbed.replicas.pace import as_stated
from testbed.replicas.worker import Computed, Evaluated, Learner, Worker
from testbed.spec import Recipe
from testbed.workloads.models import validation_tokens


class _Whole:
    """The messages of one fragment at one place, which have all tensors."""

    def __init__(self, own: Bucket, senders: Mapping[int, Bucket], sender: int, weights: Sequence[float]) -> None:
        """`own`: of what this place, `sender`, sends; `senders`: of what it takes, by place."""
        self._own, self._senders, self._sender, self._weights = own, senders, sender, weights

    def encode(self, key: Key, value: Tensors) -> Encoded:
        return Encoded(self._own.encode(value, key.step), self._own.raw_bytes)

    def decode(self, key: Key, payload: Payload) -> Tensors:
        return self._senders[key.origin].decode(payload, key.step)

    def change(self, codecs: Sequence[str], *, own: bool) -> None:
        changing = {self._sender: self._own} if own else self._senders
        for sender, bucket in changing.items():
            if sender < len(codecs):  # a server's answer has the same one throughout
                bucket.change(codecs[sender])

    def aggregate(self, values: Sequence[Tensors]) -> Tensors:
        return values[0] if len(self._senders) == 1 else weighted_sum(values, self._weights)


class _Parts:
    """Messages that each have one part of a worker's tensors, as even as can be, and go round a ring that sums them."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], codec: str, worker: int, weights: Sequence[float], seed: int
    ) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._lengths = ring_parts(self._shapes, len(weights))
        self._buckets = [
            Bucket([(length,)], codec, seed=seed, sender=part) for part, length in enumerate(self._lengths)
        ]
        self._worker, self._weight = worker, weights[worker]
        self._own: dict[int, tuple[Tensor, ...]] = {}
        """By step: what this worker adds to each part."""

    def encode(self, key: Key, value: Tensor) -> Encoded:
        bucket = self._buckets[key.part]
        return Encoded(bucket.encode([value], key.step), bucket.raw_bytes)

    def decode(self, key: Key, payload: Payload) -> Tensor:
        return self._buckets[key.part].decode(payload, key.step)[0]

    def change(self, codecs: Sequence[str], *, own: bool) -> None:
        for bucket in self._buckets:
            bucket.change(codecs[0])

    def cut(self, key: Key, value: Tensors) -> Tensor:
        """Take the worker's tensors, weighted; returns the part that begins here."""
        flat = torch.cat([each.reshape(-1) for each in value]).mul_(self._weight)
        own = self._own[key.step] = torch.split(flat, self._lengths)
        return own[self._worker]

    def add(self, key: Key, value: Tensor) -> Tensor:
        """Add what is the worker's of a part."""
        return value.add_(self._own[key.step][key.part])

    def aggregate(self, values: Sequence[Tensor]) -> Tensors:
        flat = torch.split(torch.cat(list(values)), [math.prod(shape) for shape in self._shapes])
        return [value.view(shape).clone() for value, shape in zip(flat, self._shapes, strict=True)]

    def end(self, step: int) -> None:
        """Forget a step's parts, which have all gone round."""
        del self._own[step]


_Messages = _Whole | _Parts


class ExchangeNode:
    """What all places have: a `jobs.actions.Node`."""

    def __init__(self, recipe: Recipe, place: int, shapes: Sequence[Sequence[int]]) -> None:
        """`shapes`: of the model's tensors."""
        assert recipe.data is not None
        self.recipe, self.data, self.place = recipe, recipe.data, place
        self.decisions = Decisions(as_stated(recipe))
        self._messages = [self._of_fragment(part) for part in fragment_shapes(shapes, self.data.fragments)]
        self.shapes = shapes

    def _of_fragment(self, shapes: Sequence[Sequence[int]]) -> _Messages:
        data, codecs, seed = self.data, self.decisions.at(0).codecs, self.recipe.training.seed
        if data.exchange == "all-reduce":
            return _Parts(shapes, codecs[0], self.place, data.weights, seed)
        texts = [*codecs, *([] if data.answer is None else [data.answer])]

        def bucket(sender: int) -> Bucket:
            return Bucket(shapes, texts[sender], seed=seed, sender=sender)

        senders = [data.workers] if data.exchange == "star" and self.place < data.workers else range(data.workers)
        return _Whole(bucket(self.place), {sender: bucket(sender) for sender in senders}, self.place, data.weights)

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Do what all places do. decide: take a `Decision`. sum: of the messages of a step."""
        match what:
            case "decide":
                assert isinstance(value, Decision)
                return self.decisions.add(value._replace(codecs=value.codecs or self.decisions.at(0).codecs))
            case "sum":
                return in_turn(self._messages, key.step).aggregate(value)
        raise AssertionError(what)

    def encode(self, key: Key, value: Any) -> Encoded:
        """Return the payload of a step's message. CodecError as from the codecs."""
        messages = in_turn(self._messages, key.step)
        messages.change(self.decisions.at(key.step).codecs, own=True)
        return messages.encode(key, value)

    def decode(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Return what was encoded: tensors, or a part of them. CodecError as from the codecs."""
        values = []
        for message in messages:
            of = in_turn(self._messages, message.key.step)
            of.change(self.decisions.at(message.key.step).codecs, own=False)
            assert isinstance(message.payload, bytes | memoryview)
            values.append(of.decode(message.key, message.payload))
        return values

    def said(self, step: int, phase: Phase) -> Said:
        """Return what the record of a step or an evaluation says."""
        if phase != "train":
            return Said(tokens=validation_tokens(self.recipe.workload))
        workload, parts = self.recipe.workload, self.data.parts
        batches = self.decisions.at(step).local_steps
        tokens = [part * workload.batch_tokens // sum(parts) * each for part, each in zip(parts, batches, strict=True)]
        rate = learning_rate(self.recipe.optimiser, step, self.recipe.training.steps)
        return Said(tokens=sum(tokens), learning_rate=rate)


class WorkerNode(ExchangeNode):
    """A worker."""

    def __init__(self, recipe: Recipe, number: int, learner: Learner) -> None:
        """SpecError for more fragments than the model has tensors."""
        self.replica = Worker.of(recipe, number, learner)
        super().__init__(recipe, number, [tuple(parameter.shape) for parameter in self.replica.parameters])
        self.learned: dict[int, Computed] = {}
        """By step: what its record says; without tensors."""
        self.evaluated: dict[int, Evaluated] = {}
        """Likewise, by the steps done before."""

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute; StageError for a loss or gradient that is NaN or infinite.

        local step: the last one of a step returns what is to be sent. cut: returns the part of it that goes first
        round a ring. add: what is the worker's own to a part. update: apply what the messages of a step come to.
        evaluate: returns what was `Evaluated`.
        """
        match what:
            case "local step":
                return self._local_step(key)
            case "cut":
                return self._parts(key.step).cut(key, value)
            case "add":
                return self._parts(key.step).add(key, value)
            case "update":
                return self._update(key.step, value)
            case "evaluate":
                return self._evaluate(key.step)
        return super().work(what, key, value)

    def said(self, step: int, phase: Phase) -> Said:
        """Return what the record of a step or an evaluation says: the loss over the worker's own part of the batch."""
        said = super().said(step, phase)
        if phase != "train":
            found = self.evaluated.pop(step, None)
            return said if found is None else said._replace(loss=found.loss, accuracy=found.accuracy)
        learned = self.learned.pop(step)
        return said._replace(loss=learned.loss, gradient_norm=learned.norm)

    def _local_step(self, key: Key) -> Tensors | None:
        now, replica = self.decisions.at(key.step), self.replica
        if not key.part:
            replica.begin()
        replica.local_step(key.step)
        if key.part + 1 < now.local_steps[self.place]:
            return None
        computed = replica.close(key.step)
        self.learned[key.step] = computed._replace(tensors=[])
        return computed.tensors

    def _parts(self, step: int) -> _Parts:
        messages = in_turn(self._messages, step)
        assert isinstance(messages, _Parts)
        return messages

    def _update(self, step: int, values: Sequence[Any]) -> None:
        messages = in_turn(self._messages, step)
        self.replica.receive(messages.aggregate(values))
        self.replica.apply_until(step + 1)
        if isinstance(messages, _Parts):
            messages.end(step)

    def _evaluate(self, step: int) -> Evaluated:
        found = self.evaluated[step] = self.replica.evaluate()
        if not math.isfinite(found.loss):
            raise faults.diverged(self.replica.name, "validation loss", found.loss, f"after {step} steps")
        return found

"""The nodes of data parallel training (`jobs.data_parallel`): a worker's replica, and the codecs of the messages that a
place sends and receives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from testbed.codecs.wire.header import DeviceMessage
from testbed.jobs.actions import Encoded, Key, Message
from testbed.jobs.decision import Decision, Decisions
from testbed.jobs.recorder import Said
from testbed.message_key import Phase
from testbed.nodes.aligned import AlignedRows
from testbed.nodes.bucket import Bucket, Tensors, weighted_sum
from testbed.nodes.fragments import fragment_shapes, in_turn, reduced_parts, sent_shapes
from testbed.nodes.optimise import learning_rate
from testbed.nodes.pace import as_stated
from testbed.nodes.worker import Computed, Evaluated, Learner, Worker
from testbed.runtime import failures
from testbed.spec import DataParallelSpec, Recipe
from testbed.workloads.models import validation_tokens


class _Whole:
    """The messages of one fragment at one place, each with all tensors."""

    keeps = ("_own", "_senders", "_given")

    def __init__(self, own: Bucket, senders: Mapping[int, Bucket], sender: int, weights: Sequence[float]) -> None:
        """`own`: codecs of the messages that this place, `sender`, sends; `senders`: of those that it receives, by
        place.
        """
        self._own, self._senders, self._sender, self._weights = own, senders, sender, weights
        self._given: dict[int, Any] = {}
        """Its own messages, by step, until this place decodes them."""

    def encode(self, key: Key, value: Tensors) -> Encoded:
        payload = self._own.encode(value, key.step)
        if self._sender in self._senders:
            self._given[key.step] = payload
        return Encoded(payload, self._own.raw_bytes)

    def decode(self, key: Key, payload: Any) -> Tensors:
        payload = self._given.pop(key.step, payload) if key.origin == self._sender else payload
        return self._senders[key.origin].decode(payload, key.step)

    def change(self, codecs: Sequence[str], *, own: bool) -> None:
        changing = {self._sender: self._own} if own else self._senders
        for sender, bucket in changing.items():
            if sender < len(codecs):  # a server's reply keeps its codec
                bucket.change(codecs[sender])

    def aggregate(self, values: Sequence[Tensors], step: int) -> Tensors:
        pair = len(values) < len(self._weights)
        weights = [1 / len(values)] * len(values) if pair else self._weights
        return values[0] if len(self._senders) == 1 else weighted_sum(values, weights)


class _Parts:
    """Messages of a ring all-reduce, each with one part of a worker's tensors; parts are as equal as possible. With
    `aligned`, parts of its sketches, and then of its chosen rows.
    """

    keeps = ("_buckets", "_own", "_aligned")

    def __init__(
        self, shapes: Sequence[Sequence[int]], codec: str, worker: int, data: DataParallelSpec, seed: int
    ) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._aligned = None if data.aligned is None else AlignedRows(shapes, data.aligned, seed)
        self._lengths, self._workers = reduced_parts(self._shapes, data), data.workers
        self._buckets = [
            Bucket([(length,)], codec, seed=seed, sender=part) for part, length in enumerate(self._lengths)
        ]
        self._worker, self._weight = worker, data.weights[worker]
        self._own: dict[int, tuple[Tensor, ...]] = {}
        """This worker's contribution to each part, by step."""

    def encode(self, key: Key, value: Tensor) -> Encoded:
        bucket = self._buckets[key.part]
        return Encoded(bucket.encode([value], key.step), bucket.raw_bytes)

    def decode(self, key: Key, payload: Any) -> Tensor:
        return self._buckets[key.part].decode(payload, key.step)[0]

    def change(self, codecs: Sequence[str], *, own: bool) -> None:
        for bucket in self._buckets:
            bucket.change(codecs[0])

    def cut(self, key: Key, value: Tensors) -> Tensor:
        """Store the worker's weighted tensors; returns the part whose sum starts here."""
        aligned = self._aligned
        flat = aligned.sketch(value, key.step) if aligned else torch.cat([each.reshape(-1) for each in value])
        own = self._own[key.step] = torch.split(flat.mul_(self._weight), self._lengths[: self._workers])
        return own[self._worker]

    def choose(self, key: Key, sums: Sequence[Tensor]) -> Tensor:
        """Choose the rows by the summed sketches; returns the part of their values whose sum starts here."""
        assert self._aligned is not None
        flat = self._aligned.choose(torch.cat(list(sums)), key.step).mul_(self._weight)
        parts = torch.split(flat, self._lengths[self._workers :])
        self._own[key.step] = (*self._own[key.step], *parts)
        return parts[self._worker]

    def add(self, key: Key, value: Tensor) -> Tensor:
        """Add the worker's contribution to a part."""
        return value.add_(self._own[key.step][key.part])

    def aggregate(self, values: Sequence[Tensor], step: int) -> Tensors:
        if self._aligned is not None:
            return self._aligned.spread(torch.cat(list(values)), step)
        flat = torch.split(torch.cat(list(values)), [math.prod(shape) for shape in self._shapes])
        return [value.view(shape).clone() for value, shape in zip(flat, self._shapes, strict=True)]

    def end(self, step: int) -> None:
        """Forget a step's parts after the exchange."""
        del self._own[step]


_Messages = _Whole | _Parts


class ExchangeNode:
    """Common base of all places: a `jobs.actions.Node`."""

    keeps: tuple[str, ...] = ("_messages",)

    def __init__(self, recipe: Recipe, place: int, shapes: Sequence[Sequence[int]]) -> None:
        """`shapes` are those of the model's tensors."""
        assert recipe.data is not None
        self.recipe, self.data, self.place = recipe, recipe.data, place
        self.decisions = Decisions(as_stated(recipe))
        parts = fragment_shapes(sent_shapes(shapes, self.data), self.data.fragments)
        self._messages = [self._of_fragment(part) for part in parts]
        self.shapes = shapes

    def _of_fragment(self, shapes: Sequence[Sequence[int]]) -> _Messages:
        data, codecs, seed = self.data, self.decisions.at(0).codecs, self.recipe.training.seed
        if data.exchange == "all-reduce":
            return _Parts(shapes, codecs[0], self.place, data, seed)
        texts = [*codecs, *([] if data.answer is None else [data.answer])]

        def bucket(sender: int) -> Bucket:
            return Bucket(shapes, texts[sender], seed=seed, sender=sender)

        senders = [data.workers] if data.exchange == "star" and self.place < data.workers else range(data.workers)
        return _Whole(bucket(self.place), {sender: bucket(sender) for sender in senders}, self.place, data.weights)

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Do the work common to all places. decide: apply a `Decision`. sum: sum the messages of a step."""
        match what:
            case "decide":
                assert isinstance(value, Decision)
                return self.decisions.add(value._replace(codecs=value.codecs or self.decisions.at(0).codecs))
            case "sum":
                return in_turn(self._messages, key.step).aggregate(value, key.step)
        raise AssertionError(what)

    def encode(self, key: Key, value: Any) -> Encoded:
        """Return the payload of a step's message. Raises the codecs' CodecError."""
        messages = in_turn(self._messages, key.step)
        messages.change(self.decisions.at(key.step).codecs, own=True)
        return messages.encode(key, value)

    def decode(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Decode tensors, or a part of them. Raises the codecs' CodecError."""
        values = []
        for message in messages:
            of = in_turn(self._messages, message.key.step)
            of.change(self.decisions.at(message.key.step).codecs, own=False)
            assert isinstance(message.payload, bytes | memoryview | DeviceMessage)
            values.append(of.decode(message.key, message.payload))
        return values

    def said(self, step: int, phase: Phase) -> Said:
        """Return the record's part of a step or an evaluation."""
        if phase != "train":
            return Said(tokens=validation_tokens(self.recipe.workload))
        workload, parts = self.recipe.workload, self.data.parts
        batches = self.decisions.at(step).local_steps
        tokens = [part * workload.batch_tokens // sum(parts) * each for part, each in zip(parts, batches, strict=True)]
        rate = learning_rate(self.recipe.optimiser, step, self.recipe.training.steps)
        return Said(tokens=sum(tokens), learning_rate=rate)


class WorkerNode(ExchangeNode):
    """A worker."""

    keeps = ("replica",)

    def __init__(self, recipe: Recipe, number: int, learner: Learner) -> None:
        """SpecError for more fragments than the model has tensors."""
        self.replica = Worker.of(recipe, number, learner)
        super().__init__(recipe, number, [tuple(parameter.shape) for parameter in self.replica.parameters])
        self.learned: dict[int, Computed] = {}
        """Results for the records, by step; without tensors."""
        self.evaluated: dict[int, Evaluated] = {}
        """Evaluations, by the number of steps done before."""

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute; StageError for a NaN or infinite loss or gradient.

        local step: the last one of a step returns the tensors to send. cut: returns the part that a ring sends first.
        choose: the same, of the rows that all have agreed on. add: adds the worker's contribution to a part. update:
        applies a step's aggregate. evaluate: returns `Evaluated`.
        """
        match what:
            case "local step":
                return self._local_step(key)
            case "cut":
                return self._parts(key.step).cut(key, value)
            case "choose":
                return self._parts(key.step).choose(key, value)
            case "add":
                return self._parts(key.step).add(key, value)
            case "update":
                return self._update(key.step, value)
            case "evaluate":
                return self._evaluate(key.step)
        return super().work(what, key, value)

    def weights(self) -> dict[str, Tensor]:
        """Return the trained tensors, by their number in the model."""
        return {f"{number:06}": parameter for number, parameter in enumerate(self.replica.parameters)}

    def said(self, step: int, phase: Phase) -> Said:
        """Return the record's part of a step or an evaluation; the loss is over the worker's part of the batch."""
        said = super().said(step, phase)
        if phase != "train":
            evaluated = self.evaluated.pop(step, None)
            return said if evaluated is None else said._replace(loss=evaluated.loss, accuracy=evaluated.accuracy)
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
        self.replica.receive(messages.aggregate(values, step))
        self.replica.apply_until(step + 1)
        if isinstance(messages, _Parts):
            messages.end(step)

    def _evaluate(self, step: int) -> Evaluated:
        evaluated = self.evaluated[step] = self.replica.evaluate()
        if not math.isfinite(evaluated.loss):
            raise failures.diverged(self.replica.name, "validation loss", evaluated.loss, f"after {step} steps")
        return evaluated

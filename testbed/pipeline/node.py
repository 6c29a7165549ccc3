"""What a stage has: layers, kept activations, codecs with their state, an optimiser. It does what a program says
(`jobs.pipeline`), wherever that runs.

There is no first, middle or last kind of stage: where `upstream` is None inputs are token ids, and where `downstream`
is None outputs go into the loss.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Hook
from testbed.jobs.actions import Encoded, Key, Message
from testbed.jobs.recorder import Said
from testbed.message_key import MessageKey, Phase
from testbed.pipeline import faults
from testbed.pipeline.boundary import Boundary
from testbed.pipeline.gather import global_norm
from testbed.pipeline.optimise import Optimiser, learning_rate
from testbed.spec import Recipe, text_of
from testbed.workloads.data import Batch, Data
from testbed.workloads.stage_model import StageModel

_FP32_BYTES = 4


class Outgoing(NamedTuple):
    """What a forward or backward pass leaves for the neighbour."""

    tensor: Tensor
    raw_values: int
    """How many values it stands for: more than it has where a codec in the model has left fewer of them."""


class _Kept(NamedTuple):
    """What a forward pass leaves for its backward pass."""

    source: Tensor
    """What came from upstream, or token ids: where the graph begins."""
    outputs: Tensor | None
    """With their graph; None where they are computed again."""
    raw_values: int
    """Values of the hidden states that came in, as the model knows them."""


class _Through(NamedTuple):
    """A pass through the layers."""

    outputs: Tensor
    """What goes on: the loss at the last stage."""
    values_in: int
    """Values of the hidden states that came in."""
    values_out: int
    """Values of those that go on, before a codec in the model made them fewer."""


class StageNode:
    """One stage: a `jobs.actions.Node`."""

    def __init__(
        self,
        recipe: Recipe,
        place: int,
        *,
        model: StageModel,
        data: Data,
        upstream: Boundary | None,
        downstream: Boundary | None,
    ) -> None:
        self._recipe, self._workload, self._parts = recipe, text_of(recipe), microbatches(recipe)
        self._name, self._model, self._data = recipe.pipeline.places[place], model, data
        self._upstream, self._downstream = upstream, downstream
        # Before the optimiser, because codecs that change the model put other parameters into it.
        self._upper = None if upstream is None else upstream.hook(model)
        self._lower = None if downstream is None else downstream.hook(model)
        self.hooks: Sequence[Hook] = [hook for hook in (self._upper, self._lower) if hook is not None]
        """The codecs' parts in the model."""
        learned = itertools.chain(model.parameters(), *(hook.parameters() for hook in self.hooks))
        rowwise = {parameter: axis for hook in self.hooks for parameter, axis in hook.rowwise().items()}
        self._optimiser = Optimiser(dict.fromkeys(learned), recipe.optimiser, rowwise)
        self._batches: dict[int, Batch] = {}
        """The micro-batches of this step or evaluation, by their numbers in its record."""
        self._kept: dict[int, _Kept] = {}
        self._losses: list[float] = []
        self._said = Said()
        self.doing = "before its first step"
        """For messages."""

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute; StageError for a loss or gradient that is NaN or infinite.

        start: begin a step or evaluation. forward, backward: of the `Outgoing` one, from a tensor. clip: returns the
        squared norms of this stage's gradients. update: with those of all stages. loss: returns the mean of an
        evaluation, alone in a list that is empty except at the last stage.
        """
        match what:
            case "forward":
                return self._forward(key, value)
            case "backward":
                return self._backward(key, value)
            case "clip":
                return self._optimiser.squares()
            case "update":
                return self._update(key.step, global_norm([square for squares in value for square in squares]))
            case "start":
                return self._start(key)
            case "loss":
                return self._evaluated()
        raise AssertionError(what)

    def said(self, step: int, phase: Phase) -> Said:
        """Return what the record of the step or evaluation that has just ended says."""
        return self._said

    def encode(self, key: Key, value: Outgoing) -> Encoded:
        """Return the payload for the neighbour. CodecError as from the codec."""
        boundary = self._downstream if key.what == "activation" else self._upstream
        assert boundary is not None
        payload, choice = boundary.encode(value.tensor, self._message_key(key))
        return Encoded(payload, raw_bytes=value.raw_values * _FP32_BYTES, choice=choice)

    def decode(self, messages: Sequence[Message]) -> Sequence[Tensor]:
        """Return the neighbour's tensors. CodecError as from the codec."""
        return [self._decode(message) for message in messages]

    def _decode(self, message: Message) -> Tensor:
        key, payload = message.key, message.payload
        boundary = self._upstream if key.what == "activation" else self._downstream
        assert boundary is not None
        assert isinstance(payload, memoryview)
        return boundary.decode(payload, self._message_key(key))

    # ------------------------------------------------------------------ a step, an evaluation
    def _start(self, key: Key) -> None:
        """Fetch what is learned from, or what the model is evaluated on."""
        self.doing = f"at {key.phase} step {key.step}"
        training, parts = key.phase == "train", self._parts
        self._model.train(training)
        if training:
            for hook in self.hooks:
                hook.begin(key.step, parts)
            self._batches = {part: self._data.train(key.step, part, parts) for part in range(parts)}
        else:
            numbers = itertools.product(range(self._workload.validation_batches), range(parts))
            self._batches = {
                number * parts + part: self._data.validation(number, part, parts) for number, part in numbers
            }

    def _update(self, step: int, norm: float) -> None:
        if not math.isfinite(norm):
            raise faults.diverged(self._name, "gradient norm", norm, self.doing)
        rate = learning_rate(self._recipe.optimiser, step, self._recipe.training.steps)
        self._optimiser.update(norm, rate)
        for hook in self.hooks:
            hook.after_step(step, rate)
        self._said = Said(self._loss(), tokens=self._tokens(1), gradient_norm=norm, learning_rate=rate)

    def _evaluated(self) -> list[float]:
        loss = self._loss()
        self._said = Said(loss, tokens=self._tokens(self._workload.validation_batches))
        return [] if loss is None else [loss]

    def _tokens(self, batches: int) -> int:
        return batches * self._workload.batch_size * self._workload.sequence_length

    def _loss(self) -> float | None:
        """Return the mean over the micro-batches since the last call; None except at the last stage."""
        losses, self._losses = self._losses, []
        return math.fsum(losses) / len(losses) if losses else None

    # ------------------------------------------------------------------ one micro-batch
    def _forward(self, key: Key, value: Tensor | None) -> Outgoing | None:
        training, recompute = key.phase == "train", self._recipe.pipeline.recompute
        source = self._batch(key).inputs if value is None else value.requires_grad_(training)
        with torch.set_grad_enabled(training and not recompute):
            outputs, values_in, values_out = self._through(source, key)
        if self._downstream is None:
            self._note_loss(outputs.item(), key)
        if training:
            self._kept[key.part] = _Kept(source, None if recompute else outputs, values_in)
        return None if self._downstream is None else Outgoing(outputs.detach(), values_out)

    def _backward(self, key: Key, gradient: Tensor | None) -> Outgoing | None:
        source, outputs, raw_values = self._kept.pop(key.part)
        if outputs is None:
            outputs = self._through(source, key).outputs
        if self._downstream is None:
            outputs = outputs / self._parts
        outputs.backward(gradient)  # type: ignore[no-untyped-call]
        if self._upstream is None:
            return None
        assert source.grad is not None
        return Outgoing(source.grad, raw_values)

    def _through(self, source: Tensor, key: Key) -> _Through:
        """Compute this stage's layers, with what codecs do before and after them, and at the last stage the loss."""
        if key.phase == "train":
            self._model.draw(key.step, key.part)
        batch = self._batch(key)
        hidden = source if self._upper is None else self._upper.receive(source, batch.inputs)
        outputs = self._model(hidden)
        values = outputs.numel()
        if self._downstream is None:
            outputs = self._model.loss(outputs, batch.targets)
        elif self._lower is not None:
            outputs = self._lower.send(outputs, batch.inputs)
        return _Through(outputs, hidden.numel(), values)

    def _note_loss(self, loss: float, key: Key) -> None:
        self._losses.append(loss)
        if not math.isfinite(loss):
            where = f"{self.doing}, micro-batch {self._number(key)}"
            raise faults.diverged(self._name, "loss", loss, where)

    def _number(self, key: Key) -> int:
        return number_in_record(self._recipe, key.phase, key.step, key.part)

    def _batch(self, key: Key) -> Batch:
        return self._batches[self._number(key)]

    def _message_key(self, key: Key) -> MessageKey:
        """Return what a codec calls a message."""
        return MessageKey(key.phase, key.step, key.part, self._batch(key).samples)


def microbatches(recipe: Recipe) -> int:
    """Return how many micro-batches a step has: those of every round of the schedule."""
    return recipe.pipeline.microbatches * recipe.pipeline.accumulation


def number_in_record(recipe: Recipe, phase: Phase, step: int, microbatch: int) -> int:
    """Return the number that a micro-batch has in the record of its step or evaluation; `step`, as in its key.

    The two disagree in an evaluation, and must. To a codec each validation batch is a step of its own, so that what it
    remembers of a micro-batch is as old as it is in training; the key's step therefore goes on from batch to batch and
    from one evaluation to the next. A record is about the whole evaluation, so it counts the micro-batches of all its
    batches through.
    """
    if phase == "train":
        return microbatch
    return step % text_of(recipe).validation_batches * microbatches(recipe) + microbatch

"""The node of a pipeline stage: layers, kept activations, codecs with their state, an optimiser. It serves the program
of `jobs.pipeline` under every interpreter.

First, middle and last stages share one class: without `upstream` inputs are token ids, and without `downstream` outputs
go into the loss.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Hook
from testbed.codecs.wire.header import DevicePayload
from testbed.jobs.actions import Encoded, Key, Message
from testbed.jobs.recorder import Said
from testbed.message_key import MessageKey, Phase
from testbed.nodes.boundary import Boundary
from testbed.nodes.optimise import Optimiser, learning_rate
from testbed.runtime import failures
from testbed.runtime.gather import global_norm
from testbed.spec import Recipe, text_of
from testbed.workloads.data import Batch, Data
from testbed.workloads.stage_model import StageModel

_FP32_BYTES = 4


class Outgoing(NamedTuple):
    """The output of a forward or backward pass for the neighbour."""

    tensor: Tensor
    raw_values: int
    """Number of values that it represents: more than it holds if a codec in the model has reduced them."""


class _Kept(NamedTuple):
    """Tensors that a forward pass keeps for its backward pass."""

    source: Tensor
    """Input from upstream, or token ids: the leaf of the graph."""
    outputs: Tensor | None
    """Outputs with their graph; None if they are recomputed."""
    raw_values: int
    """Number of values of the incoming hidden states, as the model sees them."""


class _Through(NamedTuple):
    """The result of a pass through the layers."""

    outputs: Tensor
    """The output; at the last stage the loss."""
    values_in: int
    """Number of values of the incoming hidden states."""
    values_out: int
    """Number of values of the outgoing hidden states, before a codec in the model reduced them."""


class StageNode:
    """One stage: a `jobs.actions.Node`."""

    keeps = ("_model", "hooks", "_optimiser", "_upstream", "_downstream")

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
        # Before the optimiser, because codecs that change the model replace parameters.
        self._upper = None if upstream is None else upstream.hook(model)
        self._lower = None if downstream is None else downstream.hook(model)
        self.hooks: Sequence[Hook] = [hook for hook in (self._upper, self._lower) if hook is not None]
        """The codecs' parts of the model."""
        learned = itertools.chain(model.parameters(), *(hook.parameters() for hook in self.hooks))
        rowwise = {parameter: axis for hook in self.hooks for parameter, axis in hook.rowwise().items()}
        self._optimiser = Optimiser(dict.fromkeys(learned), recipe.optimiser, rowwise, model.by_token())
        self._batches: dict[int, Batch] = {}
        """Micro-batches of this step or evaluation, by their number in its record."""
        self._kept: dict[int, _Kept] = {}
        self._losses: list[float] = []
        self._said = Said()
        self.doing = "before its first step"
        """Current activity, for error messages."""

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute; StageError for a NaN or infinite loss or gradient.

        start: begin a step or evaluation. forward, backward: take a tensor, return an `Outgoing`. clip: returns the
        squared norms of this stage's gradients. update: takes those of all stages. loss: returns the mean of an
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

    def weights(self) -> dict[str, Tensor]:
        """Return the trained tensors, by name."""
        named = enumerate(parameter for hook in self.hooks for parameter in hook.parameters())
        return dict(self._model.state_dict()) | {f"codec.{number}": parameter for number, parameter in named}

    def said(self, step: int, phase: Phase) -> Said:
        """Return the record's part of the step or evaluation that has just ended."""
        return self._said

    def encode(self, key: Key, value: Outgoing) -> Encoded:
        """Return the payload for the neighbour. Raises the codec's CodecError."""
        boundary = self._downstream if key.what == "activation" else self._upstream
        assert boundary is not None
        payload, choice = boundary.encode(value.tensor, self._message_key(key))
        return Encoded(payload, raw_bytes=value.raw_values * _FP32_BYTES, choice=choice)

    def decode(self, messages: Sequence[Message]) -> Sequence[Tensor]:
        """Return the neighbour's tensors. Raises the codec's CodecError."""
        return [self._decode(message) for message in messages]

    def _decode(self, message: Message) -> Tensor:
        key, payload = message.key, message.payload
        boundary = self._upstream if key.what == "activation" else self._downstream
        assert boundary is not None
        assert isinstance(payload, memoryview | DevicePayload)
        return boundary.decode(payload, self._message_key(key))

    # ------------------------------------------------------------------ a step, an evaluation
    def _start(self, key: Key) -> None:
        """Fetch the data to train or evaluate on."""
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
            raise failures.diverged(self._name, "gradient norm", norm, self.doing)
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
        """Compute this stage's layers, with the codecs' hooks before and after them, and at the last stage the loss."""
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
            raise failures.diverged(self._name, "loss", loss, where)

    def _number(self, key: Key) -> int:
        return number_in_record(self._recipe, key.phase, key.step, key.part)

    def _batch(self, key: Key) -> Batch:
        return self._batches[self._number(key)]

    def _message_key(self, key: Key) -> MessageKey:
        """Return the key that a codec sees for a message."""
        return MessageKey(key.phase, key.step, key.part, self._batch(key).samples)


def microbatches(recipe: Recipe) -> int:
    """Return the number of micro-batches of a step, over all repetitions of the schedule."""
    return recipe.pipeline.microbatches * recipe.pipeline.accumulation


def number_in_record(recipe: Recipe, phase: Phase, step: int, microbatch: int) -> int:
    """Return a micro-batch's number in the record of its step or evaluation; `step` as in its key.

    Key and record differ in an evaluation. Codecs see each validation batch as a step, so that their state of a
    micro-batch is as old as in training; the key's step therefore advances with every batch, across evaluations. A
    record covers a whole evaluation, so it numbers the micro-batches of all its batches consecutively.
    """
    if phase == "train":
        return microbatch
    return step % text_of(recipe).validation_batches * microbatches(recipe) + microbatch

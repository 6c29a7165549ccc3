"""Forward and backward passes through one stage: the input from one neighbour, the maths, the output to the other.

There is no first, middle or last kind of stage: where `upstream` is None inputs are token ids, where `downstream` is None
outputs go into the loss.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from testbed.codecs.contract import Hook, MessageKey
from testbed.pipeline import faults
from testbed.pipeline.boundary import Boundary
from testbed.pipeline.job import StageJob
from testbed.pipeline.pacing import Kind, Watch
from testbed.pipeline.port import Place
from testbed.records import ActionRecord


class Model(Protocol):
    """A stage's share of a model (`workloads` makes it); a torch.nn.Module."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Token ids or hidden states in; hidden states or, at the last stage, logits out."""
        ...

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean over the tokens."""
        ...

    def draw(self, step: int, microbatch: int) -> None:
        """What the next forward pass is for: keys what it draws at random."""
        ...

    def parameters(self) -> Any: ...

    def train(self, mode: bool) -> Any: ...


class Batch(Protocol):
    """One micro-batch; every stage derives it from the seed, so it crosses no link."""

    @property
    def inputs(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def samples(self) -> tuple[int, ...]: ...


class Done(NamedTuple):
    """What the passes since the last time have come to."""

    actions: list[ActionRecord]
    loss: float | None
    """Mean over the micro-batches; None except at the last stage."""


class Ends(NamedTuple):
    """What codecs do to the hidden states at the stage's two ends; None where they do nothing, or there is no neighbour."""

    upstream: Hook | None
    downstream: Hook | None


class _Kept(NamedTuple):
    """What a forward pass leaves for its backward pass."""

    source: Tensor
    """What came from upstream, or token ids: where the graph begins."""
    outputs: Tensor | None
    """With their graph; None where they are computed again."""
    batch: Batch
    raw_values: int
    """Of the hidden states that came in, as the model knows them."""


class _Through(NamedTuple):
    """A pass through the layers."""

    outputs: Tensor
    """What goes on: the loss at the last stage."""
    values_in: int
    """Of the hidden states that came in."""
    values_out: int
    """Of those that go on, before a codec in the model made them fewer."""


class Passes:
    """One stage's passes. Owns nothing that must be closed."""

    def __init__(
        self,
        job: StageJob,
        *,
        model: Model,
        upstream: Boundary | None,
        downstream: Boundary | None,
        watch: Watch,
        ends: Ends,
    ) -> None:
        self._stage, self._recompute = job.stage, job.pipeline.recompute
        self._parts = job.pipeline.microbatches * job.pipeline.accumulation
        self._model, self._upstream, self._downstream, self._watch = model, upstream, downstream, watch
        self._ends = ends
        self._kept: dict[int, _Kept] = {}
        self._losses: list[float] = []
        self._records: list[ActionRecord] = []

    def forward(self, batch: Batch, key: MessageKey, place: Place | None = None) -> None:
        """One micro-batch through the stage. StageError for a loss that is no number.

        `place`, where it is not the message key's, is what the records call it.
        """
        training = key.phase == "train"
        place = place or _place(key)
        self._watch.ask()
        source = batch.inputs
        if self._upstream is not None:
            source = self._take(self._upstream, key, place).requires_grad_(training)
        self._watch.begin("F")
        with torch.set_grad_enabled(training and not self._recompute):
            outputs, values_in, values_out = self._through(source, batch, key)
        if self._downstream is None:
            self._losses.append(loss := outputs.item())
            if not math.isfinite(loss):
                raise faults.diverged(
                    self._stage, "loss", loss, f"{place.phase} step {place.step}, micro-batch {place.microbatch}"
                )
        if training:
            self._kept[key.microbatch] = _Kept(source, None if self._recompute else outputs, batch, values_in)
        self._watch.done()
        self._finish("F", key, place, self._downstream, outputs.detach(), values_out)

    def backward(self, key: MessageKey) -> None:
        """The gradient of one micro-batch back through the stage."""
        source, outputs, batch, raw_values = self._kept.pop(key.microbatch)
        self._watch.ask()
        place = _place(key)
        gradient = None if self._downstream is None else self._take(self._downstream, key, place)
        self._watch.begin("B")
        if outputs is None:
            outputs = self._through(source, batch, key).outputs
        if self._downstream is None:
            outputs = outputs / self._parts
        outputs.backward(gradient)  # type: ignore[no-untyped-call]
        self._watch.done()
        self._finish("B", key, place, self._upstream, source.grad, raw_values)

    def take(self) -> Done:
        """What there is to record since the last call."""
        loss = math.fsum(self._losses) / len(self._losses) if self._losses else None
        done = Done(self._records, loss)
        self._losses, self._records = [], []
        return done

    def _take(self, source: Boundary, key: MessageKey, place: Place) -> Tensor:
        tensor, *times_ns = source.receive(key, place)
        self._watch.received(*times_ns)
        return tensor

    def _through(self, source: Tensor, batch: Batch, key: MessageKey) -> _Through:
        """This stage's layers, with what codecs do before and after them, and at the last stage the loss."""
        if key.phase == "train":
            self._model.draw(key.step, key.microbatch)
        hidden = source if self._ends.upstream is None else self._ends.upstream.receive(source, batch.inputs)
        outputs = self._model(hidden)
        values = outputs.numel()
        if self._downstream is None:
            outputs = self._model.loss(outputs, batch.targets)
        elif self._ends.downstream is not None:
            outputs = self._ends.downstream.send(outputs, batch.inputs)
        return _Through(outputs, hidden.numel(), values)

    def _finish(
        self, kind: Kind, key: MessageKey, place: Place, target: Boundary | None, output: Tensor | None, raw_values: int
    ) -> None:
        encoded_ns = None
        if target is not None:
            assert output is not None
            encoded_ns = target.send(output, key, place, self._watch.encoded, raw_values)
        self._records.append(self._watch.record(kind, place.microbatch, encoded_ns))


def _place(key: MessageKey) -> Place:
    return Place(key.phase, key.step, key.microbatch)

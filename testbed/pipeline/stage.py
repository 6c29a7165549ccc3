"""One stage of the model at work: it obeys the schedule's actions, step after step, and records when and what.

There is no first, middle or last kind of stage: where `upstream` is None inputs are token ids, where `downstream` is None
outputs go into the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from testbed.codecs.base import Slot
from testbed.counters import DeviceCounters
from testbed.errors import StageError
from testbed.pipeline.boundary import Boundary
from testbed.pipeline.control import Evaluated, Step
from testbed.pipeline.gather import Gather, global_norm
from testbed.pipeline.job import StageJob
from testbed.pipeline.optimise import Optimiser
from testbed.pipeline.schedule import Action, actions
from testbed.records import ActionRecord, CountersRecord, Phase, SocketRecord, StepRecord


class Model(Protocol):
    """A stage's share of a model (`workloads` makes it); a torch.nn.Module."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Token ids or hidden states in; hidden states or, at the last stage, logits out."""
        ...

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean over the tokens."""
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


class Data(Protocol):
    """The text, cut into batches in an order that the seed decides."""

    def train(self, step: int, microbatch: int, microbatches: int) -> Batch: ...
    def validation(self, index: int, microbatch: int, microbatches: int) -> Batch: ...


class _Snapshot(NamedTuple):
    counters: CountersRecord | None
    sockets: tuple[SocketRecord, ...]


class _Kept(NamedTuple):
    """What a forward action leaves for its backward action."""

    inputs: Tensor
    outputs: Tensor | None
    """With their graph; None where they are computed again."""
    targets: Tensor


class Stage:
    """The training loop of one stage. Owns nothing that must be closed."""

    def __init__(
        self,
        job: StageJob,
        *,
        model: Model,
        data: Data,
        upstream: Boundary | None,
        downstream: Boundary | None,
        gather: Gather,
        counters: DeviceCounters | None,
        report: Callable[[Step | Evaluated], None],
    ) -> None:
        """`report` is told of progress; only the last stage, which knows the loss, has any to tell."""
        self._job, self._model, self._data = job, model, data
        self._upstream, self._downstream = upstream, downstream
        self._gather, self._counters, self._report = gather, counters, report
        self._optimiser = Optimiser(model.parameters(), job.optimiser)
        spec = job.pipeline
        self._microbatches = spec.microbatches
        self._schedule = actions(
            spec.schedule, stage=job.stage, stages=spec.stages, microbatches=spec.microbatches, in_flight=spec.in_flight
        )
        self._kept: dict[int, _Kept] = {}
        self._losses: list[float] = []
        self._records: list[ActionRecord] = []

    def run(self, steps: IO[str]) -> None:
        """Train and evaluate as the job says, one JSON line a step or evaluation into `steps`.

        StageError for a loss or gradient that is no number; TransportError, CodecError as they come.
        """
        training = self._job.training
        for step in range(training.steps):
            self._write(steps, self._train(step))
            done = step + 1
            if done == training.steps or (training.evaluate_every and done % training.evaluate_every == 0):
                self._write(steps, self._evaluate(done))

    # -------------------------------------------------------------- a step, an evaluation
    def _train(self, step: int) -> StepRecord:
        start_ns = time.monotonic_ns()
        self._model.train(True)
        batches = [self._data.train(step, m, self._microbatches) for m in range(self._microbatches)]
        for action in self._schedule:
            batch = batches[action.microbatch]
            slot = Slot("train", step, action.microbatch, batch.samples)
            self._forward(action, batch, slot) if action.kind == "F" else self._backward(action, slot)
        optimiser_start_ns = time.monotonic_ns()
        norm = global_norm(self._gather.exchange(self._optimiser.squares()))
        synchronised_ns = time.monotonic_ns()
        snapshot = self._snapshot()  # here, because afterwards the other stages' next step is on the links already
        if not math.isfinite(norm):
            raise StageError(f"stage {self._job.stage}: the gradient norm is {norm} at step {step}: training has diverged")
        self._optimiser.update(norm)
        return self._record(step, "train", snapshot, start_ns, self._microbatches, optimiser_start_ns, synchronised_ns, norm)

    def _evaluate(self, step: int) -> StepRecord:
        start_ns = time.monotonic_ns()
        self._model.train(False)
        count = self._job.workload.validation_batches * self._microbatches
        with torch.no_grad():
            for index in range(count):
                batch = self._data.validation(*divmod(index, self._microbatches), self._microbatches)
                self._forward(Action("F", index), batch, Slot("evaluation", step, index, batch.samples))
        self._kept.clear()
        self._gather.exchange([])
        return self._record(step, "evaluation", self._snapshot(), start_ns, count)

    # -------------------------------------------------------------- actions
    def _forward(self, action: Action, batch: Batch, slot: Slot) -> None:
        asked_ns = input_ns = decoded_ns = time.monotonic_ns()
        inputs = batch.inputs
        if self._upstream is not None:
            inputs, asked_ns, input_ns, decoded_ns = self._upstream.receive(slot)
            inputs.requires_grad_(slot.phase == "train")
        recompute = self._job.pipeline.recompute
        with torch.set_grad_enabled(torch.is_grad_enabled() and not recompute):
            outputs = self._through(inputs, batch.targets)
        if self._downstream is None:
            self._losses.append(outputs.item())
            if not math.isfinite(self._losses[-1]):
                where = f"{slot.phase} step {slot.step}, micro-batch {slot.microbatch}"
                raise StageError(f"stage {self._job.stage}: the loss is {self._losses[-1]} at {where}: training has diverged")
        if slot.phase == "train":
            self._kept[action.microbatch] = _Kept(inputs, None if recompute else outputs, batch.targets)
        computed_ns = encoded_ns = time.monotonic_ns()
        if self._downstream is not None:
            encoded_ns = self._downstream.send(outputs.detach(), slot)
        self._note(action, asked_ns, input_ns, decoded_ns, computed_ns, encoded_ns)

    def _backward(self, action: Action, slot: Slot) -> None:
        asked_ns = input_ns = decoded_ns = time.monotonic_ns()
        inputs, outputs, targets = self._kept.pop(action.microbatch)
        gradient = None
        if self._downstream is not None:
            gradient, asked_ns, input_ns, decoded_ns = self._downstream.receive(slot)
        if outputs is None:
            outputs = self._through(inputs, targets)
        if self._downstream is None:
            outputs = outputs / self._microbatches
        outputs.backward(gradient)  # type: ignore[no-untyped-call]
        computed_ns = encoded_ns = time.monotonic_ns()
        if self._upstream is not None:
            assert inputs.grad is not None
            encoded_ns = self._upstream.send(inputs.grad, slot)
        self._note(action, asked_ns, input_ns, decoded_ns, computed_ns, encoded_ns)

    def _through(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """This stage's layers, and at the last stage the loss."""
        outputs = self._model(inputs)
        return outputs if self._downstream is not None else self._model.loss(outputs, targets)

    # -------------------------------------------------------------- records
    def _note(self, action: Action, *times_ns: int) -> None:
        names = ("asked_ns", "input_ns", "decoded_ns", "computed_ns", "encoded_ns")
        record = dict(zip(names, times_ns, strict=True))
        self._records.append(ActionRecord(kind=action.kind, microbatch=action.microbatch, **record))

    def _boundaries(self) -> Sequence[Boundary]:
        return [boundary for boundary in (self._upstream, self._downstream) if boundary is not None]

    def _snapshot(self) -> _Snapshot:
        counters = self._counters.read() if self._counters is not None else None
        return _Snapshot(counters, tuple(boundary.socket_record() for boundary in self._boundaries()))

    def _record(
        self,
        step: int,
        phase: Phase,
        snapshot: _Snapshot,
        start_ns: int,
        microbatches: int,
        optimiser_start_ns: int | None = None,
        synchronised_ns: int | None = None,
        norm: float | None = None,
    ) -> StepRecord:
        end_ns = time.monotonic_ns()
        frames = [boundary.records() for boundary in self._boundaries()]
        loss = math.fsum(self._losses) / len(self._losses) if self._losses else None
        samples = self._job.workload.batch_size // self._microbatches
        record = StepRecord(
            step=step,
            phase=phase,
            warmup=phase == "train" and step < self._job.training.warmup_steps,
            start_ns=start_ns,
            end_ns=end_ns,
            optimiser_start_ns=optimiser_start_ns,
            synchronised_ns=synchronised_ns,
            loss=loss,
            gradient_norm=norm,
            tokens=microbatches * samples * self._job.workload.sequence_length,
            actions=tuple(self._records),
            sent=tuple(record for sent, _ in frames for record in sent),
            received=tuple(record for _, received in frames for record in received),
            counters=snapshot.counters,
            sockets=snapshot.sockets,
        )
        self._losses, self._records = [], []
        return record

    def _write(self, steps: IO[str], record: StepRecord) -> None:
        """A whole line at a time, so that after a crash only the last can be cut off."""
        steps.write(record.model_dump_json() + "\n")
        steps.flush()
        if record.loss is None:
            return
        seconds = (record.end_ns - record.start_ns) / 1e9
        if record.phase == "train":
            self._report(Step(step=record.step, loss=record.loss, seconds=seconds, tokens=record.tokens))
        else:
            self._report(Evaluated(step=record.step, loss=record.loss, seconds=seconds))

"""Train one stage of a model. A step reads top to bottom: for each action wait, decode, compute, encode, send; then
meet and update.

`train_job` sets a job up and takes it down; `StageTrainer` is the loop. There is no first, middle or last kind of
stage: where `upstream` is None inputs are token ids, and where `downstream` is None outputs go into the loss. A tensor
goes from here through its `Boundary`, which encodes it, to the `Connection`, which sends it.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from testbed.codecs.contract import Hook
from testbed.codecs.make import make
from testbed.errors import StageError
from testbed.jobs.schedule import actions
from testbed.message_key import MessageKey, Phase
from testbed.pipeline import faults
from testbed.pipeline.boundary import Boundary
from testbed.pipeline.control import Ended, EvaluationDone, StepDone
from testbed.pipeline.gather import Gather, Met, Stops
from testbed.pipeline.job import StageJob, StageWork
from testbed.pipeline.optimise import Optimiser, learning_rate
from testbed.pipeline.pacing import Stopwatch, stopwatch_for
from testbed.pipeline.step_log import StepLog, number_in_record
from testbed.pipeline.transport import Connection
from testbed.pipeline.wiring import Wiring
from testbed.records import ActionRecord
from testbed.workloads.build import build_stage
from testbed.workloads.data import Batch, Data
from testbed.workloads.stage_model import StageModel


class _Kept(NamedTuple):
    """What a forward pass leaves for its backward pass."""

    source: Tensor
    """What came from upstream, or token ids: where the graph begins."""
    outputs: Tensor | None
    """With their graph; None where they are computed again."""
    batch: Batch
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


class StageTrainer:
    """The training loop of one stage. Owns nothing that must be closed."""

    def __init__(
        self,
        job: StageWork,
        *,
        model: StageModel,
        data: Data,
        upstream: Boundary | None,
        downstream: Boundary | None,
        gather: Gather,
        log: StepLog,
        watch: Stopwatch,
        asked: Callable[[], bool],
    ) -> None:
        """`watch` takes the times; `asked` says whether the job is to finish before its time."""
        self._job, self._model, self._data = job, model, data
        self._upstream, self._downstream = upstream, downstream
        self._gather, self._log, self._watch, self._asked = gather, log, watch, asked
        # Before the optimiser, because codecs that change the model put other parameters into it.
        self._upper = None if upstream is None else upstream.hook(model)
        self._lower = None if downstream is None else downstream.hook(model)
        self._hooks: list[Hook] = [hook for hook in (self._upper, self._lower) if hook is not None]
        learned = itertools.chain(model.parameters(), *(hook.parameters() for hook in self._hooks))
        rowwise = {parameter: axis for hook in self._hooks for parameter, axis in hook.rowwise().items()}
        self._optimiser = Optimiser(dict.fromkeys(learned), job.optimiser, rowwise)
        self._schedule = actions(
            job.pipeline.schedule,
            stage=job.stage,
            stages=job.pipeline.stages,
            microbatches=job.pipeline.microbatches,
            in_flight=job.pipeline.in_flight,
            accumulation=job.pipeline.accumulation,
        )
        self._kept: dict[int, _Kept] = {}
        self._actions: list[ActionRecord] = []
        self._losses: list[float] = []
        self._evaluated: dict[Phase, int] = {"evaluation": 0, "uncompressed": 0}
        """Batches so far."""
        self._left_ns = 0
        self.doing = "before its first step"
        """For messages."""

    @property
    def has_hooks(self) -> bool:
        """Whether a codec has a part in this stage's model."""
        return bool(self._hooks)

    def train(self) -> Ended:
        """Train and evaluate as the job says; returns why training ended, the same at all stages.

        StageError for a loss or gradient that is NaN or infinite; TransportError, CodecError as they come.
        """
        training = self._job.training
        self._left_ns = self._watch.start()
        met = self._gather.meet(self._left_ns, left_ns=self._left_ns)
        self._watch.synchronised(met.line_ns)
        stops = Stops(training, dilation=self._job.compute.dilation, start_ns=met.line_ns)
        for step in range(training.steps):
            ended = stops.after_step(step + 1, self._step(step))
            if ended != "asked" and (ended or stops.evaluation_due(step + 1)):
                reached = stops.after_evaluation(self._evaluate(step + 1, "evaluation"))
                if training.evaluate_uncompressed and reached != "asked":
                    reached = stops.after_evaluation(self._evaluate(step + 1, "uncompressed")) or reached
                ended = "target" if reached == "target" else ended or reached
            if ended:
                return ended
        raise AssertionError("the last step ends training")

    # ------------------------------------------------------------------ one step, one evaluation
    def _step(self, step: int) -> Met:
        """Go through the schedule, meet the other stages, and update the weights."""
        self.doing = f"at train step {step}"
        start_ns = self._watch.start()
        self._model.train(True)
        parts = self._job.microbatches
        for hook in self._hooks:
            hook.begin(step, parts)
        batches = [self._data.train(step, part, parts) for part in range(parts)]

        for kind, part in self._schedule:
            key = MessageKey("train", step, part, batches[part].samples)
            if kind == "F":
                self._forward(key, batches[part])
            else:
                self._backward(key)

        met = self._meet(squares=self._optimiser.squares)
        if not math.isfinite(met.norm):
            raise faults.diverged(f"stage {self._job.stage}", "gradient norm", met.norm, self.doing)

        rate = learning_rate(self._job.optimiser, step, self._job.training.steps)
        self._optimiser.update(met.norm, rate)
        for hook in self._hooks:
            hook.after_step(step, rate)
        self._left_ns = self._watch.leave(update=True)
        self._write(step, "train", start_ns, self._loss(), batches=1, gradient_norm=met.norm, learning_rate=rate)
        return met

    def _evaluate(self, step: int, phase: Phase) -> Met:
        """Put the validation batches through the stages, and meet."""
        self.doing = f"at {phase} step {step}"
        start_ns = self._watch.start()
        self._model.train(False)
        parts, batches = self._job.microbatches, self._job.workload.validation_batches
        for number, part in itertools.product(range(batches), range(parts)):
            batch = self._data.validation(number, part, parts)
            # To a codec each batch is a step (see `number_in_record`).
            self._forward(MessageKey(phase, self._evaluated[phase] + number, part, batch.samples), batch)
        self._evaluated[phase] += batches
        loss = self._loss()
        met = self._meet(loss=loss if phase == "evaluation" else None)
        self._left_ns = self._watch.leave(update=False)
        self._write(step, phase, start_ns, loss, batches=batches)
        return met

    # ------------------------------------------------------------------ one action
    def _forward(self, key: MessageKey, batch: Batch) -> None:
        """Take one micro-batch through the stage: wait, decode, compute, encode, send."""
        training = key.phase == "train"
        self._watch.ask("F", number_in_record(key, self._job))
        source = batch.inputs
        if self._upstream is not None:
            source = self._upstream.receive(key, self._watch).requires_grad_(training)

        self._watch.begin()
        with torch.set_grad_enabled(training and not self._job.pipeline.recompute):
            outputs, values_in, values_out = self._through(source, batch, key)
        if self._downstream is None:
            self._note_loss(outputs.item(), key)
        if training:
            self._kept[key.microbatch] = _Kept(
                source, None if self._job.pipeline.recompute else outputs, batch, values_in
            )
        self._watch.done()

        if self._downstream is not None:
            self._downstream.send(outputs.detach(), key, self._watch, raw_values=values_out)
        self._actions.append(self._watch.record())

    def _backward(self, key: MessageKey) -> None:
        """Take the gradient of one micro-batch back through the stage: wait, decode, compute, encode, send."""
        source, outputs, batch, raw_values = self._kept.pop(key.microbatch)
        self._watch.ask("B", number_in_record(key, self._job))
        gradient = None if self._downstream is None else self._downstream.receive(key, self._watch)

        self._watch.begin()
        if outputs is None:
            outputs = self._through(source, batch, key).outputs
        if self._downstream is None:
            outputs = outputs / self._job.microbatches
        outputs.backward(gradient)  # type: ignore[no-untyped-call]
        self._watch.done()

        if self._upstream is not None:
            assert source.grad is not None
            self._upstream.send(source.grad, key, self._watch, raw_values=raw_values)
        self._actions.append(self._watch.record())

    def _through(self, source: Tensor, batch: Batch, key: MessageKey) -> _Through:
        """Compute this stage's layers, with what codecs do before and after them, and at the last stage the loss."""
        if key.phase == "train":
            self._model.draw(key.step, key.microbatch)
        hidden = source if self._upper is None else self._upper.receive(source, batch.inputs)
        outputs = self._model(hidden)
        values = outputs.numel()
        if self._downstream is None:
            outputs = self._model.loss(outputs, batch.targets)
        elif self._lower is not None:
            outputs = self._lower.send(outputs, batch.inputs)
        return _Through(outputs, hidden.numel(), values)

    # ------------------------------------------------------------------ what is told and written down
    def _meet(self, *, loss: float | None = None, squares: Callable[[], list[float]] = list) -> Met:
        """End the actions, and hear what all stages know then."""
        actions_end_ns, line_ns = self._watch.end()
        met = self._gather.meet(line_ns, left_ns=self._left_ns, asked=self._asked(), loss=loss, squares=squares())
        self._log.met(actions_end_ns, self._watch.synchronised(met.line_ns))
        return met

    def _note_loss(self, loss: float, key: MessageKey) -> None:
        self._losses.append(loss)
        if not math.isfinite(loss):
            where = f"{self.doing}, micro-batch {number_in_record(key, self._job)}"
            raise faults.diverged(f"stage {self._job.stage}", "loss", loss, where)

    def _loss(self) -> float | None:
        """Return the mean over the micro-batches since the last call; None except at the last stage."""
        losses, self._losses = self._losses, []
        return math.fsum(losses) / len(losses) if losses else None

    def _write(
        self,
        step: int,
        phase: Phase,
        start_ns: int,
        loss: float | None,
        *,
        batches: int,
        gradient_norm: float | None = None,
        learning_rate: float | None = None,
    ) -> None:
        workload, done, self._actions = self._job.workload, self._actions, []
        self._log.write(
            step,
            phase,
            start_ns=start_ns,
            end_ns=self._left_ns,
            actions=done,
            loss=loss,
            tokens=batches * workload.batch_size * workload.sequence_length,
            gradient_norm=gradient_norm,
            learning_rate=learning_rate,
        )


# ---------------------------------------------------------------------- a job from end to end
def train_job(
    job: StageJob,
    sockets: Sequence[socket.socket],
    report: Callable[[StepDone | EvaluationDone], None],
    asked: Callable[[], bool],
) -> Ended:
    """Set torch up, build the stage, connect it to its neighbours, train, and take leave in order; returns why training
    ended.

    `sockets` are those of the job's `Gather`; they are closed at the end. `asked` says whether the job is to finish
    before its time. StageError, with advice, where memory does not suffice.
    """
    set_up_torch()
    trainer: StageTrainer | None = None
    try:
        with Wiring(job, sockets) as wiring:
            model = build_stage(
                job.workload,
                stage=job.stage,
                stages=job.pipeline.stages,
                seed=job.training.seed,
                vocabulary=job.vocabulary,
                layers=job.pipeline.layers,
            )
            data = Data(np.load(job.tokens, mmap_mode="r"), job.workload, job.training.seed)
            wiring.connect()
            with (Path(job.folder) / f"steps-{job.stage}.jsonl").open("x", encoding="utf8") as steps:
                trainer = StageTrainer(
                    job,
                    model=model,
                    data=data,
                    upstream=_boundary(job, wiring.upstream, job.stage - 1),
                    downstream=_boundary(job, wiring.downstream, job.stage),
                    gather=wiring.gather,
                    log=StepLog(job, steps, connections=wiring.connections, counters=wiring.counters, report=report),
                    watch=stopwatch_for(job.compute, job.stage),
                    asked=asked,
                )
                ended = trainer.train()
            wiring.leave()
        return ended
    except (MemoryError, RuntimeError, OSError) as error:
        explain_memory(job.stage, trainer, error)
        raise


def explain_memory(stage: int, trainer: StageTrainer | None, error: Exception) -> None:
    """Raise the StageError, with advice, for an exception that means that memory could not be had; no other.

    `trainer` is None while the stage's model is built.
    """
    if faults.is_out_of_memory(error):
        where = "while its model was built" if trainer is None else trainer.doing
        raise faults.out_of_memory(f"stage {stage}", where, error) from error


def set_up_torch() -> None:
    """Have torch use one thread and deterministic kernels. StageError when the environment or torch says otherwise."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "torch threads": torch.get_num_threads()}
    if threads != {"OMP_NUM_THREADS": "1", "torch threads": 1}:
        raise StageError(f"a stage works with one thread: set OMP_NUM_THREADS=1 before it starts; found {threads}")


def _boundary(job: StageJob, connection: Connection | None, index: int) -> Boundary | None:
    """Put codecs on a connection; None where there is no neighbour. `index` counts boundaries."""
    if connection is None:
        return None
    return Boundary(
        connection,
        index=index,
        seed=job.training.seed,
        make=partial(make, job.codec),
        timeout_s=job.limits.message_s,
    )

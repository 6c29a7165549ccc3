"""One stage of the model at work: it obeys the schedule's actions, step after step, and writes down when and what."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Protocol

from testbed.codecs.contract import MessageKey
from testbed.message_key import Phase
from testbed.pipeline import faults
from testbed.pipeline.boundary import Boundary
from testbed.pipeline.control import Ended
from testbed.pipeline.gather import Gather, Met
from testbed.pipeline.job import StageJob
from testbed.pipeline.optimise import Optimiser, learning_rate
from testbed.pipeline.pacing import Watch
from testbed.pipeline.passes import Batch, Ends, Model, Passes
from testbed.pipeline.port import Place
from testbed.pipeline.recorder import Recorder
from testbed.pipeline.schedule import actions
from testbed.pipeline.stops import Stops


class Data(Protocol):
    """The text, cut into batches in an order that the seed decides."""

    def train(self, step: int, microbatch: int, microbatches: int) -> Batch: ...
    def validation(self, index: int, microbatch: int, microbatches: int) -> Batch: ...


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
        recorder: Recorder,
        watch: Watch,
        asked: Callable[[], bool],
    ) -> None:
        """`watch` takes the times; `asked` says whether the job is to finish."""
        self._job, self._model, self._data = job, model, data
        self._gather, self._recorder, self._watch, self._asked = gather, recorder, watch, asked
        # Before the optimiser, because codecs that change the model put other parameters into it.
        ends = Ends(*(None if boundary is None else boundary.hook(model) for boundary in (upstream, downstream)))
        self._hooks = [hook for hook in ends if hook is not None]
        self._passes = Passes(job, model=model, upstream=upstream, downstream=downstream, watch=watch, ends=ends)
        learned = itertools.chain(model.parameters(), *(hook.parameters() for hook in self._hooks))
        rowwise = {parameter: axis for hook in self._hooks for parameter, axis in hook.rowwise().items()}
        self._optimiser = Optimiser(dict.fromkeys(learned), job.optimiser, rowwise)
        spec = job.pipeline
        self._parts = spec.microbatches * spec.accumulation
        self._schedule = actions(
            spec.schedule,
            stage=job.stage,
            stages=spec.stages,
            microbatches=spec.microbatches,
            in_flight=spec.in_flight,
            accumulation=spec.accumulation,
        )
        self._validated: dict[Phase, int] = {"evaluation": 0, "uncompressed": 0}
        """Batches so far."""
        self._left_ns = 0
        self.doing = "before its first step"
        """For messages."""

    def run(self) -> Ended:
        """Train and evaluate as the job says; returns why training ended, the same at all stages.

        StageError for a loss or gradient that is no number; TransportError, CodecError as they come.
        """
        training = self._job.training
        self._left_ns = self._watch.start()
        met = self._gather.meet(self._left_ns, left_ns=self._left_ns)
        self._watch.synchronised(met.line_ns)
        stops = Stops(training, dilation=self._job.compute.dilation, start_ns=met.line_ns)
        for step in range(training.steps):
            ended = stops.after_step(step + 1, self._train(step))
            if ended != "asked" and (ended or stops.evaluation_due(step + 1)):
                reached = stops.after_evaluation(self._evaluate(step + 1, "evaluation"))
                if training.evaluate_uncompressed and reached != "asked":
                    reached = stops.after_evaluation(self._evaluate(step + 1, "uncompressed")) or reached
                ended = "target" if reached == "target" else ended or reached
            if ended:
                return ended
        raise AssertionError("the last step ends training")

    def _train(self, step: int) -> Met:
        self.doing = f"at train step {step}"
        start_ns = self._watch.start()
        self._model.train(True)
        for hook in self._hooks:
            hook.begin(step, self._parts)
        batches = [self._data.train(step, part, self._parts) for part in range(self._parts)]
        for kind, part in self._schedule:
            key = MessageKey("train", step, part, batches[part].samples)
            self._passes.forward(batches[part], key) if kind == "F" else self._passes.backward(key)
        optimiser_start_ns, met = self._meet(squares=self._optimiser.squares)
        synchronised_ns = self._watch.synchronised(met.line_ns)
        snapshot = (
            self._recorder.snapshot()
        )  # here, because afterwards the other stages' next step is on the links already
        if not math.isfinite(met.norm):
            raise faults.diverged(self._job.stage, "gradient norm", met.norm, f"train step {step}")
        rate = learning_rate(self._job.optimiser, step, self._job.training.steps)
        self._optimiser.update(met.norm, rate)
        for hook in self._hooks:
            hook.after_step(step, rate)
        self._left_ns = self._watch.leave(update=True)
        done = self._passes.take()
        self._recorder.write(
            step,
            "train",
            start_ns=start_ns,
            end_ns=self._left_ns,
            snapshot=snapshot,
            actions=done.actions,
            loss=done.loss,
            tokens=self._tokens(batches=1),
            optimiser_start_ns=optimiser_start_ns,
            synchronised_ns=synchronised_ns,
            gradient_norm=met.norm,
            learning_rate=rate,
        )
        return met

    def _evaluate(self, step: int, phase: Phase) -> Met:
        self.doing = f"at {phase} step {step}"
        start_ns = self._watch.start()
        self._model.train(False)
        batches = self._job.workload.validation_batches
        for index in range(batches * self._parts):
            number, part = divmod(index, self._parts)
            batch = self._data.validation(number, part, self._parts)
            # To a codec each batch is a step, so that what it remembers is of other text, as it is in training.
            key = MessageKey(phase, self._validated[phase] + number, part, batch.samples)
            self._passes.forward(batch, key, Place(phase, step, index))
        self._validated[phase] += batches
        done = self._passes.take()
        _, met = self._meet(loss=done.loss if phase == "evaluation" else None)
        self._watch.synchronised(met.line_ns)
        snapshot = self._recorder.snapshot()
        self._left_ns = self._watch.leave(update=False)
        self._recorder.write(
            step,
            phase,
            start_ns=start_ns,
            end_ns=self._left_ns,
            snapshot=snapshot,
            actions=done.actions,
            loss=done.loss,
            tokens=self._tokens(batches=batches),
        )
        return met

    def _meet(self, *, loss: float | None = None, squares: Callable[[], list[float]] = list) -> tuple[int, Met]:
        """After the last action: when this stage was done, and what all stages know then."""
        done_ns, line_ns = self._watch.end()
        met = self._gather.meet(line_ns, left_ns=self._left_ns, asked=self._asked(), loss=loss, squares=squares())
        return done_ns, met

    def _tokens(self, *, batches: int) -> int:
        return batches * self._job.workload.batch_size * self._job.workload.sequence_length

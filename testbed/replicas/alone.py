"""Train all workers of a recipe in one process, without a network: `python -m testbed.replicas.alone JOB.json`.

Without a network a step's messages are there as soon as they are computed, so workers take turns in lockstep, and
staleness only says how many steps later each applies what came. What crosses is bytes: every receiver decodes them with
codecs of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import IO

from testbed.pipeline import alone, faults
from testbed.pipeline.alone import AloneJob, Report
from testbed.pipeline.control import Ended, EvaluationDone, StepDone
from testbed.pipeline.frame import HEADER_BYTES
from testbed.pipeline.optimise import learning_rate
from testbed.records import ActionKind, ActionRecord, ReceivedRecord, SentRecord, StepRecord, TrainingRecord
from testbed.replicas.decision import Policy, as_stated
from testbed.replicas.exchange import Frame, make_exchange
from testbed.replicas.learners import learner_of
from testbed.replicas.worker import Computed, Learner, Worker
from testbed.spec import Recipe
from testbed.workloads.models import validation_tokens


class Replicas:
    """All workers of a recipe, and a star's server."""

    def __init__(
        self,
        recipe: Recipe,
        learner: Callable[[int], Learner],
        outputs: Sequence[IO[str]],
        *,
        report: Report = lambda message: None,
        policy: Policy = lambda step: None,
    ) -> None:
        """`learner` makes what a worker learns; records go to `outputs`, by node; `policy` may change the recipe's
        numbers while training lasts.
        """
        assert recipe.data is not None
        self._recipe, self._data, self._outputs, self._report = recipe, recipe.data, outputs, report
        self.workers = [
            Worker(
                number,
                learner(number),
                optimiser=recipe.optimiser,
                outer=self._data.outer,
                steps=recipe.training.steps,
                streaming=self._data.streaming,
            )
            for number in range(self._data.workers)
        ]
        self._weights = self._data.weights
        self._now, self._policy = as_stated(recipe), policy
        shapes = [tuple(parameter.shape) for parameter in self.workers[0].parameters]
        self._exchange = make_exchange(recipe, shapes, self._now.codecs)
        self._frames: dict[int, list[Frame]] = {}
        """Of the steps whose aggregates not all workers have applied."""

    def train(self) -> Ended:
        """Train and evaluate as the recipe says; returns why training ended. StageError, CodecError as they come."""
        training = self._recipe.training
        self._decide(0)
        for step in range(training.steps):
            self._step(step, last=step + 1 == training.steps)
            due = training.evaluate_every and (step + 1) % training.evaluate_every == 0
            if due or step + 1 == training.steps:
                loss = self._evaluate(step + 1)
                if training.target_loss is not None and loss <= training.target_loss:
                    return "target"
        return "steps"

    def _decide(self, step: int) -> None:
        """Let the policy change what holds from a step on."""
        if (decision := self._policy(step)) is not None:
            assert decision.effective_from == step
            self._now = decision
            self._exchange.change(decision.codecs)

    def _step(self, step: int, *, last: bool) -> None:
        start_ns, now = time.monotonic_ns(), self._now
        computed = [
            worker.compute(step, staleness=stale, local_steps=batches)
            for worker, stale, batches in zip(self.workers, now.staleness, now.local_steps, strict=True)
        ]
        computed_ns = time.monotonic_ns()
        exchanged = self._exchange.step(step, [each.tensors for each in computed])
        exchanged_ns = time.monotonic_ns()
        for worker, aggregate in zip(self.workers, exchanged.aggregates, strict=True):
            worker.receive(aggregate)
        self._frames[step] = exchanged.frames
        if not last:
            self._decide(step + 1)
        applied = [
            worker.apply_until(step + 1 if last else step + 1 - stale)
            for worker, stale in zip(self.workers, self._now.staleness, strict=True)
        ]
        self._write(step, computed, now.local_steps, applied, (start_ns, computed_ns, exchanged_ns))
        for done in range(min(worker.applied for worker in self.workers)):
            self._frames.pop(done, None)

    def _evaluate(self, step: int) -> float:
        """Evaluate the last worker's replica with all that is under way applied, and go on as if nobody had."""
        start_ns, worker = time.monotonic_ns(), self.workers[-1]
        with worker.looking_ahead():
            loss, accuracy = worker.evaluate()
        if not math.isfinite(loss):
            raise faults.diverged(worker.name, "validation loss", loss, f"after {step} steps")
        end_ns = time.monotonic_ns()
        last = len(self._outputs) - 1
        for node, output in enumerate(self._outputs):
            record = StepRecord(
                step=step,
                phase="evaluation",
                warmup=False,
                start_ns=start_ns,
                end_ns=end_ns,
                optimiser_start_ns=None,
                synchronised_ns=None,
                loss=loss if node == last else None,
                accuracy=accuracy if node == last else None,
                gradient_norm=None,
                tokens=validation_tokens(self._recipe.workload),
                actions=(),
                sent=(),
                received=(),
                counters=None,
                sockets=(),
            )
            output.write(record.model_dump_json() + "\n")
        seconds = (end_ns - start_ns) / 1e9
        self._report(EvaluationDone(step=step, loss=loss, accuracy=accuracy, seconds=seconds))
        return loss

    # ------------------------------------------------------------------ records
    def _write(
        self,
        step: int,
        computed: Sequence[Computed],
        local_steps: Sequence[int],
        applied: Sequence[Sequence[int]],
        moments: tuple[int, int, int],
    ) -> None:
        """Record a step at every node: what it computed and sent, and what it then had of which step."""
        start_ns, computed_ns, exchanged_ns = moments
        end_ns = time.monotonic_ns()
        loss = math.fsum(weight * each.loss for weight, each in zip(self._weights, computed, strict=True))
        workload, training = self._recipe.workload, self._recipe.training
        rate = learning_rate(self._recipe.optimiser, step, training.steps)
        tokens = [
            part * workload.batch_tokens // sum(self._data.parts) * batches
            for part, batches in zip(self._data.parts, local_steps, strict=True)
        ]
        last = len(self._outputs) - 1
        for node, output in enumerate(self._outputs):
            works = node < self._data.workers
            had = applied[node] if works else [step]
            actions = [
                _action("A", number, start_ns=exchanged_ns, computed_ns=end_ns, encoded_ns=end_ns) for number in had
            ]
            if works:
                local = _action("L", step, start_ns=start_ns, computed_ns=computed_ns, encoded_ns=exchanged_ns)
                actions = [local] * local_steps[node] + actions
            record = StepRecord(
                step=step,
                phase="train",
                warmup=step < training.warmup_steps,
                start_ns=start_ns,
                end_ns=end_ns,
                optimiser_start_ns=None,
                synchronised_ns=None,
                loss=loss if node == last else None,
                gradient_norm=computed[node].norm if works else None,
                learning_rate=rate,
                tokens=sum(tokens),
                actions=tuple(actions),
                sent=tuple(_sent(frame, step, exchanged_ns) for frame in self._frames[step] if frame.sender == node),
                received=tuple(
                    _received(frame, number, exchanged_ns)
                    for number in had
                    for frame in self._frames[number]
                    if frame.receiver == node
                ),
                counters=None,
                sockets=(),
            )
            output.write(record.model_dump_json() + "\n")
        self._report(StepDone(step=step, loss=loss, seconds=(end_ns - start_ns) / 1e9, tokens=sum(tokens)))


def _action(kind: ActionKind, step: int, *, start_ns: int, computed_ns: int, encoded_ns: int) -> ActionRecord:
    return ActionRecord(
        kind=kind,
        microbatch=step,
        asked_ns=start_ns,
        input_ns=start_ns,
        decoded_ns=start_ns,
        computed_ns=computed_ns,
        encoded_ns=encoded_ns,
    )


def _sent(frame: Frame, step: int, at_ns: int) -> SentRecord:
    return SentRecord(
        direction="backward",
        microbatch=step,
        peer=frame.receiver,
        raw_bytes=frame.raw_bytes,
        payload_bytes=frame.payload_bytes,
        frame_bytes=frame.payload_bytes + HEADER_BYTES,
        queued_ns=at_ns,
        first_byte_ns=at_ns,
        last_byte_ns=at_ns,
    )


def _received(frame: Frame, step: int, at_ns: int) -> ReceivedRecord:
    return ReceivedRecord(
        direction="backward",
        microbatch=step,
        peer=frame.sender,
        payload_bytes=frame.payload_bytes,
        first_byte_ns=at_ns,
        last_byte_ns=at_ns,
    )


# ---------------------------------------------------------------------- a training from end to end
def train_alone(job: AloneJob, report: Report) -> TrainingRecord:
    """Train a recipe and write its folder, whole or not at all. StageError, CodecError, UserError as they come."""
    recipe = job.recipe
    assert recipe.data is not None
    who = f"the {recipe.data.workers} workers"

    def train(outputs: Sequence[IO[str]]) -> Ended:
        def learner(number: int) -> Learner:
            return learner_of(recipe, number, vocabulary=job.vocabulary, tokens=job.tokens)

        try:
            return Replicas(recipe, learner, outputs, report=report).train()
        except (MemoryError, RuntimeError, OSError) as error:
            if faults.is_out_of_memory(error):
                raise faults.out_of_memory(who, "while they trained", error) from error
            raise

    return alone.write_training(job, train)


def main() -> None:
    """Train what the file says, and print each step's message as a line of JSON."""
    alone.main(train_alone)


if __name__ == "__main__":
    main()

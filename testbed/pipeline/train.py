"""Train one stage of a model. A step reads top to bottom: for each action wait, decode, compute, encode, send; then
meet and update.

`train_job` sets a job up and takes it down; `StageTrainer` is the loop. What a stage computes, encodes and decodes is
its `node.StageNode`; a payload goes from there to the `Connection`, which sends it.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from testbed.errors import StageError
from testbed.jobs.actions import Key, Message
from testbed.jobs.pipeline import MATHS, MESSAGES, orders_of
from testbed.message_key import MessageKey, Phase
from testbed.pipeline import faults
from testbed.pipeline.control import Ended, EvaluationDone, StepDone
from testbed.pipeline.gather import Gather, Met, Stops
from testbed.pipeline.job import StageJob, StageWork
from testbed.pipeline.node import StageNode, build_model, make_node, open_data
from testbed.pipeline.pacing import Stopwatch, stopwatch_for
from testbed.pipeline.step_log import StepLog
from testbed.pipeline.transport import Connection
from testbed.pipeline.wiring import Wiring
from testbed.records import ActionKind, ActionRecord


class StageTrainer:
    """The training loop of one stage. Owns nothing that must be closed."""

    def __init__(
        self,
        job: StageWork,
        *,
        node: StageNode,
        upstream: Connection | None,
        downstream: Connection | None,
        gather: Gather,
        log: StepLog,
        watch: Stopwatch,
        asked: Callable[[], bool],
    ) -> None:
        """`watch` takes the times; `asked` says whether the job is to finish before its time."""
        self._job, self._node, self._upstream, self._downstream = job, node, upstream, downstream
        self._gather, self._log, self._watch, self._asked = gather, log, watch, asked
        self._schedule = orders_of(job.pipeline)[job.stage]
        self._actions: list[ActionRecord] = []
        self._evaluated: dict[Phase, int] = {"evaluation": 0, "uncompressed": 0}
        """Batches so far."""
        self._left_ns = 0

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
        start_ns = self._watch.start()
        self._node.work("start", Key("start", step), None)
        for kind, part in self._schedule:
            self._act(kind, Key(MESSAGES[kind], step, part))
        met = self._meet(squares=lambda: self._node.work("clip", Key("clip", step), None))
        self._node.work("update", Key("update", step), [met.squares])
        self._left_ns = self._watch.leave(update=True)
        self._write(step, "train", start_ns)
        return met

    def _evaluate(self, step: int, phase: Phase) -> Met:
        """Put the validation batches through the stages, and meet."""
        start_ns = self._watch.start()
        self._node.work("start", Key("start", step, phase=phase), None)
        parts, batches = self._job.microbatches, self._job.workload.validation_batches
        for number, part in itertools.product(range(batches), range(parts)):
            self._act("F", Key("activation", self._evaluated[phase] + number, part, phase=phase))
        self._evaluated[phase] += batches
        (loss,) = self._node.work("loss", Key("loss", step, phase=phase), None) or [None]
        met = self._meet(loss=loss if phase == "evaluation" else None)
        self._left_ns = self._watch.leave(update=False)
        self._write(step, phase, start_ns)
        return met

    def _act(self, kind: ActionKind, key: Key) -> None:
        """Take one micro-batch through the stage: wait, decode, compute, encode, send."""
        self._watch.ask(kind, self._job.number_in_record(key.phase, key.step, key.part))
        before, after = (self._upstream, self._downstream) if kind == "F" else (self._downstream, self._upstream)
        called, value = MessageKey(key.phase, key.step, key.part, ()), None
        if before is not None:
            arrival = before.take(called, self._job.limits.message_s)
            input_ns = time.monotonic_ns()
            (value,) = self._node.decode((Message(key, arrival.payload),))
            self._watch.received(arrival.last_byte_ns, input_ns, time.monotonic_ns())
        self._watch.begin()
        value = self._node.work(MATHS[kind], key, value)
        self._watch.done()
        if after is not None:
            payload, raw_bytes, choice = self._node.encode(key, value)
            assert isinstance(payload, memoryview)
            not_before_ns = self._watch.encoded()
            self._watch.queued(
                after.send(called, payload, raw_bytes=raw_bytes, choice=choice, not_before_ns=not_before_ns)
            )
        self._actions.append(self._watch.record())

    # ------------------------------------------------------------------ what is told and written down
    def _meet(self, *, loss: float | None = None, squares: Callable[[], list[float]] = list) -> Met:
        """End the actions, and hear what all stages know then."""
        actions_end_ns, line_ns = self._watch.end()
        met = self._gather.meet(line_ns, left_ns=self._left_ns, asked=self._asked(), loss=loss, squares=squares())
        self._log.met(actions_end_ns, self._watch.synchronised(met.line_ns))
        return met

    def _write(self, step: int, phase: Phase, start_ns: int) -> None:
        done, self._actions = self._actions, []
        said = self._node.said(step, phase)
        self._log.write(step, phase, start_ns=start_ns, end_ns=self._left_ns, actions=done, said=said)


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
    node: StageNode | None = None
    try:
        with Wiring(job, sockets) as wiring:
            model = build_model(job)
            data = open_data(job)
            wiring.connect()
            measure = {end.side: end.measure for end in wiring.connections}
            with (Path(job.folder) / f"steps-{job.stage}.jsonl").open("x", encoding="utf8") as steps:
                node = make_node(job, measure=measure, model=model, data=data)
                ended = StageTrainer(
                    job,
                    node=node,
                    upstream=wiring.upstream,
                    downstream=wiring.downstream,
                    gather=wiring.gather,
                    log=StepLog(job, steps, connections=wiring.connections, counters=wiring.counters, report=report),
                    watch=stopwatch_for(job.compute, job.stage),
                    asked=asked,
                ).train()
            wiring.leave()
        return ended
    except (MemoryError, RuntimeError, OSError) as error:
        explain_memory(job.name, node, error)
        raise


def explain_memory(name: str, node: StageNode | None, error: Exception) -> None:
    """Raise the StageError, with advice, for an exception that means that memory could not be had; no other.

    `node` is None while the stage's model is built.
    """
    if faults.is_out_of_memory(error):
        where = "while its model was built" if node is None else node.doing
        raise faults.out_of_memory(name, where, error) from error


def set_up_torch() -> None:
    """Have torch use one thread and deterministic kernels. StageError when the environment or torch says otherwise."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "torch threads": torch.get_num_threads()}
    if threads != {"OMP_NUM_THREADS": "1", "torch threads": 1}:
        raise StageError(f"a stage works with one thread: set OMP_NUM_THREADS=1 before it starts; found {threads}")

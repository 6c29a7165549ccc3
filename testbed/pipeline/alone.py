"""Train all stages of a recipe in one process, without a network: `python -m testbed.pipeline.alone JOB.json`.

Every stage runs the loop of `train.StageTrainer` in a thread of its own, as it does in a process of its own over links.
One baton goes round: whoever has it computes, and gives it up only to wait for a message or, at the end of a step, for
the other stages. So one stage computes at any moment, one core is enough, and no code is written twice: the numbers
are those of a run over links, bit for bit. What crosses a boundary is bytes that the encoder made, copied; a second
instance decodes them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, NoReturn

import numpy as np
import torch

from testbed import results
from testbed.codecs.contract import Codec, Context
from testbed.errors import SpecError, StageError, TestbedError, TransportError, UserError
from testbed.frozen import Frozen
from testbed.message_key import MessageKey, Side, incoming, outgoing
from testbed.pipeline.control import Ended, EvaluationDone, StepDone
from testbed.pipeline.gather import Gather
from testbed.pipeline.job import Limits, StageWork
from testbed.pipeline.node import StageNode, make_node
from testbed.pipeline.pacing import Stopwatch
from testbed.pipeline.step_log import StepLog
from testbed.pipeline.train import StageTrainer, explain_memory, set_up_torch
from testbed.pipeline.transport import Arrival, Payload, SentFrame, TakenFrame
from testbed.pipeline.wiring import largest_payload
from testbed.records import TrainingRecord
from testbed.spec import Measured, Recipe, TextSpec, text_of
from testbed.workloads import models as workloads
from testbed.workloads.floor import unigram_floor

Report = Callable[[StepDone | EvaluationDone], None]
_FOR_EVER_S = 7 * 24 * 3600.0
"""Nothing is lost in memory: a stage that waits, waits while another one computes, however long that takes."""


class AloneJob(Frozen):
    """What the program is told."""

    recipe: Recipe
    vocabulary: int
    """Size of the tokenizer's vocabulary; of images, their classes."""
    tokens: str
    """Path of the prepared text, a .npy of token ids; of images, the folder that keeps what was fetched."""
    folder: str
    """Where steps-<stage>.jsonl and, at the end, training.json go. It is made when the training is done."""


def works_of(recipe: Recipe, *, vocabulary: int, tokens: str, folder: str) -> tuple[StageWork, ...]:
    """Return what each stage of a recipe trains; see `AloneJob`."""
    return tuple(
        StageWork(
            stage=stage,
            codec=recipe.codec,
            compute=Measured(),
            workload=text_of(recipe),
            pipeline=recipe.pipeline,
            optimiser=recipe.optimiser,
            training=recipe.training,
            vocabulary=vocabulary,
            tokens=tokens,
            folder=folder,
            limits=Limits(connect_s=_FOR_EVER_S, message_s=_FOR_EVER_S),
        )
        for stage in range(recipe.pipeline.stages)
    )


# ---------------------------------------------------------------------- what stands in for the network
class Baton:
    """Held by the one stage that computes; a context manager. Who waits for something gives it up meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._conditions: list[threading.Condition] = []
        self.failure: BaseException | None = None
        """What ended a stage before its time. All others end when they wait next."""

    def condition(self) -> threading.Condition:
        """Return something to wait for and to notify of, to be used with the baton in hand."""
        self._conditions.append(threading.Condition(self._lock))
        return self._conditions[-1]

    def wait(self, condition: threading.Condition, until: Callable[[], object], what: str) -> None:
        """Give the baton up until something is so. TransportError where a stage has failed."""
        if not until():
            condition.wait_for(lambda: until() or self.failure is not None)
        if self.failure is not None:
            raise TransportError(f"{what}: another stage ended before its time") from self.failure

    def fail(self, error: BaseException) -> None:
        """Have all stages end; the first failure is the one that counts."""
        self.failure = self.failure or error
        for condition in self._conditions:
            condition.notify_all()

    def __enter__(self) -> Baton:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Passage:
    """One end of a boundary, in memory: a `transport.Neighbour`. Both ends belong to stages that share the baton."""

    def __init__(self, baton: Baton, *, name: str, side: Side, max_payload_bytes: int) -> None:
        """`name` is for messages, `side` is where the neighbour is; both ends are then made `neighbours`."""
        self.side = side
        self.other: Passage
        """The neighbour's end."""
        self.taken_thread_ns = 0
        """When the last frame was taken, in the time of the thread that took it."""
        self.rest_s = 0.0
        """How long whoever takes a frame sleeps before it has it; nobody computes meanwhile."""
        self._name, self._max_payload_bytes = name, max_payload_bytes
        self._baton, self._arrived = baton, baton.condition()
        self._inbox: dict[MessageKey, Arrival] = {}
        self._sent: list[SentFrame] = []
        self._taken: list[TakenFrame] = []

    def send(
        self, key: MessageKey, payload: Payload, *, raw_bytes: int, choice: str | None = None, not_before_ns: int = 0
    ) -> int:
        """Copy a payload to the neighbour. Returns the time (ns) before. TransportError as from a `Connection`."""
        queued_ns = max(time.monotonic_ns(), not_before_ns)
        view = memoryview(payload)
        copy = memoryview(bytearray(view.cast("B") if view.nbytes else b""))
        if copy.nbytes > self._max_payload_bytes:
            raise TransportError(
                f"{self._name}: the {outgoing(self.side)} tensor of {key} has {copy.nbytes} bytes; "
                f"this job takes {self._max_payload_bytes} at most"
            )
        copied_ns, key = max(time.monotonic_ns(), queued_ns), key._replace(samples=())
        self._sent.append(SentFrame(key, raw_bytes, choice, copy.nbytes, queued_ns, queued_ns, copied_ns))
        self.other._inbox[key] = Arrival(copy, queued_ns, copied_ns)
        self.other._arrived.notify()
        return queued_ns

    def take(self, key: MessageKey, timeout_s: float) -> Arrival:
        """Wait for one frame, as long as another stage computes. TransportError when one has failed."""
        key = key._replace(samples=())
        what = f"{self._name}: waiting for the {incoming(self.side)} tensor of {key}"
        self._baton.wait(self._arrived, lambda: key in self._inbox, what)
        arrival = self._inbox.pop(key)
        self._taken.append(TakenFrame(key, arrival.payload.nbytes, arrival.first_byte_ns, arrival.last_byte_ns))
        if self.rest_s:
            time.sleep(self.rest_s)
        self.taken_thread_ns = time.thread_time_ns()
        return arrival

    def sent_frames(self, timeout_s: float) -> list[SentFrame]:
        """Return all frames sent since the last call, in order."""
        sent, self._sent = self._sent, []
        return sent

    def taken_frames(self) -> list[TakenFrame]:
        """Return all frames taken since the last call, in order."""
        taken, self._taken = self._taken, []
        return taken

    def measure(self) -> NoReturn:
        """Refuse: there is no link to measure."""
        raise UserError(
            f"{self._name}: its codec goes by what its link carries, so the network takes part in the maths and it "
            'cannot be trained without one; run such cells with timing = "live"'
        )

    def close(self, timeout_s: float) -> None:
        """Do nothing: all that was sent has arrived."""


def make_passages(baton: Baton, recipe: Recipe) -> tuple[tuple[Passage | None, Passage | None], ...]:
    """Make the (upstream, downstream) ends of every stage; None where there is no neighbour."""
    pipeline, workload = recipe.pipeline, text_of(recipe)
    tokens = workload.batch_size // (pipeline.microbatches * pipeline.accumulation) * workload.sequence_length
    limit = largest_payload(tokens, workloads.hidden_width(workload))
    ends: list[list[Passage | None]] = [[None, None] for _ in range(pipeline.stages)]
    for stage in range(pipeline.stages - 1):
        early = Passage(baton, name=f"stage {stage}", side="downstream", max_payload_bytes=limit)
        late = Passage(baton, name=f"stage {stage + 1}", side="upstream", max_payload_bytes=limit)
        early.other, late.other = late, early
        ends[stage][1], ends[stage + 1][0] = early, late
    return tuple((upstream, downstream) for upstream, downstream in ends)


class Table:
    """Where the stages meet: what each has put there, round after round."""

    def __init__(self, baton: Baton, stages: int) -> None:
        self.baton, self.complete, self.stages = baton, baton.condition(), stages
        self.rounds: dict[int, dict[int, Sequence[float]]] = {}


class TableGather(Gather):
    """The `Gather` of stages that share a table and a baton."""

    def __init__(self, stage: int, table: Table) -> None:
        super().__init__(stage, (), _FOR_EVER_S)
        self._table, self._round = table, itertools.count()
        self.came_thread_ns = 0
        """When this stage came to the last meeting, and its own part of the gradient norm was known; in the time of its
        thread (CLOCK_THREAD_CPUTIME_ID)."""

    def exchange(self, values: Sequence[float]) -> list[float]:
        """Exchange values as `Gather.exchange`. TransportError when another stage has failed."""
        self.came_thread_ns = time.thread_time_ns()
        table, number = self._table, next(self._round)
        told = table.rounds.setdefault(number, {})
        told[self._stage] = tuple(values)
        if len(told) == table.stages:
            # Nobody else looks for it there: who waits holds on to it.
            del table.rounds[number]
            table.complete.notify_all()
        table.baton.wait(
            table.complete, lambda: len(told) == table.stages, f"stage {self._stage}: waiting for the end of the step"
        )
        return [value for stage in range(table.stages) for value in told[stage]]


# ---------------------------------------------------------------------- the stages
class Stages:
    """All stages of a recipe, each in a thread; a context manager that ends them."""

    def __init__(
        self,
        works: Sequence[StageWork],
        outputs: Sequence[IO[str]],
        *,
        report: Report = lambda message: None,
        watch: Callable[[Baton, int], Stopwatch] = lambda baton, stage: Stopwatch(),
        model: Callable[[StageWork], Any] | None = None,
        data: Callable[[StageWork], Any] | None = None,
        codec: Callable[[Context], Codec] | None = None,
    ) -> None:
        """Records go to `outputs`, by stage. The last three are for tests: what they make stands in for the recipe's
        own.
        """
        first = works[0]
        recipe = Recipe(
            codec=first.codec,
            workload=first.workload,
            pipeline=first.pipeline,
            optimiser=first.optimiser,
            training=first.training,
        )
        self.baton = Baton()
        self.gathers: list[TableGather] = []
        """By stage."""
        self.ended: Ended | None = None
        self.alter_model = False
        """Whether a codec has a part in the model of a stage; known when training begins."""
        self._works, self._outputs, self._report, self._watch = works, outputs, report, watch
        self._model, self._data, self._codec = model, data, codec
        self.passages = make_passages(self.baton, recipe)
        """The ends of boundaries, (upstream, downstream) by stage."""
        table = Table(self.baton, len(works))
        self.gathers = [TableGather(work.stage, table) for work in works]
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"stage {work.stage}", daemon=True) for work in works
        ]

    def start(self) -> None:
        """Let all stages train."""
        for thread in self._threads:
            thread.start()

    def join(self) -> Ended:
        """Wait for the end of training; returns why it ended. Raises what ended a stage before its time."""
        for thread in self._threads:
            thread.join()
        if self.baton.failure is not None:
            raise self.baton.failure
        assert self.ended is not None
        return self.ended

    def __enter__(self) -> Stages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if any(thread.is_alive() for thread in self._threads):
            with self.baton:
                self.baton.fail(error or TransportError("the training was ended from outside"))
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join()

    def _run(self, work: StageWork) -> None:
        """Train one stage, with the baton in hand except where it waits."""
        torch.set_num_threads(1)  # the BLAS keeps a number for each thread, and starts with all cores
        with self.baton:
            try:
                self.ended = self._train(work)
            except TransportError as error:
                self.baton.fail(error)  # as a rule what follows from the failure of another stage
            except BaseException as error:  # of a codec from outside it may be of any kind
                said = str(error) if isinstance(error, TestbedError) else f"{type(error).__name__}: {error}"
                named = said if said.startswith(f"stage {work.stage}") else f"stage {work.stage}: {said}"
                failure = (SpecError if isinstance(error, UserError) else StageError)(named)
                failure.__cause__ = error
                self.baton.fail(failure)

    def _train(self, work: StageWork) -> Ended:
        node: StageNode | None = None
        stage = work.stage
        upstream, downstream = self.passages[stage]
        connections = [passage for passage in (upstream, downstream) if passage is not None]
        try:
            node = make_node(
                work,
                measure={passage.side: passage.measure for passage in connections},
                model=None if self._model is None else self._model(work),
                data=None if self._data is None else self._data(work),
                codec=self._codec,
            )
            self.alter_model = self.alter_model or bool(node.hooks)
            return StageTrainer(
                work,
                node=node,
                upstream=upstream,
                downstream=downstream,
                gather=self.gathers[stage],
                log=StepLog(work, self._outputs[stage], connections=connections, counters=None, report=self._report),
                watch=self._watch(self.baton, stage),
                asked=lambda: False,
            ).train()
        except (MemoryError, RuntimeError, OSError) as error:
            explain_memory(work.name, node, error)
            raise


# ---------------------------------------------------------------------- a training from end to end
def train_alone(job: AloneJob, report: Report) -> TrainingRecord:
    """Train a recipe and write its folder, whole or not at all. StageError, CodecError, UserError as they come."""

    def train(outputs: Sequence[IO[str]]) -> Ended:
        works = works_of(job.recipe, vocabulary=job.vocabulary, tokens=job.tokens, folder=job.folder)
        with Stages(works, outputs, report=report) as stages:
            stages.start()
            return stages.join()

    return write_training(job, train)


def write_training(job: AloneJob, train: Callable[[Sequence[IO[str]]], Ended]) -> TrainingRecord:
    """Have a recipe trained by `train`, which is given a file for each node's records, and write its folder, whole or
    not at all.
    """
    set_up_torch()
    folder = Path(job.folder)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)  # one that was killed left it
    draft.mkdir(parents=True)
    began = time.monotonic()
    try:
        with ExitStack() as stack:
            outputs = [
                stack.enter_context((draft / f"steps-{node}.jsonl").open("x", encoding="utf8"))
                for node in range(job.recipe.nodes)
            ]
            ended = train(outputs)
        record = TrainingRecord(
            recipe=job.recipe,
            ended=_without_budget(ended),
            seconds=round(time.monotonic() - began, 3),
            peak_memory_bytes=_peak_memory_bytes(),
            taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
            unigram_floor=_floor(job),
        )
        results.write_json(draft / "training.json", record)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return record


def _floor(job: AloneJob) -> float | None:
    spec = job.recipe.workload
    if not isinstance(spec, TextSpec):
        return None
    return unigram_floor(np.load(job.tokens, mmap_mode="r"), spec, job.vocabulary)


def _peak_memory_bytes() -> int:
    """Return the most memory that this process has held.

    getrusage would count what its parent held when it was started.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) * 1024


def _without_budget(ended: Ended) -> Literal["steps", "target"]:
    assert ended in ("steps", "target"), "a recipe has no budget, and nobody asks it to end"
    return ended


def main(train: Callable[[AloneJob, Report], TrainingRecord] = train_alone) -> None:
    """Train what the file says, and print each step's message as a line of JSON."""
    parser = argparse.ArgumentParser(description="Trains one recipe; started by a sweep, not by hand.")
    parser.add_argument("job", type=Path)
    job = AloneJob.model_validate_json(parser.parse_args().job.read_bytes())

    def say(message: StepDone | EvaluationDone) -> None:
        sys.stdout.write(message.model_dump_json() + "\n")
        sys.stdout.flush()

    try:
        train(job, say)
    except TestbedError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(error.exit_status)
    os._exit(0)  # at once: taking an interpreter with torch apart needs half a second


if __name__ == "__main__":
    main()

"""Train all stages of a recipe in one process, without a network: `python -m testbed.pipeline.alone JOB.json`.

One event loop (`jobs.loop`) performs the programs of all stages, each with what it has over links, too: so no code is
written twice, and the numbers are those of a run over links, bit for bit. One stage computes at any moment, so one core
is enough. What crosses a boundary is bytes that the encoder made, copied; a second instance decodes them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np

from testbed import results
from testbed.errors import SpecError, StageError, TestbedError, TransportError, UserError
from testbed.frozen import Frozen
from testbed.jobs.actions import Encoded, Job, Key, Message, Node
from testbed.jobs.loop import Loop, MayGoOn
from testbed.jobs.pipeline import Ended, training_job
from testbed.jobs.recorder import Named, Recorder
from testbed.pipeline.control import EvaluationDone, StepDone
from testbed.pipeline.frame import HEADER_BYTES
from testbed.pipeline.job import Limits, StageWork
from testbed.pipeline.node import StageNode, make_node
from testbed.pipeline.step_log import OnHostClock, Records
from testbed.pipeline.step_log import Report as Report
from testbed.pipeline.train import explain_memory, set_up_torch
from testbed.pipeline.wiring import largest_payload
from testbed.records import TrainingRecord
from testbed.spec import Measured, Recipe, TextSpec, text_of
from testbed.workloads import models as workloads
from testbed.workloads.floor import unigram_floor

_FOR_EVER_S = 7 * 24 * 3600.0
"""Nothing is lost in memory."""


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


# ---------------------------------------------------------------------- all places at once
def run_alone(
    job: Job,
    nodes: Sequence[Node],
    outputs: Sequence[IO[str]],
    named: Callable[[Key], Named],
    *,
    warmup_steps: int,
    report: Report,
    goes_on: MayGoOn = lambda place, step: True,
) -> list[Any]:
    """Run a job's programs to their end; returns what they returned, by place. Records go to `outputs`, by place, in
    which messages have the names that `named` gives them.
    """
    recorder = Recorder(Records(nodes, outputs, warmup_steps, report).write, named, HEADER_BYTES)
    programs = [job.program(place) for place in range(len(nodes))]
    return Loop(programs, nodes, observers=[OnHostClock(recorder)], goes_on=goes_on).run()


class StageInMemory:
    """A stage's node in one process with all others: what it sends is copied, and its errors bear its name."""

    def __init__(
        self,
        stage: StageWork,
        make: Callable[[StageWork], StageNode] = make_node,
        watched: Callable[[StageNode], Node] = lambda node: node,
    ) -> None:
        """`watched` may put something between the loop and what the node does. StageError or SpecError where the node
        cannot be made.
        """
        self._stage, self._node = stage, None
        with self._named():
            self.node = self._node = make(stage)
        self._does = watched(self.node)
        tokens = stage.workload.batch_size // stage.microbatches * stage.workload.sequence_length
        self._most_bytes = largest_payload(tokens, workloads.hidden_width(stage.workload))
        self.said = self.node.said

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute."""
        with self._named():
            return self._does.work(what, key, value)

    def encode(self, key: Key, value: Any) -> Encoded:
        """Return a copy of the payload. TransportError, as of a connection, for one that is too large."""
        with self._named():
            encoded = self._does.encode(key, value)
        assert isinstance(encoded.payload, memoryview)
        if (size := len(encoded.payload)) > self._most_bytes:
            raise TransportError(
                f"{self._stage.name}: the {key.what} of {key.phase} step {key.step}, micro-batch {key.part} has "
                f"{size} bytes; this job takes {self._most_bytes} at most"
            )
        return encoded._replace(payload=memoryview(bytearray(encoded.payload)))

    def decode(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Return the messages' tensors."""
        with self._named():
            return self._does.decode(messages)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Say whose error it is: of a codec from outside it may be of any kind."""
        try:
            yield
        except Exception as error:
            explain_memory(self._stage.name, self._node, error)
            said = str(error) if isinstance(error, TestbedError) else f"{type(error).__name__}: {error}"
            named = said if said.startswith(self._stage.name) else f"{self._stage.name}: {said}"
            raise (SpecError if isinstance(error, UserError) else StageError)(named) from error


def train_stages(
    works: Sequence[StageWork],
    outputs: Sequence[IO[str]],
    *,
    report: Report = lambda message: None,
    make: Callable[[StageWork], StageNode] = make_node,
) -> Ended:
    """Train all stages of a recipe; returns why training ended. Records go to `outputs`, by stage. StageError and
    SpecError name the stage; TransportError for a message that is too large.
    """
    first = works[0]
    job = training_job(first.pipeline, first.training, first.workload.validation_batches)
    nodes = [StageInMemory(work, make) for work in works]

    def named(key: Key) -> Named:
        number = first.number_in_record(key.phase, key.step, key.part)
        return Named("forward" if key.what == "activation" else "backward", number, with_peer=False)

    ended, *_ = run_alone(job, nodes, outputs, named, warmup_steps=first.training.warmup_steps, report=report)
    return cast(Ended, ended)


# ---------------------------------------------------------------------- a training from end to end
def train_alone(job: AloneJob, report: Report) -> TrainingRecord:
    """Train a recipe and write its folder, whole or not at all. StageError, CodecError, UserError as they come."""
    works = works_of(job.recipe, vocabulary=job.vocabulary, tokens=job.tokens, folder=job.folder)
    return write_training(job, lambda outputs: train_stages(works, outputs, report=report))


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

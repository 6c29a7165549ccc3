"""Train all places of a recipe in one process, without a network: `python -m testbed.pipeline.alone JOB.json`.

One event loop (`jobs.loop`) performs the programs of all places, each with what it has over links, too: so no code is
written twice, and the numbers are those of a run over links, bit for bit. One place computes at any moment, so one core
is enough. What crosses is bytes: every receiver decodes them with codecs of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from testbed import results
from testbed.errors import SpecError, TestbedError
from testbed.frozen import Frozen
from testbed.jobs.kind import Setting
from testbed.jobs.loop import Loop, Observer
from testbed.jobs.pipeline import Ended
from testbed.jobs.recorder import StepRecorder
from testbed.pipeline import faults
from testbed.pipeline.frame import HEADER_BYTES
from testbed.pipeline.step_log import OnHostClock, Records, Report
from testbed.pipeline.training import Training, set_up_torch, training_of
from testbed.records import TrainingRecord
from testbed.spec import Recipe, TextSpec
from testbed.workloads.floor import unigram_floor


class AloneJob(Frozen):
    """What the program is told."""

    recipe: Recipe
    vocabulary: int
    """Size of the tokenizer's vocabulary; of images, their classes."""
    tokens: str
    """Path of the prepared text, a .npy of token ids; of images, the folder that keeps what was fetched."""
    folder: str
    """Where steps-<place>.jsonl and, at the end, training.json go. It is made when the training is done."""


def train_together(
    training: Training,
    outputs: Sequence[IO[str]],
    *,
    report: Report = lambda message: None,
    observers: Sequence[Observer] = (),
) -> Ended:
    """Train and evaluate all places; returns why training ended. Records go to `outputs`, by place. StageError,
    SpecError, CodecError as they come; TransportError for a message that is too large.
    """
    places = range(len(training.job.places))
    nodes = [training.node_alone(place) for place in places]
    records = Records(nodes, outputs, training.recipe.training.warmup_steps, report, training.settle)
    recorder = OnHostClock(StepRecorder(records.write, training.named, HEADER_BYTES))
    programs = [training.job.program(place) for place in places]
    ended: Ended | None
    loop = Loop(programs, nodes, observers=[recorder, *observers], goes_on=training.goes_on)
    ended, *_ = loop.run()
    if loop.untaken:
        place, sender, key = loop.untaken[0]
        names = training.job.places
        raise SpecError(
            f"{names[sender]} sends the {key.what} of step {key.step} (part {key.part}, origin {key.origin}) to "
            f"{names[place]}, which never receives it; {len(loop.untaken)} such messages were left at the end"
        )
    records.finish()
    return ended or "steps"


def train_alone(job: AloneJob, report: Report = lambda message: None) -> TrainingRecord:
    """Train a recipe and write its folder, whole or not at all. Errors as they come; StageError, with advice, where
    memory does not suffice.
    """
    set_up_torch()
    recipe, folder = job.recipe, Path(job.folder)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)  # one that was killed left it
    draft.mkdir(parents=True)
    began = time.monotonic()
    try:
        with ExitStack() as stack:
            outputs = [
                stack.enter_context((draft / f"steps-{node}.jsonl").open("x", encoding="utf8"))
                for node in range(recipe.nodes)
            ]
            training = training_of(Setting(recipe, job.vocabulary, job.tokens))
            ended = train_together(training, outputs, report=report)
        record = TrainingRecord(
            recipe=recipe,
            ended=_without_budget(ended),
            seconds=round(time.monotonic() - began, 3),
            peak_memory_bytes=_peak_memory_bytes(),
            taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
            unigram_floor=_floor(job),
        )
        results.write_json(draft / "training.json", record)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        if faults.is_out_of_memory(error):
            who = f"the {recipe.nodes} {recipe.parallelism.unit}s"
            raise faults.out_of_memory(who, "while they trained", error) from error
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


def obey(job: type[Any], does: Callable[[Any], Frozen], description: str) -> None:
    """Be a program that does the job in the file which it is given, prints the answer as a line of JSON, and ends with
    the status of its error.
    """
    parser = argparse.ArgumentParser(description=f"{description}; started by a sweep, not by hand.")
    parser.add_argument("job", type=Path)
    told = job.model_validate_json(parser.parse_args().job.read_bytes())
    status = 0
    try:
        sys.stdout.write(does(told).model_dump_json() + "\n")
        sys.stdout.flush()
    except TestbedError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        status = error.exit_status
    os._exit(status)  # at once: taking an interpreter with torch apart needs half a second


def main() -> None:
    """Train what the file says."""
    obey(AloneJob, train_alone, "Trains one recipe")


if __name__ == "__main__":
    main()

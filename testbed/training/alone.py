"""Train all places of a recipe in one process, without a network: `python -m testbed.training.alone JOB.json`.

One event loop (`jobs.loop`) runs the programs of all places with the same nodes as over links, so results are
bit-identical to those of a live run. Only one place computes at a time, so one core is enough. Messages are bytes,
which every receiver decodes with its own codecs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from testbed import manifest, paths, results
from testbed.codecs.kept_state import digest_of
from testbed.errors import SpecError, TestbedError, status_of
from testbed.frozen import Frozen
from testbed.jobs.actions import Node
from testbed.jobs.kind import Setting
from testbed.jobs.loop import Loop, Observer
from testbed.jobs.pipeline import Ended
from testbed.jobs.recorder import StepRecorder
from testbed.records import TrainingRecord
from testbed.runtime import failures
from testbed.runtime.frame import HEADER_BYTES
from testbed.runtime.step_log import OnHostClock, Records, Report
from testbed.spec import Recipe
from testbed.training.accelerator import trained_on
from testbed.training.checkpoints import Checkpoints, TogetherRun
from testbed.training.kinds import Training, set_up_torch, training_of
from testbed.training.memory_need import peak_memory
from testbed.workloads.floor import floors_of


class AloneJob(Frozen):
    """Arguments of this program."""

    recipe: Recipe
    vocabulary: int
    """Size of the tokenizer's vocabulary; for images, the number of classes."""
    tokens: str
    """Path of the prepared text, a .npy of token ids; for images, the folder of downloaded data."""
    folder: str
    """Folder of steps-<place>.jsonl, training.json and its manifest, made when the training is complete."""
    checkpoint_every: int | None = None
    """See `spec.TrainingSpec`; a draft with a checkpoint is resumed."""


class TrainedTogether(NamedTuple):
    """A training that has ended."""

    ended: Ended
    nodes: Sequence[Node]
    lasted_ns: int
    """Duration until the last action, without interruptions before which it had a checkpoint."""

    @property
    def weights(self) -> tuple[str | None, ...]:
        """SHA-256 of each place's weights (`kept_state.digest_of`); None for a place without trained weights."""
        return tuple(digest_of(node.weights()) if hasattr(node, "weights") else None for node in self.nodes)


def train_together(
    training: Training,
    outputs: Sequence[IO[str]],
    *,
    report: Report = lambda message: None,
    observers: Sequence[Observer] = (),
    checkpoints: Checkpoints | None = None,
) -> TrainedTogether:
    """Train and evaluate all places. Records go to `outputs`, by place; with `checkpoints`, these are files, and the
    training continues from the newest one. Raises StageError, SpecError and CodecError; TransportError for a message
    that is too large.
    """
    places = range(len(training.job.places))
    nodes = [training.node_alone(place) for place in places]
    records = Records(nodes, outputs, training.recipe.training.warmup_steps, report, training.settle)
    recorder = StepRecorder(records.write, training.named, HEADER_BYTES)
    clock, first_step, resting = OnHostClock(recorder), 0, None
    if checkpoints is not None:
        first_step, resting = checkpoints.resume(TogetherRun(nodes, outputs, recorder, records, clock))
    programs = [training.job.program(place, first_step) for place in places]
    ended: Ended | None
    watching = [clock, *observers]
    loop = Loop(programs, nodes, observers=watching, goes_on=training.goes_on, pause=checkpoints, resting=resting)
    ended, *_ = loop.run()
    if loop.untaken:
        place, sender, key = loop.untaken[0]
        names = training.job.places
        raise SpecError(
            f"{names[sender]} sends the {key.what} of step {key.step} (part {key.part}, origin {key.origin}) to "
            f"{names[place]}, which never receives it ({len(loop.untaken)} unreceived messages in all): add a Receive"
        )
    records.finish()
    return TrainedTogether(ended or "steps", nodes, clock.last_ns)


def train_alone(job: AloneJob, report: Report = lambda message: None) -> TrainingRecord:
    """Train a recipe and write its folder atomically. Passes errors through; StageError, with advice, when memory runs
    out. With checkpoints the draft stays after an interruption.
    """
    set_up_torch()
    recipe, folder = job.recipe, Path(job.folder)
    draft = folder.with_name(f".{folder.name}.draft")
    every, checkpoints = job.checkpoint_every, None
    if every is None or (checkpoints := Checkpoints(draft, every, recipe)).newest is None:
        shutil.rmtree(draft, ignore_errors=True)  # left by a killed training
        draft.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            outputs = [
                stack.enter_context((draft / f"steps-{node}.jsonl").open("a", encoding="utf8"))
                for node in range(recipe.nodes)
            ]
            training = training_of(Setting(recipe, job.vocabulary, job.tokens))
            trained = train_together(training, outputs, report=report, checkpoints=checkpoints)
        peak, floors = peak_memory(), floors_of(Path(job.tokens), recipe.workload, job.vocabulary)
        record = TrainingRecord(
            recipe=recipe,
            ended=_without_budget(trained.ended),
            seconds=round(trained.lasted_ns / 1e9, 3),
            peak_memory_bytes=peak,
            taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
            unigram_floor=floors.unigram,
            bigram_floor=floors.bigram,
            finished_by=manifest.NAME,
            weights=trained.weights,
            resumed=() if checkpoints is None else checkpoints.resumed,
            trained_on=trained_on(recipe, training.device),
        )
        if checkpoints is not None:
            results.remove_checkpoints(draft)
        results.write_json(draft / "training.json", record)
        manifest.write_manifest(draft / manifest.NAME, manifest.subject_of(recipe), draft.iterdir())
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        paths.sync_folder(folder.parent)
    except BaseException as error:
        again = isinstance(error, TestbedError)  # the same error would come after a resume
        if again or checkpoints is None or not results.checkpoint_steps(draft):
            shutil.rmtree(draft, ignore_errors=True)
        if failures.is_out_of_memory(error):
            who = f"the {recipe.nodes} {recipe.parallelism.unit}s"
            raise failures.out_of_memory(who, "during training", error) from error
        raise
    return record


def _without_budget(ended: Ended) -> Literal["steps", "target"]:
    assert ended in ("steps", "target"), "a recipe has no budget, and cannot be asked to end"
    return ended


def obey(job: type[Any], does: Callable[[Any], Frozen], description: str) -> None:
    """Run a program that reads a job from its file argument, does it, prints the response as a line of JSON, and exits
    with the status of its error.
    """
    parser = argparse.ArgumentParser(description=f"{description}; started by a sweep, not by hand.")
    parser.add_argument("job", type=Path)
    told = job.model_validate_json(parser.parse_args().job.read_bytes())
    answer, sys.stdout = sys.stdout, sys.stderr  # codecs and jobs of the user's may print
    status = status_of(lambda: answer.write(does(told).model_dump_json() + "\n"))
    answer.flush()
    os._exit(status)  # at once: shutting down an interpreter with torch takes half a second


def main() -> None:
    """Train the recipe in the file."""
    obey(AloneJob, train_alone, "Trains one recipe")


if __name__ == "__main__":
    main()

"""Train the recipes of a sweep, each once, without a network: results/<experiment>/trained/<recipe id>/.

Recipes that differ in nothing but schedule and depth share one training: these decide when a stage works, and neither
what it computes nor the order in which a codec sees its messages (`jobs.schedule`).

Each is a process of its own (`pipeline.alone`), as many side by side as there are cores and memory. A folder has
training.json, its last file, or the training is not finished.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from testbed import forks, paths, results
from testbed.codecs.catalogue import placement
from testbed.errors import TestbedError, UserError
from testbed.jobs.pipeline import orders_of
from testbed.pipeline.control import host_environment
from testbed.pipeline.memory import predict_memory
from testbed.records import ReceivedRecord, SentRecord, StepRecord, TrainingRecord
from testbed.results import Run
from testbed.spec import PREPARED_BY, PipelineSpec, Recipe, TextSpec, Workload
from testbed.sweep.executor import Task, execute
from testbed.sweep.session import Tokens

FOLDER = "trained"


class TrainingProgress(Protocol):
    """Who follows trainings."""

    def note(self, message: str) -> None:
        """Hear something that a person should know."""
        ...

    def trained(self, recipe: Recipe, error: TestbedError | None) -> None:
        """Hear that a training has ended; None: well."""
        ...


class Trainings(NamedTuple):
    """What became of recipes, by their ids."""

    folders: dict[str, Path]
    """Those that are trained, now or before."""
    failures: dict[str, TestbedError]


def check_trainable(recipe: Recipe) -> None:
    """Raise UserError for a recipe that needs a network to be trained."""
    if placement.parse_placement(recipe.codec).measures:
        raise UserError(
            f"cannot train {recipe.id} without a network: its codec {recipe.codec!r} goes by what its link carries; "
            'run such cells with timing = "live"'
        )


def train_missing(
    recipes: Iterable[Recipe],
    folder: Path,
    *,
    prepare: Callable[[Workload], Tokens],
    progress: TrainingProgress,
    at_once: int | None = None,
) -> Trainings:
    """Train those of the recipes that have no finished training in an experiment's result folder.

    `prepare` gets what a workload learns from ready (`controller.prepare`); it is asked once for each text. UserError
    before anything starts, where a recipe cannot be trained so. A training that fails costs its own recipe only.
    Ctrl-C ends all.
    """
    wanted = {recipe.id: recipe for recipe in recipes}
    for recipe in wanted.values():
        check_trainable(recipe)
    home = folder / FOLDER
    _sweep_up(home)
    missing = untrained(wanted.values(), folder)
    failures: dict[str, TestbedError] = {}
    if missing:
        results.make_folder(home)
        forks.start(host_environment())  # it loads while texts are prepared
        try:
            by_name = {recipe.id: recipe for recipe in missing}
            tasks = _tasks(missing, home, prepare)
            ended = execute(tasks, at_once=at_once, note=progress.note, options=host_options())
            with closing(ended):
                for result in ended:
                    if result.error is not None:
                        failures[result.task.name] = result.error
                    progress.trained(by_name[result.task.name], result.error)
        finally:
            _sweep_up(home)
    failed = {_numbers(recipe): failures[recipe.id] for recipe in missing if recipe.id in failures}
    failures = {name: failed[_numbers(recipe)] for name, recipe in wanted.items() if _numbers(recipe) in failed}
    trained = {name: trained_folder(folder, recipe) for name, recipe in wanted.items() if name not in failures}
    return Trainings(trained, failures)


def untrained(recipes: Iterable[Recipe], folder: Path) -> list[Recipe]:
    """Return which recipes are to be trained, so that an experiment's result folder has a training of each of these: of
    those that share one, which needs least memory.
    """
    sharing: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        if not is_trained(trained_folder(folder, recipe)):
            sharing.setdefault(_numbers(recipe), []).append(recipe)
    return [min(alike, key=predict_memory) for alike in sharing.values()]


def _numbers(recipe: Recipe) -> str:
    """Return what is the same for recipes that learn the same numbers.

    A stranger's codec may look at more than its own messages, so with one each schedule is trained by itself.
    """
    codecs = (part.name for spec in placement.parse_placement(recipe.codec).specs() for part in spec.parts())
    if not isinstance(recipe.parallelism, PipelineSpec) or any(":" in name for name in codecs):
        return recipe.id
    one = recipe.pipeline.model_copy(update={"schedule": "gpipe", "in_flight": 1})
    return recipe.model_copy(update={"pipeline": one}).id


def is_trained(folder: Path) -> bool:
    """Say whether a training in this folder is finished."""
    return (folder / "training.json").exists()


def trained_folder(folder: Path, recipe: Recipe) -> Path:
    """Return where a recipe's training lies in an experiment's result folder, or will: perhaps one that it shares."""
    own = folder / FOLDER / recipe.id
    if is_trained(own):
        return own
    files = (path for path in sorted(own.parent.glob("*/training.json")) if not path.parent.name.startswith("."))
    return next((path.parent for path in files if _numbers_in(path) == _numbers(recipe)), own)


@functools.cache
def _numbers_in(path: Path) -> str | None:
    """Return the `_numbers` of a finished training; None where nobody can read it any more."""
    try:
        return _numbers(results.read_json(path, TrainingRecord).recipe)
    except TestbedError:
        return None


def final_loss(folder: Path) -> float | None:
    """Return the last validation loss of a training, with the codec in place; None where it has not finished."""
    if not is_trained(folder):
        return None
    losses = [record.loss for record in load_training(folder)[-1] if record.phase == "evaluation"]
    return losses[-1] if losses else None


def floor_of(folder: Path) -> float | None:
    """Return the unigram floor that a finished training kept."""
    return results.read_json(folder / "training.json", TrainingRecord).unigram_floor


def load_training(folder: Path, recipe: Recipe | None = None) -> tuple[list[StepRecord], ...]:
    """Read the records of a finished training, by stage (or by node). ResultsError for a folder that has none.

    `recipe`: one that shares it; actions are then in the order of its schedule, and their times mean nothing.
    """
    trained = results.read_json(folder / "training.json", TrainingRecord).recipe
    stages = tuple(Run(folder).steps(stage) for stage in range(trained.nodes))
    if recipe is None or recipe == trained:
        return stages
    return tuple(_in_order(recipe.pipeline, stage, records) for stage, records in enumerate(stages))


def _in_order(pipeline: PipelineSpec, stage: int, records: Iterable[StepRecord]) -> list[StepRecord]:
    """Put what a stage did in each training step into the order of a pipeline's schedule."""
    place = {(action.kind, action.microbatch): number for number, action in enumerate(orders_of(pipeline)[stage])}

    def of_frame(frame: SentRecord | ReceivedRecord) -> int:
        return place["F" if frame.direction == "forward" else "B", frame.microbatch]

    return [
        record.model_copy(
            update={
                "actions": tuple(sorted(record.actions, key=lambda action: place[action.kind, action.microbatch])),
                "sent": tuple(sorted(record.sent, key=of_frame)),
                "received": tuple(sorted(record.received, key=of_frame)),
            }
        )
        if record.phase == "train"
        else record
        for record in records
    ]


def _tasks(recipes: list[Recipe], home: Path, prepare: Callable[[Workload], Tokens]) -> list[Task]:
    """Write each recipe's job to a file beside its folder."""
    texts: dict[object, Tokens] = {}
    tasks = []
    for recipe in recipes:
        spec = recipe.workload
        key: object = tuple(getattr(spec, name) for name in PREPARED_BY) if isinstance(spec, TextSpec) else spec
        if key not in texts:
            texts[key] = prepare(spec)
        job = {
            "recipe": recipe.model_dump(mode="json"),
            "vocabulary": texts[key].vocabulary,
            "tokens": str(texts[key].path),
            "folder": str((home / recipe.id).resolve()),
        }
        path = home / f".{recipe.id}.json"
        results.write_json(path, job)
        tasks.append(
            Task(
                name=recipe.id,
                module="testbed.pipeline.alone",
                arguments=(str(path.resolve()),),
                memory_bytes=predict_memory(recipe),
                attempt=f"train {recipe.id}",
            )
        )
    return tasks


def host_options() -> dict[str, Any]:
    """Return what `executor.execute` starts programs with that train in one process."""
    return {"popen": forks.popen, "env": host_environment(), **paths.as_invoking_user()}


def _sweep_up(home: Path) -> None:
    """Remove jobs, and what trainings that were killed have left."""
    for path in itertools.chain(home.glob(".*.json"), home.glob(".*.draft")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

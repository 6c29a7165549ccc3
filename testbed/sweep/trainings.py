"""Trains each recipe of a sweep once, without a network, into results/<experiment>/trained/<recipe id>/.

Recipes that differ only in schedule and depth share one training: these determine when a stage works, but not what it
computes, nor the order of the messages that a codec sees (`jobs.schedule`).

Each training is a separate process (`training.alone`); as many run in parallel as cores and memory allow, a GPU's
memory included. The draft of one that was killed is resumed from its newest checkpoint, if it has any
(`training.checkpoints`). A training is finished once its folder has a manifest, and is used only if that is valid; one
of an older testbed has none, and must have as many steps as its recipe.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from testbed import forks, manifest, paths, results
from testbed.codecs.catalogue import placement
from testbed.errors import CapabilityError, ResultsError, TestbedError, UserError
from testbed.jobs.pipeline import orders_of
from testbed.records import Floors, ReceivedRecord, SentRecord, StepRecord, TrainingRecord
from testbed.results import Run
from testbed.runtime.control_plane import host_environment
from testbed.spec import PREPARED_BY, ImagesSpec, PipelineSpec, Recipe, TextSpec, TrainingDevice, Workload
from testbed.sweep.executor import Cluster, Task, execute
from testbed.sweep.live_session import Tokens
from testbed.training.memory_need import DeviceMemory, predict_memory
from testbed.workloads import networks, texts

FOLDER = "trained"
Prepare = Callable[[Workload], Tokens]
"""Prepares the data of a workload."""


class TrainingProgress(Protocol):
    """Observer of the trainings."""

    def note(self, message: str) -> None:
        """Show a message to the user."""
        ...

    def trained(self, recipe: Recipe, error: TestbedError | None) -> None:
        """Handle the end of a training; `error` is None on success."""
        ...


class Trainings(NamedTuple):
    """Outcomes of the trainings, by recipe id."""

    folders: dict[str, Path]
    """Folders of the recipes that are trained, now or earlier."""
    failures: dict[str, TestbedError]


def check_trainable(recipe: Recipe) -> None:
    """Raise UserError for a recipe that cannot be trained without a network."""
    if placement.parse_placement(recipe.codec).measures:
        raise UserError(
            f"cannot train {recipe.id} without a network: its codec {recipe.codec!r} adapts to its link; "
            'run such cells with timing = "live"'
        )


def device_memory(device: TrainingDevice) -> DeviceMemory:
    """Return the memory of the device to train on, which another program measures: this one has no torch.
    CapabilityError if torch cannot use such a device of this machine.
    """
    task = Task(device, "testbed.training.accelerator", (device,), 0, f"train on {device}")
    with closing(execute([task], options=host_options())) as ended:
        (result,) = ended
    if result.error is not None:
        raise CapabilityError(str(result.error))
    return DeviceMemory.model_validate_json(result.said)


def train_missing(
    recipes: Iterable[Recipe],
    folder: Path,
    *,
    prepare: Prepare,
    progress: TrainingProgress,
    at_once: int | None = None,
    cluster: Cluster | None = None,
) -> Trainings:
    """Train the recipes that have no finished training in an experiment's result folder.

    `prepare` prepares the data of a workload (`controller.prepare`), once per text. UserError before anything starts
    if a recipe cannot be trained without a network, or on the device that it states; on a cluster that is the CPU. A
    failed training affects only its own recipe. Ctrl-C ends all. On a cluster no training has checkpoints: they would
    be lost with the machine that wrote them.
    """
    wanted = {recipe.id: recipe for recipe in recipes}
    for recipe in wanted.values():
        check_trainable(recipe)
    home = folder / FOLDER
    _sweep_up(home)
    numbers = {_numbers(recipe) for recipe in wanted.values()}
    # Other trainings may be of a job whose module cannot be imported here.
    for path in (path for path in _kept(home) if path.name in wanted or _numbers_in(path / "training.json") in numbers):
        if fault := find_fault(path):
            aside = manifest.set_aside(path)
            progress.note(f"the training {path.name} is set aside as {aside.name}: {fault}")
            _numbers_in.cache_clear()
    missing = untrained(wanted.values(), folder)
    failures: dict[str, TestbedError] = {}
    for recipe in missing:
        if not cluster and recipe.training.checkpoint_every and results.checkpoint_steps(home / f".{recipe.id}.draft"):
            progress.note(f"the training {recipe.id} resumes from its newest valid checkpoint")
    if missing:
        gpu = None
        if any(recipe.training.device != "cpu" for recipe in missing):
            if cluster is not None:
                raise UserError(
                    "cannot train on the GPUs of a cluster: its tasks use cores only; choose --executor local, or "
                    "--device cpu"
                )
            gpu = device_memory("cuda")
        results.make_folder(home)
        if cluster is None:
            forks.start(host_environment())  # torch loads while texts are prepared
        try:
            by_name = {recipe.id: recipe for recipe in missing}
            tasks, alone = _tasks(missing, home, prepare, gpu, checkpoints=cluster is None), list[Task]()
            on_gpu, note = 0 if gpu is None else gpu.free_bytes, progress.note
            for some, most in ((tasks, at_once), (alone, 1)):
                if cluster is None:
                    ended = execute(some, at_once=most, note=note, options=host_options(), device_bytes=on_gpu)
                else:
                    ended = cluster.execute(some, note=note)
                with closing(ended):
                    for task, error, *_ in ended:
                        beside = some is tasks and task.device_bytes and len(tasks) > 1
                        if beside and error is not None and "out of memory" in str(error):
                            note(f"{error}; it is trained again after the others, alone")
                            alone.append(task)  # the state of codecs is not predicted
                            continue
                        if error is not None:
                            failures[task.name] = error
                        progress.trained(by_name[task.name], error)
        finally:
            _sweep_up(home)
    failed = {_numbers(recipe): failures[recipe.id] for recipe in missing if recipe.id in failures}
    failures = {name: failed[_numbers(recipe)] for name, recipe in wanted.items() if _numbers(recipe) in failed}
    trained = {name: trained_folder(folder, recipe) for name, recipe in wanted.items() if name not in failures}
    return Trainings(trained, failures)


def untrained(recipes: Iterable[Recipe], folder: Path) -> list[Recipe]:
    """Return the recipes to train until an experiment's result folder has a training for each of `recipes`. Among those
    that share a training, the one that needs the least memory is trained.
    """
    sharing: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        if not is_trained(trained_folder(folder, recipe)):
            sharing.setdefault(_numbers(recipe), []).append(recipe)
    return [min(alike, key=predict_memory) for alike in sharing.values()]


def _numbers(recipe: Recipe) -> str:
    """Return a key that is equal for recipes with identical training results.

    A third-party codec may look at more than its own messages, so with one, each schedule is trained separately.
    """
    codecs = (part.name for spec in placement.parse_placement(recipe.codec).specs() for part in spec.parts())
    if not isinstance(recipe.parallelism, PipelineSpec) or any(":" in name for name in codecs):
        return recipe.id
    one = recipe.pipeline.model_copy(update={"schedule": "gpipe", "in_flight": 1})
    return recipe.model_copy(update={"pipeline": one}).id


def is_trained(folder: Path) -> bool:
    """Return whether this folder holds a finished training, complete and unaltered."""
    return not find_fault(folder)


def find_fault(folder: Path) -> str:
    """Return why a folder holds no finished training: the missing, truncated or altered file; empty if it does."""
    proving = folder / manifest.NAME
    try:
        record = results.read_json(folder / "training.json", TrainingRecord)
        if record.recipe.id != folder.name:
            return f"training.json is that of {record.recipe.id}"
        if proving.exists() or record.finished_by is not None:
            return manifest.find_fault(proving, lambda: manifest.subject_of(record.recipe))
    except ResultsError as error:
        return str(error)
    counts = sorted({Run(folder).count_steps(node) for node in range(record.recipe.nodes)})
    steps = record.recipe.training.steps if record.ended == "steps" else counts[-1][0]
    whole = len(counts) == 1 and counts[0][0] == steps > 0
    return "" if whole else f"its records of {steps} steps and further evaluations are incomplete"


def _kept(home: Path) -> list[Path]:
    """Return the folders of trainings, without drafts and those set aside: an id has no dot."""
    return [path for path in sorted(home.glob("*/")) if "." not in path.name]


def trained_folder(folder: Path, recipe: Recipe) -> Path:
    """Return the folder of a recipe's training in an experiment's result folder, finished or not; it may be shared."""
    own = folder / FOLDER / recipe.id
    if is_trained(own):
        return own
    alike = (path for path in _kept(own.parent) if _numbers_in(path / "training.json") == _numbers(recipe))
    return next(filter(is_trained, alike), own)


@functools.cache
def _numbers_in(path: Path) -> str | None:
    """Return the `_numbers` of a finished training; None if it is no longer readable."""
    try:
        return _numbers(results.read_json(path, TrainingRecord).recipe)
    except TestbedError:
        return None


def final_loss(folder: Path) -> float | None:
    """Return the last validation loss of a training, with the codec in place; None if it is unfinished."""
    if not is_trained(folder):
        return None
    losses = [record.loss for record in load_training(folder)[-1] if record.phase == "evaluation"]
    return losses[-1] if losses else None


def floors_of(folder: Path) -> Floors:
    """Return the floors stored with a finished training."""
    record = results.read_json(folder / "training.json", TrainingRecord)
    return Floors(record.unigram_floor, record.bigram_floor)


def load_training(folder: Path, recipe: Recipe | None = None) -> tuple[list[StepRecord], ...]:
    """Read the records of a finished training, by stage (or by node). ResultsError for a folder without them.

    `recipe`: a recipe that shares the training; the actions are then reordered to its schedule, and their times are
    meaningless.
    """
    trained = results.read_json(folder / "training.json", TrainingRecord).recipe
    stages = tuple(Run(folder).steps(stage) for stage in range(trained.nodes))
    if recipe is None or recipe.id == trained.id:
        return stages
    return tuple(_in_order(recipe.pipeline, stage, records) for stage, records in enumerate(stages))


def _in_order(pipeline: PipelineSpec, stage: int, records: Iterable[StepRecord]) -> list[StepRecord]:
    """Reorder the actions of a stage in each training step to a pipeline's schedule."""
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


def files_of(workload: Workload, tokens: Tokens) -> tuple[Path, ...]:
    """Return the files of a workload's prepared data: none of images that come with scikit-learn."""
    if not isinstance(workload, ImagesSpec):
        return (tokens.path,)
    if (hub := texts.hub_set(workload.images, "images")) is None:
        return ()
    files = networks.prepared_paths(hub, tokens.path)
    proving = files[2].with_suffix(manifest.ENDING)
    return (*files, *([proving] if proving.exists() else []))


def _tasks(
    recipes: list[Recipe], home: Path, prepare: Prepare, gpu: DeviceMemory | None, *, checkpoints: bool
) -> list[Task]:
    """Write each recipe's job to a file next to its folder; return the tasks that run them. `gpu`: its memory, if any
    recipe is trained on one.
    """
    prepared: dict[object, Tokens] = {}
    tasks = []
    for recipe in recipes:
        spec = recipe.workload
        key: object = tuple(getattr(spec, name) for name in PREPARED_BY) if isinstance(spec, TextSpec) else spec
        if key not in prepared:
            prepared[key] = prepare(spec)
        job = {
            "recipe": recipe.model_dump(mode="json"),
            "vocabulary": prepared[key].vocabulary,
            "tokens": str(prepared[key].path),
            "folder": str((home / recipe.id).resolve()),
            "checkpoint_every": recipe.training.checkpoint_every if checkpoints else None,
        }
        path = home / f".{recipe.id}.json"
        results.write_json(path, job)
        need, there = predict_memory(recipe), None if recipe.training.device == "cpu" else gpu
        tasks.append(
            Task(
                name=recipe.id,
                module="testbed.training.alone",
                arguments=(str(path.resolve()),),
                memory_bytes=need if there is None else need + there.host_bytes,
                device_bytes=0 if there is None else need + there.process_bytes,
                attempt=f"train {recipe.id}",
                reads=(path.resolve(), *files_of(spec, prepared[key])),
                writes=(home / recipe.id).resolve(),
            )
        )
    return tasks


def host_options() -> dict[str, Any]:
    """Return the options of `executor.execute` for programs that train in one process."""
    return {"popen": forks.popen, "env": host_environment(), **paths.as_invoking_user()}


def _sweep_up(home: Path) -> None:
    """Remove job files, and the leftovers of killed trainings that cannot be resumed."""
    drafts = (path for path in home.glob(".*.draft") if not results.checkpoint_steps(path))
    for path in itertools.chain(home.glob(".*.json"), drafts):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

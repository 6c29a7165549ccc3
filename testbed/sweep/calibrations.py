"""Calibrates a sweep: measures how long each action of each recipe, or a worker's part of a step, takes on this
machine, once.

Durations are stored by content in the user's cache: by recipe (only the fields that affect durations), machine,
versions and timed sources. A second sweep, or a fresh clone, thus has the same numbers to the nanosecond.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import testbed
from testbed import paths, results
from testbed.errors import ResultsError, UserError, status_of
from testbed.frozen import Frozen, canonical_json
from testbed.jobs.kind import JobKind
from testbed.processors import read_processors
from testbed.records import (
    Calibration,
    CodecCosts,
    MessageCosts,
    PlaceCosts,
    ReplicaCosts,
    StageCosts,
    StageMaths,
    WorkerMaths,
)
from testbed.spec import DataParallelSpec, PipelineSpec, Recipe, Workload
from testbed.sweep.environment import describe_machine, hold_machine
from testbed.sweep.executor import Cluster, Task, TaskResult, execute
from testbed.sweep.live_session import Tokens
from testbed.sweep.trainings import check_trainable, files_of, host_options
from testbed.training.memory_need import available_memory, predict_memory
from testbed.training.timing import CalibrationDone, CalibrationJob, TimedRecipe, timed
from testbed.vm.launch import choose_processor, idlest_first

BUDGET_S = 12.0
"""Enough for three rounds of a sweep of four codecs. With 30 s as many recipes of the default sweep were noisy here."""
_SOURCES = ("codecs", "workloads", "jobs", "nodes", "training")
"""Folders with the timed sources."""
_LOOK_S = 0.1
_SHARE = 0.8
"""Share of the available memory that a calibration may use."""
_Kept = TypeVar("_Kept", bound=Frozen)


class _KeptSubject(Frozen):
    """The cache entry of one subject."""

    taken_at: str
    maths: tuple[StageMaths, ...] | None
    """None if the subject shares its maths with others."""
    codecs: tuple[CodecCosts, ...] | tuple[MessageCosts, ...] | tuple[PlaceCosts, ...]
    """For a job of a table `job`, the costs of all actions of its places."""


class _KeptMaths(Frozen):
    """The cache entry of maths that subjects share."""

    taken_at: str
    maths: tuple[StageMaths, ...] | tuple[WorkerMaths, ...]


def calibrate(
    recipes: Iterable[Recipe],
    *,
    prepare: Callable[[Workload], Tokens],
    budget_s: float = BUDGET_S,
    again: bool = False,
    given: Calibration | None = None,
    note: Callable[[str], None] | None = None,
    cluster: Cluster | None = None,
    before: Mapping[str, Any] = MappingProxyType({}),
) -> Calibration:
    """Return the durations of all recipes: stored ones, and for the other recipes new measurements, alone on one core,
    for at most `budget_s` seconds, under the lock of the machine that measures; for this one's, see `hold_machine`.

    With a budget of 0, recipes without stored durations are omitted.

    `prepare` prepares the data of a workload (`controller.prepare`). `again`: ignore stored durations. `given`: a
    calibration to use instead; UserError lists the recipes missing from it. On a cluster, all are those of one kind of
    machine: that of `before`, the machine of an earlier calibration, if there is one. UserError for a recipe that
    cannot be trained without a network, StageError if the measurement fails.
    """
    wanted = {recipe.id: recipe for recipe in recipes}
    if given is not None:
        check_given(given, wanted.values())
        return given
    for recipe in wanted.values():
        check_trainable(recipe)
    machine = describe_machine() if cluster is None else cluster.machine(before, note or (lambda message: None))
    keys = _Keys(machine)
    subjects = {recipe.id: timed(recipe) for recipe in wanted.values()}

    def missing() -> list[Recipe]:
        return list({keys.subject(one): one for one in subjects.values() if again or keys.kept(one) is None}.values())

    if missing() and budget_s > 0:
        with hold_machine(note) if cluster is None else nullcontext():  # there, the task holds its machine
            if left := missing():  # another testbed may have measured them before releasing the machine
                _measure(left, keys, prepare, budget_s, again, cluster)
    costs: dict[str, dict[str, Any]] = {"recipes": {}, "replicas": {}, "jobs": {}}
    dates = []
    for name, subject in subjects.items():
        if (kept := keys.kept(subject)) is not None:  # None: the budget is 0
            kind, durations, dated = kept
            costs[kind][name] = durations
            dates.append(dated)
    return Calibration(taken_at=max(dates, default=_now()), machine=machine, **costs)


def check_given(given: Calibration, recipes: Iterable[Recipe]) -> None:
    """Raise UserError unless a calibration has the durations of all places and messages of these recipes."""
    wanted = {recipe.id: recipe for recipe in recipes}
    what = f"the calibration passed in (taken at {given.taken_at})"
    remedy = "omit --calibration to measure them here, or pass one of the same sweep"
    if lacking := [name for name in wanted if name not in given.recipes | given.replicas | given.jobs]:
        listed = ", ".join(lacking)
        raise UserError(f"{what} lacks {len(lacking)} of {len(wanted)} recipes: {listed}; {remedy}")
    for name, recipe in wanted.items():
        if not _fits(given, name, recipe):
            raise UserError(
                f"{what} does not fit recipe {name}: stages, workers or places, or the messages of one, are missing; "
                f"{remedy}"
            )


def _fits(given: Calibration, name: str, recipe: Recipe) -> bool:
    """Return whether a calibration has all places and messages of a recipe."""
    match recipe.parallelism:
        case PipelineSpec(stages=stages):
            costs = given.recipes.get(name, ())
            ahead = all("forward" in cost.encode and "backward" in cost.decode for cost in costs[:-1])
            behind = all("backward" in cost.encode and "forward" in cost.decode for cost in costs[1:])
            return len(costs) == stages and ahead and behind
        case DataParallelSpec() as data if (replicas := given.replicas.get(name)) is not None:
            timed = data.fragments if data.aligned is None else 2
            counts = [len(side) for sender in replicas.messages for side in (sender.encode, sender.decode)]
            return len(replicas.workers) == data.workers and counts == [timed] * 2 * len(data.places)
        case JobKind() as job:
            return len(given.jobs.get(name, ())) == len(job.places)
    return False


class _Keys:
    """Locates cache files, whose names are hashes of everything that determines their content."""

    def __init__(self, machine: Mapping[str, Any]) -> None:
        """`machine`: the one that is measured, as from `describe_machine`."""
        self._here: dict[str, Any] = {**kind_of(machine), "sources": hash_of_sources(_SOURCES)}
        self._folder = paths.cache_folder() / "calibrations"

    def subject(self, subject: Recipe) -> Path:
        """Return the file of one subject."""
        return self._file("subject", subject)

    def maths(self, subject: Recipe) -> Path:
        """Return the file of the maths that a subject shares with others."""
        return self._file(
            "maths", subject.model_copy(update={"codec": "none", "outside": None, **_without_answer(subject)})
        )

    def kept(self, subject: Recipe) -> tuple[str, object, str] | None:
        """Return the field of `Calibration` for a subject, its stored durations, and the time of the latest; None if
        any are missing.
        """
        own = _read(self.subject(subject), _KeptSubject)
        if own is None:
            return None
        if subject.job is not None:
            return "jobs", own.codecs, own.taken_at
        maths: tuple[StageMaths | WorkerMaths, ...] | None = own.maths
        taken_at = own.taken_at
        if maths is None:
            shared = _read(self.maths(subject), _KeptMaths)
            if shared is None:
                return None
            maths, taken_at = shared.maths, max(taken_at, shared.taken_at)
        if subject.data is not None:
            return "replicas", ReplicaCosts.model_validate({"workers": maths, "messages": own.codecs}), taken_at
        stages = [dict(stage) | dict(codec) for stage, codec in zip(maths, own.codecs, strict=True)]
        return "recipes", tuple(map(StageCosts.model_validate, stages)), taken_at

    def _file(self, kind: str, subject: Recipe) -> Path:
        content = f"{kind}\n{canonical_json(subject)}\n{sorted(self._here.items())}"
        return self._folder / f"{hashlib.blake2b(content.encode(), digest_size=12).hexdigest()}.json"


def _read(path: Path, kind: type[_Kept]) -> _Kept | None:
    """Read a cache file; None if it is missing or unreadable."""
    try:
        return results.read_json(path, kind) if path.exists() else None
    except ResultsError:
        return None


def _without_answer(subject: Recipe) -> dict[str, object]:
    """Return a change of a recipe that resets its server's answer to the default, because only codecs depend on it."""
    data = subject.data
    return {} if data is None or data.answer is None else {"data": data.model_copy(update={"answer": "none"})}


def kind_of(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a described machine on which durations depend."""
    known = {name: machine.get(name) for name in ("cpu_model", "cores", "kernel", "python")}
    return known | {"torch": machine.get("versions", {}).get("torch")}


def hash_of_sources(folders: Iterable[str]) -> str:
    """Hash the sources and tables in folders of the package, e.g. the timed ones."""
    package = Path(testbed.__file__).resolve().parent
    total = hashlib.blake2b(digest_size=16)
    files = (path for folder in folders for path in (package / folder).rglob("*"))
    for path in sorted(path for path in files if path.suffix in (".py", ".toml")):
        total.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return total.hexdigest()


# ---------------------------------------------------------------------- measuring
def _measure(
    missing: Sequence[Recipe],
    keys: _Keys,
    prepare: Callable[[Workload], Tokens],
    budget_s: float,
    again: bool,
    cluster: Cluster | None,
) -> None:
    """Time the missing subjects, and store the results."""
    by_name = {recipe.id: recipe for recipe in missing}
    text_of = functools.cache(prepare)
    subjects, files = [], dict[str, tuple[Path, ...]]()
    for recipe in by_name.values():
        tokens = text_of(recipe.workload)
        files[recipe.id] = files_of(recipe.workload, tokens)
        shared = keys.maths(recipe)
        subjects.append(
            TimedRecipe(
                name=recipe.id,
                recipe=recipe,
                vocabulary=tokens.vocabulary,
                tokens=str(tokens.path),
                maths=shared.stem,
                maths_known=not again and _read(shared, _KeptMaths) is not None,
            )
        )
    folder = results.make_folder(paths.cache_folder() / "calibrations", "set XDG_CACHE_HOME to a folder of yours")
    for kind in (PipelineSpec, DataParallelSpec, JobKind):
        own = [subject for subject in subjects if isinstance(subject.recipe.parallelism, kind)]
        if not own:
            continue
        share_s = budget_s * len(own) / len(subjects)
        if cluster is None:
            done = _run(CalibrationJob(groups=_groups(own), budget_s=share_s, processor=None))
        else:
            read = tuple(dict.fromkeys(file for subject in own for file in files[subject.name]))
            done = _run_on(cluster, CalibrationJob(groups=(tuple(own),), budget_s=share_s, processor=None), read)
        now = _now()
        for name, maths in done.maths.items():
            results.write_json(folder / f"{name}.json", _KeptMaths(taken_at=now, maths=maths))
        for measured in done.subjects:
            kept = _KeptSubject(taken_at=now, maths=measured.maths, codecs=measured.codecs)
            results.write_json(keys.subject(by_name[measured.name]), kept)


def _groups(subjects: Sequence[TimedRecipe]) -> tuple[tuple[TimedRecipe, ...], ...]:
    """Group subjects, in order, so that each group fits into memory."""
    free = available_memory() * _SHARE
    groups: list[list[TimedRecipe]] = []
    left = 0.0
    for subject in subjects:
        needed = predict_memory(subject.recipe)
        if not groups or needed > left:
            groups.append([])
            left = free
        groups[-1].append(subject)
        left -= needed
    return tuple(map(tuple, groups))


def _run(job: CalibrationJob) -> CalibrationDone:
    """Run the calibration program on the idlest processor."""
    before = read_processors()
    time.sleep(_LOOK_S)
    processor, hold = choose_processor(idlest_first(before, read_processors(), os.sched_getaffinity(0)))
    folder = results.make_folder(paths.cache_folder(), "set XDG_CACHE_HOME to a folder of yours")
    path = folder / ".calibration.json"  # only one process measures at a time (`environment.hold_machine`)
    try:
        results.write_json(path, job.model_copy(update={"processor": processor}))
        task = Task(
            name="calibration",
            module="testbed.training.calibrate",
            arguments=(str(path),),
            memory_bytes=0,
            attempt="calibrate this machine",
        )
        return _done(execute([task], options=host_options()))
    finally:
        path.unlink(missing_ok=True)
        if hold is not None:
            hold.close()


def _run_on(cluster: Cluster, job: CalibrationJob, reads: tuple[Path, ...]) -> CalibrationDone:
    """Run this module as a program on a machine of a cluster."""
    with paths.scratch_folder("testbed-calibration-") as scratch:
        path = scratch / "calibration.json"
        results.write_json(path, job)
        task = Task(
            name="calibration",
            module="testbed.sweep.calibrations",
            arguments=(str(path),),
            memory_bytes=max(predict_memory(subject.recipe) for group in job.groups for subject in group),
            attempt="measure durations",
            reads=(path, *reads),
        )
        return _done(cluster.execute([task], note=lambda message: None, measured=True))


def _done(ended: Generator[TaskResult]) -> CalibrationDone:
    with closing(ended):
        (result,) = ended
    if result.error is not None:
        raise result.error
    return CalibrationDone.model_validate_json(result.said)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main() -> None:
    """Measure here what the file in the argument asks for, alone; print the durations."""

    def measure() -> None:
        job = CalibrationJob.model_validate_json(Path(sys.argv[1]).read_bytes())
        groups = _groups([subject for group in job.groups for subject in group])
        with hold_machine(lambda message: None):
            done = _run(job.model_copy(update={"groups": groups}))
        answer.write(done.model_dump_json() + "\n")
        answer.flush()

    answer, sys.stdout = sys.stdout, sys.stderr  # codecs of the user's may print
    sys.exit(status_of(measure))


if __name__ == "__main__":
    main()

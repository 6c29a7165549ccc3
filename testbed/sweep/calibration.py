"""Calibrate a sweep: how long each action of each recipe takes on this machine, or a worker's part of a step, measured
once and kept.

Durations are kept by content in the user's cache: by recipe (without what decides no duration), machine, versions and
the sources that are timed. So a second sweep, or a fresh clone, has the same numbers to the nanosecond.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import testbed
from testbed import paths, results
from testbed.codecs.catalogue import placement, table
from testbed.errors import ResultsError, UserError
from testbed.frozen import Frozen, canonical_json
from testbed.jobs.kind import JobKind
from testbed.pipeline.calibration import CalibrationDone, CalibrationJob, TimedRecipe, timed
from testbed.pipeline.memory import available_memory, predict_memory
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
from testbed.spec import DataParallelSpec, Parallelism, PipelineSpec, Recipe, Workload
from testbed.sweep.environment import describe_machine, hold_machine
from testbed.sweep.executor import Task, execute
from testbed.sweep.session import Tokens
from testbed.sweep.trainings import check_trainable, host_options
from testbed.vm.launch import choose_processor, idlest_first

BUDGET_S = 12.0
"""Three rounds of a sweep of four codecs. With 30 s as many recipes of the default sweep were noisy here: all."""
_TIMED = ("codecs", "workloads", "pipeline")
_SOURCES: Mapping[type[Parallelism], tuple[str, ...]] = {
    PipelineSpec: _TIMED,
    DataParallelSpec: (*_TIMED, "replicas"),
    JobKind: (*_TIMED, "jobs", "kinds"),
}
"""By kind of job: the folders with the sources that are timed."""
_LOOK_S = 0.1
_SHARE = 0.8
"""Of the memory that is available, what a calibration may take."""
_Kept = TypeVar("_Kept", bound=Frozen)


class _KeptSubject(Frozen):
    """What the cache holds of one subject."""

    taken_at: str
    maths: tuple[StageMaths, ...] | None
    """None where it is the maths that others share."""
    codecs: tuple[CodecCosts, ...] | tuple[MessageCosts, ...] | tuple[PlaceCosts, ...]
    """Of a job of a table `job`, all that its places do."""


class _KeptMaths(Frozen):
    """What the cache holds of maths that subjects share."""

    taken_at: str
    maths: tuple[StageMaths, ...] | tuple[WorkerMaths, ...]


def calibrate(
    recipes: Iterable[Recipe],
    *,
    prepare: Callable[[Workload], Tokens],
    budget_s: float = BUDGET_S,
    again: bool = False,
    given: Calibration | None = None,
) -> Calibration:
    """Return the durations of all recipes: those that are kept, and for the others what is measured now, alone on one
    core, for `budget_s` seconds at most, while no other testbed measures.

    Without anything to spend, recipes that are not kept are left out.

    `prepare` gets what a workload learns from ready (`controller.prepare`). `again`: what is kept does not count.
    `given`: a calibration to be used instead; UserError names recipes that it lacks. UserError for a recipe that cannot
    be trained without a network, StageError when the measuring fails.
    """
    wanted = {recipe.id: recipe for recipe in recipes}
    if given is not None:
        return _checked(given, wanted)
    for recipe in wanted.values():
        check_trainable(recipe)
    keys = _Keys()
    subjects = {recipe.id: timed(recipe) for recipe in wanted.values()}
    missing = {keys.subject(one): one for one in subjects.values() if again or keys.kept(one) is None}
    if missing and budget_s > 0:
        with hold_machine():
            _measure(list(missing.values()), keys, prepare, budget_s, again)
    costs: dict[str, dict[str, Any]] = {"recipes": {}, "replicas": {}, "jobs": {}}
    dates = []
    for name, subject in subjects.items():
        if (kept := keys.kept(subject)) is not None:  # None: with nothing to spend
            kind, found, dated = kept
            costs[kind][name] = found
            dates.append(dated)
    return Calibration(taken_at=max(dates, default=_now()), machine=describe_machine(), **costs)


def _checked(given: Calibration, wanted: dict[str, Recipe]) -> Calibration:
    if lacking := [name for name in wanted if name not in given.recipes | given.replicas | given.jobs]:
        raise UserError(
            f"the calibration that was given (taken at {given.taken_at}) lacks {len(lacking)} of {len(wanted)} "
            f"recipes: {', '.join(lacking)}; measure them here by leaving it out, or give one of the same sweep"
        )
    return given


class _Keys:
    """Where the cache keeps what: files named by a hash of all that decides their content."""

    def __init__(self) -> None:
        machine = describe_machine()
        self._here: dict[str, Any] = {name: machine[name] for name in ("cpu_model", "cores", "kernel", "python")}
        self._here["torch"] = machine["versions"]["torch"]
        self._sources = {kind: _hash_of_sources(folders) for kind, folders in _SOURCES.items()}
        self._folder = paths.cache_folder() / "calibrations"

    def subject(self, subject: Recipe) -> Path:
        """Return the file of one subject."""
        return self._file("subject", subject, _hash_of_strangers(subject))

    def maths(self, subject: Recipe) -> Path:
        """Return the file of the maths that it shares with others."""
        return self._file("maths", subject.model_copy(update={"codec": "none", **_without_answer(subject)}), "")

    def kept(self, subject: Recipe) -> tuple[str, object, str] | None:
        """Return the field of `Calibration` that a subject's durations belong in, these, and when the latest were
        taken; None where any are missing.
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

    def _file(self, kind: str, subject: Recipe, more: str) -> Path:
        here = self._here | {"sources": self._sources[_kind(subject)]}
        content = f"{kind}\n{canonical_json(subject)}\n{more}\n{sorted(here.items())}"
        return self._folder / f"{hashlib.blake2b(content.encode(), digest_size=12).hexdigest()}.json"


def _read(path: Path, kind: type[_Kept]) -> _Kept | None:
    """Read what is kept; None where there is nothing, or nothing that can be read."""
    try:
        return results.read_json(path, kind) if path.exists() else None
    except ResultsError:
        return None


def _without_answer(subject: Recipe) -> dict[str, object]:
    """Return a change of a recipe after which its server answers as all others do: that is a codec's."""
    data = subject.data
    return {} if data is None or data.answer is None else {"data": data.model_copy(update={"answer": "none"})}


def _hash_of_sources(folders: Sequence[str]) -> str:
    """Hash the sources that are timed."""
    package = Path(testbed.__file__).resolve().parent
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(path for folder in folders for path in (package / folder).rglob("*.py")):
        total.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def _kind(recipe: Recipe) -> type[Parallelism]:
    """Return the row of `_SOURCES` that a recipe is of."""
    return next(kind for kind in _SOURCES if isinstance(recipe.parallelism, kind))


def _hash_of_strangers(subject: Recipe) -> str:
    """Hash the modules of a recipe's codecs and kind of job that are not ours."""
    total = hashlib.blake2b(digest_size=16)
    names = {part.name for spec in placement.parse_placement(subject.codec).specs() for part in spec.parts()}
    names |= {subject.job.kind} if isinstance(subject.job, JobKind) else set()
    for name in sorted(name for name in names if ":" in name):
        origin = table.locate_module(name.partition(":")[0], name).origin
        total.update(f"{name}\n".encode() + (Path(origin).read_bytes() if origin else b""))
    return total.hexdigest()


# ---------------------------------------------------------------------- measuring
def _measure(
    missing: Sequence[Recipe],
    keys: _Keys,
    prepare: Callable[[Workload], Tokens],
    budget_s: float,
    again: bool,
) -> None:
    """Time what is missing, and keep it."""
    by_name = {recipe.id: recipe for recipe in missing}
    text_of = functools.cache(prepare)
    subjects = []
    for recipe in by_name.values():
        tokens = text_of(recipe.workload)
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
    for kind in _SOURCES:
        own = [subject for subject in subjects if _kind(subject.recipe) is kind]
        if not own:
            continue
        share_s = budget_s * len(own) / len(subjects)
        done = _run(CalibrationJob(groups=_groups(own), budget_s=share_s, processor=None))
        now = _now()
        for name, maths in done.maths.items():
            results.write_json(folder / f"{name}.json", _KeptMaths(taken_at=now, maths=maths))
        for found in done.subjects:
            kept = _KeptSubject(taken_at=now, maths=found.maths, codecs=found.codecs)
            results.write_json(keys.subject(by_name[found.name]), kept)


def _groups(subjects: Sequence[TimedRecipe]) -> tuple[tuple[TimedRecipe, ...], ...]:
    """Put those together that memory can hold at once, in their order."""
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
    """Run a program on the processor that idles most."""
    before = read_processors()
    time.sleep(_LOOK_S)
    processor, hold = choose_processor(idlest_first(before, read_processors(), os.sched_getaffinity(0)))
    folder = results.make_folder(paths.cache_folder(), "set XDG_CACHE_HOME to a folder of yours")
    path = folder / ".calibration.json"  # one measures at a time (`environment.hold_machine`)
    try:
        results.write_json(path, job.model_copy(update={"processor": processor}))
        task = Task(
            name="calibration",
            module="testbed.pipeline.calibrate",
            arguments=(str(path),),
            memory_bytes=0,
            attempt="calibrate this machine",
        )
        with closing(execute([task], options=host_options())) as ended:
            (result,) = ended
    finally:
        path.unlink(missing_ok=True)
        if hold is not None:
            hold.close()
    if result.error is not None:
        raise result.error
    return CalibrationDone.model_validate_json(result.said)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

"""The result folders: `results/<experiment>/<cell id>/run-<k>/`. Written whole or not at all; read back as records.

cell.json  DIGEST.trace (where a link follows one)  environment.json  lab.json  certificate.json  steps-<stage>.jsonl
counters.jsonl  summary.json (last)
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, RootModel, ValidationError, model_validator

from testbed import paths
from testbed.errors import ResultsError, SpecError, UserError
from testbed.frozen import Frozen
from testbed.profiles import trace
from testbed.records import LabRecord, RunCertificates, Sample, StepRecord, Summary
from testbed.spec import Cell

Record = TypeVar("Record", bound=BaseModel)
Order = Literal["grouped", "interleaved"]
"""Of the runs of a sweep; see `sweep.conduct.arrange_runs`."""


def check_folder(path: Path, remedy: str = "choose another with --results") -> None:
    """Check that `make_folder` could make a folder, without making it. SpecError, which ends with `remedy`."""
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise SpecError(f"cannot make the folder {path}: {nearest} is not a folder; {remedy}")
    if not os.access(nearest, os.W_OK):
        raise SpecError(f"cannot write to the folder {nearest}; {remedy}")


def make_folder(path: Path, remedy: str = "choose another with --results") -> Path:
    """Make a folder and its missing parents, owned by the invoking user. SpecError, which ends with `remedy`, if it
    cannot be.
    """
    missing = [p for p in (path, *path.parents) if not p.exists()]
    try:
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            paths.give_to_user(folder)
    except OSError as error:
        raise SpecError(f"cannot make the folder {path}: {error.strerror}; {remedy}") from None
    if not os.access(path, os.W_OK):
        raise SpecError(f"cannot write to the folder {path}; {remedy}")
    return path


@contextmanager
def locked(path: Path, busy: str = "") -> Iterator[None]:
    """Hold a lock, and wait for whoever holds it; or raise UserError with `busy`, where that is given. It is free again
    when its holder ends, however that ends.
    """
    with path.open("a") as file:
        paths.give_to_user(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise UserError(busy) from None
        yield


def write_json(path: Path, content: BaseModel | dict[str, Any]) -> None:
    """Write a record so that a reader sees the old file or the new one, never a part."""
    text = (
        content.model_dump_json(indent=1)
        if isinstance(content, BaseModel)
        else json.dumps(content, indent=1, sort_keys=True)
    )
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text + "\n", encoding="utf8")
    paths.give_to_user(draft)
    draft.replace(path)


def read_json(path: Path, kind: type[Record]) -> Record:
    """Read a record back. ResultsError names the file."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        raise ResultsError(
            f"{path} is not a {kind.__name__} record: {error.error_count()} faults, first: {error.errors()[0]}"
        ) from None


def _read_lines(path: Path, kind: type[Record]) -> Iterator[Record]:
    """Read the records of a file that has one per line, without a last line that was cut off. ResultsError names file
    and line.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield kind.model_validate_json(line)
            except ValidationError as error:
                raise ResultsError(
                    f"{path}, line {number}, is not a {kind.__name__} record: {error.errors()[0]}"
                ) from None


class ClaimSpec(Frozen):
    """One claim about two arms, with the effect that decides it."""

    name: str
    """In a few words, for tables."""
    ours: dict[str, Any]
    """Which cells: dotted field = value, or a list of values, as in [[only]]."""
    baseline: dict[str, Any]
    """Those that they are compared with."""
    loss: float | None = None
    """As in `CompareSpec`; exactly one of the three is stated."""
    speed_up: Annotated[float, Field(gt=0)] | None = None
    time_to_loss: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one_effect(self) -> ClaimSpec:
        stated = [name for name in ("loss", "speed_up", "time_to_loss") if getattr(self, name) is not None]
        if len(stated) != 1:
            raise ValueError(
                f"claim {self.name!r} states {' and '.join(stated) or 'no effect'}; one of loss, speed_up and "
                "time_to_loss is needed"
            )
        return self


class CompareSpec(Frozen):
    """[compare]: what each arm is compared with, and the effects that decide a verdict (`metrics.verdicts`)."""

    baselines: Annotated[tuple[str, ...], Field(min_length=1)] = ("bf16", "fp32")
    """Codecs that every arm is compared with: first what people send, then what nothing is lost by."""
    loss: float | None = None
    """Claim: an arm's validation loss after equal tokens lies at most so many nats above the baseline's. None: the
    difference has an interval and no verdict."""
    speed_up: Annotated[float, Field(gt=0)] | None = None
    """Claim: an arm's step is at least so many times as fast as the baseline's over the same network."""
    time_to_loss: Annotated[float, Field(gt=0)] | None = None
    """Claim: an arm reaches `target_loss` at least so many times as fast."""
    target_loss: Annotated[float, Field(gt=0)] | None = None
    """Stated beforehand: a loss that is read off one arm selects."""
    claims: tuple[ClaimSpec, ...] = ()
    """Comparisons with an effect of their own."""

    @model_validator(mode="after")
    def _target_stated(self) -> CompareSpec:
        timed = self.time_to_loss is not None or any(claim.time_to_loss is not None for claim in self.claims)
        if timed and self.target_loss is None:
            raise ValueError("time_to_loss is stated without target_loss, the loss that is to be reached")
        return self


class SweepRecord(Frozen):
    """sweep.json: which cells the last sweep into a result folder asked for. The folder may hold others from before."""

    question: str
    command: str
    """What was typed, to be typed again."""
    cells: tuple[str, ...]
    """Ids, as the file has them; runs that only served to tune are not among them."""
    repeats: int = 1
    """Good runs that each cell was to have."""
    order: Order = "grouped"
    order_seed: int = 0
    tuned: bool = False
    """Whether tuning.json says how a field was chosen for each arm."""
    marks: dict[str, str] = Field(default={})
    """Ids of cells -> what must be known of the value that was chosen for them, where something must."""
    stated: tuple[str, ...] = ()
    """Ids of cells that state the field which is chosen for others."""
    compare: CompareSpec | None = None
    """What the file says about comparisons."""
    live_checks: dict[str, str] = Field(default={})
    """Ids of live cells -> ids of the played ones that were checked with them."""
    live_reason: str = ""
    """Why there was no live check, where one was asked for."""


class TriedValue(Frozen):
    """One value of the tuned field, for one arm."""

    value: Any
    cells: tuple[str, ...]
    """Ids of its cells, one per seed."""
    losses: tuple[float | None, ...]
    """Final validation losses; None where no run ended well."""
    mean_loss: float | None
    """None: out, because a loss is missing or not finite."""
    added: bool = False
    """Whether it was not asked for, and tried because the best value was at the end of the list."""


class TunedArm(Frozen):
    """One arm: what was tried and what was taken."""

    arm: dict[str, Any]
    """For example {"codec": "int8"}."""
    tried: tuple[TriedValue, ...]
    """In ascending order."""
    chosen: Any
    """None where no value led to a finite loss with every seed."""
    mark: str = ""
    """Why the choice cannot be relied on, in a few words that go wherever the arm's numbers go; empty where it can."""

    @property
    def left(self) -> bool:
        """Whether there is a value to run the arm with."""
        return self.chosen is not None


class RankCheck(Frozen):
    """Whether short runs rank values as full ones do: the first arm's values, trained at full length too."""

    arm: dict[str, Any]
    steps: int
    """The full length."""
    tried: tuple[TriedValue, ...]
    """At full length; without the values that were out at the short one."""
    chosen: Any
    """The best value at full length."""
    tau: float | None
    """Kendall's rank correlation of the mean losses at both lengths; None below two values."""
    regret: float | None
    """What the short runs' choice costs at full length, in nats per token; None where its loss is not finite."""
    alike: bool
    """Whether both lengths choose the same value."""


class TuningRecord(Frozen):
    """tuning.json: how one field was chosen for each arm before the sweep."""

    field: str
    """Dotted."""
    steps: int | None
    """Of each run; None: as many as the arm's own training has."""
    seeds: tuple[int, ...]
    over: str
    """The network of trials that need one: those of live cells."""
    arms: tuple[TunedArm, ...]
    widen: int = 0
    """Values that each arm could have had beyond those that were asked for."""
    quick: bool = False
    """Whether it is a short form, whose choice says nothing."""
    check: RankCheck | None = None
    """None where the runs had full length, or the form is a short one."""


def last_tuning(experiment: Path) -> TuningRecord | None:
    """Read how the last sweep into this folder was tuned; None where it was not."""
    path = experiment / "tuning.json"
    return read_json(path, TuningRecord) if path.exists() else None


def last_sweep(experiment: Path) -> SweepRecord:
    """Read what the last sweep into this folder asked for; every cell in it where none was recorded."""
    path = experiment / "sweep.json"
    if path.exists():
        return read_json(path, SweepRecord)
    cells = sorted(folder.name for folder in experiment.glob("*/") if any(folder.glob("run-*")))
    return SweepRecord(question="", command="", cells=tuple(cells))


class Environment(RootModel[dict[str, Any]]):
    """environment.json: see `sweep.environment`."""


class Run(NamedTuple):
    """One run's folder; files are read when asked for."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name.removeprefix("run-"))

    @property
    def cell(self) -> Cell:
        trace.find_kept_traces(self.folder)
        return read_json(self.folder / "cell.json", Cell)

    @property
    def lab(self) -> LabRecord:
        return read_json(self.folder / "lab.json", LabRecord)

    @property
    def environment(self) -> dict[str, Any]:
        """environment.json: the machine; empty where there is none. ResultsError when it cannot be read."""
        path = self.folder / "environment.json"
        return read_json(path, Environment).root if path.exists() else {}

    @property
    def certificates(self) -> RunCertificates:
        return read_json(self.folder / "certificate.json", RunCertificates)

    @property
    def summary(self) -> Summary | None:
        """The run in numbers; None while it has not ended."""
        path = self.folder / "summary.json"
        return read_json(path, Summary) if path.exists() else None

    def steps(self, stage: int) -> list[StepRecord]:
        """Read the records of one stage; a last line that was cut off by a crash is left out."""
        return list(_read_lines(self.folder / f"steps-{stage}.jsonl", StepRecord))

    def samples(self) -> Iterator[Sample]:
        """Read the lab's counters, ten times a second, oldest first; none where they were not taken."""
        return _read_lines(self.folder / "counters.jsonl", Sample)


def runs(experiment: Path, cell_id: str | None = None) -> Iterator[Run]:
    """Yield every run below an experiment's result folder, by cell and number."""
    cells = [experiment / cell_id] if cell_id else sorted(experiment.glob("*/"))
    for cell in cells:
        yield from sorted((Run(p) for p in cell.glob("run-*/")), key=lambda run: run.number)


def finished_runs(experiment: Path, cell_id: str) -> list[Run]:
    """Return the runs of a cell that ended well, oldest first."""
    return [run for run in runs(experiment, cell_id) if (summary := run.summary) is not None and summary.status == "ok"]


def finished(experiment: Path, cell_id: str) -> Run | None:
    """Return the newest run of a cell that ended well, or None."""
    done = finished_runs(experiment, cell_id)
    return done[-1] if done else None


def new_run(experiment: Path, cell: Cell) -> Run:
    """Make a fresh folder for the next run of a cell, with cell.json in it."""
    number = max((r.number for r in runs(experiment, cell.id)), default=0) + 1
    run = Run(make_folder(experiment / cell.id / f"run-{number}"))
    for profile in cell.profiles:
        for pipe in (profile.up, profile.down):
            if pipe is not None and pipe.trace is not None:
                paths.give_to_user(trace.keep_trace(pipe.trace, run.folder))
    write_json(run.folder / "cell.json", cell)
    return run

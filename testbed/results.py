"""The result folders: `results/<experiment>/<cell id>/run-<k>/`. Files are written atomically and read back as records.

cell.json  DIGEST.trace (if a link follows one)  environment.json  lab.json  certificate.json  steps-<stage>.jsonl
counters.jsonl  summary.json  manifest.json (last)
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, Field, RootModel, ValidationError, model_validator

import testbed
from testbed import manifest, paths
from testbed.errors import ResultsError, SpecError, TestbedError
from testbed.frozen import Frozen
from testbed.profiles import rate_trace
from testbed.proofs import Proof, proofs_in
from testbed.records import LabRecord, RunCertificates, Sample, StepRecord, Summary
from testbed.spec import Cell, Recipe

Record = TypeVar("Record", bound=BaseModel)
Order = Literal["grouped", "interleaved"]
"""Order of the runs of a sweep; see `sweep.conduct.arrange_runs`."""
CHECKPOINT: Final = "checkpoint-"
"""How the name of a training's checkpoint begins; its step follows."""


def check_folder(path: Path, remedy: str = "choose another with --results", *, to_write: bool = True) -> None:
    """Check, without creating it, that `make_folder` could create a folder, or that it can be read.
    Otherwise SpecError, with `remedy`.
    """
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise SpecError(f"cannot make the folder {path}: {nearest} is not a folder; {remedy}")
    if to_write and not os.access(nearest, os.W_OK):
        raise SpecError(f"cannot write to the folder {nearest}; {remedy}")


def make_folder(path: Path, remedy: str = "choose another with --results") -> Path:
    """Create a folder and its missing parents, owned by the invoking user. If that fails, SpecError, with `remedy`."""
    try:
        paths.make_folders(path)
    except OSError as error:
        raise SpecError(f"cannot make the folder {path}: {error.strerror}; {remedy}") from None
    if not os.access(path, os.W_OK):
        raise SpecError(f"cannot write to the folder {path}; {remedy}")
    return path


def write_json(path: Path, content: BaseModel | dict[str, Any]) -> None:
    """Write a record atomically: a reader sees the old file or the new one, never a part."""
    text = (
        content.model_dump_json(indent=1)
        if isinstance(content, BaseModel)
        else json.dumps(content, indent=1, sort_keys=True)
    )
    paths.write_atomically(path, text + "\n")


def read_json(path: Path, kind: type[Record]) -> Record:
    """Read a record back. ResultsError names the file."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ResultsError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        raise ResultsError(
            f"{path} is not a {kind.__name__} record: {error.error_count()} errors, the first: {error.errors()[0]}"
        ) from None


def read_lines(path: Path, kind: type[Record]) -> Iterator[Record]:
    """Read a file with one record per line, without a truncated last line. ResultsError names the file and line."""
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
    """One claim about two arms, with its threshold."""

    name: str
    """Short name, for tables."""
    ours: dict[str, Any]
    """Filter of the cells: dotted field = value, or a list of values, as in [[only]]."""
    baseline: dict[str, Any]
    """Filter of the cells to compare with."""
    loss: float | None = None
    """As in `CompareSpec`; exactly one of the three is stated."""
    speed_up: Annotated[float, Field(gt=0)] | None = None
    time_to_loss: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one_effect(self) -> ClaimSpec:
        stated = [name for name in ("loss", "speed_up", "time_to_loss") if getattr(self, name) is not None]
        if len(stated) != 1:
            raise ValueError(
                f"claim {self.name!r} states {' and '.join(stated) or 'no effect'}; state exactly one of loss, "
                "speed_up and time_to_loss"
            )
        return self


class CompareSpec(Frozen):
    """[compare]: the baselines of each arm, and the thresholds of the verdicts (`metrics.verdicts`)."""

    baselines: Annotated[tuple[str, ...], Field(min_length=1)] = ("bf16", "fp32")
    """Codecs that every arm is compared with: first the usual one, then the lossless one."""
    loss: float | None = None
    """Claim: an arm's validation loss after equal tokens is at most this many nats above the baseline's. None: report
    the difference with its interval, but no verdict."""
    speed_up: Annotated[float, Field(gt=0)] | None = None
    """Claim: an arm's step is at least this many times as fast as the baseline's over the same network."""
    time_to_loss: Annotated[float, Field(gt=0)] | None = None
    """Claim: an arm reaches `target_loss` at least this many times as fast."""
    target_loss: Annotated[float, Field(gt=0)] | None = None
    """Target loss, stated in advance: a loss taken from the results of an arm would favour it."""
    claims: tuple[ClaimSpec, ...] = ()
    """Comparisons with their own thresholds."""
    looks: Annotated[int, Field(ge=1)] = 1
    """How often verdicts are sought at growing data: 2 if seeds are added where a first look left claims open. Each
    look has its share of the 5 %. State it before the first look."""

    @model_validator(mode="after")
    def _target_stated(self) -> CompareSpec:
        timed = self.time_to_loss is not None or any(claim.time_to_loss is not None for claim in self.claims)
        if timed and self.target_loss is None:
            raise ValueError("time_to_loss is stated without target_loss; state the loss to reach")
        return self


class SweepRecord(Frozen):
    """sweep.json: the cells of the last sweep into a result folder. The folder may hold cells of earlier sweeps too."""

    question: str
    command: str
    """Command line of the sweep."""
    cells: tuple[str, ...]
    """Ids in the order of the file, without cells that were only used for tuning."""
    repeats: int = 1
    """Requested number of successful runs per cell."""
    order: Order = "grouped"
    order_seed: int = 0
    tuned: bool = False
    """Whether a field was tuned for each arm; see tuning.json."""
    marks: dict[str, str] = Field(default={})
    """Caveats about the values chosen by tuning, by cell id."""
    stated: tuple[str, ...] = ()
    """Ids of cells that state the tuned field themselves, and that no arm is tuned to."""
    compare: CompareSpec | None = None
    """The [compare] table of the file."""
    live_checks: dict[str, str] = Field(default={})
    """Ids of live cells -> ids of the played cells that they check."""
    live_reason: str = ""
    """Why a requested live check was not made."""


class TriedValue(Frozen):
    """One value of the tuned field, for one arm."""

    value: Any
    cells: tuple[str, ...]
    """Ids of its cells, one per seed."""
    losses: tuple[float | None, ...]
    """Final validation losses; None if no run succeeded."""
    mean_loss: float | None
    """Mean of the losses; None: disqualified, because a loss is missing or not finite."""
    added: bool = False
    """Whether the value was added, because the best value was at the end of the list."""


class TunedArm(Frozen):
    """One arm: the values tried and the value chosen."""

    arm: dict[str, Any]
    """For example {"codec": "int8"}."""
    tried: tuple[TriedValue, ...]
    """In ascending order."""
    chosen: Any
    """Chosen value; None if no value led to a finite loss with every seed."""
    mark: str = ""
    """Short reason why the choice is unreliable, shown with the arm's numbers; empty if it is reliable."""

    @property
    def left(self) -> bool:
        """Whether the arm has a chosen value."""
        return self.chosen is not None


class RankCheck(Frozen):
    """Check that short runs rank values as full ones do, with the first arm's values trained at full length too."""

    arm: dict[str, Any]
    steps: int
    """The full length."""
    tried: tuple[TriedValue, ...]
    """Values at full length, without those disqualified at the short one."""
    chosen: Any
    """The best value at full length."""
    tau: float | None
    """Kendall's rank correlation of the mean losses at both lengths; None below two values."""
    regret: float | None
    """Excess loss of the short runs' choice at full length, in nats per token; None if its loss is not finite."""
    alike: bool
    """Whether both lengths choose the same value."""


class TuningRecord(Frozen):
    """tuning.json: how one field was chosen for each arm before the sweep."""

    field: str
    """Dotted."""
    steps: int | None
    """Number of steps per run; None: those of the arm's training."""
    seeds: tuple[int, ...]
    over: str
    """The network of live trials."""
    arms: tuple[TunedArm, ...]
    widen: int = 0
    """Maximum number of values added per arm."""
    quick: bool = False
    """Whether it is a short form, with a meaningless choice."""
    check: RankCheck | None = None
    """None if the runs had full length, or in a short form."""


def last_tuning(experiment: Path) -> TuningRecord | None:
    """Read the tuning of the last sweep into this folder; None if it was not tuned."""
    path = experiment / "tuning.json"
    return read_json(path, TuningRecord) if path.exists() else None


def last_sweep(experiment: Path) -> SweepRecord:
    """Read the record of the last sweep into this folder; without one, every cell in the folder."""
    path = experiment / "sweep.json"
    if path.exists():
        return read_json(path, SweepRecord)
    cells = dict.fromkeys(run.folder.parent.name for run in runs(experiment))
    return SweepRecord(question="", command="", cells=tuple(cells))


class Environment(RootModel[dict[str, Any]]):
    """environment.json: see `sweep.environment`."""


FINISHED_BY = "finished_by"
"""Key of environment.json that distinguishes a run whose manifest is missing from an old run, which never had one."""


class Run(NamedTuple):
    """One run's folder; files are read on access."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name.removeprefix("run-"))

    @property
    def cell(self) -> Cell:
        version, settled = manifest.version_of(self.folder, "cell.json")
        return (_cell if settled else _cell.__wrapped__)(self.folder, version)

    @property
    def lab(self) -> LabRecord:
        return read_json(self.folder / "lab.json", LabRecord)

    @property
    def environment(self) -> dict[str, Any]:
        """environment.json: the machine; empty if missing. ResultsError if it cannot be read."""
        path = self.folder / "environment.json"
        return read_json(path, Environment).root if path.exists() else {}

    @property
    def certificates(self) -> RunCertificates:
        return read_json(self.folder / "certificate.json", RunCertificates)

    @property
    def summary(self) -> Summary | None:
        """The summary of the run; None until it has ended. ResultsError for an altered run."""
        return self.summary_by(self.proof)

    def summary_by(self, proof: Proof) -> Summary | None:
        """Return the summary, like `summary`, of a run whose `proof` this is."""
        if proof.state == "altered":
            raise ResultsError(f"{self.folder} was altered after it was written: {proof.why}; {MADE_AGAIN}")
        return read_json(self.folder / "summary.json", Summary) if proof.sound else None

    @property
    def proof(self) -> Proof:
        """Whether its files are complete, unaltered, and those of the cell that its folder is named after. SpecError
        for a verified run of a codec or job that cannot be imported here. Unchanged files are read once (`proofs`).
        """
        version, settled = manifest.version_of(self.folder)
        proofs, name = proofs_in(self.folder.parent.parent).known, "/".join(self.folder.parts[-2:])
        known = proofs.get(name)
        if known is None or known[0] != version:
            known = version, self._prove()
            if settled:
                proofs[name] = known
        return known[1]

    def _prove(self) -> Proof:
        proving, verified = self.folder / manifest.NAME, (self.folder / manifest.NAME).exists()
        try:
            fault = manifest.find_fault(proving, lambda: manifest.subject_of(self.cell)) if verified else ""
            if not fault and (cell := self.cell).id != self.folder.parent.name:
                fault = f"cell.json is that of {cell.id}"
            if fault or verified:
                return Proof("altered", fault) if fault else Proof("verified")
            due = self.environment.get(FINISHED_BY) == manifest.NAME
            if due or not (self.folder / "summary.json").exists():
                return Proof("unfinished", f"it is still running, or was killed: it has no {proving.name}")
            fault = self._disagreement(cell, read_json(self.folder / "summary.json", Summary))
        except TestbedError as error:
            if verified and isinstance(error, SpecError):
                raise  # its files are unaltered: the module of its codec or job is missing here
            fault = str(error)
        return Proof("altered", fault) if fault else Proof("unverified")

    def _disagreement(self, cell: Cell, summary: Summary) -> str:
        """Return how the files of an old run contradict its summary; empty if they agree."""
        if summary.cell_id != cell.id:
            return f"summary.json is that of {summary.cell_id}"
        if summary.certificate is not None:
            _ = self.certificates  # raises ResultsError if there are none
        nodes = [node for node, name in enumerate(cell.node_names) if name not in summary.lost]
        steps = min((self.count_steps(node)[0] for node in nodes), default=0)
        agree = summary.status != "ok" or steps == summary.steps
        return "" if agree else f"summary.json says {summary.steps} steps, but the records have {steps}"

    def count_steps(self, node: int) -> tuple[int, int]:
        """Count a node's training steps and all of its records, in complete lines and without reading them."""
        path = self.folder / f"steps-{node}.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return sum(b'"phase":"train"' in line for line in lines), len(lines)

    def finish(self, summary: Summary) -> None:
        """Write the summary, and then the manifest that makes the run a finished one."""
        write_json(self.folder / "summary.json", summary)
        manifest.write_manifest(self.folder / manifest.NAME, manifest.subject_of(self.cell), self.folder.iterdir())
        for folder in (self.folder.parent, self.folder.parent.parent):
            paths.sync_folder(folder)

    def steps(self, stage: int) -> list[StepRecord]:
        """Read the records of one stage, without a last line truncated by a crash."""
        return list(read_lines(self.folder / f"steps-{stage}.jsonl", StepRecord))

    def all_steps(self) -> list[list[StepRecord]]:
        """Return the records of every node, by node."""
        return [self.steps(node) for node in range(self.cell.nodes)]

    def samples(self) -> Iterator[Sample]:
        """Read the samples of the lab's counters, oldest first; none if they were not taken."""
        return read_lines(self.folder / "counters.jsonl", Sample)


@functools.lru_cache(maxsize=1 << 12)
def _cell(folder: Path, version: str) -> Cell:
    rate_trace.find_kept_traces(folder)
    return read_json(folder / "cell.json", Cell)


MADE_AGAIN = "repeat the sweep, which sets it aside and makes the run again"


def runs(experiment: Path, cell_id: str | None = None) -> Iterator[Run]:
    """Yield every run below an experiment's result folder, by cell and number: folders named run-<digits>."""
    for cell in [cell_id] if cell_id else _folders_in(experiment):
        named = (name for name in _folders_in(experiment / cell) if re.fullmatch(r"run-[0-9]+", name))
        yield from sorted((Run(experiment / cell / name) for name in named), key=lambda run: run.number)


def _folders_in(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, in order; none if it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())
    return []


def finished_runs(experiment: Path, cell_id: str) -> list[Run]:
    """Return the successful, unaltered runs of a cell, oldest first."""
    proved = ((run, run.proof) for run in runs(experiment, cell_id))
    ended = ((run, run.summary_by(proof)) for run, proof in proved if proof.sound)
    return [run for run, summary in ended if summary is not None and summary.status == "ok"]


def finished(experiment: Path, cell_id: str) -> Run | None:
    """Return the newest successful run of a cell, or None."""
    done = finished_runs(experiment, cell_id)
    return done[-1] if done else None


def set_aside(experiment: Path, cell_ids: Iterable[str], note: Callable[[str], None]) -> None:
    """Rename the altered and unfinished runs of cells, and tell `note` which. The caller must hold the folder's lock: a
    run in progress is unfinished, too.
    """
    for run in [run for cell_id in cell_ids for run in runs(experiment, cell_id)]:
        if not (proof := run.proof).sound:
            aside = manifest.set_aside(run.folder)
            note(f"{run.folder.parent.name}/{run.folder.name} is set aside as {aside.name}: {proof.why}")


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, valid or not, in order."""
    return sorted(int(path.name.removeprefix(CHECKPOINT)) for path in folder.glob(f"{CHECKPOINT}*[0-9]"))


def checkpoint_subject(recipe: Recipe) -> str:
    """Return the subject of a checkpoint's manifest: its training, by these versions."""
    return f"{manifest.subject_of(recipe)} testbed {testbed.__version__} torch {metadata.version('torch')}"


def newest_checkpoint(folder: Path, recipe: Recipe) -> int | None:
    """Return the last step that has a valid checkpoint of a training in a folder; None: none has."""
    subject = checkpoint_subject(recipe)

    def is_whole(step: int) -> bool:
        return not manifest.find_fault(folder / f"{CHECKPOINT}{step}" / manifest.NAME, lambda: subject)

    return next(filter(is_whole, reversed(checkpoint_steps(folder))), None)


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints in a folder, and a draft of one."""
    for path in folder.glob(f"{CHECKPOINT}*[0-9]"):
        shutil.rmtree(path)
    shutil.rmtree(folder / f".{CHECKPOINT}draft", ignore_errors=True)


def new_run(experiment: Path, cell: Cell) -> Run:
    """Create the folder of the next run of a cell, with cell.json in it."""
    number = max((r.number for r in runs(experiment, cell.id)), default=0) + 1
    run = Run(make_folder(experiment / cell.id / f"run-{number}"))
    for profile in cell.all_profiles:
        for pipe in (profile.up, profile.down):
            if pipe is not None and pipe.trace is not None:
                paths.give_to_user(rate_trace.keep_trace(pipe.trace, run.folder))
    write_json(run.folder / "cell.json", cell)
    return run

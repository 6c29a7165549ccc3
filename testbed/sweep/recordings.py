"""Which run a cell with `timing = "replay"` replays: that of the same cell, really trained over links that are not shaped."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from testbed import paths, results
from testbed.errors import StageError
from testbed.profiles.loading import read_profile
from testbed.spec import Cell, recording

_UNSHAPED = "datacenter.toml"
_OVERRUNS = 0.01


def recording_of(cell: Cell) -> Cell:
    """The cell whose run `cell` replays; cells that differ in their links alone share it.

    It has no time budget: how many steps fit into one depends on the links, so the replay watches it.
    """
    unshaped = read_profile(paths.profile_folders()[-1] / _UNSHAPED)  # the shipped one, whatever else has its name
    trained = recording(cell, unshaped)
    return trained.model_copy(update={"training": trained.training.model_copy(update={"budget_s": None})})


def with_recordings(cells: Iterable[Cell], have: Container[str] = ()) -> tuple[Cell, ...]:
    """The same cells, and before them the recordings that replays among them need: each once, and one time less in its own place.

    `have` holds the ids of cells with a good run, which need no other.
    """
    cells = tuple(cells)
    needed = {
        one.id: one for one in (recording_of(cell) for cell in cells if cell.timing == "replay") if one.id not in have
    }
    early, rest = set(needed), []
    for cell in cells:
        if cell.id in early:
            early.remove(cell.id)
        else:
            rest.append(cell)
    return (*needed.values(), *rest)


def pairs(experiment: Path) -> Iterator[tuple[results.Run, results.Run]]:
    """Every cell in a result folder with good runs of both timings: its newest full run and its newest replay."""
    for folder in sorted(experiment.glob("*/")):
        replay = results.finished(experiment, folder.name)
        if replay is None or (cell := replay.cell).timing != "replay":
            continue
        if full := results.finished(experiment, cell.model_copy(update={"timing": "full"}).id):
            yield full, replay


def doubt(folder: Path) -> str | None:
    """Why what replays this run may not take the time that a full run would; None: no reason."""
    run = results.Run(folder)
    summary, cell, cores = run.summary, run.cell, run.environment.get("cores")
    if summary is not None and summary.overrun_share is not None and summary.overrun_share > _OVERRUNS:
        return (
            f"the recording {cell.id} has {summary.overrun_share:.1%} overruns: this machine is too slow for the emulated "
            "device, and what replays it is slower than the device would be; compute.dilation makes time for it"
        )
    if cell.compute.mode == "measured" and cores is not None and cores < cell.pipeline.stages:
        return (
            f"the recording {cell.id} was made on {cores} processors by {cell.pipeline.stages} stages without pacing: its "
            "durations include waiting for a processor, and replays over slower links may take longer than full runs; "
            "compute.mode = 'paced' has none of that"
        )
    return None


def folder_of(cell: Cell, experiment: Path) -> Path:
    """The newest good run in an experiment's result folder that `cell` can replay. StageError where there is none."""
    wanted = recording_of(cell)
    if run := results.finished(experiment, wanted.id):
        return run.folder
    tried = [summary for run in results.runs(experiment, wanted.id) if (summary := run.summary) is not None]
    found = f"its last run {tried[-1].status}: {tried[-1].error}" if tried else "it has not been run"
    raise StageError(
        f"cannot replay {cell.id}: its recording, the cell {wanted.id}, has no good run in {experiment} ({found}); "
        "the same sweep runs it first, or train this cell itself with timing=full"
    )

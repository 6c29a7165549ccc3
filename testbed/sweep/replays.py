"""Find the run that a cell with `timing = "replay"` replays: that of the same cell, really trained over links without
shaping.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from testbed import paths, results
from testbed.errors import StageError
from testbed.profiles.loading import read_profile
from testbed.spec import Cell

_UNSHAPED = "datacenter.toml"
_OVERRUNS = 0.01


def recording_of(cell: Cell) -> Cell:
    """Return the cell whose run `cell` replays: the same, really trained over unshaped links; cells that differ in
    their links alone share it.

    It has no time budget: how many steps fit into one depends on the links, so the replay watches it.
    """
    unshaped = read_profile(paths.profile_folders()[-1] / _UNSHAPED)  # the shipped one, whatever else has its name
    training = cell.training.model_copy(update={"budget_s": None})
    return cell.model_copy(update={"timing": "full", "profiles": (unshaped,), "training": training})


def with_recordings(cells: Iterable[Cell], have: Container[str] = ()) -> tuple[Cell, ...]:
    """Put the recordings that replays need before the cells: each once, and one time less in its own place.

    `have` holds the ids of cells with a good run, which need no other.
    """
    cells = tuple(cells)
    needed = {
        recorded.id: recorded
        for recorded in (recording_of(cell) for cell in cells if cell.timing == "replay")
        if recorded.id not in have
    }
    early, rest = set(needed), []
    for cell in cells:
        if cell.id in early:
            early.remove(cell.id)
        else:
            rest.append(cell)
    return (*needed.values(), *rest)


def timed_both_ways(experiment: Path) -> Iterator[tuple[results.Run, results.Run]]:
    """Yield the newest full run and the newest replay of every cell in a result folder that has good runs of both."""
    for folder in sorted(experiment.glob("*/")):
        replay = results.finished(experiment, folder.name)
        if replay is None or (cell := replay.cell).timing != "replay":
            continue
        if full := results.finished(experiment, cell.model_copy(update={"timing": "full"}).id):
            yield full, replay


def doubt_about(folder: Path) -> str | None:
    """Say why what replays this run may not take the time that a full run would; None: there is no reason."""
    run = results.Run(folder)
    summary, cell, cores = run.summary, run.cell, run.environment.get("cores")
    if summary is not None and summary.overrun_share is not None and summary.overrun_share > _OVERRUNS:
        return (
            f"the recording {cell.id} has {summary.overrun_share:.1%} overruns: this machine is too slow for the "
            "emulated device, and what replays it is slower than the device would be; "
            "compute.dilation makes time for it"
        )
    if cell.compute.mode == "measured" and cores is not None and cores < cell.pipeline.stages:
        return (
            f"the recording {cell.id} was made on {cores} processors by {cell.pipeline.stages} stages without pacing: "
            "its durations include waiting for a processor, and replays over slower links may take longer than full "
            "runs; compute.mode = 'paced' has none of that"
        )
    return None


def recording_folder(cell: Cell, experiment: Path) -> Path:
    """Return the folder of the newest good run in an experiment's results that `cell` can replay. StageError where
    there is none.
    """
    wanted = recording_of(cell)
    if run := results.finished(experiment, wanted.id):
        return run.folder
    tried = [summary for run in results.runs(experiment, wanted.id) if (summary := run.summary) is not None]
    state = f"its last run {tried[-1].status}: {tried[-1].error}" if tried else "it has not been run"
    raise StageError(
        f"cannot replay {cell.id}: its recording, the cell {wanted.id}, has no good run in {experiment} ({state}); "
        "the same sweep runs it first, or train this cell itself with timing=full"
    )

"""Results for other programs: tables as CSV or Parquet, event files for TensorBoard, timelines for Perfetto. Starts nothing.

columns   what the tables hold            rows      a run's files as rows
files     CSV, Parquet, pandas            board     TensorBoard
timeline  Perfetto and chrome://tracing    page   README.md, drawn from the columns
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from testbed.errors import ResultsError, UnknownNameError
from testbed.export import board, files, timeline
from testbed.export.page import page
from testbed.results import Run, last_sweep, make_folder, runs

__all__ = ["FORMATS", "chosen", "export", "page"]

FORMATS: Mapping[str, Callable[[Iterable[Run], Path], list[Path]]] = {
    "csv": partial(files.write, form="csv"),
    "parquet": partial(files.write, form="parquet"),
    "tensorboard": board.write,
    "perfetto": timeline.write,
}
"""What results can be written as."""


def chosen(experiment: Path) -> list[Run]:
    """Every run of the cells of a folder's last sweep, well ended or not, cell by cell. ResultsError when there is none."""
    found = [run for cell_id in last_sweep(experiment).cells for run in runs(experiment, cell_id)]
    if not found:
        raise ResultsError(
            f"{experiment} holds no run of its last sweep, so there is nothing to export; run the sweep again"
        )
    return found


def export(experiment: Path, form: str, folder: Path) -> list[Path]:
    """Write the runs of an experiment's last sweep to `folder`, which is made. Returns what was written.

    UnknownNameError for a form that is not in FORMATS, ResultsError where there are no results, SpecError where they cannot be
    written.
    """
    if form not in FORMATS:
        raise UnknownNameError("format", form, FORMATS)
    found = chosen(experiment)
    return FORMATS[form](found, make_folder(folder, "choose another folder with -o"))

"""Exports results to other programs, as CSV, Parquet, pandas, TensorBoard and Perfetto. Runs nothing.

columns       the columns of the tables, and the README generated from them
rows          a run's files as rows of the tables
table_files   the tables as CSV or Parquet files, and as pandas frames
event_files   event files for TensorBoard
perfetto      timelines for Perfetto and chrome://tracing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from testbed.errors import ResultsError, UnknownNameError
from testbed.export import event_files, perfetto, table_files
from testbed.export.columns import draw_export_page
from testbed.results import Run, last_sweep, make_folder, runs

__all__ = ["FORMATS", "draw_export_page", "export", "runs_to_export"]

FORMATS: Mapping[str, Callable[[Iterable[Run], Path], list[Path]]] = {
    "csv": partial(table_files.write_tables, form="csv"),
    "parquet": partial(table_files.write_tables, form="parquet"),
    "tensorboard": event_files.write_event_files,
    "perfetto": perfetto.write_timelines,
}
"""Name of each format -> its writer."""


def runs_to_export(experiment: Path) -> list[Run]:
    """Return all runs of the cells of a folder's last sweep, including failed ones.

    ResultsError if there are none.
    """
    exported = [run for cell_id in last_sweep(experiment).cells for run in runs(experiment, cell_id)]
    if not exported:
        lost = "holds no run of its last sweep, so there is nothing to export; run the sweep again"
        raise ResultsError(f"{experiment} {lost}")
    return exported


def export(experiment: Path, form: str, folder: Path) -> list[Path]:
    """Write the runs of an experiment's last sweep to `folder`, which is created; return the files or folders written.

    UnknownNameError for a form that is not in FORMATS, ResultsError without results, SpecError if they cannot be
    written.
    """
    if form not in FORMATS:
        raise UnknownNameError("format", form, FORMATS)
    exported = runs_to_export(experiment)
    return FORMATS[form](exported, make_folder(folder, "choose another folder with -o"))

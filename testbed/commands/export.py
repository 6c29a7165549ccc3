"""The `export` command: results as tables, event files and timelines for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.commands.console import say
from testbed.errors import UserError

_FORMS = (
    "csv, parquet (six tables and columns.csv, which describes them), tensorboard (event files), perfetto (timelines)"
)


def export(
    folder: Annotated[Path, typer.Argument(help="An experiment's result folder.")] = Path("results/default"),
    to: Annotated[str, typer.Option(help=f"Format: {_FORMS}.")] = "csv",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Folder to write to; default: export/FORMAT in the result folder."),
    ] = None,
) -> None:
    """Write the runs of an experiment's last sweep as tables, event files or timelines. Runs nothing."""
    from testbed import export as exporting

    if not folder.is_dir():
        raise UserError(f"there is no result folder {folder}; run a sweep first, or name another folder")
    place = output or folder / "export" / to
    written = exporting.export(folder, to, place)
    say(f"{to}: {len(written)} {'folders' if to == 'tensorboard' else 'files'} in {place}")

"""What the programs of experiments that train or measure share: their command line, and the tables they write and go
on with. On disk these are whole, or as they were before.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class CommandLine(NamedTuple):
    """What is asked of such a program."""

    output: Path
    quick: bool
    results: Path
    """With what was played; the folder of the tables, where the program does not ask for it."""


def asked_of(arguments: Sequence[str], what: str | None, folder: Path, *, reads_results: bool = False) -> CommandLine:
    """Read a command line; `what` is its help, `folder` the one that tables are for where none is named."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=folder, help="folder for the tables (%(default)s)")
    parser.set_defaults(results=folder)
    if reads_results:
        parser.add_argument("--results", type=Path, help="folder of what was played (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short form, which shows nothing but that it works")
    return CommandLine(**vars(parser.parse_args(arguments)))


def write_rows(path: Path, fields: Sequence[str], rows: Iterable[Sequence[Any]], *, digits: int | None = None) -> None:
    """Write a table; floats with so many significant digits, or with all that tell them apart."""
    draft = path.with_name(f"{path.name}.part")
    with draft.open("w", encoding="utf8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([fields, *(shortened(row, digits) for row in rows)])
    draft.rename(path)


def append_rows(path: Path, rows: Iterable[Any]) -> None:
    """Put rows, NamedTuples of one kind, at the end of a table."""
    added = list(rows)
    write_rows(path, added[0]._fields, [*read_rows(path), *added], digits=7)


def read_rows(path: Path) -> list[tuple[str, ...]]:
    """Return the rows of a table below its headings; none where it is not there."""
    return [tuple(row.values()) for row in read_records(path)]


def read_records(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table by heading; none where it is not there."""
    if not path.is_file():
        return []
    with path.open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def shortened(row: Sequence[Any], digits: int | None) -> list[Any]:
    """Return a row whose floats are text of so many significant digits; as it is for None."""
    return [f"{cell:.{digits}g}" if digits and isinstance(cell, float) else cell for cell in row]

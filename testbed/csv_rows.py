"""Shared by the experiments' programs that train or measure: how to run them, and resumable CSV tables. A table on disk
is always complete: the new version or the previous one.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from testbed.errors import status_of


def run_program(
    main: Callable[[argparse.Namespace], object], what: str | None, home: Path | str, **flags: Mapping[str, Any]
) -> NoReturn:
    """Run a program of an experiment and exit: `main` receives the parsed command line, with `output` and `quick`.

    `what` is its help text, `home` the default folder of its tables or the program itself, which lies there, `flags`
    further options, as for `add_argument`. Creates the output folder. Errors go to stderr. If torch is imported, it
    uses one thread here and in child processes, so that no number depends on the number of cores.
    """
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = home if isinstance(home, Path) else Path(home).resolve().parent
    parser.add_argument("--output", type=Path, default=folder, help="folder for the tables (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="short form, to check that the program works")
    for name, how in flags.items():
        parser.add_argument(f"--{name}", **how)
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    if "torch" in sys.modules:
        os.environ["OMP_NUM_THREADS"] = "1"  # trainings check it
        sys.modules["torch"].set_num_threads(1)
    sys.exit(status_of(lambda: main(asked)))


class Table:
    """A growing table of NamedTuples: keeps the rows already in its file, and writes new ones at once."""

    def __init__(self, path: Path, kind: type[Any], *key: str, digits: int | None = 7, say: bool = True) -> None:
        """Read the file, if it exists. `key`: fields that identify a row; `say`: print added rows."""
        self._path, self._fields, self._digits, self._say = path, kind._fields, digits, say
        self._key = [self._fields.index(name) for name in key]
        self.rows: list[Sequence[Any]] = [*read_rows(path)]

    def __contains__(self, key: Sequence[Any]) -> bool:
        """Return whether there is a row with this key."""
        return self.find(*key) is not None

    def find(self, *key: Any) -> dict[str, str] | None:
        """Return the row with this key, as text by heading; None if there is none."""
        wanted = [str(part) for part in key]
        for row in self.rows:
            if [str(row[place]) for place in self._key] == wanted:
                return dict(zip(self._fields, map(str, row), strict=True))
        return None

    def add(self, rows: Iterable[Any]) -> None:
        """Append rows to the table, and write it."""
        added = [shortened(row, self._digits) for row in rows]
        for row in added if self._say else ():
            print(*row, flush=True)  # noqa: T201
        self.rows += added
        write_rows(self._path, self._fields, self.rows)


def write_rows(path: Path, fields: Sequence[str], rows: Iterable[Sequence[Any]], *, digits: int | None = None) -> None:
    """Write a table; floats with `digits` significant digits, or (None) with as many as identify them."""
    draft = path.with_name(f"{path.name}.part")
    with draft.open("w", encoding="utf8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([fields, *(shortened(row, digits) for row in rows)])
    draft.rename(path)


def read_rows(path: Path) -> list[tuple[str, ...]]:
    """Return the rows of a table without its headings; none if the file is missing."""
    return [tuple(row.values()) for row in read_records(path)]


def read_records(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table by heading; none if the file is missing."""
    if not path.is_file():
        return []
    with path.open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def shortened(row: Sequence[Any], digits: int | None) -> list[Any]:
    """Return a row with floats formatted to `digits` significant digits; None: unchanged."""
    return [f"{cell:.{digits}g}" if digits and isinstance(cell, float) else cell for cell in row]

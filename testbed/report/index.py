"""A page that lists every sweep of a folder of results, and links to its report and to what it was compared with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from testbed import __version__, results
from testbed.errors import ResultsError
from testbed.report.collect import latest, read_runs
from testbed.report.templates import write_page


class _Row(NamedTuple):
    name: str
    folder: Path
    question: str
    finished: int
    asked: int
    certified: int
    codecs: int
    networks: int
    report: str
    """Its address, seen from the index; empty where none was written."""
    compared: dict[str, str]
    """Name of another result folder -> the page that shows both."""


def sweeps(folder: Path) -> list[Path]:
    """Return the result folders of a folder, by name: those that hold a sweep's record."""
    return sorted(path.parent for path in folder.glob("*/sweep.json"))


def write_index(folder: Path) -> Path:
    """Write `index.html` into a folder of result folders; return it. ResultsError where there is none in it."""
    found = sweeps(folder)
    if not found:
        raise ResultsError(f"{folder} holds no result folder (one with a sweep.json in it); run a sweep first")
    rows = [_row(path) for path in found]
    return write_page(folder / "index.html", "index", title="All results", rows=rows, version=__version__)


def _row(path: Path) -> _Row:
    sweep = results.last_sweep(path)
    good = [result for result in read_runs(latest(path, sweep.cells)) if result.ok]
    certified = {result.run.folder.parent: True for result in good}
    for result in good:
        certified[result.run.folder.parent] &= result.certified
    return _Row(
        name=path.name,
        folder=path,
        question=sweep.question,
        finished=len(certified),
        asked=len(sweep.cells),
        certified=sum(certified.values()),
        codecs=len({result.cell.codec for result in good}),
        networks=len({result.cell.network for result in good}),
        report=f"{path.name}/report.html" if (path / "report.html").exists() else "",
        compared={
            page.stem.removeprefix("against-"): f"{path.name}/{page.name}" for page in sorted(path.glob("against-*"))
        },
    )

"""A page that lists every sweep of a folder of results, with links to its report and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed import __version__, results
from testbed.errors import ResultsError
from testbed.report.collect import latest, read_each
from testbed.report.templates import write_page


def sweeps(folder: Path) -> list[Path]:
    """Return the result folders in a folder, by name: those with a sweep's record."""
    return sorted(path.parent for path in folder.glob("*/sweep.json"))


def write_index(folder: Path) -> Path:
    """Write `index.html` into a folder of result folders; return it. ResultsError if there are none."""
    folders = sweeps(folder)
    if not folders:
        raise ResultsError(f"{folder} has no result folder (one with a sweep.json); run a sweep first")
    rows = [_row(path) for path in folders]
    return write_page(folder / "index.html", "index", title="All results", rows=rows, version=__version__)


def _row(path: Path) -> dict[str, Any]:
    """Return the index entry of a result folder: its name, question, counts, and the addresses, relative to the index,
    of its report (empty if there is none) and of its comparisons with other folders.
    """
    sweep = results.last_sweep(path)
    read = read_each(latest(path, sweep.cells))
    good = [(one.run.folder.parent, one.cell.codec, one.cell.network, one.certified) for one in read if one.ok]
    finished, codecs, networks = ({row[column] for row in good} for column in range(3))
    certified = finished - {row[0] for row in good if not row[3]}
    pages = sorted(path.glob("against-*"))
    return {
        "name": path.name,
        "folder": path,
        "question": sweep.question,
        "counts": [len(each) for each in (finished, sweep.cells, certified, codecs, networks)],
        "report": f"{path.name}/report.html" if (path / "report.html").exists() else "",
        "compared": {page.stem.removeprefix("against-"): f"{path.name}/{page.name}" for page in pages},
    }

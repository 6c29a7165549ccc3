"""Generate the tables of codecs/README.md: codecs from the catalogue, folders from their docstrings.

No torch here.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from pathlib import Path

from testbed.codecs.catalogue.table import ROWS

_FOLDER = Path(__file__).parents[1]


def draw_codec_table() -> str:
    """Return a Markdown table of all codecs with their sizes."""
    rows = []
    for row in ROWS:
        size = f"`{row.bits}`" + (f"; gradients `{row.backward_bits}`" if row.backward_bits else "")
        note = f"; {row.size_note}" if row.size_note else ""
        rows.append((f"`{row.name}`", size + note, row.summary, row.source))
    return _table(("codec", "bits per element", "description", "source"), rows)


def draw_folder_table() -> str:
    """Return a Markdown table of the modules of codecs/ by folder, with the question that each folder answers."""
    rows = [("`codecs/`", _summary(_FOLDER / "__init__.py"), _modules(_FOLDER))]
    for folder in sorted(path.parent for path in _FOLDER.glob("*/__init__.py")):
        rows.append((f"`{folder.name}/`", _summary(folder / "__init__.py"), _modules(folder)))
    return _table(("folder", "contents", "modules"), rows)


def _summary(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    docstring = inspect.cleandoc(ast.get_docstring(ast.parse(path.read_text(encoding="utf8"))) or "")
    first = " ".join(docstring.partition("\n\n")[0].split())
    ends = [place for mark in (". ", "? ") if (place := first.find(mark)) >= 0]
    return first[: min(ends) + 1] if ends else first


def _modules(folder: Path) -> str:
    return ", ".join(f"`{path.stem}`" for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__"))


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

"""Pages show strings from files as text: none of them becomes an element, an attribute or a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from testbed import manifest, results
from testbed.records import LabRecord, RunCertificates, Summary
from testbed.report import page
from testbed.report.against import write_against
from testbed.report.index import write_index
from testbed.report.page import write_report
from testbed.results import Environment, SweepRecord
from testbed.spec import Cell
from tests.synthetic import Pipeline, cell, pipe, profile, record_sweep, write_run

ATTACK = "\"'><img src=x onerror=alert(1)></script><script>alert(2)</script>&amp;{{7*7}}"
FILES: dict[str, type[BaseModel]] = {
    "cell.json": Cell,
    "lab.json": LabRecord,
    "certificate.json": RunCertificates,
    "environment.json": Environment,
    "summary.json": Summary,
    "sweep.json": SweepRecord,
}


class _Found(HTMLParser):
    """Elements and attributes of a page that nobody but the attack would write."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.wrong += [
            f"{tag} {name}={value}" for name, value in attrs if name == "onerror" or (name, value) == ("src", "x")
        ]


def _strings(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(content, str):
        yield place
    for key, value in (
        content.items() if isinstance(content, dict) else enumerate(content if isinstance(content, list) else ())
    ):
        yield from _strings(value, (*place, key))


def _attack(content: Any, record: type[BaseModel]) -> int:
    """Put the attack into every string of a record that may be any text; return into how many."""
    changed = 0
    for place in list(_strings(content)):
        *outer, last = place
        inner: Any = content
        for key in outer:
            inner = inner[key]
        if last in ("cell_id", "codec", "model", "family", "name", "link") or "cells" in outer:
            continue  # they name folders, classes, sizes and links
        before, inner[last] = inner[last], f"{inner[last]}{ATTACK}"
        try:
            record.model_validate_json(json.dumps(content))
            changed += 1
        except ValidationError:
            inner[last] = before
    return changed


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = results.make_folder(tmp_path_factory.mktemp("results") / "attacked")
    link = profile("home", pipe(80_000_000, 10_000_000), pipe(80_000_000, 10_000_000))
    changed = dict.fromkeys(FILES, 0)
    cells = []
    for codec in ("fp32", "int8", "bf16"):  # before they are written: a cell's digest is the name of its folder
        content = cell(codec, link).model_dump(mode="json")
        changed["cell.json"] += _attack(content, Cell)
        cells.append(Cell.model_validate_json(json.dumps(content)))
    for number, what in enumerate(cells):
        write_run(folder, what, Pipeline(link), verdict="FAIL", failure="it stopped" if number == 2 else None)
    record_sweep(folder, cells, live_reason="no root", marks={cells[0].id: "odd"})
    for path in sorted(folder.rglob("*.json")):
        if path.name not in (manifest.NAME, "cell.json"):
            content = json.loads(path.read_text(encoding="utf8"))
            changed[path.name] += _attack(content, FILES[path.name])
            path.write_text(json.dumps(content), encoding="utf8")
    for path in folder.rglob(manifest.NAME):  # an altered run would be left out
        subject = results.read_json(path.with_name("cell.json"), Cell)
        manifest.write_manifest(path, manifest.subject_of(subject), path.parent.iterdir())
    assert min(changed.values()) >= 1, changed
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "least"),
    [
        (lambda folder: [write_report(folder, folder / "report.html"), *folder.glob("cells/*.html")], 1),
        (lambda folder: [write_index(folder.parent)], 1),
        (lambda folder: [write_against(folder, folder)], 0),  # of equal cells it has codecs and numbers
    ],
    ids=["report", "index", "against"],
)
def test_a_page_shows_strings_of_files_as_text(
    write: Callable[[Path], list[Path]], least: int, attacked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "draw_figures", lambda *_, **__: [])
    write(attacked)
    shown = 0
    for path in attacked.parent.rglob("*.html"):
        text = path.read_text(encoding="utf8")
        found = _Found()
        found.feed(text)
        assert not found.wrong, path
        assert "<script>alert(2)" not in text, path
        shown += text.count("&lt;img src=x onerror")
    assert shown >= least


@pytest.mark.slow
def test_a_figure_shows_strings_of_files_as_text(attacked: Path) -> None:
    write_report(attacked, attacked / "drawn.html")
    for path in attacked.rglob("*.svg"):
        assert "<img" not in path.read_text(encoding="utf8"), path
    found = _Found()
    found.feed((attacked / "drawn.html").read_text(encoding="utf8"))
    assert not found.wrong

"""proofs.json changes no answer, whatever happens to the runs or to itself; it only saves reading the files again."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import testbed
from testbed import manifest, proofs, results
from testbed.report import collect
from testbed.results import Run
from tests.altered import ALTERATIONS
from tests.synthetic import Pipeline, cell, write_run

CELLS = cell("int8"), cell("bf16")
TICK_S = 0.012
"""More than the time between two values of a file system's clock."""


@pytest.fixture
def kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few runs are worth a file, and files are old enough at once."""
    monkeypatch.setattr(proofs, "_WORTH", 1)
    monkeypatch.setattr(manifest, "_SETTLED_NS", 0)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of each cell."""
    folder = tmp_path_factory.mktemp("proofs")
    for what in CELLS:
        run = write_run(folder, what, Pipeline(what.profiles[0]))
        results.write_json(run.folder / "environment.json", {results.FINISHED_BY: manifest.NAME})
        run.finish(run.summary_by(proofs.Proof("verified")))  # type: ignore[arg-type]
    yield folder
    shutil.rmtree(folder)


def answers(folder: Path) -> Any:
    """What a new process says of a folder."""
    time.sleep(TICK_S)
    for kept in (proofs.proofs_in, results._cell, manifest._known):
        kept.cache_clear()  # type: ignore[attr-defined]
    said = {run.folder: run.proof for run in results.runs(folder)}
    finished = [results.finished_runs(folder, what.id) for what in CELLS]
    return said, finished, collect.latest(folder), collect.left_out(folder)


def answers_of_files(folder: Path) -> Any:
    """The same without proofs.json, which is there again afterwards."""
    kept, aside = folder / proofs.NAME, folder / "aside"
    if kept.exists():
        kept.rename(aside)
    try:
        return answers(folder)
    finally:
        if aside.exists():
            aside.replace(kept)


class Folder:
    """A result folder, and what may happen to it."""

    def __init__(self, folder: Path, template: Path, seed: int) -> None:
        self.folder, self.template, self.random = folder, template, random.Random(seed)
        self.older = b"{}"

    def add(self) -> None:
        what = self.random.choice(CELLS).id
        number = max((run.number for run in results.runs(self.folder, what)), default=0) + 1
        shutil.copytree(self.template / what / "run-1", self.folder / what / f"run-{number}")

    def half_write(self) -> None:
        self.add()
        (max(results.runs(self.folder), key=lambda run: run.number).folder / manifest.NAME).unlink()

    def remove(self) -> None:
        if runs := list(results.runs(self.folder)):
            shutil.rmtree(self.random.choice(runs).folder)

    def alter(self) -> None:
        if path := self._file():
            other = self.template / self.random.choice(CELLS).id / "run-1" / path.name
            self.random.choice(list(ALTERATIONS.values()))(path, other)

    def alter_with_the_same_size_and_time(self) -> None:
        if path := self._file():
            before = path.stat()
            path.write_bytes(path.read_bytes().swapcase())
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def mend(self) -> None:
        for run in results.runs(self.folder):
            shutil.copytree(self.template / run.folder.parent.name / "run-1", run.folder, dirs_exist_ok=True)

    def damage_the_file(self) -> None:
        if (path := self.folder / proofs.NAME).exists():
            older = self.folder / "older"
            older.write_bytes(self.older)
            self.older = path.read_bytes()
            self.random.choice(list(ALTERATIONS.values()))(path, older)
            older.unlink()

    def _file(self) -> Path | None:
        files = [path for run in results.runs(self.folder) for path in sorted(run.folder.iterdir())]
        return self.random.choice(files) if files else None


@pytest.mark.slow
@pytest.mark.usefixtures("kept_at_once")
@pytest.mark.parametrize("seed", range(2))
def test_a_folder_with_its_file_says_what_its_runs_say(tmp_path: Path, template: Path, seed: int) -> None:
    folder = Folder(tmp_path, template, seed)
    events = [folder.add, folder.add, folder.half_write, folder.remove, folder.alter, folder.mend]
    events += [folder.alter_with_the_same_size_and_time, folder.damage_the_file]
    for _ in range(30):
        time.sleep(TICK_S)
        folder.random.choice(events)()
        read = answers_of_files(tmp_path)
        for when in ("with an old file, a damaged one or none", "with the file that it then wrote"):
            assert answers(tmp_path) == read, when
    assert (tmp_path / proofs.NAME).exists()


@pytest.mark.usefixtures("kept_at_once")
def test_verified_runs_are_not_read_again_until_they_change(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    read: list[Path] = []
    prove = Run._prove
    monkeypatch.setattr(Run, "_prove", lambda run: read.append(run.folder) or prove(run))
    answers(tmp_path)
    assert len(read) == len(CELLS)
    answers(tmp_path)
    assert len(read) == len(CELLS), "another process reads none of them"
    changed = tmp_path / CELLS[0].id / "run-1"
    (changed / "lab.json").write_text("{}")
    answers(tmp_path)
    assert set(read[len(CELLS) :]) == {changed}
    read.clear()
    monkeypatch.setattr(testbed, "__version__", "0.0.7")
    answers(tmp_path)
    assert set(read) == {run.folder for run in results.runs(tmp_path)}, "another version judges anew"


@pytest.mark.usefixtures("kept_at_once")
def test_a_file_that_cannot_be_written_stops_no_reader(tmp_path: Path, template: Path) -> None:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    (tmp_path / proofs.NAME).mkdir()
    assert len(answers(tmp_path)[2]) == len(CELLS)


def test_a_small_folder_has_no_such_file(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_SETTLED_NS", 0)
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    answers(tmp_path)
    assert not (tmp_path / proofs.NAME).exists()

"""Lists the steps that reproduce an experiment's numbers: its sweeps and programs, in order.

`reproduce.toml` in the experiment's folder has a table [[step]] for each; experiments/README.md documents the format.
Without that file the steps are sweep.toml or cells.toml, if present, and then figures.py.
"""

from __future__ import annotations

import hashlib
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

from testbed import paths
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import Frozen, read_toml, validated
from testbed.units import parse_time

FILE = "reproduce.toml"
FIGURES = "figures.py"
CELLS = "cells.toml"
"""File of a predicted experiment: `predict.cells`."""
QUICK = "quick"
"""Folder for short forms, inside the results folder."""


class StepTable(Frozen):
    """[[step]]: a command line. Its first word is a sweep's .toml, cells.toml or a program's .py in the folder, or
    `testbed`.

    {folder} stands for the experiment's own folder, {results} for its result folder, {output} for the folder of CSVs
    and figures.
    """

    run: str
    quick: str = ""
    """Command line of the short form; empty: `run`, with --quick for a sweep."""
    takes: str = ""
    """Duration of a program, e.g. '300s'; the duration of a sweep is predicted."""


class StepFile(Frozen):
    """reproduce.toml."""

    step: tuple[StepTable, ...]


class Step(NamedTuple):
    """One command to run."""

    words: tuple[str, ...]
    """Command line of the file, with its placeholders substituted."""
    sweep: Path | None
    """File of the sweep or of the predicted cells, if the step is one."""
    program: Path | None
    """File of the program, if the step is one."""
    keeps: bool
    """Whether its output is independent of the results, so that it need not run again."""
    takes_s: float | None

    @property
    def predicts(self) -> bool:
        """Whether its file lists predicted cells."""
        return self.sweep is not None and self.sweep.name == CELLS

    def command(self, results: Path, *, quick: bool, device: str = "") -> list[str]:
        """Return the command to execute. `results` holds the results of all experiments; sweeps train on `device`."""
        testbed = [sys.executable, "-P", "-m", "testbed"]
        if self.sweep is not None:
            verb, more = ("predict", []) if self.predicts else ("sweep", ["--live-checks", "0", "--no-report"])
            flags = ["--results", str(results), *(["--quick", *more] if quick else [])]
            flags += ["--device", device] if device and not self.predicts else []
            return [*testbed, verb, str(self.sweep), *flags, *self.words[1:]]
        if self.program is not None:
            return [sys.executable, str(self.program), *self.words[1:]]
        return [*testbed, *self.words[1:]]


class Reproduction(NamedTuple):
    """An experiment, its steps, and their output folders."""

    name: str
    folder: Path
    """The experiment's folder, with its README and committed CSVs."""
    results: Path
    """Result folder of this form, short or full."""
    output: Path
    """Folder for CSVs and figures; never `folder`."""
    steps: tuple[Step, ...]

    @property
    def all_results(self) -> Path:
        """The folder of the results of all experiments."""
        return self.results.parent

    def stamp(self, step: Step) -> str:
        """Return a text that changes when a step that keeps its output must run again."""
        sources = [path.read_bytes() for kind in ("py", "toml") for path in sorted(self.folder.glob(f"*.{kind}"))]
        return hashlib.sha256(b"".join([repr(step.words).encode(), *sources])).hexdigest()

    def is_kept(self, step: Step) -> bool:
        """Return whether a step's output is here, and need not be made again."""
        stamp = self.stamp_file(step)
        return step.keeps and stamp.is_file() and stamp.read_text("utf8") == self.stamp(step)

    def stamp_file(self, step: Step) -> Path:
        """Return the file that holds the stamp of a step's output."""
        return self.output / f".step-{self.steps.index(step)}"


def reproducible() -> dict[str, Path]:
    """Return the folders of the experiments that have steps, by name: `./experiments` before the shipped ones."""
    return {
        folder.name: folder
        for above in reversed(paths.experiment_folders())
        for folder in sorted(above.iterdir())
        if any((folder / name).is_file() for name in (FILE, FIGURES, "sweep.toml", CELLS))
    }


def load_reproduction(name: str, results: Path, *, quick: bool) -> Reproduction:
    """Read an experiment's steps. `results` holds the results of all experiments; short forms go to a folder in it.

    UnknownNameError for an unknown experiment, SpecError for an invalid file.
    """
    known = reproducible()
    if name not in known:
        raise UnknownNameError("experiment", name, known)
    folder, own = known[name], (results / QUICK if quick else results) / name
    output = own / "drawn"
    where = folder / FILE
    places = {"folder": str(folder), "results": str(own), "output": str(output)}
    steps = tuple(_step(table, folder, places, str(where), quick=quick) for table in _tables(folder))
    return Reproduction(name, folder, own, output, steps)


def _tables(folder: Path) -> tuple[StepTable, ...]:
    path = folder / FILE
    if not path.is_file():
        figures = f"{FIGURES} --results {{results}} --output {{output}}"
        texts = {"sweep.toml": "sweep.toml", CELLS: CELLS, FIGURES: figures}
        return tuple(StepTable(run=text) for name, text in texts.items() if (folder / name).is_file())
    return validated(StepFile, read_toml(path), str(path)).step


def _step(table: StepTable, folder: Path, places: dict[str, str], where: str, *, quick: bool) -> Step:
    text = table.quick if quick and table.quick else table.run
    try:
        words = [word.format_map(places) for word in shlex.split(text)]
        takes_s = parse_time(table.takes) / 1e9 if table.takes else None
    except (KeyError, ValueError, IndexError, AttributeError, SpecError) as error:
        known = ", ".join(f"{{{name}}}" for name in places)
        raise SpecError(f"{where}: cannot read the step {text!r}: {error}; its placeholders are {known}") from None
    if not words:
        raise SpecError(f"{where}: a step is empty")
    path = folder / words[0]
    kind = "" if words[0] == "testbed" else path.suffix
    if words[0] != "testbed" and (kind not in (".toml", ".py") or not path.is_file()):
        raise SpecError(
            f"{where}: the step {text!r} begins with {words[0]!r}, which is neither 'testbed' nor a .toml or .py of "
            f"{folder}"
        )
    return Step(
        tuple(words),
        path if kind == ".toml" else None,
        path if kind == ".py" else None,
        keeps=kind != ".toml" and "{results}" not in text,
        takes_s=takes_s,
    )

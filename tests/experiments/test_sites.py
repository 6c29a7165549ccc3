"""sites: what is trained with churn has the absences that were played."""

from __future__ import annotations

import argparse
import importlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from testbed import csv_rows
from testbed.errors import ResultsError
from testbed.report import publishing
from testbed.studies import tuned_text
from testbed.studies.tuned_text import Curve, Plan, Tried
from tests.commands import Command

FOLDER = Command.shipped / "sites"
ALTERED = "data parallel, 2 whole, with churn"


class Programs(NamedTuple):
    """What the experiment runs."""

    train: ModuleType
    figures: ModuleType


@pytest.fixture
def programs() -> Iterator[Programs]:
    with publishing.figures_program(FOLDER) as figures:
        yield Programs(importlib.import_module("train"), figures)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of what was trained and played."""
    for path in FOLDER.glob("*.csv"):
        shutil.copy(path, tmp_path)
    return tmp_path


class Stopped(Exception):
    """Somebody stopped a training."""


def stop(*asked: object) -> None:
    raise Stopped


def alter_an_absence(folder: Path) -> None:
    """Let another replica be away in one step of `ALTERED`, as a new play of its steps may find."""
    cells = csv_rows.read_records(folder / "cells.csv")
    (cell,) = {row["cell"] for row in cells if f"{row['label.method']}, with churn" == ALTERED}
    rows = csv_rows.read_records(folder / "rounds.csv")
    row = next(row for row in rows if row["cell"] == cell and not row["away"])
    row["away"] = "1"
    csv_rows.write_rows(folder / "rounds.csv", list(row), [list(each.values()) for each in rows])


def forget_what_was_trained(folder: Path) -> None:
    """Somebody stopped train.py after it had written curves and before layouts.csv."""
    rows = [row for row in csv_rows.read_records(folder / "layouts.csv") if row["layout"] != ALTERED]
    csv_rows.write_rows(folder / "layouts.csv", list(rows[0]), [list(row.values()) for row in rows])


def texts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.csv")}


def test_what_was_trained_with_the_absences_that_were_played_is_kept(
    programs: Programs, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned_text, "train_tuned", stop)
    programs.train.main(argparse.Namespace(results=folder, output=folder, quick=False))
    assert texts(folder) == texts(FOLDER)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alter", "refusals"),
    [
        (alter_an_absence, 2),
        (forget_what_was_trained, 1),  # then its curves are gone too
    ],
)
def test_what_was_trained_with_other_absences_or_unknown_ones_is_trained_again_and_refused_until_then(
    programs: Programs, folder: Path, monkeypatch: pytest.MonkeyPatch, alter: Callable[[Path], None], refusals: int
) -> None:
    command = argparse.Namespace(results=folder, output=folder, quick=False)
    programs.figures.results(folder)
    alter(folder)
    monkeypatch.setattr(tuned_text, "train_tuned", stop)
    for _ in range(refusals):
        with pytest.raises(ResultsError, match="other absences"):
            programs.figures.results(folder)
        with pytest.raises(Stopped):
            programs.train.main(command)
    trained = []

    def train(name: str, variants: object, rate: float, plan: Plan) -> tuple[list[Tried], list[Curve]]:
        trained.append(name)
        curves = [
            Curve(name, rate, seed, batches, 2.4, 1000 * batches)
            for seed in plan.seeds
            for batches in range(plan.evaluate_every, plan.batches + 1, plan.evaluate_every)
        ]
        return [Tried(name, plan.target, None, 0.9, rate, 16.0, 2.4, chosen=True)], curves

    monkeypatch.setattr(tuned_text, "train_tuned", train)
    programs.train.main(command)
    assert trained == [ALTERED]
    programs.figures.results(folder)
    for name in ("curves.csv", "tuning.csv", "layouts.csv"):
        old, new = ([row for row in csv_rows.read_rows(each / name) if row[0] != ALTERED] for each in (FOLDER, folder))
        assert new == old
    programs.train.main(command)
    assert trained == [ALTERED], "it is there now"

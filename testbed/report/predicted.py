"""What the figure programs of predicted experiments share: those whose cells are played from shapes (cells.toml)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from testbed.report import experiments
from testbed.report.claims import Claim

FILE = "cells.csv"
_NEAR = 0.03
ROUNDED = 1e-5
"""cells.csv has six digits: by so much a step may seem shorter than its ideal, where it is as long."""


def cells(folder: Path) -> Any:
    """Return the rows of an experiment's cells.csv as a frame."""
    return pd.read_csv(folder / FILE)


def departure(rows: Any) -> float:
    """Return by how much the played step that is farthest from its ideal departs from it, as a share. `rows`: of
    cells.csv; those that were only computed do not count.
    """
    played = rows[rows.step_s.notna()]
    return float((played.step_s / played.ideal_s - 1).abs().max())


def make(
    folder: Path,
    figure: str,
    draw: Callable[[Path], Any],
    blocks: Callable[[Path], Mapping[str, str]],
    claims: Callable[[Path], Iterable[Claim]],
) -> None:
    """Be experiments/NAME/figures.py, which lies in `folder`: write cells.csv, the figure, claims.csv and the README's
    blocks; published.csv goes with them, where there is one.
    """
    results, output = experiments.folders(folder.name, "Figure, CSVs and the README's blocks.")
    (output / FILE).write_bytes((results / FILE).read_bytes())
    experiments.draw_and_publish(folder, output, {figure: draw}, blocks, claims)


def explained(folder: Path) -> dict[str, float]:
    """Return how far played cells are from arithmetic, for a row of claims.toml (`claim_rows`)."""
    return explained_by(cells(folder))


def explained_by(rows: Any) -> dict[str, float]:
    """Return the same of some rows of cells.csv: also how many of them were played."""
    return {"value": departure(rows), "near": _NEAR, "played": int(rows.step_s.notna().sum())}

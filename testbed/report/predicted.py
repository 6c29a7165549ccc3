"""What the figure programs of predicted experiments share: those whose cells are played from shapes (cells.toml)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from testbed.report import experiments
from testbed.report.claims import Claim
from testbed.report.numbers import percent

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


def explained(
    rows: Any,
    command: str,
    *,
    step: str = "A played step",
    rate: str = "rate",
    over: str = "",
    why: str = "the critical path over the pipe formula, with headers; the rest is TCP",
) -> Claim:
    """Return the claim that played steps are explained by arithmetic, and whether these are; `over` says which."""
    off = departure(rows)
    return Claim(
        claim=f"{step} is explained to within {100 * _NEAR:.0f} % by bytes, {rate}, delay and schedule",
        source="ours",
        ours=f"{percent(off, '{:.2f}')} at most{over}",
        interval="exact",
        verdict="holds" if off < _NEAR else "fails",
        why=why,
        command=command,
    )


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


def explained_facts(folder: Path) -> dict[str, float]:
    """Return how far played cells are from arithmetic, for a row of claims.toml (`claim_rows`)."""
    return departure_facts(cells(folder))


def departure_facts(rows: Any) -> dict[str, float]:
    """Return the same of some rows of cells.csv: also how many of them were played."""
    return {"value": departure(rows), "near": _NEAR, "played": int(rows.step_s.notna().sum())}

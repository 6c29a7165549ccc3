"""Shared by the figure programs of predicted experiments, whose cells are played from shapes (cells.toml)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from testbed.metrics.statistics import IntervalEstimate, of_ratios
from testbed.report import experiments

FILE = "cells.csv"
_NEAR = 0.03
ROUNDED = 1e-5
"""Rounding error of cells.csv, which has six digits: a step may seem shorter than its ideal by this share."""


def cells(folder: Path) -> Any:
    """Return the rows of an experiment's cells.csv as a frame."""
    return pd.read_csv(folder / FILE)


def departure(rows: Any) -> float:
    """Return the largest relative difference between a played step and its ideal. `rows`: of cells.csv; ignores cells
    that were only computed.
    """
    played = rows[rows.step_s.notna()]
    return float((played.step_s / played.ideal_s - 1).abs().max())


def explained(folder: Path) -> dict[str, float]:
    """Return the largest difference between played cells and their ideal, as facts for claims.toml (`claim_rows`)."""
    return explained_by(cells(folder))


def explained_by(rows: Any) -> dict[str, float]:
    """Return the same for some rows of cells.csv, with the number of played ones."""
    return {"value": departure(rows), "near": _NEAR, "played": int(rows.step_s.notna().sum())}


def ratio(frame: Any, ours: Mapping[str, Any], base: Mapping[str, Any]) -> IntervalEstimate | None:
    """Return the ratio of the steps of `base` and `ours`, paired by the links' seed; None if either was not played.

    Both state values of all columns in which the rows of `frame` differ, except `link_seed`.
    """
    a, b = (experiments.matching(frame, chosen).set_index("link_seed").step_s.dropna() for chosen in (ours, base))
    both = a.index.intersection(b.index)
    return of_ratios(list(b[both] / a[both]), "link seed") if len(both) else None

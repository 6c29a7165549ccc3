"""testbed measures the effect of codecs on wall-clock time and convergence when a model is trained over slow links.

Data flows one way: experiment files -> `sweep.plan` -> `Cell` -> training, calibration, trace and player (live: a lab
and stage hosts) -> result files -> `metrics` -> `report`.

In a notebook: `testbed.run_cell(codec="int8", profile="cable")`, `testbed.load("results/default")`,
`testbed.steps(FOLDER)`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
_NOTEBOOK = ("load", "run_cell", "steps")


def __getattr__(name: str) -> Any:
    """Import the notebook's functions on first use, so that other users of testbed do not import pandas."""
    if name in _NOTEBOOK:
        # By name: every module imports this one, so it must not depend on higher layers.
        return getattr(importlib.import_module("testbed.notebook"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NOTEBOOK])

"""testbed: what does a codec do to wall-clock time and convergence when one model is trained over slow links?

The flow is one way: experiment files -> `sweep.plan` -> `Cell` -> training, calibration, trace and player (or, live, a
lab and stage hosts) -> result files -> `metrics` -> `report`.

In a notebook: `testbed.run_cell(codec="int8", profile="cable")`, `testbed.load("results/default")`,
`testbed.steps(FOLDER)`.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
_NOTEBOOK = ("load", "run_cell", "steps")


def __getattr__(name: str) -> Any:
    """Import the notebook's functions when they are used: everything else that imports testbed does not need pandas."""
    if name in _NOTEBOOK:
        # By name: every module imports this one, and none may depend on what lies above it.
        return getattr(importlib.import_module("testbed.notebook"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_NOTEBOOK])

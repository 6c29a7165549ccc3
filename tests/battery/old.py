"""Results of before stay readable: `old-results.tar.xz` has three folders that a sweep left in November 2026."""

from __future__ import annotations

import functools
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import testbed
from tests.battery.entries import Record, digest

_OF_STEPS = ["step", "phase", "step_s", "loss", "gradient_norm", "learning_rate"]
ARCHIVE = Path(__file__).parent / "old-results.tar.xz"
FOLDERS = ("pipeline", "replicas", "asynchronous")
_COLUMNS = [
    *("codec", "network", "up_rate_bps", "down_rate_bps", "round_trip_s", "topology", "timing", "clock", "codec_cost"),
    *("workload.model", "training.steps", "step_s", "ideal_step_s", "efficiency", "validation_loss", "train_loss"),
    *("payload_bytes_per_step", "wire_bytes_per_step", "tokens_per_s", "certificate", "measured_steps"),
]


def old_results(folder: Path) -> dict[str, Callable[[], Record]]:
    """Return an entry for each folder, which is unpacked into `folder`."""
    return {
        **{f"old results: {name}": functools.partial(_read, name, folder) for name in FOLDERS},
        **{f"old report: {name}": functools.partial(_draw, name, folder) for name in FOLDERS},
    }


def _read(name: str, folder: Path) -> Record:
    made = _unpacked(name, folder)
    frame = testbed.load(made)
    rows = [[repr(row[column]) for column in _COLUMNS] for _, row in frame.iterrows()]
    steps = testbed.steps(made / frame.folder[0])[_OF_STEPS]
    return {
        "rows": digest(rows),
        "steps": digest([list(map(repr, row)) for row in steps.itertuples(index=False)]),
        "info": rows[0],
    }


def _draw(name: str, folder: Path) -> Record:
    made = _unpacked(name, folder)
    subprocess.run([sys.executable, "-m", "testbed", "report", str(made)], check=True, capture_output=True)
    return {"drawn": (made / "report.html").stat().st_size > 10_000}


def _unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / name

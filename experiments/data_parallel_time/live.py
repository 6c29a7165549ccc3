"""Set live runs on the real clock beside the same ones on the virtual clock: writes live.csv.

sudo .venv/bin/python -m testbed sweep data_parallel_time --clock real
python -m testbed sweep data_parallel_time --clock virtual
python experiments/data_parallel_time/live.py [--results results/data_parallel_time] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from testbed import csv_rows, results
from testbed.records import Summary

HERE = Path(__file__).resolve().parent


class Compared(NamedTuple):
    """A cell on both clocks."""

    exchange: str
    staleness: int
    network: str
    virtual_s: float
    """A step in the steady state."""
    real_s: float
    apart: float
    """Of the real clock's from the virtual one's, as a share."""
    same_losses: bool
    bound: float | None
    """How much what was found wrong with the real links changes a step, at most, as a share."""
    overruns: float
    """The share of actions that this machine could not make in the device's time."""


def compared(folder: Path) -> list[Compared]:
    """Return a row for each cell that has a good run on either clock, the newest."""
    newest: dict[tuple[str, int, str], dict[str, Summary]] = {}
    for run in results.runs(folder):
        cell, summary = run.cell, run.summary
        if cell.data is None or summary is None or summary.status != "ok":
            continue
        key = (cell.data.exchange, max(cell.data.staleness), cell.network)
        newest.setdefault(key, {})[cell.clock] = summary
    rows = []
    for key, clocks in sorted(newest.items()):
        if clocks.keys() != {"real", "virtual"}:
            continue
        real, virtual = clocks["real"], clocks["virtual"]
        assert real.step_s is not None
        assert virtual.step_s is not None
        apart = real.step_s / virtual.step_s - 1
        same = real.validation_loss == virtual.validation_loss
        rows.append(Compared(*key, virtual.step_s, real.step_s, apart, same, real.bound, real.overrun_share or 0.0))
    return rows


def main(arguments: list[str]) -> int:
    """Write live.csv."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results/data_parallel_time"))
    parser.add_argument("--output", type=Path, default=HERE)
    asked = parser.parse_args(arguments)
    csv_rows.write_rows(asked.output / "live.csv", Compared._fields, compared(asked.results), digits=6)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

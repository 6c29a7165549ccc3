"""Generates summary.csv, the claims and README blocks of the default experiment from its sweep's results.

python experiments/default/figures.py [--results results/default] [--output experiments/default]

The figures are those of the sweep's own report.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas

from testbed.report import claim_rows, experiments, publishing
from testbed.report.claim_rows import Facts
from testbed.report.claims import EXACT

BASELINE = "fp32"
_MB = 1e6


def summary(results: Path) -> Any:
    """Return a row for each cell: step time, bytes and loss, and the speed-up over fp32 on the same network."""
    runs = experiments.runs_frame(results)
    numbers = ["step_s", "payload_bytes_per_step", "wire_bytes_per_step", "validation_loss", "efficiency"]
    table = runs.groupby(["profile", "codec"], sort=False)[numbers].mean().reset_index()
    table["exact"] = bool(runs.timing.eq("played").all() and runs.clock.eq("virtual").all())
    base = table[table.codec == BASELINE].set_index("profile").step_s
    table["speed_up"] = table.profile.map(base) / table.step_s
    table["whole"] = table.profile.map(base)  # the fastest network first, and on each the largest payload
    order = ["whole", "payload_bytes_per_step", "codec"]
    return table.sort_values(order, ascending=[True, False, False]).drop(columns="whole")


def of_cells(folder: Path, column: str, cells: Sequence[tuple[str, str]]) -> list[float] | None:
    """Return a column of summary.csv for some networks and codecs; None if it lacks one of these cells."""
    table = pandas.read_csv(folder / "summary.csv").set_index(["profile", "codec"])[column]
    return [float(table[cell]) for cell in cells] if {*cells} <= {*table.index} else None


def speed_ups(folder: Path, nothing: float) -> Facts | None:
    """Return the speed-up of a step by int8 in a datacenter and behind a cable modem; a speed-up within `nothing`
    counts as none.
    """
    found = of_cells(folder, "speed_up", [("datacenter", "int8"), ("cable", "int8")])
    if found is None:
        return None
    fast, slow = found
    exact = pandas.read_csv(folder / "summary.csv").exact.all()
    said = {"datacenter": fast, "cable": slow, "interval": EXACT if exact else "one run of each cell"}
    return {**said, "faster_only_slow": slow > 1 + nothing and abs(fast - 1) < nothing}


def payload(folder: Path) -> Facts | None:
    """Return the MB per step behind a cable modem, of the difference as int8 and of the tensor."""
    found = of_cells(folder, "payload_bytes_per_step", [("cable", "delta-int8"), ("cable", "int8")])
    return {"value": found[0] / _MB, "plain": found[1] / _MB} if found else None


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README, from the CSVs of a folder."""
    table, made = pandas.read_csv(folder / "summary.csv"), claim_rows.claims(globals(), folder)
    shown = pandas.DataFrame(
        {
            "network": table.profile,
            "codec": table.codec,
            "step": (1e3 * table.step_s).map("{:.0f} ms".format),
            "speed-up": table.speed_up.map("{:.2f}x".format),
            "payload per step": (table.payload_bytes_per_step / _MB).map("{:.2f} MB".format),
            "wire per step": (table.wire_bytes_per_step / _MB).map("{:.2f} MB".format),
            "validation loss": table.validation_loss.map("{:.4f}".format),
            "efficiency": table.efficiency.map("{:.2f}".format),
        }
    )
    words = " ".join(f"{claim.claim[0].upper()}{claim.claim[1:]}: {claim.verdict} ({claim.ours})." for claim in made)
    return {"answer": experiments.prose(f"**Answer.** {words}"), "cells": shown}


def write(results: Path, output: Path) -> None:
    """Write the CSV of a sweep's results."""
    summary(results).to_csv(output / "summary.csv", index=False, float_format="%.9g", lineterminator="\n")


if __name__ == "__main__":
    publishing.run(globals())

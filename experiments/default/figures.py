"""Make summary.csv, the claims and the README's generated blocks of the default experiment from its sweep's results.

python experiments/default/figures.py [--results results/default] [--output experiments/default]

The figures are those of the sweep's own report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas

from testbed.report import experiments
from testbed.report.claims import EXACT, Claim, claims_table

NAME = "default"
BASELINE, INT8, DELTA = "fp32", "int8", "delta-int8"
FAST, SLOW = "datacenter", "cable"
COMMAND = f"python -m testbed reproduce {NAME}"
NOTHING = 0.05
"""A speed-up within this is none."""
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


def claims(folder: Path) -> list[Claim]:
    """Return what summary.csv says of the claims; those whose cells it lacks are left out."""
    table = pandas.read_csv(folder / "summary.csv")
    cells = table.set_index(["profile", "codec"])
    interval = EXACT if table.exact.all() else "one run of each cell"
    made = []
    if {(FAST, INT8), (SLOW, INT8)} <= set(cells.index):
        fast, slow = cells.speed_up[FAST, INT8], cells.speed_up[SLOW, INT8]
        made.append(
            Claim(
                claim="a quarter of the bytes makes a step faster over a slow link, and none in a datacenter",
                source="ours",
                ours=f"{slow:.2f}x behind a cable modem, {fast:.2f}x in a datacenter",
                interval=interval,
                verdict="holds" if slow > 1 + NOTHING and abs(fast - 1) < NOTHING else "fails",
                why="at this ratio of bytes to compute: a small model on one core for each stage",
                command=COMMAND,
            )
        )
    if {(SLOW, INT8), (SLOW, DELTA)} <= set(cells.index):
        plain, delta = (cells.payload_bytes_per_step[SLOW, codec] for codec in (INT8, DELTA))
        made.append(
            Claim(
                claim="the difference from the previous step's tensor takes fewer bytes, as int8, than the tensor does",
                source="Bedoya and Zhang, activation delta (second-hand)",
                published='"we only send the difference"',
                ours=f"{delta / _MB:.3f} MB against {plain / _MB:.3f} MB per step",
                interval=EXACT,
                verdict="holds" if delta < plain else "fails",
                why="counted bytes; a difference has as many values as the tensor",
                command=COMMAND,
            )
        )
    return made


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README, from the CSVs of a folder."""
    table, made = pandas.read_csv(folder / "summary.csv"), claims(folder)
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
    return {
        "answer": experiments.prose(f"**Answer.** {words}"),
        "claims": claims_table(made),
        "cells": experiments.markdown_of(shown),
    }


def main() -> None:
    """Write summary.csv and the claims; put the generated blocks into the README, and print them."""
    results, output = experiments.folders(NAME, "summary.csv, claims and the generated blocks of the README.")
    summary(results).to_csv(output / "summary.csv", index=False, float_format="%.9g", lineterminator="\n")
    experiments.publish(output, blocks(output), claims(output))


if __name__ == "__main__":
    main()

"""Make the figure, cells.csv, claims.csv and the README's blocks of four_regions from what was played.

python -m testbed predict four_regions
python experiments/four_regions/figures.py [--results results/four_regions] [--output FOLDER]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from testbed.report import claim_rows, experiments, predicted, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table

PUBLISHED = 13.0


def times(folder: Path) -> Any:
    """Return a row for each draw, delay and schedule: seconds per step raw and compressed, and how many times as long
    it is as the compressed one, and that as in a datacenter with bf16.
    """
    frame = predicted.cells(folder)
    datacenter_s = frame[(frame.grid == "datacenter") & (frame.codec == "bf16")].ideal_s.iloc[0]
    drawn = frame[frame.grid == "drawn"]
    wide = drawn.assign(codec=drawn.codec.fillna("compressed").replace("bf16", "raw")).pivot_table(
        index=["schedule", "links.delay", "links.seed"], columns="codec", values="ideal_s"
    )
    wide = wide.reset_index().rename(columns={"links.delay": "delay"})
    return wide.assign(slower=wide.raw / wide.compressed, datacenter=wide.compressed / datacenter_s)


def usual(folder: Path) -> Any:
    """Return the rows of `times` with GPipe and 20 ms."""
    every = times(folder)
    return every[(every.schedule == "gpipe") & (every.delay == "20ms")]


def table(folder: Path) -> Any:
    """Return, by schedule and delay, the range over the draws."""
    rows = []
    for (schedule, delay), part in times(folder).groupby(["schedule", "delay"]):
        rows.append(
            {
                "schedule": schedule,
                "delay": delay,
                "draws": len(part),
                "raw": _range(part.raw, "{:.0f}", " s"),
                "compressed": _range(part.compressed, "{:.1f}", " s"),
                "raw is slower": _range(part.slower, "{:.1f}", "x"),
                "compressed against a datacenter": _range(part.datacenter, "{:.2f}", "x"),
            }
        )
    return pd.DataFrame(rows)


def _range(values: Any, form: str, unit: str) -> str:
    ends = [form.format(values.min()), form.format(values.max())]
    return (ends[0] if ends[0] == ends[1] else " to ".join(ends)) + unit


def drawn(folder: Path, published: float = PUBLISHED) -> Facts:
    """Return how many times slower the raw run is, with GPipe and 20 ms and over all that was drawn, and how near the
    compressed one is to a datacenter.
    """
    every, ours = times(folder), usual(folder)
    all_of = every.slower.agg(["min", "max"])
    ends = {name: ours[name].agg(["min", "mean", "max"]) for name in ("slower", "datacenter")}
    nearest = every[every.delay == "1ms"].datacenter.min()
    inside = all_of["min"] <= published <= all_of["max"]
    return {**ends, "every": all_of, "nearest": nearest, "draws": len(ours), "inside": inside}


def claims(folder: Path) -> list[Claim]:
    """Return what was claimed and what became of it."""
    return claim_rows.claims(globals(), folder)


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    ours = usual(folder)
    answer = (
        f"Without compression a step of 64 stages takes {_range(ours.raw, '{:.0f}', ' s')} over {len(ours)} draws of "
        f"60 to 350 Mbit/s, {_range(ours.slower, '{:.1f}', '')} times as long as with 84 bytes per token (published: "
        f"13 times). The compressed step is {_range(ours.datacenter, '{:.2f}', '')} times a "
        f"datacenter's: at a delay of 20 ms, 126 hops in a row cost half a step, and no codec shortens them."
    )
    return {
        "answer": experiments.prose(answer),
        "draws": experiments.markdown_of(table(folder)),
        "claims": claims_table(claims(folder)),
    }


def draw(folder: Path) -> Any:
    """Draw how much slower the raw run is by draw, delay and schedule."""
    every = times(folder).set_index(["schedule", "delay"]).slower.sort_index()
    figure, axes = plt.subplots(figsize=(7.6, 2.7), layout="constrained")
    looks = {"gpipe": ("GPipe", "#0072b2"), "1f1b": ("1F1B", "#e69f00")}
    order = [(schedule, delay) for delay in ("1ms", "20ms", "75ms") for schedule in looks]
    for place, key in enumerate(order):
        part = every.loc[[key]]
        axes.plot(part, [place] * len(part), "o", color=looks[key[0]][1], mfc="none")
    axes.axvline(PUBLISHED, color=style.INK, lw=1)
    axes.annotate("published", (PUBLISHED, -0.55), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(order)), [f"{looks[schedule][0]}, delay {delay[:-2]} ms" for schedule, delay in order])
    axes.set_ylim(len(order) - 0.5, -0.9)
    axes.set_xlim(0, None)
    axes.set_xlabel("raw step / compressed step; one circle for each draw of the links' rates")
    axes.set_title("The published 13x is within what delay and schedule leave open")
    return figure


if __name__ == "__main__":
    predicted.make(Path(__file__).parent, "slowdown", draw, blocks, claims)

"""Make the figure, cells.csv, claims.csv and the README's blocks of four_regions from what was played.

python -m testbed predict four_regions
python experiments/four_regions/figures.py [--results results/four_regions] [--output FOLDER]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from testbed.report import experiments, predicted, style
from testbed.report.claims import Claim, claims_table

NAME = "four_regions"
FIGURE = "slowdown"
COMMAND = f"python -m testbed predict {NAME}"
SOURCE = "Protocol Models, arXiv 2506.01260 (second-hand)"
PUBLISHED = 13.0


def times(folder: Path) -> Any:
    """Return a row for each draw, delay and schedule: seconds per step raw and compressed, and their ratio."""
    frame = predicted.cells(folder)
    drawn = frame[frame.grid == "drawn"]
    wide = drawn.assign(codec=drawn.codec.fillna("84 B per token")).pivot_table(
        index=["schedule", "links.delay", "links.seed"], columns="codec", values="ideal_s"
    )
    wide = wide.rename(columns={"bf16": "raw", "84 B per token": "compressed"}).reset_index()
    return wide.assign(slower=wide.raw / wide.compressed)


def datacenter_s(folder: Path) -> float:
    """Return seconds per step of bf16 in a datacenter."""
    frame = predicted.cells(folder)
    return float(frame[(frame.grid == "datacenter") & (frame.codec == "bf16")].ideal_s.iloc[0])


def table(folder: Path) -> Any:
    """Return, by schedule and delay, the range over the draws."""
    rows = []
    for (schedule, delay), part in times(folder).groupby(["schedule", "links.delay"]):
        rows.append(
            {
                "schedule": schedule,
                "delay": delay,
                "draws": len(part),
                "raw": _range(part.raw, "{:.0f}", " s"),
                "compressed": _range(part.compressed, "{:.1f}", " s"),
                "raw is slower": _range(part.slower, "{:.1f}", "x"),
                "compressed against a datacenter": _range(part.compressed / datacenter_s(folder), "{:.2f}", "x"),
            }
        )
    return pd.DataFrame(rows)


def _range(values: Any, form: str, unit: str) -> str:
    ends = [form.format(values.min()), form.format(values.max())]
    return (ends[0] if ends[0] == ends[1] else " to ".join(ends)) + unit


def claims(folder: Path) -> list[Claim]:
    """Return what was claimed and what became of it."""
    every = times(folder)
    usual = every[(every.schedule == "gpipe") & (every["links.delay"] == "20ms")]
    closeness = usual.compressed / datacenter_s(folder)
    inside = every.slower.min() <= PUBLISHED <= every.slower.max()
    return [
        Claim(
            claim="8 B parameters over 60 to 350 Mbit/s: without compression 13 times slower",
            source=SOURCE,
            published=f"{PUBLISHED:g}x",
            ours=f"{usual.slower.mean():.1f}x with GPipe and 20 ms",
            interval=f"{usual.slower.min():.1f} to {usual.slower.max():.1f} over {len(usual)} draws of the rates",
            verdict="holds" if inside else "fails",
            why=f"over the delays and schedules that the source leaves open it is {every.slower.min():.1f} to "
            f"{every.slower.max():.1f}; the delay, not the rate, decides what is left of the compressed step",
            command=COMMAND,
        ),
        Claim(
            claim="A hundredfold compressed run over such links is as fast as a datacenter",
            source=SOURCE,
            published="matches the centralised run (in convergence)",
            ours=f"{closeness.mean():.2f} times the step with 20 ms",
            interval=f"{closeness.min():.2f} to {closeness.max():.2f} over {len(usual)} draws of the rates",
            verdict="not comparable",
            why="64 stages are 126 hops in a row: with 1 ms of delay it is "
            f"{every[every['links.delay'] == '1ms'].compressed.min() / datacenter_s(folder):.2f} "
            f"times; the source speaks "
            "of convergence, this row of time per step",
            command=COMMAND,
        ),
        predicted.explained(
            predicted.cells(folder),
            COMMAND,
            step="A played step of 64 stages",
            rate="rates",
            why="two played cells of one draw against the critical path over the pipe formula",
        ),
    ]


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    every = times(folder)
    usual = every[(every.schedule == "gpipe") & (every["links.delay"] == "20ms")]
    answer = (
        f"Without compression a step of 64 stages takes {_range(usual.raw, '{:.0f}', ' s')} over {len(usual)} draws of "
        f"60 to 350 Mbit/s, {_range(usual.slower, '{:.1f}', '')} times as long as with 84 bytes per token (published: "
        f"13 times). The compressed step is {_range(usual.compressed / datacenter_s(folder), '{:.2f}', '')} times a "
        f"datacenter's: at a delay of 20 ms, 126 hops in a row cost half a step, and no codec shortens them."
    ).replace("%", " %")
    return {
        "answer": experiments.prose(answer),
        "draws": experiments.markdown_of(table(folder)),
        "claims": claims_table(claims(folder)),
    }


def draw(folder: Path) -> Any:
    """Draw how much slower the raw run is by draw, delay and schedule."""
    every = times(folder)
    figure, axes = plt.subplots(figsize=(7.6, 2.7), layout="constrained")
    names = {"gpipe": "GPipe", "1f1b": "1F1B"}
    colours = {"gpipe": "#0072b2", "1f1b": "#e69f00"}
    order = [(schedule, delay) for delay in ("1ms", "20ms", "75ms") for schedule in names]
    for place, (schedule, delay) in enumerate(order):
        part = every[(every.schedule == schedule) & (every["links.delay"] == delay)]
        axes.plot(part.slower, [place] * len(part), "o", color=colours[schedule], mfc="none")
    axes.axvline(PUBLISHED, color=style.INK, lw=1)
    axes.annotate("published", (PUBLISHED, -0.55), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(order)), [f"{names[schedule]}, delay {delay[:-2]} ms" for schedule, delay in order])
    axes.set_ylim(len(order) - 0.5, -0.9)
    axes.set_xlim(0, None)
    axes.set_xlabel("raw step / compressed step; one circle for each draw of the links' rates")
    axes.set_title("The published 13x is within what delay and schedule leave open")
    return figure


if __name__ == "__main__":
    predicted.make(Path(__file__).parent, FIGURE, draw, blocks, claims)

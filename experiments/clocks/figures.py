"""Make the figure, summary.csv, the claims and the README's blocks of clocks from the results of its sweep.

python experiments/clocks/figures.py [--results results/clocks] [--output experiments/clocks]
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D

from testbed import results
from testbed.metrics import statistics
from testbed.metrics.fidelity import compare_timings
from testbed.metrics.live_checks import timed_both_ways
from testbed.metrics.steps import align, counted
from testbed.records import StepRecord
from testbed.report import claim_rows, experiments, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim
from testbed.report.numbers import percent

_MARKERS = {"1f1b": "o", "gpipe": "s"}


def _stages(run: results.Run) -> list[list[StepRecord]]:
    return [run.steps(stage) for stage in range(run.cell.pipeline.stages)]


def _seconds(run: results.Run) -> list[float]:
    assert run.summary is not None
    steps = counted(align(_stages(run)), run.summary.steady_from)
    return [step.seconds / run.cell.compute.dilation for step in steps]


def differences(folder: Path) -> Any:
    """Return a pandas.DataFrame with a row for each cell: live and played step in ms, and how far they are apart.

    A step is the median of a run's steps. A cell whose links draw at random was played several times, each with another
    seed for its links, and these are taken together. low and high enclose the difference with 95 % confidence, from the
    spread of the steps on both sides; difference_of_means compares the means, in which rare long stalls count more.
    """
    rows = []
    for live, newest in timed_both_ways(folder):
        cell = newest.cell
        played = results.finished_runs(folder, newest.folder.parent.name)
        theirs, ours = _seconds(live), [second for run in played for second in _seconds(run)]
        live_s, played_s = median(theirs), median(ours)
        spread = statistics.percentiles(statistics.resampled(ours) / statistics.resampled(theirs) - 1)
        live_summary, summary = live.summary, newest.summary
        assert live_summary is not None
        assert summary is not None
        fidelity = compare_timings(live_summary, _stages(live), summary, _stages(newest))
        rows.append(
            {
                "network": cell.network,
                "schedule": cell.pipeline.schedule,
                "codec": cell.codec,
                "by_chance": cell.by_chance,
                "live_steps": len(theirs),
                "played_steps": len(ours),
                "live_ms": live_s * 1e3,
                "played_ms": played_s * 1e3,
                "difference": played_s / live_s - 1,
                "low": spread.low,
                "high": spread.high,
                "difference_of_means": mean(ours) / mean(theirs) - 1,
                "same_losses": fidelity.same_losses,
                "live_bound": live_summary.bound,
                "overruns": live_summary.overrun_share,
            }
        )
    return pd.DataFrame(rows).sort_values(["by_chance", "network", "schedule", "codec"]).reset_index(drop=True)


def blocks(folder: Path) -> dict[str, str]:
    """Return what the README says of summary.csv."""
    frame = pd.read_csv(folder / "summary.csv")
    sure, chance = frame[~frame.by_chance], frame[frame.by_chance]
    apart, by_chance = sure.difference.abs(), chance.difference.abs()
    within = int(((chance.low <= 0) & (chance.high >= 0)).sum())
    losses = "The losses are the same in all of them, bit for bit." if frame.same_losses.all() else "LOSSES DIFFER."
    answer = (
        f"Over links that lose nothing a played step and a live one are {percent(apart.median())} apart in the median "
        f"of {len(sure)} cells and {percent(apart.max())} at most; over links that lose packets "
        f"{percent(by_chance.median())} in the median of {len(chance)} and {percent(by_chance.max())} at most, and "
        f"{within} of the {len(chance)} intervals contain zero. {losses}"
    )
    table = frame.assign(
        live=frame.live_ms.map("{:.1f} ms".format),
        played=frame.played_ms.map("{:.1f} ms".format),
        apart=frame.difference.map(_signed),
        interval=frame.low.map(_signed) + " to " + frame.high.map(_signed),
        losses=frame.same_losses.map({True: "identical", False: "DIFFER"}),
    )[["network", "schedule", "codec", "live", "played", "apart", "interval", "losses"]]
    return {"answer": experiments.prose(answer), "table": experiments.markdown_of(table)}


def steps_apart(folder: Path, median_bar: float, worst_bar: float) -> Facts:
    """Return how far played steps are from live ones over links that lose nothing."""
    frame = pd.read_csv(folder / "summary.csv")
    sure = frame[~frame.by_chance]
    middle, worst = sure.difference.abs().median(), sure.difference.abs().max()
    met = middle <= median_bar and worst <= worst_bar
    return {"median": middle, "worst": worst, "met": met, "least": sure.low.min(), "most": sure.high.max(),
            "cells": len(sure)}  # fmt: skip


def links_apart(folder: Path) -> Facts:
    """Return how far the quantity of a link that is farthest from its ideal departs from it."""
    found = pd.read_csv(Path(__file__).with_name("certificates.csv"))  # bench clock makes it
    return {"value": (found.found / found.ideal - 1).abs().max(), "quantities": len(found)}


def claims(folder: Path) -> list[Claim]:
    """Return the two claims that the virtual clock rests on."""
    return claim_rows.claims(globals(), folder)


def _signed(share: float) -> str:
    return percent(share, "{:+.1f}")


def draw(frame: Any, title: str, caption: str) -> Any:
    """Draw how much longer or shorter a played step is than the live one, cell by cell."""
    looks = style.looks(frame.codec)
    figure, axes = plt.subplots(figsize=(8.2, 1.9 + 0.28 * len(frame)), layout="constrained")
    for place, row in enumerate(frame.itertuples()):
        look = looks[row.codec]
        axes.plot([100 * row.low, 100 * row.high], [place, place], color=look.colour, linewidth=1.2)
        axes.plot(100 * row.difference, place, _MARKERS[row.schedule], color=look.colour, linestyle="none")
    axes.axvline(0, color="black", linewidth=0.8)
    for limit in (-2.5, 2.5):
        axes.axvline(limit, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(frame)), [f"{row.network}  {row.schedule}  {row.codec}" for row in frame.itertuples()])
    axes.invert_yaxis()
    reach = max(3.0, 110 * frame[["low", "high"]].abs().to_numpy().max())
    axes.set_xlim(-reach, reach)
    axes.set_xlabel("played step against live step, %")
    axes.set_title(title)
    marks = {codec: (look.colour, "o") for codec, look in looks.items()}
    marks |= {schedule: ("grey", marker) for schedule, marker in _MARKERS.items()}
    handles = [Line2D([], [], color=c, marker=m, linestyle="none", label=name) for name, (c, m) in marks.items()]
    axes.legend(handles=handles, loc="upper right")
    figure.supxlabel(caption, fontsize=7.2, x=0.01, ha="left")
    return figure


if __name__ == "__main__":
    folder, output = experiments.folders("clocks", "Figure, summary.csv, the claims and the README's blocks.")
    frame = differences(folder)
    frame.to_csv(output / "summary.csv", index=False, float_format="%.6g", lineterminator="\n")
    sure = frame[~frame.by_chance].difference.abs()
    title = f"Without loss, played and live steps are {percent(sure.median())} apart, {percent(sure.max())} at most"
    with style.applied():
        runs = experiments.runs_frame(folder)
        caption = (
            "live: real clock, relay, torch and TCP together; played: virtual clock, netem; bars: 95 %, from the "
            f"spread of the steps\n{runs.machine.iloc[0]}; {runs.compute.iloc[0]}; dotted: 2.5 %"
        )
        experiments.save_figure(draw(frame, title, caption), output, "clocks")
    experiments.publish(output, blocks(output), claims(output))

"""Generates the figure, summary.csv, claims and README blocks of clocks from the results of its sweep.

python experiments/clocks/figures.py [--results results/clocks] [--output experiments/clocks]
"""

from pathlib import Path
from statistics import mean, median
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from testbed import results
from testbed.metrics import statistics
from testbed.metrics.fidelity import compare_timings
from testbed.metrics.live_checks import timed_both_ways
from testbed.metrics.steps import align, counted
from testbed.report import experiments, plots, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent

_MARKERS = {"1f1b": "o", "gpipe": "s"}
HELD_OUT_STAGES = 2
"""Of the cells of held_out.toml, on which no term was fitted."""


def _seconds(run: results.Run) -> list[float]:
    assert run.summary is not None
    steps = counted(align(run.all_steps()), run.summary.steady_from)
    return [step.seconds / run.cell.compute.dilation for step in steps]


def differences(folder: Path) -> Any:
    """Return a pandas.DataFrame with a row for each cell: live and played step in ms, and their difference.

    A step is the median of a run's steps. A cell with random links was played several times, each with another seed for
    its links; these are combined. low and high bound the difference with 95 % confidence, from the spread of the steps
    on both sides; difference_of_means compares the means, which rare long stalls affect more.
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
        fidelity = compare_timings(live_summary, live.all_steps(), summary, newest.all_steps())
        rows.append(
            {
                "network": cell.network,
                "schedule": cell.pipeline.schedule,
                "codec": cell.codec,
                "by_chance": cell.by_chance,
                "held_out": cell.pipeline.stages == HELD_OUT_STAGES,
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
    order = ["by_chance", "held_out", "network", "schedule", "codec"]
    return pd.DataFrame(rows).sort_values(order).reset_index(drop=True)


def blocks(folder: Path) -> dict[str, str]:
    """Return the README's blocks from summary.csv."""
    frame = pd.read_csv(folder / "summary.csv")
    sure, chance = frame[~frame.by_chance], frame[frame.by_chance]
    apart, by_chance = sure.difference.abs(), chance.difference.abs()
    held_out = sure[sure.held_out].difference.abs()
    within = int(((chance.low <= 0) & (chance.high >= 0)).sum())
    losses = "The losses are the same in all of them, bit for bit." if frame.same_losses.all() else "LOSSES DIFFER."
    answer = (
        f"Without packet loss, a played and a live step differ by {percent(apart.median())} in the median "
        f"of {len(sure)} cells and by at most {percent(apart.max())} ({percent(held_out.median())} and "
        f"{percent(held_out.max())} in the {len(held_out)} on which nothing was fitted); with packet loss, by "
        f"{percent(by_chance.median())} in the median of {len(chance)} and by at most {percent(by_chance.max())}, and "
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


def steps_apart(folder: Path, median_bar: float, worst_bar: float, held_out: bool) -> Facts:
    """Return the difference between played and live steps over links without loss, of cells held out or others."""
    frame = pd.read_csv(folder / "summary.csv")
    sure = frame[~frame.by_chance & (frame.held_out == held_out)]
    middle, worst = sure.difference.abs().median(), sure.difference.abs().max()
    met = middle <= median_bar and worst <= worst_bar
    return {"median": middle, "worst": worst, "met": met, "least": sure.low.min(), "most": sure.high.max(),
            "cells": len(sure)}  # fmt: skip


def links_apart(folder: Path) -> Facts:
    """Return the largest deviation of any quantity of a link from its ideal."""
    found = pd.read_csv(Path(__file__).with_name("certificates.csv"))  # written by `bench clock`
    return {"value": (found.found / found.ideal - 1).abs().max(), "quantities": len(found)}


def _signed(share: float) -> str:
    return percent(share, "{:+.1f}")


def draw(frame: Any, title: str, caption: str) -> Any:
    """Draw the relative difference of played and live steps, cell by cell."""
    looks = style.looks(frame.codec)
    figure, ((axes,),) = plots.panels(1, 1, (8.2, 1.9 + 0.28 * len(frame)))
    for place, row in enumerate(frame.itertuples()):
        found = plots.ErrorBar(100 * row.difference, (100 * row.low, 100 * row.high))
        plots.estimates(axes, [(place, found)], looks[row.codec].colour, _MARKERS[row.schedule], across=True, width=1.2)
    axes.axvline(0, color="black", linewidth=0.8)
    for limit in (-2.5, 2.5):
        axes.axvline(limit, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(frame)), [f"{row.network}  {row.schedule}  {row.codec}" for row in frame.itertuples()])
    axes.invert_yaxis()
    reach = max(3.0, 110 * frame[["low", "high"]].abs().to_numpy().max())
    axes.set(xlim=(-reach, reach), xlabel="played step against live step, %", title=title)
    marks = {codec: (look.colour, "o") for codec, look in looks.items()}
    marks |= {schedule: ("grey", marker) for schedule, marker in _MARKERS.items()}
    handles = [Line2D([], [], color=c, marker=m, linestyle="none", label=name) for name, (c, m) in marks.items()]
    axes.legend(handles=handles, loc="upper right")
    figure.supxlabel(caption, fontsize=7.2, x=0.01, ha="left")
    return figure


def write(results: Path, output: Path) -> None:
    """Write summary.csv, and draw it."""
    frame, runs = differences(results), experiments.runs_frame(results)
    frame.to_csv(output / "summary.csv", index=False, float_format="%.6g", lineterminator="\n")
    sure = frame[~frame.by_chance].difference.abs()
    title = f"Without loss, played and live steps are {percent(sure.median())} apart, {percent(sure.max())} at most"
    caption = (
        "live: real clock, relay, torch and TCP together; played: virtual clock, netem; bars: 95 %, from the "
        f"spread of the steps\n{runs.machine.iloc[0]}; {runs.compute.iloc[0]}; dotted: 2.5 %"
    )
    publishing.save_figure(draw(frame, title, caption), output, "clocks")


if __name__ == "__main__":
    publishing.run(globals())

"""Make the figure, summary.csv and the README's table of clocks from the results of its sweep.

python experiments/clocks/figures.py [--results results/clocks] [--output experiments/clocks]
"""

from __future__ import annotations

import sys
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D

from testbed import results
from testbed.metrics.fidelity import compare_timings
from testbed.metrics.live_checks import timed_both_ways
from testbed.report import experiments, style

NAME = "clocks"
_MARKERS = {"1f1b": "o", "gpipe": "s"}


def differences(folder: Any) -> Any:
    """Return a pandas.DataFrame with a row for each cell: live and played step in ms, and how far they are apart.

    A cell whose links draw at random was played several times, each with another seed for its links; so was the live
    one run. Its played step is the median of those, and low and high are the least and the largest.
    """
    rows = []
    for live, newest in timed_both_ways(folder):
        cell = newest.cell
        played = results.finished_runs(folder, newest.folder.parent.name)
        stages = [[run.steps(stage) for stage in range(cell.pipeline.stages)] for run in (live, newest)]
        summaries = [run.summary for run in (live, newest)]
        assert summaries[0] is not None
        assert summaries[1] is not None
        one = compare_timings(summaries[0], stages[0], summaries[1], stages[1])
        steps = [run.summary.step_s for run in played if run.summary is not None and run.summary.step_s is not None]
        if one.live_s is None or not steps:
            continue
        rows.append(
            {
                "network": cell.network,
                "schedule": cell.pipeline.schedule,
                "codec": cell.codec,
                "live_ms": one.live_s * 1e3,
                "played_ms": median(steps) * 1e3,
                "difference": median(steps) / one.live_s - 1,
                "low": min(steps) / one.live_s - 1,
                "high": max(steps) / one.live_s - 1,
                "same_losses": one.same_losses,
                "live_bound": summaries[0].bound,
                "overruns": summaries[0].overrun_share,
            }
        )
    return pd.DataFrame(rows).sort_values(["network", "schedule", "codec"]).reset_index(drop=True)


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
    handles = [
        Line2D([], [], color=look.colour, marker="o", linestyle="none", label=codec) for codec, look in looks.items()
    ]
    handles += [Line2D([], [], color="grey", marker=m, linestyle="none", label=name) for name, m in _MARKERS.items()]
    axes.legend(handles=handles, loc="lower left", ncols=2)
    figure.supxlabel(caption, fontsize=7.2, x=0.01, ha="left")
    return figure


def main() -> None:
    """Write the figure and summary.csv, print the table."""
    folder, output = experiments.folders(NAME, "Figure, summary.csv and the table of the README.")
    frame = differences(folder)
    off = frame.difference.abs()
    title = f"Played against live: {off.median():.2%} apart in the median, {off.max():.2%} at most".replace("%", " %")
    with style.applied():
        caption = experiments.caption(experiments.runs_frame(folder))
        experiments.save_figure(draw(frame, title, caption), output, "clocks")
    frame.to_csv(output / "summary.csv", index=False, float_format="%.6g")
    table = frame.assign(
        live=frame.live_ms.map("{:.1f} ms".format),
        played=frame.played_ms.map("{:.1f} ms".format),
        apart=frame.difference.map("{:+.2%}".format),
        losses=frame.same_losses.map({True: "identical", False: "DIFFER"}),
    )[["network", "schedule", "codec", "live", "played", "apart", "losses"]]
    sys.stdout.write(f"{experiments.markdown_of(table)}\n\n{title}\n")


if __name__ == "__main__":
    main()

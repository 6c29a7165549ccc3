"""Make the figure, summary.csv, the claims and the README's blocks of clocks from the results of its sweep.

python experiments/clocks/figures.py [--results results/clocks] [--output experiments/clocks]
"""

from __future__ import annotations

import textwrap
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
from testbed.report import experiments, style
from testbed.report.claims import Claim

NAME = "clocks"
BAR_MEDIAN, BAR_WORST, BAR_LINK = 0.01, 0.025, 0.001
"""How far apart a played and a live step may be, and a quantity of a link from its ideal, as shares."""
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
    apart = sure.difference.abs()
    within = int(((chance.low <= 0) & (chance.high >= 0)).sum())
    losses = "The losses are the same in all of them, bit for bit." if frame.same_losses.all() else "LOSSES DIFFER."
    answer = (
        f"Over links that lose nothing a played step and a live one are {_percent(apart.median())} apart in the median "
        f"of {len(sure)} cells and {_percent(apart.max())} at most; over links that lose packets "
        f"{_percent(chance.difference.abs().median())} in the median of {len(chance)} and "
        f"{_percent(chance.difference.abs().max())} at most, and {within} of the {len(chance)} intervals contain zero. "
        f"{losses}"
    )
    table = frame.assign(
        live=frame.live_ms.map("{:.1f} ms".format),
        played=frame.played_ms.map("{:.1f} ms".format),
        apart=[_signed(value) for value in frame.difference],
        interval=[f"{_signed(row.low)} to {_signed(row.high)}" for row in frame.itertuples()],
        losses=frame.same_losses.map({True: "identical", False: "DIFFER"}),
    )[["network", "schedule", "codec", "live", "played", "apart", "interval", "losses"]]
    return {"answer": "\n".join(textwrap.wrap(answer, 118)), "table": experiments.markdown_of(table)}


def claims(folder: Path) -> list[Claim]:
    """Return the two claims that the virtual clock rests on."""
    frame = pd.read_csv(folder / "summary.csv")
    sure = frame[~frame.by_chance]
    apart = sure.difference.abs()
    met = apart.median() <= BAR_MEDIAN and apart.max() <= BAR_WORST
    found = pd.read_csv(Path(__file__).with_name("certificates.csv"))  # bench clock makes it
    furthest = ((found.found - found.ideal) / found.ideal).abs().max()
    return [
        Claim(
            claim="a step that is played on the virtual clock takes as long as a live one, torch and TCP together",
            source="ours",
            published="within 1 % in the median and 2.5 % at worst",
            ours=f"{_percent(apart.median())} in the median, {_percent(apart.max())} at worst",
            interval=f"{_signed(sure.low.min())} to {_signed(sure.high.max())}, {len(sure)} cells without loss",
            verdict="holds" if met else "fails",
            why="what is left is this machine's: waking a stage that waited, and the kernel's copy into a socket",
            command="python -m testbed reproduce clocks",
        ),
        Claim(
            claim="every quantity of a link on the virtual clock lies within 0.1 % of its ideal",
            source="ours",
            published="0.1 %",
            ours=f"{100 * furthest:.3f} % at worst of {len(found)} quantities",
            interval="exact",
            verdict="holds" if furthest <= BAR_LINK else "fails",
            why="a probe played over 12 links from 10 Mbit/s to 1 Gbit/s and 5 to 100 ms, against the pipe formula",
            command="python -m testbed bench clock -o experiments/clocks/certificates.csv",
        ),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


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
    axes.legend(handles=handles, loc="upper right")
    figure.supxlabel(caption, fontsize=7.2, x=0.01, ha="left")
    return figure


def main() -> None:
    """Write the figure, summary.csv, claims.csv and the README's blocks."""
    folder, output = experiments.folders(NAME, "Figure, summary.csv, the claims and the README's blocks.")
    frame = differences(folder)
    frame.to_csv(output / "summary.csv", index=False, float_format="%.6g", lineterminator="\n")
    sure = frame[~frame.by_chance].difference.abs()
    title = f"Without loss, played and live steps are {_percent(sure.median())} apart, {_percent(sure.max())} at most"
    with style.applied():
        runs = experiments.runs_frame(folder)
        caption = (
            "live: real clock, relay, torch and TCP together; played: virtual clock, netem; bars: 95 %, from the "
            f"spread of the steps\n{runs.machine.iloc[0]}; {runs.compute.iloc[0]}; dotted: 2.5 %"
        )
        experiments.save_figure(draw(frame, title, caption), output, "clocks")
    experiments.publish(output, blocks(output), claims(output))


if __name__ == "__main__":
    main()

"""Generates the figure, cells.csv, claims.csv and README blocks of four_regions from played cells.

python -m testbed predict four_regions
python experiments/four_regions/figures.py [--results results/four_regions] [--output FOLDER]
"""

from pathlib import Path
from typing import Any

from testbed.report import experiments, plots, predicted, publishing, style
from testbed.report.canvas import name_rows, note
from testbed.report.claim_rows import Facts
from testbed.report.numbers import span

PUBLISHED = 13.0


def times(folder: Path) -> Any:
    """Return a row for each draw, delay and schedule: raw and compressed seconds per step, the ratio of both, and the
    ratio of the compressed step and a datacenter's with bf16.
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


@experiments.table
def table(folder: Path) -> Any:
    """Return, by schedule and delay, the range over the draws."""
    for (schedule, delay), part in times(folder).groupby(["schedule", "delay"]):
        yield {
            "schedule": schedule,
            "delay": delay,
            "draws": len(part),
            "raw": span(part.raw, "{:.0f}".format, " s"),
            "compressed": span(part.compressed, "{:.1f}".format, " s"),
            "raw is slower": span(part.slower, "{:.1f}".format, "x"),
            "compressed against a datacenter": span(part.datacenter, "{:.2f}".format, "x"),
        }


def drawn(folder: Path, published: float = PUBLISHED) -> Facts:
    """Return the slowdown of the raw run, with GPipe and 20 ms and over all draws, and the ratio of the compressed one
    to a datacenter's.
    """
    every, ours = times(folder), usual(folder)
    all_of = every.slower.agg(["min", "max"])
    ends = {name: ours[name].agg(["min", "mean", "max"]) for name in ("slower", "datacenter")}
    nearest = every[every.delay == "1ms"].datacenter.min()
    facts = {"low": ours.slower.min(), "high": ours.slower.max(), "nearest": nearest, "draws": len(ours)}
    return {**ends, "every": all_of, "value": ours.slower.mean(), "published": published, **facts}


def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    ours = usual(folder)
    return (
        f"Without compression a step of 64 stages takes {span(ours.raw, '{:.0f}'.format, ' s')} over {len(ours)} draws "
        f"of 60 to 350 Mbit/s, {span(ours.slower, '{:.1f}'.format)} times as long as with 84 bytes per token "
        f"(published: 13 times). The compressed step is {span(ours.datacenter, '{:.2f}'.format)} times a "
        f"datacenter's: at a delay of 20 ms, 126 sequential hops cost half a step, and no codec shortens them."
    )


def draw(folder: Path) -> Any:
    """Draw the slowdown of the raw run by draw, delay and schedule."""
    every = times(folder).set_index(["schedule", "delay"]).slower.sort_index()
    figure, ((axes,),) = plots.panels(1, 1, (7.6, 2.7))
    looks = {"gpipe": ("GPipe", "#0072b2"), "1f1b": ("1F1B", "#e69f00")}
    order = [(schedule, delay) for delay in ("1ms", "20ms", "75ms") for schedule in looks]
    for place, key in enumerate(order):
        part = every.loc[[key]]
        axes.plot(part, [place] * len(part), "o", color=looks[key[0]][1], mfc="none")
    axes.axvline(PUBLISHED, color=style.INK, lw=1)
    note(axes, "published", (PUBLISHED, -0.55), (4, 0), va="center", size=8.5)
    name_rows(axes, [f"{looks[schedule][0]}, delay {delay[:-2]} ms" for schedule, delay in order])
    axes.set(ylim=(len(order) - 0.5, -0.9), xlim=(0, None))
    axes.set_xlabel("raw step / compressed step; one circle for each draw of the links' rates")
    ours = span(usual(folder).slower, "{:.1f}".format, "x")
    axes.set_title(f"{ours} with 20 ms and GPipe, published {PUBLISHED:g}x: what is not stated decides")
    return figure


BLOCKS = {"answer": answer, "draws": table}
FIGURES = {"slowdown": draw}

if __name__ == "__main__":
    publishing.run(globals())

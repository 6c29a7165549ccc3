"""Generates the figures, CSVs, claims.csv and README blocks of protocol_nanogpt from played cells and trainings.

python -m testbed predict protocol_nanogpt
python -m testbed sweep protocol_nanogpt
python experiments/protocol_nanogpt/figures.py [--results results/protocol_nanogpt] [--output FOLDER]
"""

from pathlib import Path
from typing import Any

import pandas as pd
import training
from matplotlib.figure import Figure

from testbed.report import experiments, plots, predicted, publishing, style
from testbed.report.canvas import name_rows, note
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent

RUNS = {"dense": "dense, 2,048 B per token", "subspace": "subspace, 322 B per token"}
_BUFFER = {
    "link(200Mbit, 50ms)": "cubic, a buffer of one round trip",
    "link(200Mbit, 50ms, congestion_control=bbr)": "bbr, a buffer of one round trip",
    "link(200Mbit, 50ms, buffer=60s)": "cubic, buffers in which nothing is lost",
}


def cells(folder: Path) -> Any:
    """Return the rows of cells.csv; `run` is the record's name in the figure."""
    frame = predicted.cells(folder)
    return frame.assign(run=frame["label.run"])


def step_times(folder: Path) -> Any:
    """Return seconds per step by run (columns) and by source (rows)."""
    frame, said = cells(folder), pd.read_csv(folder / "published.csv").set_index("run")
    by = {grid: part.set_index("run") for grid, part in frame.groupby("grid")}
    lossy = by["buffer"][by["buffer"].links == "link(200Mbit, 50ms)"]
    rows = {
        "published": said.step_s,
        "their meter, computed": by["meter"].ideal_s,
        "one downlink for both neighbours, played": by["shared"].step_s,
        "links both ways, ideal": by["links"].ideal_s,
        "links both ways, played": by["links"].step_s,
        "played, a buffer of one round trip": lossy[lossy.packets == lossy.packets.max()].step_s,
    }
    return pd.DataFrame(rows).T[list(RUNS)]


def _lossless(frame: Any) -> Any:
    return frame[frame.grid.isin(["links", "shared"])]


def buffers(folder: Path) -> Any:
    """Return TCP's effect on the subspace run, by transport and by the packets per message."""
    frame = cells(folder)
    part = frame[frame.grid == "buffer"]
    return pd.DataFrame(
        {
            "transport": part.links.map(_BUFFER),
            "packets per message": part.packets.astype(int),
            "step": part.step_s.map("{:.2f} s".format, na_action="ignore"),
            "above the ideal": (part.step_s / part.ideal_s - 1).map(
                lambda share: percent(share, "{:+.1f}"), na_action="ignore"
            ),
            "retransmitted": (part.retransmitted_bytes / 1e6).map("{:.2f} MB".format, na_action="ignore"),
        }
    )


def meter(folder: Path, run: str) -> Facts:
    """Return the relative deviation of a record's step by its own meter from the published one, and its step over
    links.
    """
    times = step_times(folder)[run]
    said, computed = times["published"], times["their meter, computed"]
    share, name = computed / said - 1, RUNS[run]
    facts = {"said": said, "computed": computed, "played": times["links both ways, played"], "name": name}
    return {"value": computed, "share": share, **facts}


def times_as_fast(folder: Path, to_target: bool = False) -> Facts:
    """Return the speed-up of the subspace run over links, by the meter and as published; `to_target`: counting the
    steps that each run needs.
    """
    steps, needed = step_times(folder), training.needed(folder)
    ratios = (steps.dense / steps.subspace) / (needed["factor"] if to_target else 1)
    theirs, computed = ratios["published"], ratios["their meter, computed"]
    return {"value": ratios["links both ways, played"], "theirs": theirs, "computed": computed, **needed}


def lossless(folder: Path) -> Facts:
    """Return the deviation of played steps from arithmetic without packet loss."""
    return predicted.explained_by(_lossless(cells(folder)))


def small_buffer(folder: Path) -> Facts | None:
    """Return the extension of the subspace run's step by a buffer of one round trip; the short form only computes
    that step.
    """
    times = step_times(folder).subspace
    played = times["played, a buffer of one round trip"]
    return None if pd.isna(played) else {"value": played / times["links both ways, ideal"] - 1}


trained, steps_needed = training.loss, training.steps_needed


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    times = step_times(folder)
    computed, links = times.loc["their meter, computed"], times.loc["links both ways, played"]
    worst = (computed / times.loc["published"] - 1).abs().max()
    table = times.assign(ratio=times.dense / times.subspace).reset_index(names="seconds per step")
    for column in ("dense", "subspace"):
        table[column] = table[column].map("{:.2f}".format, na_action="ignore")
    table["ratio"] = table.ratio.map("{:.2f}x".format, na_action="ignore")
    said = times.loc["published"]
    answer = (
        f"Both records' {said.dense:.2f} and {said.subspace:.2f} s per step follow from bytes, 1F1B and their "
        f"simulated link to {worst:.2%}. Over TCP links they take {links.dense:.1f} and {links.subspace:.1f} s: "
        f"{links.dense / links.subspace:.2f} times as fast with 322 bytes per token, published "
        f"{said.dense / said.subspace:.2f}."
    ).replace("%", " %")
    return {
        "answer": experiments.prose(answer + training.answer(folder)),
        "steps": table,
        "buffers": buffers(folder),
        **training.blocks(folder),
    }


def draw(folder: Path) -> Any:
    """Draw seconds per step of both runs as bars."""
    times = step_times(folder)
    figure, (row,) = plots.panels(1, 2, (9.2, 3.1), sharey=True)
    colours = [style.INK, style.MUTED, "#e69f00", "#56b4e9", "#0072b2", "#7b4fa3"]
    for axes, (run, name) in zip(row, RUNS.items(), strict=True):
        axes.barh(range(len(times)), times[run], color=colours, height=0.66)
        for place, seconds in enumerate(times[run]):
            inside: Any = {"ha": "right", "color": style.PAPER} if pd.notna(seconds) else {"color": style.MUTED}
            words, at = (f"{seconds:.1f}", seconds) if pd.notna(seconds) else ("not played", 0)
            note(axes, words, (at, place), (-4 if at else 4, 0), va="center", size=8.5, **inside)
        axes.axvline(times[run]["published"], color=style.INK, lw=0.8, ls=":")
        axes.set(title=name, xlabel="seconds per step", xlim=(0, times[run].max() * 1.03))
        name_rows(axes, list(times.index))
    plots.finish(figure, "Both records follow from their simulated link; real links carry both directions at once")
    return figure


def draw_steps(folder: Path) -> Figure:
    """Draw the trained arms' losses against steps."""
    figure, ((axes,),) = plots.panels(1, 1, (7.6, 3.8))
    training.draw(axes, folder)
    losses = training.Losses(folder)
    names = {
        losses.equal: "after equal steps",
        losses.longer: f"after {losses.longer / losses.equal:.2f} times as many",
    }
    found = {words: losses.against(training.SUBSPACE, steps) for steps, words in names.items()}
    ends = ",\n".join(f"{experiments.with_ends(each, '{:+.2f}')} {words}" for words, each in found.items() if each)
    plots.finish(figure, f"Nats above the dense run: {ends}")
    return figure


FIGURES = {"step-time": draw, "steps": draw_steps}
write = training.write


if __name__ == "__main__":
    publishing.run(globals())

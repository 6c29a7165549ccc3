"""Make the figures, the CSVs, claims.csv and the README's blocks of protocol_nanogpt from what was played and trained.

python -m testbed predict protocol_nanogpt
python -m testbed sweep protocol_nanogpt
python experiments/protocol_nanogpt/figures.py [--results results/protocol_nanogpt] [--output FOLDER]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import training
from matplotlib.figure import Figure

from testbed.report import claim_rows, experiments, predicted, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table
from testbed.report.numbers import percent

NAME = "protocol_nanogpt"
RUNS = {"dense": "dense, 2,048 B per token", "subspace": "subspace, 322 B per token"}
_BUFFER = {
    "link(200Mbit, 50ms)": "cubic, a buffer of one round trip",
    "link(200Mbit, 50ms, congestion_control=bbr)": "bbr, a buffer of one round trip",
    "link(200Mbit, 50ms, buffer=60s)": "cubic, buffers in which nothing is lost",
}


def cells(folder: Path) -> Any:
    """Return the rows of cells.csv; `run` is what the figure calls the record."""
    frame = predicted.cells(folder)
    return frame.assign(run=frame["label.run"])


def step_times(folder: Path) -> Any:
    """Return seconds per step by run (columns) and by what they are of (rows)."""
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
    """Return what TCP makes of the subspace run, by transport and by how finely messages are divided."""
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
    """Return how far a record's step by its own meter is from what it says, as a share, and over links."""
    times = step_times(folder)[run]
    said, computed = times["published"], times["their meter, computed"]
    share, name = computed / said - 1, RUNS[run]
    facts = {"said": said, "computed": computed, "played": times["links both ways, played"], "name": name}
    return {"value": abs(share), "share": share, **facts}


def times_as_fast(folder: Path, near: float, to_target: bool = False) -> Facts:
    """Return how many times as fast the subspace run is over links, by the meter and as published; `to_target`: with
    the steps that each needs.
    """
    steps, needed = step_times(folder), training.needed(folder)
    ratios = (steps.dense / steps.subspace) / (needed["factor"] if to_target else 1)
    theirs, computed = ratios["published"], ratios["their meter, computed"]
    about = {"theirs": theirs, "bar": near * theirs, "computed": computed, **needed}
    return {"value": ratios["links both ways, played"], **about}


def lossless(folder: Path) -> Facts:
    """Return how far played steps are from arithmetic where no packet is lost."""
    return predicted.explained_by(_lossless(cells(folder)))


def small_buffer(folder: Path) -> Facts | None:
    """Return by how much a buffer of one round trip makes the subspace run's step longer; the short form only computes
    it.
    """
    times = step_times(folder).subspace
    played = times["played, a buffer of one round trip"]
    return None if pd.isna(played) else {"value": played / times["links both ways, ideal"] - 1}


trained, steps_needed = training.loss, training.steps_needed


def claims(folder: Path) -> list[Claim]:
    """Return what was claimed and what became of it."""
    return claim_rows.claims(globals(), folder)


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
        "steps": experiments.markdown_of(table),
        "buffers": experiments.markdown_of(buffers(folder)),
        "claims": claims_table(claims(folder)),
        **training.blocks(folder),
    }


def draw(folder: Path) -> Any:
    """Draw seconds per step of both runs as bars."""
    times = step_times(folder)
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.1), layout="constrained", sharey=True)
    colours = [style.INK, style.MUTED, "#e69f00", "#56b4e9", "#0072b2", "#7b4fa3"]
    for axes, (run, name) in zip(panels, RUNS.items(), strict=True):
        axes.barh(range(len(times)), times[run], color=colours, height=0.66)
        for place, seconds in enumerate(times[run]):
            words, colour = (f"{seconds:.1f}", style.PAPER) if pd.notna(seconds) else ("not played", style.MUTED)
            where, side = (seconds, "right") if pd.notna(seconds) else (0, "left")
            axes.annotate(
                words,
                (where, place),
                (-4 if side == "right" else 4, 0),
                textcoords="offset points",
                va="center",
                ha=side,
                color=colour,
                fontsize=8.5,
            )
        axes.axvline(times[run]["published"], color=style.INK, lw=0.8, ls=":")
        axes.set(title=name, xlabel="seconds per step", xlim=(0, times[run].max() * 1.03))
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(times)), times.index)
    panels[0].invert_yaxis()
    style.state(figure, "Both records follow from their simulated link; real links carry both directions at once")
    return figure


def draw_steps(folder: Path) -> Figure:
    """Draw the trained arms' losses against steps."""
    figure = Figure(figsize=(7.6, 3.8), layout="constrained")
    training.draw(figure.subplots(), folder)
    losses = training.Losses(folder)
    found = losses.against(training.SUBSPACE, losses.equal)
    ends = "" if found is None else f": {found.value:+.2f} nats after equal steps"
    style.state(figure, f"Training through 40 of 256 channels{ends}")
    return figure


def main() -> None:
    """Write the CSVs, the figures and the claims; put the generated blocks into the README, and print them."""
    here = Path(__file__).parent
    results, output = experiments.folders(NAME, "Figures, CSVs and the README's blocks.")
    (output / predicted.FILE).write_bytes((results / predicted.FILE).read_bytes())
    training.write(results, output)
    experiments.draw_and_publish(here, output, {"step-time": draw, "steps": draw_steps}, blocks, claims)


if __name__ == "__main__":
    main()

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

from testbed.report import experiments, predicted, style
from testbed.report.claims import Claim, claims_table
from testbed.report.numbers import percent

NAME = "protocol_nanogpt"
COMMAND = f"python -m testbed predict {NAME}"
RECORDS = "ProtocolNanoGPT at 0551bc3, records/ (checked)"
RUNS = {"dense": "dense, 2,048 B per token", "subspace": "subspace, 322 B per token"}
_BUFFER = {
    "link(200Mbit, 50ms)": "cubic, a buffer of one round trip",
    "link(200Mbit, 50ms, congestion_control=bbr)": "bbr, a buffer of one round trip",
    "link(200Mbit, 50ms, buffer=60s)": "cubic, buffers in which nothing is lost",
}
TCP = "the critical path over the pipe formula, with headers; the rest is TCP (acknowledgements, windows)"


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


def claims(folder: Path) -> list[Claim]:
    """Return what was claimed and what became of it."""
    frame, times = cells(folder), step_times(folder)
    said = pd.read_csv(folder / "published.csv").set_index("run")
    rows = []
    for run, name in RUNS.items():
        share = times[run]["their meter, computed"] / said.step_s[run] - 1
        rows.append(
            Claim(
                claim=f"A step of the {run} record takes {said.step_s[run]} s over 200 Mbit/s and 50 ms",
                source=RECORDS,
                published=f"{said.step_s[run]} s",
                ours=f"{times[run]['their meter, computed']:.2f} s by their meter, "
                f"{times[run]['links both ways, played']:.2f} s over links",
                interval="exact",
                verdict="holds" if abs(share) < 0.03 else "fails",
                why=f"{share:+.2%}: bytes ({name}), 1F1B, and one inbound wire per stage on which the delay stands "
                "too; a real link carries both directions at once".replace("%", " %"),
                command=COMMAND,
            )
        )
    theirs, ours = said.step_s.dense / said.step_s.subspace, _ratio(times, "links both ways, played")
    rows.append(
        Claim(
            claim="322 instead of 2,048 bytes per token make a step 5.05 times as fast",
            source=RECORDS,
            published=f"{theirs:.2f}x",
            ours=f"{ours:.2f}x over links, {_ratio(times, 'their meter, computed'):.2f}x by their meter",
            interval="exact",
            verdict="holds" if ours > 0.95 * theirs else "fails",
            why="6.36 times fewer bytes; the delay, which no codec shortens, takes the rest",
            command=COMMAND,
        )
    )
    steps = said.steps_to_target
    theirs *= steps.dense / steps.subspace
    net = ours * steps.dense / steps.subspace
    rows += [
        Claim(
            claim="With the steps that each needs, the subspace run is 1.62 times as fast to its target loss",
            source=RECORDS,
            published=f"{theirs:.2f}x",
            ours=f"{net:.2f}x, with their step counts",
            interval="exact",
            verdict="holds" if net > 0.95 * theirs else "fails",
            why=f"{steps.subspace} steps instead of {steps.dense}, taken from the records: only the time is ours",
            command=COMMAND,
        ),
        *training.claims(folder),
        predicted.explained(_lossless(frame), COMMAND, over=" where no packet is lost", why=TCP),
    ]
    played = times.subspace["played, a buffer of one round trip"]
    if pd.isna(played):  # the short form only computes it
        return rows
    lossy = played / times.subspace["links both ways, ideal"] - 1
    rows.append(
        Claim(
            claim="TCP fills a link whose buffer holds one round trip, so that arithmetic with the rate is enough",
            source="ours",
            ours=f"{lossy:+.1%} for the subspace run with cubic".replace("%", " %"),
            interval="exact for one seed and at a fraction of the rate",
            verdict="fails" if lossy > 0.03 else "holds",
            why="messages larger than the buffer overflow it, and cubic's smaller window then leaves the link idle",
            command=COMMAND,
        )
    )
    return rows


def _ratio(times: Any, row: str) -> float:
    return float(times.dense[row] / times.subspace[row])


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    times = step_times(folder)
    meter, links = times.loc["their meter, computed"], times.loc["links both ways, played"]
    worst = (meter / times.loc["published"] - 1).abs().max()
    table = times.assign(ratio=times.dense / times.subspace).reset_index(names="seconds per step")
    for column in ("dense", "subspace"):
        table[column] = table[column].map("{:.2f}".format, na_action="ignore")
    table["ratio"] = table.ratio.map("{:.2f}x".format, na_action="ignore")
    said = times.loc["published"]
    needed = pd.read_csv(folder / "published.csv").set_index("run").steps_to_target
    answer = (
        f"Both records' {said.dense:.2f} and {said.subspace:.2f} s per step follow from bytes, 1F1B and their "
        f"simulated link to {worst:.2%}. Over TCP links they take {links.dense:.1f} and {links.subspace:.1f} s: "
        f"{links.dense / links.subspace:.2f} times as fast with 322 bytes per token, published "
        f"{said.dense / said.subspace:.2f}."
    ).replace("%", " %")
    return {
        "answer": experiments.prose(answer + training.answer(folder, needed.subspace / needed.dense)),
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

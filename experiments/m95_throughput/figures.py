"""Generates the figure, cells.csv, claims.csv and README blocks of m95_throughput from played cells.

python -m testbed predict m95_throughput
python experiments/m95_throughput/figures.py [--results results/m95_throughput] [--output FOLDER]
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from testbed.report import experiments, plots, predicted, publishing, style
from testbed.report.canvas import note
from testbed.report.claim_rows import Facts

PUBLISHED = {"bf16": 3600, "mask(0.1)": 29_300, "mask(0.05)": 48_900}
"""Tokens per second with compressed data parallelism: dense, M90, M95."""
NAMES = {"bf16": "dense", "mask(0.1)": "90 % masked", "mask(0.05)": "95 % masked"}


def played(folder: Path) -> Any:
    """Return tokens per second by codec (rows) and schedule."""
    frame = predicted.cells(folder)
    part = frame[frame.grid == "schedules"]
    return part.pivot_table(index="codec", columns="schedule", values="tokens_per_s").reindex(list(NAMES))


def compute_bound(folder: Path) -> float:
    """Return the tokens per second of GPUs that never wait for a message."""
    frame = predicted.cells(folder)
    row = frame[frame.grid == "schedules"].iloc[0]
    return float(row.tokens_per_s * (row.step_s if pd.notna(row.step_s) else row.ideal_s) / row.no_network_s)


@experiments.table
def table(folder: Path) -> Any:
    """Return published and our tokens per second, and their ratios to the dense run."""
    ours = played(folder)
    for codec, name in NAMES.items():
        row = {"run": name, "published": PUBLISHED[codec], "published / dense": f"{PUBLISHED[codec] / 3600:.1f}x"}
        for schedule in ours.columns:
            row[schedule] = f"{ours[schedule][codec]:.0f}"
            row[f"{schedule} / dense"] = f"{ours[schedule][codec] / ours[schedule]['bf16']:.1f}x"
        yield row


def delays(folder: Path) -> Any:
    """Return our tokens per second by delay, schedule and way to send."""
    frame = predicted.cells(folder)
    part = frame[frame.grid == "delays"].assign(delay=lambda f: f.links.str.extract(r", ([\d.]+ms)")[0])
    wide = part.pivot_table(index=["schedule", "sends", "delay"], columns="codec", values="tokens_per_s", sort=False)
    wide = wide[list(NAMES)].rename(columns=NAMES).reset_index()
    wide["95 % / dense"] = (wide["95 % masked"] / wide["dense"]).map("{:.1f}x".format)
    for name in NAMES.values():
        wide[name] = wide[name].map("{:.0f}".format)
    return wide


def masked(folder: Path, codecs: Sequence[str] = ("mask(0.1)", "mask(0.05)")) -> Iterator[Facts]:
    """Yield the speed-up of each masked run over the dense one, published and ours."""
    ours = played(folder).gpipe
    for codec in codecs:
        theirs = PUBLISHED[codec] / PUBLISHED["bf16"]
        facts = {"name": NAMES[codec], "theirs": theirs, "tokens": compute_bound(folder)}
        yield {"value": ours[codec] / ours["bf16"], "share": ours[codec] / facts["tokens"], **facts}


def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    ours = played(folder).gpipe
    theirs, off = PUBLISHED["mask(0.05)"] / PUBLISHED["bf16"], predicted.departure(predicted.cells(folder))
    return (
        f"Twenty times fewer bytes make the pipeline {ours['mask(0.05)'] / ours['bf16']:.1f} times "
        f"as fast at 200 Mbit/s "
        f"(published {theirs:.1f}), because the GPUs then limit it: without a network they reach "
        f"{compute_bound(folder):.0f} tokens per second, and with 19 of 20 values masked "
        f"{ours['mask(0.05)']:.0f}. Tenfold less gives {ours['mask(0.1)'] / ours['bf16']:.1f} times (published "
        f"{PUBLISHED['mask(0.1)'] / PUBLISHED['bf16']:.1f}). Played steps are within {off:.2%} of bytes, "
        "delay and schedule."
    ).replace("%", " %")


def draw(folder: Path) -> Any:
    """Draw the speed-up over the dense run against the reduction of bytes."""
    ours = played(folder)
    figure, ((axes,),) = plots.panels(1, 1, (6.6, 3.6))
    fewer = [1, 10, 20]
    axes.plot([1, 20], [1, 20], color=style.MUTED, lw=0.9, ls=":")
    at: Any = {"rotation": 26, "rotation_mode": "anchor", "color": style.MUTED, "size": 8, "ha": "center"}
    axes.annotate("speed-up equal to the reduction of bytes", (6.4, 6.9), **at)
    for schedule, colour, name, down in (("gpipe", "#0072b2", "GPipe", 6), ("1f1b", "#e69f00", "1F1B", -15)):
        speed = ours[schedule] / ours[schedule]["bf16"]
        axes.plot(fewer, speed, "o-", color=colour)
        note(axes, name, (15, speed.iloc[1:].mean()), (0, down), color=colour, ha="right")
    said = [PUBLISHED[codec] / PUBLISHED["bf16"] for codec in NAMES]
    axes.plot(fewer, said, "s", color=style.INK, mfc="none")
    note(axes, "published", (20, said[2]), (-8, -3), ha="right")
    bound = compute_bound(folder) / ours.gpipe["bf16"]
    plots.level(axes, bound, "GPUs without a network", at=0)
    axes.set(xlabel="times fewer bytes than dense bf16", ylabel="speed-up over the dense run", ylim=(0, 21))
    axes.set_title("Beyond tenfold, the GPUs limit the gain from masking")
    return figure


BLOCKS = {"answer": answer, "throughput": table, "delays": delays}
FIGURES = {"throughput": draw}

if __name__ == "__main__":
    publishing.run(globals())

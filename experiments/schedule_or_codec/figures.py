"""Make the figure, cells.csv, claims.csv and the README's blocks of schedule_or_codec from what was played.

python -m testbed predict schedule_or_codec
python experiments/schedule_or_codec/figures.py [--results results/schedule_or_codec] [--output FOLDER]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from testbed.report import claim_rows, experiments, predicted, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table
from testbed.report.numbers import percent

NAME = "schedule_or_codec"
FIGURE = "speed-up"
CODECS = {"bf16": "bf16", "int8": "int8", "int4(group=64)": "int4", "322": "subspace, 322 B", "21": "21 B per token"}
FEWER = {"int8": 1.99, "int4(group=64)": 3.76, "322": 6.36, "21": 97.5}
NAMES = {"bf16": "bf16", "322": "subspace", "21": "least"}
DELAY = "50ms"


def cells(folder: Path) -> Any:
    """Return the rows of cells.csv with one name for what is sent, and the links' delay."""
    frame = predicted.cells(folder)
    stated = frame["payload.forward"].map("{:.0f}".format)
    return frame.assign(sent=frame.codec.fillna(stated), delay=frame.links.str.extract(r", ([\d.]+ms)")[0])


def steps(folder: Path, delay: str = DELAY) -> Any:
    """Return seconds per step by what is sent (rows) and micro-batches in flight, at one delay."""
    frame = cells(folder)
    part = frame[(frame.grid == "depth") & (frame.delay == delay)]
    return part.pivot_table(index="sent", columns="in_flight", values="ideal_s").reindex(list(CODECS))


def table(folder: Path) -> Any:
    """Return speed-ups over bf16 in classic 1F1B, at the delay of the records."""
    times = steps(folder)
    base, rows = times[8]["bf16"], []
    for sent, name in CODECS.items():
        row: dict[str, Any] = {"sent": name}
        for depth in times.columns:
            row[f"{depth} in flight"] = f"{times[depth][sent]:.2f} s ({base / times[depth][sent]:.2f}x)"
        rows.append(row)
    return pd.DataFrame(rows)


def gains(folder: Path) -> dict[str, float]:
    """Return speed-ups over bf16 with 8 in flight, by what is sent and how many are, and bf16's seconds per step."""
    times = steps(folder)
    base = times[8]["bf16"]
    found = {f"{name}_{depth}": base / times[depth][sent] for sent, name in NAMES.items() for depth in times.columns}
    return found | {f"bf16_{depth}_s": times[depth]["bf16"] for depth in times.columns}


def hundredfold(folder: Path) -> Facts:
    """Return `gains`, of which the value is that of 21 bytes per token with all in flight."""
    found = gains(folder)
    return {"value": found["least_32"], **found}


def deepest(folder: Path) -> Facts:
    """Return `gains`, of which the value is bf16's seconds with all in flight."""
    found = gains(folder)
    return {"value": found["bf16_32_s"], **found}


def claims(folder: Path) -> list[Claim]:
    """Return what was claimed and what became of it."""
    return claim_rows.claims(globals(), folder)


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    answer = (
        "At 200 Mbit/s and 50 ms the subspace's 322 bytes per token earn {subspace_8:.2f}x in classic 1F1B, and twice "
        "as many micro-batches in flight earn {bf16_16:.2f}x with no codec at all; both together {subspace_16:.2f}x. "
        "At a hundredfold less the schedule decides: {least_8:.0f}x with 8 in flight, {least_32:.0f}x with 32. Played "
        "steps are within {off} of bytes, delay and schedule."
    ).format(**gains(folder), off=percent(predicted.departure(cells(folder)), "{:.2f}"))
    return {
        "answer": experiments.prose(answer),
        "steps": experiments.markdown_of(table(folder)),
        "claims": claims_table(claims(folder)),
    }


def draw(folder: Path) -> Any:
    """Draw the speed-up over bf16 in classic 1F1B against the delay, a panel for each number in flight."""
    delays = ["1ms", "10ms", "50ms", "100ms", "200ms"]
    named = ["bf16", "int8", "322", "21"]
    figure, panels = plt.subplots(1, 3, figsize=(9.2, 3.4), layout="constrained", sharey=True)
    colours = dict(zip(named, ("#0072b2", "#d55e00", "#7b4fa3", "#009e73"), strict=True))
    times = {delay: steps(folder, delay) for delay in delays}
    for axes, depth in zip(panels, (8, 16, 32), strict=True):
        for sent in named:
            speed = [times[delay][8]["bf16"] / times[delay][depth][sent] for delay in delays]
            axes.plot(range(len(delays)), speed, "o-", color=colours[sent], ms=3.5)
            if depth == 8:
                axes.annotate(
                    CODECS[sent], (0, speed[0]), (2, 5), textcoords="offset points", color=colours[sent], fontsize=8.5
                )
        axes.set_yscale("log")
        axes.set_yticks([1, 2, 5, 10, 20, 50, 100], ["1x", "2x", "5x", "10x", "20x", "50x", "100x"])
        axes.minorticks_off()
        axes.set_xticks(range(len(delays)), [d[:-2] for d in delays])
        axes.set(
            title=f"{depth} in flight" + (" (1F1B)" if depth == 8 else " (all)" if depth == 32 else ""),
            xlabel="one-way delay, ms",
        )
    panels[0].set_ylabel("speed-up over bf16, 8 in flight")
    style.state(figure, "Fewer bytes need more in flight as the delay grows")
    return figure


if __name__ == "__main__":
    predicted.make(Path(__file__).parent, FIGURE, draw, blocks, claims)

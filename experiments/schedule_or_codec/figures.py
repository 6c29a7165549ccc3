"""Generates the figure, cells.csv, claims.csv and README blocks of schedule_or_codec from played cells.

python -m testbed predict schedule_or_codec
python experiments/schedule_or_codec/figures.py [--results results/schedule_or_codec] [--output FOLDER]
"""

from pathlib import Path
from typing import Any

from testbed.report import experiments, plots, predicted, publishing
from testbed.report.canvas import note
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent

CODECS = {"bf16": "bf16", "int8": "int8", "int4(group=64)": "int4", "322": "subspace, 322 B", "21": "21 B per token"}
NAMES = {"bf16": "bf16", "322": "subspace", "21": "least"}
DELAY = "50ms"
WORDS = {8: " (1F1B)", 32: " (all)"}
"""Numbers of micro-batches in flight."""


def cells(folder: Path) -> Any:
    """Return the rows of cells.csv with a name for each payload, and the links' delay."""
    frame = predicted.cells(folder)
    stated = frame["payload.forward"].map("{:.0f}".format)
    return frame.assign(sent=frame.codec.fillna(stated), delay=frame.links.str.extract(r", ([\d.]+ms)")[0])


def steps(folder: Path, delay: str = DELAY) -> Any:
    """Return seconds per step by payload (rows) and micro-batches in flight, at one delay."""
    frame = cells(folder)
    part = frame[(frame.grid == "depth") & (frame.delay == delay)]
    return part.pivot_table(index="sent", columns="in_flight", values="ideal_s").reindex(list(CODECS))


@experiments.table
def table(folder: Path) -> Any:
    """Return speed-ups over bf16 in classic 1F1B, at the delay of the records."""
    times = steps(folder)
    base = times[8]["bf16"]
    for sent, name in CODECS.items():
        row: dict[str, Any] = {"sent": name}
        for depth in times.columns:
            row[f"{depth} in flight"] = f"{times[depth][sent]:.2f} s ({base / times[depth][sent]:.2f}x)"
        yield row


def gains(folder: Path, of: str = "least_32") -> Facts:
    """Return speed-ups over bf16 with 8 in flight, by payload and number in flight, and bf16's seconds per step; `of`:
    the one that is the value.
    """
    times = steps(folder)
    base = times[8]["bf16"]
    found = {f"{name}_{depth}": base / times[depth][sent] for sent, name in NAMES.items() for depth in times.columns}
    found |= {f"bf16_{depth}_s": times[depth]["bf16"] for depth in times.columns}
    return {**found, "value": found[of]}


def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    return (
        "At 200 Mbit/s and 50 ms, the subspace's 322 bytes per token gain {subspace_8:.2f}x in classic 1F1B, and twice "
        "as many micro-batches in flight gain {bf16_16:.2f}x without a codec; both together {subspace_16:.2f}x. "
        "At a hundredfold compression the schedule dominates: {least_8:.0f}x with 8 in flight, {least_32:.0f}x with "
        "32. Played steps are within {off} of bytes, delay and schedule."
    ).format(**gains(folder), off=percent(predicted.departure(cells(folder)), "{:.2f}"))


def _title(gains: list[float]) -> str:
    several = " to ".join(f"{each:.1f}" for each in (min(gains), max(gains)))
    return f"16 in flight make bf16 {several} times as fast; all 32 pay only for small messages"


def draw(folder: Path) -> Any:
    """Draw the speed-up over bf16 in classic 1F1B against the delay, a panel for each number in flight."""
    delays = ["1ms", "10ms", "50ms", "100ms", "200ms"]
    named = ["bf16", "int8", "322", "21"]
    figure, (row,) = plots.panels(1, 3, (9.2, 3.4), sharey=True)
    colours = dict(zip(named, ("#0072b2", "#d55e00", "#7b4fa3", "#009e73"), strict=True))
    times = {delay: steps(folder, delay) for delay in delays}
    for axes, depth in zip(row, (8, 16, 32), strict=True):
        for sent in named:
            speed = [times[delay][8]["bf16"] / times[delay][depth][sent] for delay in delays]
            axes.plot(range(len(delays)), speed, "o-", color=colours[sent], ms=3.5)
            if depth == 8:
                name = CODECS[sent] + " (hundredfold)" * (sent == "21")
                note(axes, name, (0, speed[0]), (2, 5), color=colours[sent], size=8.5)
        axes.set_yscale("log")
        plots.ticks(axes.yaxis, [1, 2, 5, 10, 20, 50, 100], "{:g}x".format)
        axes.set_xticks(range(len(delays)), [d[:-2] for d in delays])
        axes.set_title(f"{depth} in flight{WORDS.get(depth, '')}")
        axes.set_xlabel("one-way delay, ms (not to scale)")
    row[0].set_ylabel("speed-up over bf16, 8 in flight")
    note(axes, "eight stages, 200 Mbit/s", (1, 1), (-4, -4), xycoords="axes fraction", ha="right", va="top", size=8)
    plots.finish(figure, _title([each[8]["bf16"] / each[16]["bf16"] for each in times.values()]))
    return figure


BLOCKS = {"answer": answer, "steps": table}
FIGURES = {"speed-up": draw}

if __name__ == "__main__":
    publishing.run(globals())

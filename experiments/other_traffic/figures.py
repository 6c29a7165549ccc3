"""Generates the figure, cells.csv, claims.csv and README blocks of other_traffic from played cells.

python -m testbed predict other_traffic
python experiments/other_traffic/figures.py [--results results/other_traffic] [--output FOLDER]
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from testbed.report import experiments, plots, predicted, publishing, style
from testbed.report.claim_rows import Facts

BASELINE, NOBODY = "bf16", "nobody else"
PLAIN, INT8 = {"codec": BASELINE}, {"codec": "int8"}
QUEUES = ("fifo, 1 BDP", "fifo, 10 BDP", "fq_codel", "cake")
WHY = "ratio of their steps with cubic, played over links with the same seeds"
SEED_S = 8.0
"""Seconds of one core that one more seed of both arms takes."""
TRAFFIC = {
    "": NOBODY,
    "1 cubic up": "1 cubic upload",
    "1 bbr up": "1 bbr upload",
    "4 cubic up": "4 cubic uploads",
}


def steps(folder: Path) -> Any:
    """Return a row for each played cell: its queue, traffic and congestion control, and its step in seconds."""
    frame = predicted.cells(folder)
    links = frame.links
    depth = links.str.extract(r"buffer=(\d+)ms")[0].map({"50": "fifo, 1 BDP", "500": "fifo, 10 BDP"})
    queue = links.str.extract(r"queue=(\w+)")[0]
    return frame.assign(
        queue=queue.where(queue != "fifo", depth),
        traffic=links.str.extract(r"background=([^)]+)")[0].fillna("").map(TRAFFIC),
        control=links.str.extract(r"congestion_control=(\w+)")[0].fillna("cubic"),
        link_seed=frame.link_seed.fillna(0).astype(int),
    )


def times(
    folder: Path,
    ours: dict[str, Any],
    base: dict[str, Any],
    least: float = 1.0,
    every: bool = False,
    control: str = "cubic",
) -> Iterator[Facts]:
    """Yield the ratio of the steps of `base` and `ours`, with one congestion control: once, or `every` queue and
    traffic. `least`: the claimed ratio.
    """
    frame = experiments.matching(steps(folder), {"control": control})
    for (queue, traffic), part in frame.groupby(["queue", "traffic"], sort=False) if every else [(("", ""), frame)]:
        if found := predicted.ratio(part, ours, base):
            yield {"queue": queue, "traffic": traffic, **experiments.ratio_facts(found, least, WHY, SEED_S)}


@experiments.table
def table(folder: Path, control: str) -> Any:
    """Return a row for each traffic and queue: the baseline's step and each codec's speed-up over it."""
    frame = experiments.matching(steps(folder), {"control": control})
    for traffic in TRAFFIC.values():
        for queue in QUEUES:
            part = experiments.matching(frame, {"queue": queue, "traffic": traffic})
            plain = experiments.matching(part, {"codec": BASELINE})
            if plain.empty:
                continue
            row = {"traffic": traffic, "queue": queue, f"{BASELINE}: step": f"{plain.step_s.mean():.2f} s"}
            for codec in frame.codec.unique():
                if codec != BASELINE and (found := predicted.ratio(part, {"codec": codec}, PLAIN)):
                    row[codec] = experiments.with_ends(found, "{:.2f}", unit="x")
            yield row


def gains(folder: Path, control: str, alone: bool) -> str:
    """Return int8's smallest and largest speed-up over the queues, alone or beside other traffic, in words."""
    facts = times(folder, INT8, PLAIN, every=True, control=control)
    found = [each["value"] for each in facts if (each["traffic"] == NOBODY) == alone]
    return f"{min(found):.2f} to {max(found):.2f}" if found else "(not played)"


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame = experiments.matching(steps(folder), {"control": "cubic"})
    plain = frame[frame.codec == BASELINE].groupby(["traffic", "queue"]).step_s.mean()
    most = [traffic for traffic in TRAFFIC.values() if traffic in plain.index][-1]
    queues = ", ".join(f"{plain[most, queue]:.3g} s ({queue})" for queue in QUEUES if (most, queue) in plain)
    aqm = max(plain[NOBODY, queue] for queue in QUEUES[2:] if (NOBODY, queue) in plain)
    said = (
        f"int8 is {gains(folder, 'cubic', alone=True)} times as fast as bf16 alone, and beside uploads "
        f"{gains(folder, 'cubic', alone=False)} times with cubic, {gains(folder, 'bbr', alone=False)} with bbr. "
        f"The queue decides more: beside {most} bf16's step takes {queues}. Alone, fq_codel or cake make it "
        f"{aqm / plain[NOBODY, QUEUES[1]]:.2f} times as long as a deep fifo, because they drop packets of bursts."
    )
    return {"answer": said, "cubic": table(folder, "cubic"), "bbr": table(folder, "bbr")}


def draw(folder: Path) -> Any:
    """Draw bf16's step, and below it each codec's speed-up over it, for each queue, with a column per traffic."""
    frame = steps(folder)
    codecs = [codec for codec in frame.codec.unique() if codec != BASELINE]
    looks = style.looks(frame.codec.unique())
    figure, axes = plots.panels(2, len(TRAFFIC), (9.6, 4.6), sharey="row", sharex=True)
    for (above, below), traffic in zip(axes.T, TRAFFIC.values(), strict=True):
        above.set_title(traffic)
        for control, hollow, shift in (("cubic", False, -0.12), ("bbr", True, 0.12)):
            part = experiments.matching(frame, {"traffic": traffic, "control": control})
            places = [(place + shift, part[part.queue == queue]) for place, queue in enumerate(QUEUES)]
            base = [(at, rows[rows.codec == BASELINE].step_s) for at, rows in places]
            means = [(at, plots.ErrorBar(each.mean(), (each.min(), each.max()))) for at, each in base if len(each)]
            plots.estimates(above, means, looks[BASELINE].colour, looks[BASELINE].marker, hollow=hollow, ms=4)
            for codec in codecs:
                found = [(at, predicted.ratio(rows, {"codec": codec}, PLAIN)) for at, rows in places]
                plots.estimates(below, found, looks[codec].colour, looks[codec].marker, hollow=hollow, ms=4)
        below.axhline(1, color=style.MUTED, lw=0.8)
        below.set_yscale("log")
        above.set_yscale("log")
        below.set_xticks(range(len(QUEUES)), [queue.replace(", ", "\n") for queue in QUEUES], size=7)
    axes[0, 0].set_ylabel(f"{BASELINE}'s step, s")
    axes[1, 0].set_ylabel(f"speed-up over {BASELINE}")
    plots.ticks(axes[0, 0].yaxis, [0.5, 1, 2, 4, 8, 16])
    plots.ticks(axes[1, 0].yaxis, [0.5, 1, 2, 5, 10, 20])
    lines = [
        Line2D([], [], color=looks[each].colour, marker=looks[each].marker, ls="none", ms=4, label=each)
        for each in looks
    ]
    lines += [
        Line2D([], [], color=style.INK, marker="o", ls="none", ms=4, mfc=face, label=f"training's TCP: {label}")
        for face, label in ((style.INK, "cubic"), (style.PAPER, "bbr"))
    ]
    finding = "Beside uploads, the queue decides more about a step than int8 does"
    plots.finish(figure, finding, legend=lines, columns=len(lines))
    return figure


FIGURES = {"step": draw}

if __name__ == "__main__":
    publishing.run(globals())

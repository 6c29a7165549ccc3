"""Generates the figure, cells.csv, claims.csv and README blocks of last_mile from played cells.

python -m testbed predict last_mile
python experiments/last_mile/figures.py [--results results/last_mile] [--output FOLDER]
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from testbed.metrics.statistics import of_ratios
from testbed.report import experiments, plots, predicted, publishing, style
from testbed.report.claim_rows import Facts

BASELINE = "bf16"
PLAIN = {"codec": BASELINE}
WHY = "ratio of their steps, played over the same links"
SEED_S = 2.0
"""Seconds of one core that one more seed of both arms takes."""
CAKE = ", queue=cake"
CALL = ", background=call up + call down"


def steps(folder: Path) -> Any:
    """Return a row for each played cell: its access, whether a call is beside it, and its step in seconds."""
    frame = predicted.cells(folder)
    return frame.assign(
        access=frame.links.str.removesuffix(CALL),
        call=frame.links.str.endswith(CALL),
        link_seed=frame.link_seed.fillna(0).astype(int),
    )


def call_costs(folder: Path, codec: str) -> Iterator[Facts]:
    """Yield how many times as long a codec's step takes beside a call, for each access without chance of its own."""
    for access, part in steps(folder).groupby("access", sort=False):
        part = part[part.codec == codec]
        alone, beside = (part[part.call == call].step_s for call in (False, True))
        if len(alone) == 1 and len(beside) > 1:
            found = of_ratios(list(beside / alone.iloc[0]), "link seed")
            yield {"access": access, **experiments.ratio_facts(found)}


def times(folder: Path, codec: str, call: bool, least: float = 1.0) -> Iterator[Facts]:
    """Yield a codec's speed-up over the baseline, for each access. `least`: the claimed one."""
    for access, part in steps(folder).groupby("access", sort=False):
        if found := predicted.ratio(part[part.call == call], {"codec": codec}, PLAIN):
            yield {"access": access, **experiments.ratio_facts(found, least, WHY, SEED_S)}


@experiments.table
def table(folder: Path) -> Any:
    """Return a row for each access, without and with a call: the baseline's step and each codec's speed-up."""
    frame = steps(folder)
    for access, rows in frame.groupby("access", sort=False):
        for call, part in rows.groupby("call"):
            row = {"access": access, "call": "yes" if call else "no"}
            row[f"{BASELINE}: step"] = f"{part[part.codec == BASELINE].step_s.mean():.2f} s"
            for codec in frame.codec.unique():
                if codec != BASELINE and (found := predicted.ratio(part, {"codec": codec}, PLAIN)):
                    row[codec] = experiments.with_ends(found, "{:.2f}", unit="x")
            yield row


def gains(folder: Path, codec: str) -> str:
    """Return a codec's smallest and largest speed-up without a call, in words."""
    found = sorted((facts["value"], facts["access"]) for facts in times(folder, codec, call=False))
    if not found:
        return "(not played)"
    (least, worst), (most, best) = found[0], found[-1]
    return f"{least:.2f} ({worst}) to {most:.3g} ({best})"


def beside_calls(folder: Path) -> str:
    """Return the smallest and largest ratio of a codec's speed-ups beside a call and without one, in words."""
    shares = []
    for codec in sorted(set(steps(folder).codec) - {BASELINE}):
        alone, beside = (
            {each["access"]: each["value"] for each in times(folder, codec, call)} for call in (False, True)
        )
        shares += [beside[access] / alone[access] for access in alone.keys() & beside.keys()]
    return f"{min(shares):.2f} to {max(shares):.2f} times as much" if shares else "(not played)"


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame = steps(folder)
    plain = frame[(frame.codec == BASELINE) & ~frame.call].groupby("access").step_s.mean()
    cake = {name: plain[name] / plain[bare] for name in plain.index if (bare := name.removesuffix(CAKE)) != name}
    calls = {facts["access"]: facts["value"] for facts in call_costs(folder, BASELINE)}
    most, *others = sorted(calls, key=calls.__getitem__, reverse=True)
    said = (
        f"Without a call int8 is {gains(folder, 'int8')} times as fast as bf16, topk(0.01) "
        f"{gains(folder, 'topk(0.01)')}. A video call makes bf16's step at most "
        f"{calls[others[0] if others else most]:.2f} times as long, but {calls[most]:.2f} times over {most}, whose "
        f"uplink it fills; beside it a codec gains {beside_calls(folder)}. A router with cake makes bf16's step up to "
        f"{max(cake.values()):.2f} times as long, because it drops packets of bursts."
    )
    return {"answer": said, "steps": table(folder)}


def draw(folder: Path) -> Any:
    """Draw each codec's speed-up over the baseline for each access, hollow beside a call."""
    frame = steps(folder)
    looks = style.looks(frame.codec.unique())
    every = list(frame.access.unique())
    figure, ((axes,),) = plots.panels(1, 1, (7.2, 0.32 * len(every) + 1.2))
    for codec in (each for each in looks if each != BASELINE):
        for call, shift in ((False, -0.15), (True, 0.15)):
            part = frame[frame.call == call]
            points = [
                (place + shift, predicted.ratio(part[part.access == access], {"codec": codec}, PLAIN))
                for place, access in enumerate(every)
            ]
            look = looks[codec]
            plots.estimates(axes, points, look.colour, look.marker, hollow=call, across=True, ms=4)
    axes.axvline(1, color=style.MUTED, lw=0.8)
    axes.set(xscale="log", xlabel=f"speed-up over {BASELINE}")
    axes.set_yticks(range(len(every)), every)
    axes.invert_yaxis()
    plots.ticks(axes.xaxis, [1, 1.5, 2, 3, 5, 10, 20, 50])
    lines = [
        Line2D([], [], color=looks[each].colour, marker=looks[each].marker, ls="none", ms=4, label=each)
        for each in looks
        if each != BASELINE
    ]
    lines += [
        Line2D([], [], color=style.INK, marker="o", ls="none", ms=4, mfc=style.PAPER, label="beside a video call")
    ]
    finding = f"Beside a video call a codec gains {beside_calls(folder)}"
    plots.finish(figure, finding, legend=lines, columns=len(lines))
    return figure


FIGURES = {"speed-up": draw}

if __name__ == "__main__":
    publishing.run(globals())

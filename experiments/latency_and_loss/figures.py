"""Generates the figure, cells.csv, claims.csv and README blocks of latency_and_loss from played cells.

python -m testbed predict latency_and_loss
python experiments/latency_and_loss/figures.py [--results results/latency_and_loss] [--output FOLDER]
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from testbed.report import experiments, plots, predicted, publishing, style
from testbed.report.claim_rows import Facts

BASELINE = "bf16"
FEWEST = "topk(0.01)"
"""The codec with the fewest bytes."""
WAYS = (("cubic", False, "-", "full"), ("bbr", False, ":", "none"), ("cubic", True, (0, (5, 1.5)), "none"))
"""Congestion control, slow start after idle, and their line styles."""
USUAL = {"control": "cubic", "restarts": False}
LINK = ["delay", "loss", "control", "restarts"]
"""Parameters of links: one-way delay in ms, lost packets in percent, congestion control, slow start after idle."""


def steps(folder: Path) -> Any:
    """Return a row for each played cell with its links' parameters, and its step in seconds."""
    frame = predicted.cells(folder)
    links = frame.links
    return frame.assign(
        delay=links.str.extract(r", (\d+)ms")[0].astype(int),
        loss=links.str.extract(r"loss=([\d.]+)%")[0].astype(float).fillna(0.0),
        control=links.str.extract(r"congestion_control=(\w+)")[0].fillna("cubic"),
        restarts=links.str.contains("slow_start_after_idle=true"),
        link_seed=frame.link_seed.fillna(0).astype(int),
    )


def speed_ups(folder: Path) -> Any:
    """Return each codec's speed-up over the baseline on each link, with its interval over the links' seeds."""
    frame, rows = steps(folder), []
    for key, part in frame.groupby(LINK):
        for codec in frame.codec.unique():
            if codec != BASELINE and (found := predicted.ratio(part, {"codec": codec}, {"codec": BASELINE})):
                low, high = found.interval or (found.value, found.value)
                rows.append((*key, codec, found.value, low, high))
    return pd.DataFrame(rows, columns=[*LINK, "codec", "speed_up", "low", "high"])


@experiments.table
def table(folder: Path, ours: dict[str, Any], base: dict[str, Any], against: str = "") -> Any:
    """Return a row for each delay and loss: for each codec, the ratio of the steps of `base` and `ours`; or, with a
    codec to compare `against`, its step, and the ratio of that to each other codec's.
    """
    for (loss, delay), part in steps(folder).groupby(["loss", "delay"]):
        row = {}
        if against and not (plain := experiments.matching(part, {**base, "codec": against})).empty:
            row[f"{against}: step"] = f"{plain.step_s.mean():.2f} s"
        for codec in part.codec.unique():
            found = predicted.ratio(part, {**ours, "codec": codec}, {**base, "codec": against or codec})
            if codec != against and found:
                row[codec] = experiments.with_ends(found, "{:.2f}", unit="x")
        if row:
            yield {"loss": f"{loss:g} %", "delay": f"{delay} ms", **row}


def links(frame: Any, on: str) -> list[dict[str, Any]]:
    """Return the selected links: without loss, those with the shortest delay ("near") or the longest ("far"); or, for
    each loss, those of the middle delay ("lossy").
    """
    if on != "lossy":
        return [{"loss": 0.0, "delay": int(frame.delay.min() if on == "near" else frame.delay.max())}]
    delays = frame[frame.loss > 0].groupby("loss").delay.unique()
    return [{"loss": float(loss), "delay": int(sorted(each)[len(each) // 2])} for loss, each in delays.items()]


def explained_without_loss(folder: Path) -> Facts:
    """Return the deviation of played cells without loss from arithmetic."""
    return predicted.explained_by(experiments.matching(steps(folder), {**USUAL, "loss": 0.0}))


def times(folder: Path, on: str, ours: dict[str, Any], base: dict[str, Any]) -> Iterator[Facts]:
    """Yield the ratio of the steps of `base` and `ours`, on the selected links."""
    frame = steps(folder)
    for link in links(frame, on):
        if found := predicted.ratio(frame, {**USUAL, **link, **ours}, {**USUAL, **link, **base}):
            yield {**link, **experiments.ratio_facts(found)}


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame, plain = steps(folder), {"codec": BASELINE}

    def gain(link: dict[str, Any], ours: dict[str, Any]) -> str:
        found = predicted.ratio(frame, {**USUAL, **link, **plain, **ours}, {**USUAL, **link, **plain})
        return "(not played)" if found is None else f"{found.value:.3g} times"

    still = [
        f"{gain(link, {'codec': FEWEST})} as fast at {link['delay']} ms"
        for link in (*links(frame, "near"), *links(frame, "far"))
    ]
    said = [f"At 80 Mbit/s without loss {FEWEST} makes {BASELINE}'s step {' and '.join(still)}: round trips remain."]
    said += [
        f"At {link['loss']:g} % loss and {link['delay']} ms bbr instead of cubic makes it "
        f"{gain(link, {'control': 'bbr'})} as fast, int8 over cubic {gain(link, {'codec': 'int8'})}."
        for link in links(frame, "lossy")
    ]
    return {
        "answer": experiments.prose(" ".join(said)),
        "codecs": table(folder, USUAL, USUAL, BASELINE),
        "control": table(folder, {**USUAL, "control": "bbr"}, USUAL),
        "restarts": table(folder, USUAL, {**USUAL, "restarts": True}),
    }


def draw(folder: Path) -> Any:
    """Draw the speed-up of each codec against the delay, for each loss."""
    frame = speed_ups(folder)
    losses = sorted(frame.loss.unique())
    looks = style.looks(frame.codec.unique())
    figure, (row,) = plots.panels(1, len(losses), (9.2, 3.6), sharey=True)
    for axes, loss in zip(row, losses, strict=True):
        for codec in frame.codec.unique():
            for control, restarts, dash, fill in WAYS:
                part = experiments.matching(
                    frame, {"loss": loss, "codec": codec, "control": control, "restarts": restarts}
                )
                if part.empty:
                    continue
                look = looks[codec]
                axes.plot(part.delay, part.speed_up, look.marker, ls=dash, color=look.colour, fillstyle=fill, ms=4)
                axes.fill_between(part.delay, part.low, part.high, color=look.colour, alpha=0.15, lw=0)
        axes.axhline(1, color=style.MUTED, lw=0.8)
        axes.set(xscale="log", yscale="log", xlabel="one-way delay, ms", xlim=(0.8, 250))
        plots.ticks(axes.xaxis, sorted(frame.delay.unique()))
        axes.set_title("no loss" if not loss else f"{loss:g} % lost each way")
    row[0].set_ylabel(f"speed-up over {BASELINE}")
    plots.ticks(row[0].yaxis, [1, 2, 3, 5, 10, 20, 50])
    lines = [
        Line2D([], [], color=looks[codec].colour, marker=looks[codec].marker, ms=4, label=codec) for codec in looks
    ]
    lines += [
        Line2D([], [], color=style.INK, ls=dash, label=label)
        for (_, _, dash, _), label in zip(WAYS, ("cubic", "bbr", "cubic, slow start after idle"), strict=True)
    ]
    plots.finish(figure, legend=lines, at="upper center", columns=len(lines))
    return figure


FIGURES = {"speed-up": draw}

if __name__ == "__main__":
    publishing.run(globals())

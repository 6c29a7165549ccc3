"""Make the figure, cells.csv, claims.csv and the README's blocks of latency_and_loss from what was played.

python -m testbed predict latency_and_loss
python experiments/latency_and_loss/figures.py [--results results/latency_and_loss] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D

from testbed.metrics.statistics import IntervalEstimate, of_ratios
from testbed.report import claim_rows, experiments, predicted, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table

BASELINE = "bf16"
FEWEST = "topk(0.01)"
"""The codec of the fewest bytes."""
WAYS = (("cubic", False, "-", "full"), ("bbr", False, ":", "none"), ("cubic", True, (0, (5, 1.5)), "none"))
"""Congestion control, whether it begins anew after a pause, and how they are drawn."""
USUAL = {"control": "cubic", "restarts": False}
LINK = ["delay", "loss", "control", "restarts"]
"""What links differ in: one-way delay in ms, lost packets in per cent, congestion control, slow start after idle."""


def steps(folder: Path) -> Any:
    """Return a row for each played cell with what its links differ in, and its step in seconds."""
    frame = predicted.cells(folder)
    links = frame.links
    return frame.assign(
        delay=links.str.extract(r", (\d+)ms")[0].astype(int),
        loss=links.str.extract(r"loss=([\d.]+)%")[0].astype(float).fillna(0.0),
        control=links.str.extract(r"congestion_control=(\w+)")[0].fillna("cubic"),
        restarts=links.str.contains("slow_start_after_idle=true"),
        link_seed=frame.link_seed.fillna(0).astype(int),
    )


def ratio(frame: Any, ours: dict[str, Any], base: dict[str, Any]) -> IntervalEstimate | None:
    """Return how many times as long the step of `base` takes as that of `ours`, paired by the links' seed; None where
    one of them was not played. Both name all that the rows differ in.
    """
    a, b = (_chosen(frame, chosen).set_index("link_seed").step_s for chosen in (ours, base))
    both = a.index.intersection(b.index)
    return of_ratios(list(b[both] / a[both]), "link seed") if len(both) else None


def _chosen(frame: Any, chosen: dict[str, Any]) -> Any:
    for name, value in chosen.items():
        frame = frame[frame[name] == value]
    return frame


def speed_ups(folder: Path) -> Any:
    """Return each codec's speed-up over the baseline on each link, with its interval over the links' seeds."""
    frame, rows = steps(folder), []
    for key, part in frame.groupby(LINK):
        for codec in frame.codec.unique():
            if codec != BASELINE and (found := ratio(part, {"codec": codec}, {"codec": BASELINE})):
                low, high = found.interval or (found.value, found.value)
                rows.append((*key, codec, found.value, low, high))
    return pd.DataFrame(rows, columns=[*LINK, "codec", "speed_up", "low", "high"])


def words(found: IntervalEstimate) -> str:
    """Say a ratio and its interval."""
    if found.interval is None:
        return f"{found.value:.2f}x"
    return f"{found.value:.2f}x ({found.interval.low:.2f} to {found.interval.high:.2f})"


def table(folder: Path, ours: dict[str, Any], base: dict[str, Any], against: str = "") -> Any:
    """Return a row for each delay and loss: for each codec, how many times as long a step of `base` takes as one of
    `ours`; or with a codec to compare `against`, that one's step, and how many times as long it is as each other's.
    """
    rows = []
    for (loss, delay), part in steps(folder).groupby(["loss", "delay"]):
        row = {}
        if against and not (plain := _chosen(part, {**base, "codec": against})).empty:
            row[f"{against}: step"] = f"{plain.step_s.median():.2f} s"
        for codec in part.codec.unique():
            found = ratio(part, {**ours, "codec": codec}, {**base, "codec": against or codec})
            if codec != against and found:
                row[codec] = words(found)
        if row:
            rows.append({"loss": f"{loss:g} %", "delay": f"{delay} ms", **row})
    return pd.DataFrame(rows)


def links(frame: Any, on: str) -> list[dict[str, Any]]:
    """Return which links are meant: without loss the shortest delay ("near") or the longest ("far"); or, for each loss,
    that of the middle delay ("lossy").
    """
    if on != "lossy":
        return [{"loss": 0.0, "delay": int(frame.delay.min() if on == "near" else frame.delay.max())}]
    delays = frame[frame.loss > 0].groupby("loss").delay.unique()
    return [{"loss": float(loss), "delay": int(sorted(each)[len(each) // 2])} for loss, each in delays.items()]


def explained_without_loss(folder: Path) -> Facts:
    """Return how far played cells without loss are from arithmetic."""
    return predicted.explained_by(_chosen(steps(folder), {**USUAL, "loss": 0.0}))


def times(folder: Path, on: str, ours: dict[str, Any], base: dict[str, Any]) -> Iterator[Facts]:
    """Yield how many times as long the step of `base` takes as that of `ours`, on the links that are meant."""
    frame = steps(folder)
    for link in links(frame, on):
        if found := ratio(frame, {**USUAL, **link, **ours}, {**USUAL, **link, **base}):
            facts = {**link, "value": found.value}
            if found.interval is not None:
                low, high = found.interval
                interval = f"{low:.2f} to {high:.2f}, 95 %, {found.n} seeds of the links"
                facts |= {"low": low, "high": high, "interval": interval}
            yield facts


def claims(folder: Path) -> list[Claim]:
    """Return what is claimed here and what became of it."""
    return claim_rows.claims(globals(), folder)


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame, plain = steps(folder), {"codec": BASELINE}

    def gain(link: dict[str, Any], ours: dict[str, Any]) -> str:
        found = ratio(frame, {**USUAL, **link, **plain, **ours}, {**USUAL, **link, **plain})
        return "(not played)" if found is None else f"{found.value:.3g} times"

    still = [
        f"{gain(link, {'codec': FEWEST})} as fast at {link['delay']} ms"
        for link in (*links(frame, "near"), *links(frame, "far"))
    ]
    said = [f"At 80 Mbit/s without loss {FEWEST} makes {BASELINE}'s step {' and '.join(still)}: round trips are left."]
    said += [
        f"At {link['loss']:g} % loss and {link['delay']} ms bbr for cubic makes it {gain(link, {'control': 'bbr'})} as "
        f"fast, int8 over cubic {gain(link, {'codec': 'int8'})}."
        for link in links(frame, "lossy")
    ]
    return {
        "answer": experiments.prose(" ".join(said)),
        "codecs": experiments.markdown_of(table(folder, USUAL, USUAL, BASELINE)),
        "control": experiments.markdown_of(table(folder, {**USUAL, "control": "bbr"}, USUAL)),
        "restarts": experiments.markdown_of(table(folder, USUAL, {**USUAL, "restarts": True})),
        "claims": claims_table(claims(folder)),
    }


def draw(folder: Path) -> Any:
    """Draw the speed-up of each codec against the delay, for each loss."""
    frame = speed_ups(folder)
    losses = sorted(frame.loss.unique())
    looks = style.looks(frame.codec.unique())
    figure, row = plt.subplots(1, len(losses), figsize=(9.2, 3.6), layout="constrained", sharey=True, squeeze=False)
    for axes, loss in zip(row[0], losses, strict=True):
        for codec in frame.codec.unique():
            for control, restarts, dash, fill in WAYS:
                part = _chosen(frame, {"loss": loss, "codec": codec, "control": control, "restarts": restarts})
                if part.empty:
                    continue
                look = looks[codec]
                axes.plot(part.delay, part.speed_up, look.marker, ls=dash, color=look.colour, fillstyle=fill, ms=4)
                axes.fill_between(part.delay, part.low, part.high, color=look.colour, alpha=0.15, lw=0)
        axes.axhline(1, color=style.MUTED, lw=0.8)
        axes.set(xscale="log", yscale="log", xlabel="one-way delay, ms", xlim=(0.8, 250))
        delays = sorted(frame.delay.unique())
        axes.set_xticks(delays, [str(delay) for delay in delays])
        axes.minorticks_off()
        axes.set_title("no loss" if not loss else f"{loss:g} % lost each way")
    row[0][0].set_ylabel(f"speed-up over {BASELINE}")
    ticks = [1, 2, 3, 5, 10, 20, 50]
    row[0][0].set_yticks(ticks, list(map(str, ticks)))
    lines = [
        Line2D([], [], color=looks[codec].colour, marker=looks[codec].marker, ms=4, label=codec) for codec in looks
    ]
    lines += [
        Line2D([], [], color=style.INK, ls=dash, label=label)
        for (_, _, dash, _), label in zip(WAYS, ("cubic", "bbr", "cubic, slow start after idle"), strict=True)
    ]
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines))
    return figure


if __name__ == "__main__":
    predicted.make(Path(__file__).parent, "speed-up", draw, blocks, claims)

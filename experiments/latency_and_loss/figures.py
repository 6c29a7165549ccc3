"""Make the figure, cells.csv, claims.csv and the README's blocks of latency_and_loss from what was played.

python -m testbed predict latency_and_loss
python experiments/latency_and_loss/figures.py [--results results/latency_and_loss] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.lines import Line2D

from testbed.metrics.statistics import IntervalEstimate, of_ratios
from testbed.report import experiments, predicted, style
from testbed.report.claims import EXACT, Claim, Verdict, claims_table

NAME = "latency_and_loss"
COMMAND = f"python -m testbed predict {NAME}"
BASELINE = "bf16"
PAYS = 1.1
"""A codec that makes a step less than so many times as fast is not worth what it does to the numbers."""
FEWEST = "topk(0.01)"
"""The codec of the fewest bytes."""
WAYS = (("cubic", False), ("bbr", False), ("cubic", True))
"""Congestion control, and whether it begins anew after a pause, as they are drawn."""
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
        link = dict(zip(LINK, key, strict=True))
        for codec in frame.codec.unique():
            if codec == BASELINE:
                continue
            found = ratio(part, {"codec": codec}, {"codec": BASELINE})
            if found is not None:
                low, high = found.interval or (found.value, found.value)
                rows.append({**link, "codec": codec, "speed_up": found.value, "low": low, "high": high})
    return pd.DataFrame(rows)


def words(found: IntervalEstimate) -> str:
    """Say a ratio and its interval."""
    if found.interval is None:
        return f"{found.value:.2f}x"
    return f"{found.value:.2f}x ({found.interval.low:.2f} to {found.interval.high:.2f})"


def table(folder: Path, ours: Callable[[Any], dict[str, str]]) -> Any:
    """Return a row for each delay and loss: what `ours` makes of the rows of such links."""
    frame, rows = steps(folder), []
    for (loss, delay), part in frame.groupby(["loss", "delay"]):
        row = ours(part)
        if row:
            rows.append({"loss": f"{loss:g} %", "delay": f"{delay} ms", **row})
    return pd.DataFrame(rows)


def by_codec(folder: Path) -> Any:
    """Return the baseline's step and each codec's speed-up, with cubic and no restarts."""

    def row(part: Any) -> dict[str, str]:
        usual = {"control": "cubic", "restarts": False}
        base = _chosen(part, {**usual, "codec": BASELINE})
        if base.empty:
            return {}
        said = {f"{BASELINE}: step": f"{base.step_s.median():.2f} s"}
        for codec in part.codec.unique():
            if codec != BASELINE and (found := ratio(part, {**usual, "codec": codec}, {**usual, "codec": BASELINE})):
                said[codec] = words(found)
        return said

    return table(folder, row)


def compared(folder: Path, ours: dict[str, Any], base: dict[str, Any]) -> Any:
    """Return, for each codec, how many times as long a step of `base` takes as one of `ours`."""

    def row(part: Any) -> dict[str, str]:
        found = {
            codec: ratio(part, {**ours, "codec": codec}, {**base, "codec": codec}) for codec in part.codec.unique()
        }
        return {codec: words(one) for codec, one in found.items() if one is not None}

    return table(folder, row)


def _lossy(frame: Any) -> list[tuple[float, int]]:
    """Return a link for each loss: that of the middle delay."""
    found = []
    for loss, part in frame[frame.loss > 0].groupby("loss"):
        delays = sorted(part.delay.unique())
        found.append((float(loss), int(delays[len(delays) // 2])))
    return found


def _verdict(found: IntervalEstimate, least: float) -> Verdict:
    """Judge that a ratio is at least so much."""
    low, high = found.interval or (found.value, found.value)
    return "holds" if low >= least else "fails" if high < least else "not resolved"


def _interval(found: IntervalEstimate) -> str:
    if found.interval is None:
        return EXACT
    return f"{found.interval.low:.2f} to {found.interval.high:.2f}, 95 %, {found.n} seeds of the links"


def claims(folder: Path) -> list[Claim]:
    """Return what is claimed here and what became of it."""
    frame = steps(folder)
    usual = {"control": "cubic", "restarts": False}
    still = _chosen(frame, {**usual, "loss": 0.0})
    rows = [
        predicted.explained(
            still,
            COMMAND,
            over=f" over {len(still)} links without loss, cubic",
            why="the critical path over the pipe formula, with headers; the rest is TCP",
        )
    ]
    far = int(still.delay.max())
    fewest = {**usual, "loss": 0.0, "delay": far, "codec": FEWEST}
    compared = [
        (
            f"At {far} ms of delay and no loss {FEWEST} still makes a step {PAYS} times as fast as {BASELINE}",
            fewest,
            {**fewest, "codec": BASELINE},
            PAYS,
        ),
        (
            f"Slow start after idle makes a {BASELINE} step at {far} ms more than twice as long",
            {**fewest, "codec": BASELINE},
            {**fewest, "codec": BASELINE, "restarts": True},
            2.0,
        ),
    ]
    for loss, delay in _lossy(frame):
        link = {**usual, "loss": loss, "delay": delay}
        compared.append(
            (
                f"At {loss:g} % loss and {delay} ms, int8 over cubic is faster than {BASELINE} over bbr",
                {**link, "codec": "int8"},
                {**link, "control": "bbr", "codec": BASELINE},
                1.0,
            )
        )
    for claim, ours, base, least in compared:
        if (found := ratio(frame, ours, base)) is not None:
            rows.append(
                Claim(
                    claim=claim,
                    source="ours",
                    ours=f"{found.value:.2f}x",
                    interval=_interval(found),
                    verdict=_verdict(found, least),
                    why="the one's step over the other's, played with the same losses on the links",
                    command=COMMAND,
                )
            )
    return rows


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame = steps(folder)
    usual = {"control": "cubic", "restarts": False}
    base, near, far = {**usual, "codec": BASELINE}, int(frame.delay.min()), int(frame.delay.max())

    def gain(ours: dict[str, Any], base: dict[str, Any]) -> str:
        found = ratio(frame, ours, base)
        return "(not played)" if found is None else f"{found.value:.3g} times"

    still = [
        f"{gain({**usual, **link, 'codec': FEWEST}, {**base, **link})} as fast at {link['delay']} ms"
        for link in ({"loss": 0.0, "delay": near}, {"loss": 0.0, "delay": far})
    ]
    said = [f"At 80 Mbit/s without loss {FEWEST} makes {BASELINE}'s step {' and '.join(still)}: round trips are left."]
    for loss, delay in _lossy(frame):
        link = {"loss": loss, "delay": delay}
        said.append(
            f"At {loss:g} % loss and {delay} ms bbr for cubic makes it "
            f"{gain({**base, **link, 'control': 'bbr'}, {**base, **link})} as fast, int8 over cubic "
            f"{gain({**base, **link, 'codec': 'int8'}, {**base, **link})}."
        )
    answer = " ".join(said)
    return {
        "answer": experiments.prose(answer),
        "codecs": experiments.markdown_of(by_codec(folder)),
        "control": experiments.markdown_of(compared(folder, {**usual, "control": "bbr"}, usual)),
        "restarts": experiments.markdown_of(compared(folder, usual, {**usual, "restarts": True})),
        "claims": claims_table(claims(folder)),
    }


def draw(folder: Path) -> Any:
    """Draw the speed-up of each codec against the delay, for each loss."""
    frame = speed_ups(folder)
    losses = sorted(frame.loss.unique())
    looks = style.looks(frame.codec.unique())
    figure, row = plt.subplots(1, len(losses), figsize=(9.2, 3.6), layout="constrained", sharey=True, squeeze=False)
    ways = ((WAYS[0], "-", "full"), (WAYS[1], ":", "none"), (WAYS[2], (0, (5, 1.5)), "none"))
    for axes, loss in zip(row[0], losses, strict=True):
        for codec in frame.codec.unique():
            for (control, restarts), dash, fill in ways:
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
        for (_, dash, _), label in zip(ways, ("cubic", "bbr", "cubic, slow start after idle"), strict=True)
    ]
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines))
    return figure


if __name__ == "__main__":
    predicted.make(Path(__file__).parent, "speed-up", draw, blocks, claims)

"""Make the figure, cells.csv, claims.csv and the README's blocks of tah_throughput from what was played.

python -m testbed predict tah_throughput
python experiments/tah_throughput/figures.py [--results results/tah_throughput] [--output experiments/tah_throughput]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from testbed.report import claim_rows, experiments, predicted, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table

NAME = "tah_throughput"
CODECS = {"fp32": "uncompressed", "acsgd": "AQ-SGD", "tah": "TAH-Quant"}
RATES = {"100Mbit": 100, "300Mbit": 300, "500Mbit": 500, "1Gbit": 1000}
NEAR = 0.05
"""A published number within this share of ours holds: the table's own rows at one rate differ by more."""


def cells(folder: Path) -> Any:
    """Return the rows of cells.csv with the rate of each cell's links."""
    frame = predicted.cells(folder)
    return frame.assign(rate=frame.links.str.extract(r"\((\w+),")[0])


def modelled(frame: Any, *, same_compute: bool = False) -> Any:
    """Return tokens per second by rate and codec: sends overlap with computing, which takes 1.8 times as long as its
    FLOPs say. The uncompressed baseline computes in fp32 and AQ-SGD's stages take 2.2 times as long, unless all have
    the `same_compute`.
    """
    shown = frame[(frame.sends == "overlapped") & (frame.compute == 1.8) & (frame.grid == "table3")]
    if not same_compute:
        own = frame[frame.grid.isin(["baseline", "cache"]) & (frame.sends == "overlapped")]
        shown = pd.concat([shown[shown.codec == "tah"], own])
    return shown.pivot_table(index="rate", columns="codec", values="tokens_per_s").loc[list(RATES)]


def published(folder: Path) -> Any:
    """Return the published Table 3 by rate and codec."""
    frame = pd.read_csv(folder / "published.csv")
    three = frame[frame.table == 3]
    return three.pivot_table(index="rate", columns="codec", values="tokens_per_s").loc[list(RATES)]


def hypotheses(folder: Path) -> Any:
    """Return how far each explanation is from the published columns: the root mean square of the relative error."""
    frame, said = cells(folder), published(folder)
    fits = frame[frame.grid == "fit"]
    rows = []
    for sends in ("overlapped", "blocking"):
        row: dict[str, Any] = {"sends": sends}
        for codec, name in CODECS.items():
            errors = {
                compute: _error(part.set_index("rate").tokens_per_s, said[codec])
                for compute, part in fits[(fits.sends == sends) & (fits.codec == codec)].groupby("compute")
            }
            best = min(errors, key=errors.__getitem__)
            row |= {f"{name}: compute x": f"{best:g}", f"{name}: error": f"{errors[best]:.1%}".replace("%", " %")}
        rows.append(row)
    return pd.DataFrame(rows)


def _error(ours: Any, theirs: Any) -> float:
    return math.sqrt(sum(math.log(ours[rate] / theirs[rate]) ** 2 for rate in RATES) / len(RATES))


def microbatches(folder: Path) -> Any:
    """Return Tables 5 and 6 beside the best explanation: of sends, precision and compute, those of the least error."""
    frame, said = cells(folder), pd.read_csv(folder / "published.csv")
    grid, rows = frame[frame.grid == "microbatch"], []
    for (rate, codec), theirs in said[said.table > 3].groupby(["rate", "codec"], sort=False):
        wanted = theirs.set_index("microbatch").tokens_per_s
        best, least = None, math.inf
        for how, part in grid[(grid.rate == rate) & (grid.codec == codec)].groupby(["sends", "precision", "compute"]):
            ours = part.set_index("sequences").tokens_per_s
            error = math.sqrt(sum(math.log(ours[m] / wanted[m]) ** 2 for m in wanted.index) / len(wanted))
            if error < least:
                best, least = (how, ours), error
        assert best is not None
        (sends, precision, compute), ours = best
        row = {"rate": rate, "codec": CODECS[str(codec)]}
        row |= {f"micro-batch {m}": f"{wanted[m]:.0f} / {ours[m]:.0f}" for m in wanted.index}
        rows.append(row | {"best": f"{sends}, {precision}, x {compute:g}", "error": f"{least:.1%}".replace("%", " %")})
    return pd.DataFrame(rows)


def table3(folder: Path) -> Any:
    """Return the published table beside ours."""
    frame, said = cells(folder), published(folder)
    ours, same = modelled(frame), modelled(frame, same_compute=True)
    rows = []
    for rate in RATES:
        row: dict[str, Any] = {"rate": rate}
        for codec, name in CODECS.items():
            share = ours[codec][rate] / said[codec][rate] - 1
            row[f"{name}: published / ours"] = (
                f"{said[codec][rate]:.0f} / {ours[codec][rate]:.0f} ({share:+.0%})".replace("%", " %")
            )
        row["TAH speed-up: published"] = f"{said.tah[rate] / said.fp32[rate]:.2f}x"
        row["ours"] = f"{ours.tah[rate] / ours.fp32[rate]:.2f}x"
        row["of which the codec"] = f"{same.tah[rate] / same.fp32[rate]:.2f}x"
        rows.append(row)
    return pd.DataFrame(rows)


def throughput(folder: Path, codec: str, rate: str) -> Facts:
    """Return how far ours is from the published throughput, as a share, and both."""
    ours, said = modelled(cells(folder))[codec][rate], published(folder)[codec][rate]
    share = ours / said - 1
    return {"value": abs(share), "share": share, "tokens": ours, "theirs": said, "name": CODECS[codec], "near": NEAR}


def speed_ups(folder: Path) -> Iterator[Facts]:
    """Yield at each rate how many times as fast as the uncompressed wire TAH-Quant is: with both computing alike, with
    a baseline that computes in fp32, and as published.
    """
    frame, said = cells(folder), published(folder)
    ours, same = modelled(frame), modelled(frame, same_compute=True)
    for rate in RATES:
        theirs = said.tah[rate] / said.fp32[rate]
        facts = {"theirs": theirs, "near": theirs * (1 - NEAR), "apart": ours.tah[rate] / ours.fp32[rate]}
        yield {"value": same.tah[rate] / same.fp32[rate], "rate": rate, **facts}


def claims(folder: Path) -> list[Claim]:
    """Return what was claimed and what became of it."""
    return claim_rows.claims(globals(), folder)


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame, said = cells(folder), published(folder)
    ours, same = modelled(frame), modelled(frame, same_compute=True)
    tah = _error(ours.tah, said.tah)
    codec, theirs = same.tah / same.fp32, said.tah / said.fp32
    answer = (
        "With one number for computing (1.8 times as long as its FLOPs say), bytes, rate and GPipe explain TAH-Quant's "
        f"four throughputs to {tah:.1%} (root mean square), and its baseline's only in fp32, twice as slowly. The "
        f"codec alone earns {codec['100Mbit']:.2f}x at 100 Mbit/s (published {theirs['100Mbit']:.2f}x) and "
        f"{codec['1Gbit']:.2f}x at 1 Gbit/s (published {theirs['1Gbit']:.2f}x)."
    ).replace("%", " %")
    return {
        "answer": experiments.prose(answer),
        "table3": experiments.markdown_of(table3(folder)),
        "hypotheses": experiments.markdown_of(hypotheses(folder)),
        "microbatches": experiments.markdown_of(microbatches(folder)),
        "claims": claims_table(claims(folder)),
    }


def draw(folder: Path) -> Any:
    """Draw throughput and speed-up against the rate: published as points, ours as lines."""
    frame, said = cells(folder), published(folder)
    ours, same = modelled(frame), modelled(frame, same_compute=True)
    rates = list(RATES.values())
    looks = style.looks(CODECS)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.7), layout="constrained")
    for codec, name in CODECS.items():
        look = looks[codec]
        left.plot(rates, ours[codec], color=look.colour)
        left.plot(rates, said[codec], look.marker, color=look.colour, mfc="none")
        left.annotate(
            name, (rates[-1], ours[codec].iloc[-1]), (6, 0), textcoords="offset points", color=look.colour, va="center"
        )
    left.plot(rates, same.fp32, color=looks["fp32"].colour, ls=":")
    left.annotate(
        "uncompressed,\nsame computing",
        (500, same.fp32["500Mbit"]),
        (4, -24),
        textcoords="offset points",
        color=style.MUTED,
        fontsize=8,
    )
    left.set(ylabel="tokens per second", ylim=(0, None))
    left.set_title("Throughput: published (markers), ours (lines)")
    speed = said.tah / said.fp32
    right.plot(rates, speed, looks["tah"].marker, color=looks["tah"].colour, mfc="none")
    right.plot(rates, ours.tah / ours.fp32, color=looks["tah"].colour)
    right.plot(rates, same.tah / same.fp32, color=looks["tah"].colour, ls=":")
    right.annotate(
        "baseline computes in fp32",
        (500, (ours.tah / ours.fp32)["500Mbit"]),
        (-52, 16),
        textcoords="offset points",
        color=looks["tah"].colour,
        fontsize=8.5,
    )
    right.annotate(
        "both compute alike",
        (480, (same.tah / same.fp32)["500Mbit"]),
        (-92, -12),
        textcoords="offset points",
        color=style.MUTED,
        fontsize=8.5,
    )
    right.axhline(1, color=style.MUTED, lw=0.8)
    right.set(ylabel="speed-up of TAH-Quant", ylim=(0, None))
    right.set_title("Above 300 Mbit/s most of it is the slower baseline")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(rates, list(map(str, rates)))
        axes.minorticks_off()
        axes.set_xlabel("rate of every link, Mbit/s")
    left.set_xlim(90, 1900)
    return figure


if __name__ == "__main__":
    predicted.make(Path(__file__).parent, "throughput", draw, blocks, claims)

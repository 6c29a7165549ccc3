"""Generates the figure, cells.csv, claims.csv and README blocks of data_parallel_time from played cells.

python -m testbed predict data_parallel_time
python experiments/data_parallel_time/figures.py [--results results/data_parallel_time] [--output FOLDER]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from testbed.report import experiments, plots, predicted, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent

_SOME_GRIDS = ("exchange", "answer_bits")
"""Columns that cells.csv lacks if only the grid of two workers was played, as in the short form."""
LIVE, DECIDED, ESTIMATES = "live.csv", "decided.csv", "estimates.csv"
"""Live runs on both clocks (live.py), and leaders' estimates of links (estimates.py)."""
TITLES = {
    "pair": "delayed aggregation between two workers",
    "server": "a server on a fast link",
    "ring": "rings",
    "shared": "a server whose link the workers share",
    "paced": "such a server with bbr",
    "peers": "four workers that send to each other",
}


def cells(folder: Path) -> Any:
    """Return the rows of cells.csv with the links' delay in ms and the played cycle's deviation from its formula."""
    frame = predicted.cells(folder)
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *_SOME_GRIDS])))
    return frame.assign(
        delay=frame.links.str.extract(r", (\d+)ms")[0].astype(int), off=frame.step_s / frame.formula_s - 1
    )


def table(folder: Path) -> Any:
    """Return all cells except those of two workers: played, formula, and the ideal of the event simulation."""
    frame = cells(folder)
    rows = frame[frame.grid != "pair"]
    return pd.DataFrame(
        {
            "exchange": rows.exchange.fillna("star"),
            "bits, answer": [
                f"{row.bits:g}" + ("" if pd.isna(row.answer_bits) else f", {row.answer_bits:g}")
                for row in rows.itertuples()
            ],
            "delay": rows.delay.map("{} ms".format),
            "server's link": ["10 times" if "1Gbit" in row.links else "as the workers'" for row in rows.itertuples()],
            "TCP": ["bbr" if "bbr" in row.links else "cubic" for row in rows.itertuples()],
            "staleness": rows.staleness,
            "played": rows.step_s.map("{:.3f} s".format),
            "formula": rows.formula_s.map("{:.3f} s".format),
            "apart": _percents(rows.off, "{:+.1f}"),
            "ideal": rows.ideal_s.map("{:.3f} s".format),
            "efficiency": _percents(rows.ideal_s / rows.step_s),
        }
    )


def regimes(folder: Path) -> Any:
    """Return, for each staleness, the cells of two workers and the deviation of played cycles from the formula."""
    frame = cells(folder)
    rows = []
    for staleness, part in frame[frame.grid == "pair"].groupby("staleness"):
        rows.append(
            {
                "staleness": int(staleness),
                "settings": len(part),
                "median": percent(part.off.abs().median(), "{:.2f}"),
                "worst": percent(part.off.abs().max(), "{:.2f}"),
                "step, fastest to slowest": f"{part.step_s.min():.2f} to {part.step_s.max():.2f} s",
            }
        )
    return pd.DataFrame(rows)


def live(folder: Path) -> Any:
    """Return every cell that was run live on both clocks."""
    rows = pd.read_csv(folder / LIVE)
    return pd.DataFrame(
        {
            "exchange": rows.exchange,
            "workers": rows.workers,
            "staleness": rows.staleness,
            "link": rows.network,
            "steps": rows.steps,
            "virtual": (rows.virtual_s * 1e3).map("{:.1f} ms".format),
            "real": (rows.real_s * 1e3).map("{:.1f} ms".format),
            "apart": _percents(rows.apart, "{:+.1f}"),
            "means apart": _percents(rows.mean_apart, "{:+.1f}"),
            "links' bound": _percents(rows.bound),
            "dropped": rows.dropped,
            "same losses": rows.same_losses.map({True: "yes", False: "no"}),
        }
    )


def decided(folder: Path) -> Any:
    """Return every cell, live on both clocks, in which the network affects the training."""
    rows = pd.read_csv(folder / DECIDED)
    return pd.DataFrame(
        {
            "decided by": rows.by,
            "link": rows.network,
            "steps": rows.steps,
            "virtual": rows.virtual_s.map("{:.2f} s".format),
            "real": rows.real_s.map("{:.2f} s".format),
            "apart": _percents(rows.apart, "{:+.1f}"),
            "steps alike": _percents(rows.alike, "{:.0f}"),
            "bytes apart": _percents(rows.bytes_apart, "{:+.1f}"),
            "loss, virtual": rows.virtual_loss.map("{:.3f}".format),
            "loss, real": rows.real_loss.map("{:.3f}".format),
            "links' bound": _percents(rows.bound),
        }
    )


def estimates(folder: Path) -> Any:
    """Return leaders' estimates of links."""
    rows = pd.read_csv(folder / ESTIMATES)
    return pd.DataFrame(
        {
            "clock": rows.clock,
            "link": rows.network,
            "messages": rows.messages,
            "rate, median": _percents(rows.rate_off, "{:+.1f}"),
            "off by": _percents(rows.rate_off_by),
            "second half": _percents(rows.settled_off_by),
            "delay": _percents(rows.delay_off, "{:+.2f}"),
            "certificate off by": _percents(rows.certificate_off, "{:.2f}"),
        }
    )


def cycles(folder: Path, grids: Sequence[str], near: float, by: str = "formula") -> Iterator[Facts]:
    """Yield for each grid the deviation of played cycles from the formula or the ideal."""
    frame = cells(folder)
    frame = frame.assign(off=frame.step_s / frame[f"{by}_s"] - 1)
    for grid in grids:
        part = frame[frame.grid == grid]
        off = part.off.abs()
        if len(part):
            facts = {"title": TITLES[grid], "settings": len(part), "met": int((off <= near).sum())}
            yield {"value": off.max(), "median": off.median(), "worst": _worst(part), "by": by, **facts}


def ideal(folder: Path) -> Facts:
    """Return the ideal as a share of the played cycles: a bound, except for the CSV's rounding."""
    frame = cells(folder)
    share = frame.ideal_s / frame.step_s
    peers = share[frame.grid == "peers"]
    return {
        "least": share.min(),
        "most": share.max(),
        "settings": len(share),
        "known": share.count(),
        "bound": len(share) == share.count() and share.max() <= 1 + predicted.ROUNDED,
        "peers": "" if peers.empty else f"; all-to-all of four {percent(peers.min())} to {percent(peers.max())}",
    }


def measured(folder: Path, table: str, column: str = "apart") -> Facts | None:
    """Return, for live measurements without dropped packets, the deviation of a column from 0, and the least, largest
    and sum of every other column; None if the table is empty, as in the short form.
    """
    every = pd.read_csv(folder / table)
    if every.empty:
        return None
    dropped = every.get("dropped", pd.Series(0, every.index)) > 0
    rows, facts = every[~dropped], {"every": len(every), "lossy": ""}
    if dropped.any():
        facts["lossy"] = f"if one overflows {percent(every[dropped].apart.abs().max())}; "
    numbers = rows.select_dtypes("number").abs()
    return {
        "value": numbers[column].max(),
        "median": numbers[column].median(),
        "worst": rows.loc[numbers[column].idxmax()],
        "rows": len(rows),
        "least": numbers.min(),
        "most": numbers.max(),
        "sum": numbers.sum(),
        "same": int(every.get("same_losses", pd.Series(dtype=int)).sum()),
        **facts,
    }


def _worst(part: Any) -> str:
    row = part.loc[part.off.abs().idxmax()]
    exchange = "star" if pd.isna(row.exchange) else row.exchange
    return f"{exchange}, {row.bits:g} bits, {row.delay} ms, staleness {int(row.staleness)}"


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame, said = cells(folder), []
    for grid, part in frame.groupby("grid", sort=False):
        said.append(f"{TITLES[str(grid)]} {percent(part.off.abs().max(), '{:.2f}')}")
    answer = f"Largest deviation of played cycles from arithmetic: {'; '.join(said)}."
    return {
        "answer": experiments.prose(answer),
        "regimes": regimes(folder),
        "others": table(folder),
        "live": live(folder),
        "estimates": estimates(folder),
        "decided": decided(folder),
    }


def _percents(shares: Any, form: str = "{:.1f}") -> Any:
    """Return a column of shares as text; unknown ones are empty."""
    return shares.map(lambda share: "" if pd.isna(share) else percent(share, form))


def draw(folder: Path) -> Any:
    """Draw the cycle of two workers against the delay: formulas as lines, played as markers."""
    frame = cells(folder)
    pair = frame[frame.grid == "pair"]
    sizes = sorted(pair.bits.unique())
    figure, (row,) = plots.panels(1, len(sizes), (9.2, 3.2))
    colours = ("#767d86", "#0072b2", "#d55e00", "#009e73")
    for axes, bits in zip(row, sizes, strict=True):
        for colour, (staleness, part) in zip(colours, pair[pair.bits == bits].groupby("staleness"), strict=False):
            part = part.sort_values("delay")
            axes.plot(part.delay, part.formula_s, color=colour, lw=1.2)
            size = 10 - 2 * staleness  # if they are equally fast, each is visible inside the previous one
            axes.plot(part.delay, part.step_s, "o", color=colour, mfc="none", ms=size, label=f"staleness {staleness:g}")
        axes.axhline(float(pair.compute_s.iloc[0]), color=style.MUTED, lw=0.8, ls=":")
        axes.set(xlabel="one-way delay, ms", ylim=(0, None), xlim=(0, None))
        megabytes = pair[pair.bits == bits].message_bytes.iloc[0] / 1e6
        axes.set_title(f"{bits:g} bits per parameter, {megabytes:.0f} MB")
    row[0].set_ylabel("seconds per step")
    plots.finish(figure, legend=row[0], at="upper center")
    return figure


FIGURES = {"cycle": draw}

if __name__ == "__main__":
    publishing.run(globals())

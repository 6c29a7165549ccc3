"""Make the figure, cells.csv, claims.csv and the README's blocks of data_parallel_time from what was played.

python -m testbed predict data_parallel_time
python experiments/data_parallel_time/figures.py [--results results/data_parallel_time] [--output FOLDER]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from testbed.report import experiments, predicted, style
from testbed.report.claims import Claim, claims_table

NAME = "data_parallel_time"
COMMAND = f"python -m testbed predict {NAME}"
SOURCE = "time model of delayed aggregation (DeCo-SGD, arXiv 2507.17346; derived)"
NEAR = {"pair": 0.01, "server": 0.02, "ring": 0.02, "shared": 0.02, "paced": 0.02, "peers": 0.02}
"""How far a played cycle may be from its formula, by grid."""
BY_THE_IDEAL = ("paced", "peers")
"""Grids in which flows share links, or TCP holds back, and which are held against the ideal too."""
_SOME_GRIDS = ("exchange", "answer_bits")
"""Columns that cells.csv lacks where only the grid of two workers was played, as in the short form."""
LIVE, DECIDED, LIVE_NEAR = "live.csv", "decided.csv", 0.03
"""Live runs on both clocks (live.py), and how far apart their steps may be, or trainings."""
ESTIMATES, RATE_NEAR = "estimates.csv", 0.1
"""What leaders took links for (estimates.py), and how far a rate may be off in the median message."""
TITLES = {
    "pair": "delayed aggregation between two workers",
    "server": "a server on a fast link",
    "ring": "rings",
    "shared": "a server whose link the workers share",
    "paced": "such a server with bbr",
    "peers": "four workers, each of which sends to every other",
}


def cells(folder: Path) -> Any:
    """Return the rows of cells.csv with the links' delay in ms and how far a played cycle is from its formula."""
    frame = predicted.cells(folder)
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *_SOME_GRIDS])))
    return frame.assign(
        delay=frame.links.str.extract(r", (\d+)ms")[0].astype(int), off=frame.step_s / frame.formula_s - 1
    )


def table(folder: Path) -> Any:
    """Return every cell but those of two workers: played, formula, and the ideal of the event simulation."""
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
            "apart": _percents(rows.off, "+.1%"),
            "ideal": rows.ideal_s.map("{:.3f} s".format),
            "efficiency": _percents(rows.ideal_s / rows.step_s),
        }
    )


def regimes(folder: Path) -> Any:
    """Return, for each staleness, the cells of two workers and how far played cycles are from the formula."""
    frame = cells(folder)
    rows = []
    for staleness, part in frame[frame.grid == "pair"].groupby("staleness"):
        rows.append(
            {
                "staleness": int(staleness),
                "settings": len(part),
                "median": _percent(part.off.abs().median(), ".2%"),
                "worst": _percent(part.off.abs().max(), ".2%"),
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
            "virtual": [f"{value * 1e3:.1f} ms" for value in rows.virtual_s],
            "real": [f"{value * 1e3:.1f} ms" for value in rows.real_s],
            "apart": _percents(rows.apart, "+.1%"),
            "means apart": _percents(rows.mean_apart, "+.1%"),
            "links' bound": _percents(rows.bound),
            "dropped": rows.dropped,
            "same losses": rows.same_losses.map({True: "yes", False: "no"}),
        }
    )


def live_claim(folder: Path) -> Claim:
    """Return whether live steps on the real clock are those on the virtual one."""
    every = pd.read_csv(folder / LIVE)
    rows = every[every.dropped == 0]
    apart = rows.apart.abs()
    worst = rows.loc[apart.idxmax()]
    near = _percent(LIVE_NEAR, ".0%")
    most = every[every.dropped > 0].apart.abs().max()
    lossy = "" if pd.isna(most) else f"where one overflows {_percent(most)}; "
    return Claim(
        claim=f"Where no queue overflows a live step on the real clock is that on the virtual clock to within {near}",
        source="ours",
        published="",
        ours=f"{_percent(apart.max())} at most, {_percent(apart.median())} in the median of {len(rows)} cells",
        interval="one run of each",
        verdict="holds" if apart.max() <= LIVE_NEAR else "fails",
        why=f"the worst: {worst.exchange}, staleness {worst.staleness}, {worst.network}; by the means of the same "
        f"steps {_percent(rows.mean_apart.abs().max())} at most; {lossy}the losses of {int(every.same_losses.sum())} "
        f"of all {len(every)} are the same bit for bit",
        command=f"python -m testbed reproduce {NAME}",
    )


def decided(folder: Path) -> Any:
    """Return every cell, live on both clocks, in which the network decides what is learned."""
    rows = pd.read_csv(folder / DECIDED)
    return pd.DataFrame(
        {
            "decided by": rows.by,
            "link": rows.network,
            "steps": rows.steps,
            "virtual": [f"{value:.2f} s" for value in rows.virtual_s],
            "real": [f"{value:.2f} s" for value in rows.real_s],
            "apart": _percents(rows.apart, "+.1%"),
            "steps alike": _percents(rows.alike, ".0%"),
            "bytes apart": _percents(rows.bytes_apart, "+.1%"),
            "loss, virtual": rows.virtual_loss.map("{:.3f}".format),
            "loss, real": rows.real_loss.map("{:.3f}".format),
            "links' bound": _percents(rows.bound),
        }
    )


def decided_claims(folder: Path) -> list[Claim]:
    """Return whether trainings in which the network decides take as long on the real clock as on the virtual one, and
    how well it was measured; the short form has none.
    """
    rows = pd.read_csv(folder / DECIDED)
    if rows.empty:
        return []
    apart = rows.apart.abs()
    worst, near = rows.loc[apart.idxmax()], _percent(LIVE_NEAR, ".0%")
    same_time = Claim(
        claim="Where the network decides what is learned a live training on the real clock takes as long as on the "
        f"virtual clock to within {near}",
        source="ours",
        published="",
        ours=f"{_percent(apart.max())} at most, {_percent(apart.median())} in the median of {len(rows)} trainings",
        interval="one run of each",
        verdict="holds" if apart.max() <= LIVE_NEAR else "fails",
        why=f"the worst: {worst.by}, {worst.network}; of their steps {_percent(rows.alike.min(), '.0%')} to "
        f"{_percent(rows.alike.max(), '.0%')} had the same decisions; this machine was late in "
        f"{_percent(rows.overruns.max())} of a run's actions at most",
        command=f"python -m testbed reproduce {NAME}",
    )
    known = pd.read_csv(folder / ESTIMATES)
    if known.empty:
        return [same_time]
    off = known.rate_off_by
    estimated = Claim(
        claim=f"What DeCo-SGD's leader takes a link's rate for is off by {_percent(RATE_NEAR, '.0%')} at most in the "
        "median message",
        source="ours",
        published="",
        ours=f"{_percent(off.min())} to {_percent(off.max())} in {len(known)} runs",
        interval=f"{int(known.messages.sum())} messages",
        verdict="holds" if off.max() <= RATE_NEAR else "fails",
        why=f"delays are off by {_percent(known.delay_off.abs().max())} at most; certificates measured the same links "
        f"to {_percent(known.certificate_off.max())}",
        command=f"python -m testbed reproduce {NAME}",
    )
    return [same_time, estimated]


def estimates(folder: Path) -> Any:
    """Return what leaders took links for."""
    rows = pd.read_csv(folder / ESTIMATES)
    return pd.DataFrame(
        {
            "clock": rows.clock,
            "link": rows.network,
            "messages": rows.messages,
            "rate, median": _percents(rows.rate_off, "+.1%"),
            "off by": _percents(rows.rate_off_by),
            "second half": _percents(rows.settled_off_by),
            "delay": _percents(rows.delay_off, "+.2%"),
            "certificate off by": _percents(rows.certificate_off, ".2%"),
        }
    )


def claims(folder: Path) -> list[Claim]:
    """Return what arithmetic claims and what became of it."""
    frame, rows = cells(folder), []
    for grid, part in frame.groupby("grid", sort=False):
        rows.append(cycle_claim(str(grid), part))
        if grid in BY_THE_IDEAL:
            rows.append(cycle_claim(str(grid), part.assign(off=part.step_s / part.ideal_s - 1), "ideal"))
    return [*rows, bound_claim(frame), live_claim(folder), *decided_claims(folder)]


def cycle_claim(grid: str, part: Any, by: str = "formula") -> Claim:
    """Return whether the played cycles of a grid are what the formula or the ideal says; `part.off`: how far they are
    from it.
    """
    near, off = NEAR[grid], part.off.abs()
    return Claim(
        claim=f"The {by} gives the steady cycle of {TITLES[grid]} to within {_percent(near, '.0%')}",
        source=SOURCE if grid == "pair" else "ours",
        published="max{Tc, P/B, (Tc + P/B + b)/(staleness + 1)}" if grid == "pair" else "",
        ours=f"{_percent(off.max())} at most, {_percent(off.median())} in the median of {len(part)} settings",
        interval="exact",
        verdict="holds" if off.max() <= near else "fails",
        why=f"{int((off <= near).sum())} of {len(part)} are; the worst: {_worst(part)}",
        command=COMMAND,
    )


def bound_claim(frame: Any) -> Claim:
    """Return whether the ideal is a bound: no cycle is played in less, but for the CSV's rounding."""
    share = frame.ideal_s / frame.step_s
    peers = share[frame.grid == "peers"]
    of_peers = "" if peers.empty else f"; all-to-all of four {_percent(peers.min())} to {_percent(peers.max())}"
    return Claim(
        claim="No cycle is played in less than the ideal over the same links",
        source="ours",
        published="",
        ours=f"the ideal is {_percent(share.min())} to {_percent(share.max())} of what was played in {len(share)} "
        "settings",
        interval="exact",
        verdict="holds" if len(share) == share.count() and share.max() <= 1 + predicted.ROUNDED else "fails",
        why=f"{share.count()} of {len(share)} have an ideal{of_peers}",
        command=COMMAND,
    )


def _worst(part: Any) -> str:
    row = part.loc[part.off.abs().idxmax()]
    exchange = "star" if pd.isna(row.exchange) else row.exchange
    return f"{exchange}, {row.bits:g} bits, {row.delay} ms, staleness {int(row.staleness)}"


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame, said = cells(folder), []
    for grid, part in frame.groupby("grid", sort=False):
        off = part.off.abs()
        said.append(f"{TITLES[str(grid)]} {_percent(off.max(), '.2%')}")
    answer = f"How far played cycles are from arithmetic, at worst: {'; '.join(said)}."
    return {
        "answer": experiments.prose(answer),
        "regimes": experiments.markdown_of(regimes(folder)),
        "others": experiments.markdown_of(table(folder)),
        "live": experiments.markdown_of(live(folder)),
        "estimates": experiments.markdown_of(estimates(folder)),
        "decided": experiments.markdown_of(decided(folder)),
        "claims": claims_table(claims(folder)),
    }


def _percent(share: float, form: str = ".1%") -> str:
    return f"{share:{form}}".replace("%", " %")


def _percents(shares: Any, form: str = ".1%") -> list[str]:
    """Return a column of shares as text; what is not known is empty."""
    return ["" if pd.isna(share) else _percent(share, form) for share in shares]


def draw(folder: Path) -> Any:
    """Draw the cycle of two workers against the delay: formulas as lines, played as markers."""
    frame = cells(folder)
    pair = frame[frame.grid == "pair"]
    sizes = sorted(pair.bits.unique())
    figure, row = plt.subplots(1, len(sizes), figsize=(9.2, 3.2), layout="constrained", squeeze=False)
    colours = ("#767d86", "#0072b2", "#d55e00", "#009e73")
    for axes, bits in zip(row[0], sizes, strict=True):
        for colour, (staleness, part) in zip(colours, pair[pair.bits == bits].groupby("staleness"), strict=False):
            part = part.sort_values("delay")
            axes.plot(part.delay, part.formula_s, color=colour, lw=1.2)
            size = 10 - 2 * staleness  # where they are as fast, each is seen inside the one before
            axes.plot(part.delay, part.step_s, "o", color=colour, mfc="none", ms=size, label=f"staleness {staleness:g}")
        axes.axhline(float(pair.compute_s.iloc[0]), color=style.MUTED, lw=0.8, ls=":")
        axes.set(xlabel="one-way delay, ms", ylim=(0, None), xlim=(0, None))
        megabytes = pair[pair.bits == bits].message_bytes.iloc[0] / 1e6
        axes.set_title(f"{bits:g} bits a parameter, {megabytes:.0f} MB")
    row[0][0].set_ylabel("seconds per step")
    figure.legend(*row[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


if __name__ == "__main__":
    predicted.make(Path(__file__).parent, "cycle", draw, blocks, claims)

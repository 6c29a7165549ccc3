"""Generates the maps, summary.csv, claims and README blocks of networks_x_codecs from its sweep's results.

python experiments/networks_x_codecs/figures.py [--results results/networks_x_codecs] [--output
experiments/networks_x_codecs]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from testbed import units
from testbed.report import experiments, maps, publishing
from testbed.report.claim_rows import Facts
from testbed.report.maps import BASELINE, MILDEST_WITHIN, Grid, limits_bps, stops_paying_bps

WANTED_DELAY_S = 0.01
"""The delay of the table of limits."""
HOW = "engine netem; star of 2 stages, 1f1b, 4 micro-batches per step; gpt2, 256 tokens per micro-batch; played"
"""Of sweep.toml."""
_CELL = ["compute.source", "network", "codec"]
_COLUMNS = [
    *("compute.source", "network", "up_rate_bps", "down_rate_bps", "round_trip_s", "codec"),
    *("step_s", "ideal_step_s", "payload_bytes_per_step", "certified"),
]


def limits_table(made: Sequence[Grid]) -> Any:
    """Return the rate up to which each codec pays, by device, over links with the delay nearest to WANTED_DELAY_S."""
    said = {}
    for grid in made:
        row = min(range(len(grid.delays_s)), key=lambda at: abs(grid.delays_s[at] - WANTED_DELAY_S))
        for codec in grid.step_s:
            if codec != grid.baseline:
                limit = stops_paying_bps(grid.rates_bps, grid.speed_up(codec)[row].tolist())
                said[codec, grid.device] = _limit_words(limit, grid)
    return _by_device(said, "codec")


def _by_device(said: Mapping[tuple[str, str], str], name: str) -> Any:
    """Return a table of texts by codec or network (as `name` states) and device."""
    frame = pd.DataFrame([(*key, words) for key, words in said.items()], columns=[name, "device", "words"])
    return frame.pivot_table(index=name, columns="device", values="words", aggfunc="first", sort=False).reset_index()


def _limit_words(limit_bps: float, grid: Grid) -> str:
    if math.isnan(limit_bps):
        return "–"  # noqa: RUF001
    if limit_bps == math.inf:
        return f"beyond {units.format_rate(grid.rates_bps[-1])}"
    return f"{units.format_rate(round(float(f'{limit_bps:.2g}')))}" if limit_bps else "nowhere"


def shipped_table(runs: Any) -> Any:
    """Return, for each shipped profile, the speed-up over the baseline of the fastest codec, by device."""
    said = {}
    named = runs[~runs.network.str.startswith("link-") & runs.certified]
    for (network, source), cells in named.groupby(["network", "compute.source"], sort=True):
        means = cells.groupby("codec").step_s.mean()
        if BASELINE in means and len(means) > 1:
            fastest = means.idxmin()
            said[network, maps.device_of(source)] = f"{fastest} {means[BASELINE] / means[fastest]:.1f}x"
    return _by_device(said, "network")


def settings(runs: Any) -> str:
    """Describe the conditions of the runs, without naming each of a hundred links."""
    sources = dict.fromkeys(runs["compute.source"])
    kinds = [
        HOW,
        "; ".join(f"{maps.device_of(source)}: {source.partition(': ')[2]}" for source in sources),
        "codec cost: device; links alike up and down, buffer 100 ms, TCP cubic, slow start after idle off, MTU 1500",
    ]
    if not runs.certified.all():
        kinds.append(f"not certified: {int((~runs.certified).sum())} of {len(runs)} runs, which are left out")
    return "\n".join(kinds)


def titles(made: Sequence[Grid]) -> tuple[str, str, str]:
    """Return the finding of each figure, computed from the grids."""
    spread = max(float(np.nanmax(np.nanmax(each, axis=0) / np.nanmin(each, axis=0))) for each in map(limits_bps, made))
    return (
        f"No codec is {100 * MILDEST_WITHIN:.0f} % faster: {'; '.join(map(_enough_words, made))}",
        "The fastest codec over the grid: up to "
        f"{', '.join(f'{most_gained(grid):.3g}x on {grid.device}' for grid in made)}",
        f"Codecs stop paying within a factor of {spread:.1f} of each other's rates",
    )


def most_gained(grid: Grid) -> float:
    """Return the largest speed-up of the fastest codec over the baseline."""
    return float(np.nanmax(grid.gain))


def _enough_words(grid: Grid) -> str:
    rate = baseline_enough_bps(grid)
    if rate is None:
        return f"than {grid.baseline} on {grid.device} nowhere up to {units.format_rate(grid.rates_bps[-1])}"
    return f"than {grid.baseline} on {grid.device} from {units.format_rate(rate)} on"


def baseline_enough_bps(grid: Grid) -> int | None:
    """Return the lowest rate from which on the baseline is within MILDEST_WITHIN of the fastest at every delay; None if
    there is none.
    """
    near = (grid.step_s[grid.baseline] <= grid.best_s * (1 + MILDEST_WITHIN)).all(axis=0)
    held = [rate for at, rate in enumerate(grid.rates_bps) if near[at:].all()]
    return held[0] if held else None


def blocks(folder: Path) -> dict[str, str]:
    """Return the README's blocks from summary.csv."""
    runs = pd.read_csv(folder / "summary.csv")
    made = maps.grids(runs)
    choice, speed_up, _ = titles(made)
    networks, cells = runs.network.nunique(), len(runs.groupby(["compute.source", "network", "codec"]))
    near = float((runs.ideal_step_s / runs.step_s).median())
    answer = (
        f"{networks} networks, {runs.codec.nunique()} codecs, {len(made)} devices: {cells} cells, "
        f"{int(runs.certified.sum())} of {len(runs)} runs certified, {100 * near:.1f} % of the ideal in the median. "
        f"{choice}. {speed_up}."
    )
    return {
        "answer": experiments.prose(answer),
        "limits": limits_table(made),
        "shipped": shipped_table(runs),
    }


def enough(folder: Path) -> Iterator[Facts]:
    """Yield for each device the rate from which on no codec pays, and the largest gain below it."""
    for grid in maps.grids(pd.read_csv(folder / "summary.csv")):
        rate, delays_ms = baseline_enough_bps(grid), [1e3 * delay_s for delay_s in grid.delays_s]
        yield {
            "found": rate is not None,
            "rate": "none" if rate is None else units.format_rate(rate),
            "device": grid.device,
            "baseline": grid.baseline,
            "last": units.format_rate(grid.rates_bps[-1]),
            "delays": f"{delays_ms[0]:g} to {delays_ms[-1]:g} ms",
            "gain": most_gained(grid),
        }


def write(results: Path, output: Path) -> None:
    """Write summary.csv. After a sweep of some cells (`--only`), the rows of all others are kept."""
    runs, path = experiments.runs_frame(results), output / "summary.csv"
    rows = runs[_COLUMNS]
    if path.is_file():
        before = pd.read_csv(path, dtype=dict.fromkeys(["up_rate_bps", "down_rate_bps"], "Int64"))
        kept = before[~before.set_index(_CELL).index.isin(rows.set_index(_CELL).index)]
        rows = pd.concat([rows, kept]).sort_values(["codec", "network"], kind="stable")
    rows.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")


def _figure(number: int, draw: Callable[..., Figure]) -> Callable[[Path], Figure]:
    def drawn(folder: Path) -> Figure:
        runs = pd.read_csv(folder / "summary.csv")
        made = maps.grids(runs)
        return draw(made, titles(made)[number], settings(runs))

    return drawn


FIGURES = {
    name: _figure(number, draw)
    for number, (name, draw) in enumerate(
        (("choice", maps.draw_choice), ("speed-up", maps.draw_speed_up), ("limits", maps.draw_limits))
    )
}

if __name__ == "__main__":
    publishing.run(globals())

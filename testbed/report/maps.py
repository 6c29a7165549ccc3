"""Maps over a grid of rate and delay: the best codec, its speed-up, and the rate at which codecs stop paying.

The baseline of a device that computes in bf16 is bf16: its messages never were fp32. They are drawn from the frame of
`experiments.runs_frame`, or from its columns that an experiment commits. Cells with the same source of durations belong
to one device; a network is a point of the grid if all its links are equal, and symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from testbed import units
from testbed.errors import ResultsError
from testbed.report import canvas, plots
from testbed.report.canvas import Handle
from testbed.report.remarks import labelled
from testbed.report.style import INK, MUTED, PAPER, looks

BASELINE, HALF = "fp32", "bf16"
MILDEST_WITHIN = 0.05
"""Codecs within this share of the fastest are equivalent; a map shows the one of them that sends the most bits."""
PAYS = 1.05
"""Speed-up below which a codec no longer pays."""
_SLOWED = 0.9
"""Efficiency of the baseline below which TCP, and not the rate, makes its step."""
_LEVELS = (PAYS, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0)
_SHADES = LinearSegmentedColormap.from_list("speed-up", ["#f7f9fb", "#9ecae1", "#3182bd", "#08306b"])

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Grid:
    """Step times of one device over a grid of links."""

    device: str
    rates_bps: tuple[int, ...]
    delays_s: tuple[float, ...]
    """One-way delays of one link."""
    step_s: Mapping[str, Matrix]
    """By codec, most bytes first, on a tie the faster one first: (delays, rates), NaN without a reliable run. The
    baseline sends most."""
    baseline: str = BASELINE
    slowed: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros((1, 1), dtype=bool))
    """Where the baseline's step takes longer than its ideal by more than `_SLOWED` allows."""

    def speed_up(self, codec: str) -> Matrix:
        """Return the speed-up of a codec over the baseline. ResultsError without a run of the baseline."""
        if self.baseline not in self.step_s:
            raise ResultsError(f"device {self.device}: there is no run of the baseline {self.baseline}; add one")
        return np.asarray(self.step_s[self.baseline] / self.step_s[codec])

    @property
    def best_s(self) -> Matrix:
        """The shortest step time of any codec; NaN if any codec's is missing, which might be the best."""
        return np.asarray(np.min(list(self.step_s.values()), axis=0))

    @property
    def gain(self) -> Matrix:
        """The speed-up of the fastest codec over the baseline."""
        return np.asarray(self.step_s[self.baseline] / self.best_s)

    def mildest(self) -> npt.NDArray[np.int64]:
        """Return the index in `step_s` of the codec with the most bits among those within MILDEST_WITHIN of the
        fastest; -1 if a codec's time is missing.
        """
        near = np.stack([times <= self.best_s * (1 + MILDEST_WITHIN) for times in self.step_s.values()])
        return np.where(np.isnan(self.best_s), -1, near.argmax(axis=0))


def grids(frame: Any) -> list[Grid]:
    """Return the grid of each device in a frame of runs (`experiments.runs_frame`), slowest first.

    Times are means over the runs of a cell. Runs without a passing certificate count as missing. ResultsError if no
    network is a point of a grid.
    """
    points = frame[_on_grid(frame)]
    if points.empty:
        raise ResultsError("no network of these results is symmetric, so there is no grid to draw")
    points = points.assign(device=[device_of(source) for source in points["compute.source"]])
    made = []
    for device, cells in points.groupby("device", sort=False):
        half = str(cells["compute.source"].iloc[0]).endswith(HALF) and HALF in set(cells.codec)
        made.append(_grid(device, cells[cells.codec != BASELINE] if half else cells, HALF if half else BASELINE))
    return sorted(made, key=lambda grid: -float(np.nanmin(grid.best_s, initial=math.inf)))


def _on_grid(frame: Any) -> Any:
    """Return whether each row's links are a plain `link(RATE, DELAY)`."""
    return frame.network.str.fullmatch(r"link-[^-+]+-[^-+]+") & (frame.up_rate_bps == frame.down_rate_bps)


def device_of(source: object) -> str:
    """Return the device named in a cell's `compute.source`."""
    return str(source).partition(":")[0] if isinstance(source, str) else "this machine"


def _grid(device: str, cells: Any, baseline: str) -> Grid:
    times = cells.assign(delay=cells.round_trip_s / 2, rate=cells.up_rate_bps.astype(int))
    rates, delays = sorted(set(times.rate)), sorted(set(times.delay))
    sizes = times.groupby("codec")[["payload_bytes_per_step", "step_s"]].mean()
    # Payloads that differ only by a header count as equal.
    order = sorted(sizes.itertuples(), key=lambda of: (-round(20 * math.log(of.payload_bytes_per_step)), of.step_s))
    step_s = {}
    for codec in (of.Index for of in order):
        own = times[(times.codec == codec) & times.certified]
        table = own.pivot_table(index="delay", columns="rate", values="step_s", aggfunc="mean", dropna=False)
        step_s[str(codec)] = table.reindex(index=delays, columns=rates).to_numpy(np.float64)
    own = times[times.codec == baseline].assign(efficiency=times.ideal_step_s / times.step_s)
    table = own.pivot_table(index="delay", columns="rate", values="efficiency", aggfunc="mean", dropna=False)
    slowed = table.reindex(index=delays, columns=rates).to_numpy(np.float64) < _SLOWED
    return Grid(device, tuple(rates), tuple(delays), step_s, baseline, slowed)


def stops_paying_bps(rates_bps: Sequence[float], speed_ups: Sequence[float]) -> float:
    """Return the rate at which a codec's speed-up first falls below PAYS, interpolated linearly in the log of the rate.

    0 if it does not pay at the slowest rate, infinity if it pays at all rates; ignores points that are NaN.
    """
    known = [(rate, gain) for rate, gain in zip(rates_bps, speed_ups, strict=True) if not math.isnan(gain)]
    if not known:
        return math.nan
    if known[0][1] < PAYS:
        return 0.0
    for (slow, more), (fast, less) in pairwise(known):
        if less < PAYS:
            share = (more - PAYS) / (more - less)
            return math.exp(math.log(slow) + share * (math.log(fast) - math.log(slow)))
    return math.inf


def limits_bps(grid: Grid) -> Matrix:
    """Return the rate at which each codec but the baseline stops paying, within the grid's rates: (codecs, delays)."""
    gains = [grid.speed_up(codec) for codec in grid.step_s if codec != grid.baseline]
    limits = np.array([[stops_paying_bps(grid.rates_bps, row) for row in rows] for rows in gains])
    return limits.clip(grid.rates_bps[0], grid.rates_bps[-1])


# ---------------------------------------------------------------------- figures
def draw_choice(made: Sequence[Grid], title: str, settings: str) -> Figure:
    """Draw the best codec for each link with its speed-up over the baseline, one panel per device. A star: the
    baseline is slowed by TCP, not by the rate.
    """
    codecs = _codecs(made)
    names = [np.array([*grid.step_s, ""])[grid.mildest()] for grid in made]
    every = looks(codecs)
    shown = {name for chosen in names for name in chosen.ravel()}
    legend: list[Handle] = [
        Patch(facecolor=every[codec].colour, label=labelled(codec)) for codec in codecs if codec in shown
    ]
    if "" in shown:
        legend.append(Patch(facecolor=PAPER, edgecolor=MUTED, hatch="///", label="a run is missing or not certified"))
    if any(grid.slowed.any() for grid in made):
        legend.append(Line2D([], [], ls="none", label="*: TCP slows the baseline, not the rate"))
    figure, panels = _panels(made, title, legend, settings)
    colours = ListedColormap([every[codec].colour for codec in codecs])
    for grid, axes, chosen in zip(made, panels, names, strict=True):
        numbers = np.array([[codecs.index(name) if name else -1 for name in row] for row in chosen])
        axes.pcolormesh(
            np.ma.masked_less(numbers, 0), cmap=colours, vmin=-0.5, vmax=len(codecs) - 0.5, edgecolors=PAPER, lw=0.8
        )
        _hatch(axes, numbers < 0)
        gains = _chosen_gain(grid, grid.mildest())
        for row, column in np.argwhere(numbers >= 0):
            words = _gain(float(gains[row, column])) + "*" * int(grid.slowed[row, column])
            if (codec := chosen[row, column]) != grid.baseline:
                how = {**_CENTRED, "size": 6.6, "color": _readable_on(every[codec].colour)}
                axes.text(column + 0.5, row + 0.36, words, **how)
        for row, begin, end, number in _regions(numbers):
            name = codecs[number]
            if (end - begin) * _cell_inches(figure, axes, len(grid.rates_bps)) > 0.065 * len(name):
                colour = _readable_on(every[name].colour)
                axes.text((begin + end) / 2, row + 0.74, name, **_CENTRED, size=7, weight="bold", color=colour)
    return figure


def draw_speed_up(made: Sequence[Grid], title: str, settings: str) -> Figure:
    """Draw the speed-up of the fastest codec over the baseline for each link."""
    most = max(np.nanmax(grid.gain) for grid in made)
    levels = [1.0, *(level for level in _LEVELS if level < most), max(float(most), PAYS)]
    norm = BoundaryNorm(levels, 256)
    legend: list[Handle] = [
        Patch(facecolor=_SHADES(norm(low)), edgecolor=MUTED, lw=0.4, label=f"{low:g} to {high:.3g}x")
        for low, high in pairwise(levels)
    ]
    figure, panels = _panels(made, title, legend, settings)
    for grid, axes in zip(made, panels, strict=True):
        axes.pcolormesh(np.ma.masked_invalid(grid.gain), cmap=_SHADES, norm=norm, edgecolors=PAPER, lw=0.4)
        _hatch(axes, np.isnan(grid.gain))
    return figure


def draw_limits(made: Sequence[Grid], title: str, settings: str) -> Figure:
    """Draw the rates at which codecs stop paying over the links' delay, one panel per device: the first and the last of
    them as lines, all others as the band between. Limits beyond the fastest rate lie at the upper edge.
    """
    figure, panels = canvas.canvas(title, 2.7, [], settings, len(made), columns=min(3, len(made)))
    rates = sorted({rate for grid in made for rate in grid.rates_bps})
    for number, (grid, axes) in enumerate(zip(made, panels, strict=True)):
        x = [1e3 * delay for delay in grid.delays_s]
        codecs = [codec for codec in grid.step_s if codec != grid.baseline]
        limits = limits_bps(grid)
        ends = np.nanmin(limits, axis=0), np.nanmax(limits, axis=0)
        axes.fill_between(x, *ends, color=_SHADES(0.35), lw=0)
        order = np.argsort(np.nanmean(np.log(limits), axis=1))
        every = looks(_codecs(made))
        for at, shift, side in ((order[0], -11, "right"), (order[-1], 4, "left")):
            look = every[codecs[at]]
            axes.plot(x, limits[at], color=look.colour, marker=look.marker, ms=4)
            place = x[min(1, len(x) - 1)], limits[at][min(1, len(x) - 1)]
            canvas.note(axes, codecs[at], place, (0, shift), ha=side, size=7.5, color=look.colour)
        axes.set(xscale="log", yscale="log", ylim=(rates[0] / 1.15, rates[-1] * 1.3))
        axes.set_title(f"{grid.device}, against {grid.baseline}")
        axes.set_xlabel("one-way delay of a link, ms")
        _tick(axes, "x", x, [f"{delay:g}" for delay in x])
        _tick(axes, "y", rates, [units.format_rate(rate) if number % 3 == 0 else "" for rate in rates])
        if number % 3 == 0:
            axes.set_ylabel(f"{100 * (PAYS - 1):.0f} % faster than the baseline up to")
    return figure


_CENTRED: Any = {"ha": "center", "va": "center"}


def _hatch(axes: Axes, missing: npt.NDArray[np.bool_]) -> None:
    """Hatch the cells of a map without a number."""
    for row, column in np.argwhere(missing):
        axes.add_patch(Rectangle((column, row), 1, 1, fc="none", ec=MUTED, hatch="///", lw=0))


def _codecs(made: Sequence[Grid]) -> list[str]:
    """Return the codecs of all grids, most bits first."""
    return list(dict.fromkeys(codec for grid in made for codec in grid.step_s))


def _chosen_gain(grid: Grid, chosen: npt.NDArray[np.int64]) -> Matrix:
    every = np.stack([grid.speed_up(codec) for codec in grid.step_s])
    gains: Matrix = np.take_along_axis(every, np.maximum(chosen, 0)[np.newaxis], axis=0)[0]
    return gains


def _gain(gain: float) -> str:
    return f"{gain:.0f}x" if gain >= 9.95 else f"{gain:.1f}x"


def _regions(chosen: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (row, begin, end, number): the longest run of each number in any row, in the row nearest to the centre."""
    longest: dict[int, tuple[int, float, int, int]] = {}
    for row, line in enumerate(chosen):
        at = 0
        for number, cells in groupby(line.tolist()):
            length = len(list(cells))
            rank = (length, -abs(row + 0.5 - len(chosen) / 2), row, at)
            if number >= 0 and rank > longest.get(number, (0, 0.0, 0, 0)):
                longest[number] = rank
            at += length
    for number, (length, _, row, at) in longest.items():
        yield row, at, at + length, number


def _readable_on(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else PAPER


def _panels(made: Sequence[Grid], title: str, legend: Sequence[Handle], settings: str) -> tuple[Figure, list[Axes]]:
    """Make a panel for each device, with cells of equal size regardless of their rates and delays."""
    figure, panels = canvas.canvas(title, 2.6, legend, settings, len(made), columns=min(3, len(made)))
    for number, (grid, axes) in enumerate(zip(made, panels, strict=True)):
        axes.set_title(f"{grid.device}, against {grid.baseline}")
        rates, delays = map(_short_rate, grid.rates_bps), [f"{1e3 * delay:g}" for delay in grid.delays_s]
        label = "delay of a link, one way, ms" if number % 3 == 0 else ""
        plots.cells(axes, list(rates), delays, "rate of a link, Mbit/s (G: Gbit/s)", label)
        axes.tick_params(length=0, labelsize=7.5)
    figure.draw_without_rendering()  # computes the layout: the width of a cell determines whether a name fits
    return figure, panels


def _short_rate(rate_bps: float) -> str:
    return f"{rate_bps / 1e6:g}" if rate_bps < 1e9 else f"{rate_bps / 1e9:g}G"


def _cell_inches(figure: Figure, axes: Axes, columns: int) -> float:
    return float(axes.get_position().width * figure.get_figwidth() / columns)


def _tick(axes: Axes, side: str, places: Sequence[float], words: Sequence[str]) -> None:
    axis = axes.xaxis if side == "x" else axes.yaxis
    axis.set_ticks(list(places), list(words))
    axis.set_ticks([], minor=True)

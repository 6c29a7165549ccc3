"""Shared by the figures of experiments/: panels and their legend, ticks, levels, estimates with intervals, bands.

Each function draws numbers into axes. `canvas` makes the figures of reports, which have a foot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from testbed.report import style
from testbed.report.canvas import Handle, note

_SIGNED = "{:g}".format


class Estimate(Protocol):
    """A number with its interval; judgements and estimates match it."""

    @property
    def value(self) -> float: ...
    @property
    def interval(self) -> tuple[float, float] | None: ...


class ErrorBar(NamedTuple):
    """An estimate with numbers from a table."""

    value: float
    interval: tuple[float, float] | None


def panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, Any]:
    """Return a figure of this size in inches, and its axes, an array (rows, columns); `shared`: as for `subplots`."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def finish(
    figure: Figure,
    finding: str = "",
    legend: Axes | Sequence[Axes] | Sequence[Handle] = (),
    at: str = "lower left",
    columns: int = 4,
    **how: Any,
) -> None:
    """Put the finding above a figure, and one legend for all panels outside: of these handles, or of the labels drawn
    in these axes, without duplicates.
    """
    every = [legend] if isinstance(legend, Axes) else legend
    known: dict[str, Any] = {}
    for each in every:
        drawn = zip(*each.get_legend_handles_labels(), strict=True) if isinstance(each, Axes) else [(each, "")]
        for handle, label in drawn:
            known.setdefault(label or str(handle.get_label()), handle)
    if known:
        place: Any = f"outside {at}"
        figure.legend(known.values(), known.keys(), loc=place, ncols=columns, **how)
    if finding:
        style.state(figure, finding)


def ticks(axis: Axis, places: Iterable[float], words: Callable[[float], str] | Iterable[str] = _SIGNED) -> None:
    """Put the ticks of an axis exactly at the given places within its limits, regardless of its scale."""
    at = list(places)
    axis.set_major_locator(FixedLocator(at))
    axis.set_major_formatter(FixedFormatter([words(place) for place in at] if callable(words) else list(words)))
    axis.set_minor_locator(NullLocator())


def cells(axes: Axes, columns: Sequence[object], rows: Sequence[object], xlabel: str, ylabel: str) -> None:
    """Set up a panel as a map of unit cells, rows from below, with a name for each column and row."""
    axes.grid(visible=False)
    axes.set(xlim=(0, len(columns)), ylim=(0, len(rows)), xlabel=xlabel, ylabel=ylabel)
    axes.set_xticks(np.arange(len(columns)) + 0.5, list(map(str, columns)))
    axes.set_yticks(np.arange(len(rows)) + 0.5, list(map(str, rows)))


def level(axes: Axes, value: float, words: str, *, at: float = 1, dash: Any = (0, (6, 3)), **look: Any) -> None:
    """Draw a horizontal line with its name above it: at the right end, or starting at the share `at` of the width."""
    look = {"color": style.MUTED, **look}
    axes.axhline(value, lw=0.9, ls=dash, zorder=1, **look)
    side: dict[str, Any] = {"ha": "right" if at == 1 else "left", "va": "bottom", "size": 7.5}
    note(axes, words, (at, value), (-2 if at == 1 else 3, 2), xycoords=("axes fraction", "data"), **side, **look)


def estimates(
    axes: Axes,
    points: Iterable[tuple[float, Estimate | None]],
    colour: str,
    marker: str = "o",
    *,
    label: str = "",
    line: Any = "none",
    hollow: bool = False,
    across: bool = False,
    width: float = 1.1,
    **mark: Any,
) -> None:
    """Draw estimates as marks with their intervals, joined by a `line`; omits None. `across`: places are rows, and
    numbers lie along x.
    """
    known = [(place, estimate) for place, estimate in points if estimate is not None]
    for place, estimate in known:
        if estimate.interval is not None:
            ends = [place, place], list(estimate.interval)
            axes.plot(*(ends[::-1] if across else ends), color=colour, lw=width)
    marks = [place for place, _ in known], [estimate.value for _, estimate in known]
    face = style.PAPER if hollow else colour
    axes.plot(*(marks[::-1] if across else marks), ls=line, marker=marker, color=colour, mfc=face, label=label, **mark)


def band(
    axes: Axes,
    x: Sequence[float],
    per_seed: Sequence[Sequence[float]],
    colour: str,
    label: str,
    *,
    dash: Any = "-",
    **line: Any,
) -> None:
    """Draw the mean of the seeds as a line, and a band from the lowest to the highest.

    `per_seed`: (seeds, points), `x`: (points).
    """
    rows = np.asarray(per_seed, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != len(x):
        raise ValueError(f"{label}: {rows.shape} losses for {len(x)} points; each seed needs one at each point")
    axes.plot(x, rows.mean(axis=0), color=colour, ls=dash, label=label, **line)
    axes.fill_between(x, rows.min(axis=0), rows.max(axis=0), color=colour, alpha=0.18, lw=0)


def curve(axes: Axes, rows: Any, x: str, y: str, colour: str, label: str, **line: Any) -> None:
    """Draw the `band` of two columns of a frame with a row per place and seed; omits places that a seed lacks."""
    wide = rows.pivot_table(index=x, columns="seed", values=y).dropna()
    band(axes, wide.index.tolist(), wide.T.to_numpy().tolist(), colour, label, **line)

"""The unigram and bigram floors of the experiments' texts, from experiments/floors.csv: in figures, and in claims."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas
from matplotlib.axes import Axes

from testbed.records import NEAR_FLOOR
from testbed.report import plots
from testbed.report.canvas import note
from testbed.report.style import MUTED

FILE = "floors.csv"
_NEAR = 0.25
"""Distance from an axis, as a share of its length, up to which the axis is extended to a floor."""


def floors_of(home: Path, part: str = "") -> Mapping[str, float]:
    """Return the floors of the text of an experiment, whose folder is `home`, by name; empty without a text. `part`: a
    part of the experiment with another text, as floors.csv names it.
    """
    if not (home.parent / FILE).is_file():
        return {}
    rows = pandas.read_csv(home.parent / FILE).set_index("experiment")
    whose = rows[rows.index == (f"{home.name}, {part}" if part else home.name)]
    return {f"{which} floor": float(whose[f"{which}_floor"].iloc[0]) for which in ("unigram", "bigram") if len(whose)}


def draw_floors(axes: Axes, home: Path, less: float = 0.0, corner: tuple[int, int] = (1, 0), label: float = 0) -> None:
    """Draw the floors as lines where they lie within an axis of losses or near it, and state others in a corner.

    `less`: the loss from which the axis shows differences. `label`: the share of the width at which lines are named.
    """
    far = []
    for name, floor in floors_of(home).items():
        low, high = axes.get_ylim()
        at, near = floor - less, _NEAR * (high - low)
        if low - near <= at <= high + near:
            axes.set_ylim(min(low, at - near / 4), max(high, at + near / 4))
            plots.level(axes, at, f"{name} {floor:.2f}", at=label, dash=(0, (2, 2)))
        else:
            far.append(f"{name} {floor:.2f}" if not less else f"{name} at {at:+.2f}")
    if far:
        (x, y), how = corner, {"xycoords": "axes fraction", "size": 7.2, "color": MUTED}
        sides = {"ha": "right" if x else "left", "va": "top" if y else "bottom"}
        note(axes, "; ".join(far), corner, (3 - 6 * x, 3 - 6 * y), **how, **sides)


def floor_mark(home: Path, loss: float, part: str = "") -> str:
    """Return what a loss near a floor, or above one, means for a claim; empty if it is well below both."""
    floors = floors_of(home, part)
    if not floors or loss < (bigram := floors["bigram floor"]) - NEAR_FLOOR:
        return ""
    if loss > (unigram := floors["unigram floor"]) - NEAR_FLOOR:
        return f"{loss:.2f} nats are those of word frequencies ({unigram:.2f})"
    near = "no fewer than" if loss >= bigram else f"within {NEAR_FLOOR:g} of"
    return f"{loss:.2f} nats are {near} those of a bigram table ({bigram:.2f})"

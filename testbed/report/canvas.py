"""The frame of every figure: title and legend on top, panels in a grid, the settings below.

Sizes are inches, whatever the number of panels, so that nothing collides.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from testbed import units
from testbed.report.collect import Group
from testbed.report.style import INK, MUTED, PAPER, Look, looks
from testbed.spec import LinkProfile

Handle = Line2D | Patch
WIDTH = 10.0
_LEGEND_CHARACTERS = 125
"""What fits beside each other above the panels."""
_SETTINGS_CHARACTERS = 160
"""What fits beside each other below the panels."""
_BETWEEN_ROWS = 0.95
HOLLOW_DASH = (0, (3, 2))


class Drawing(NamedTuple):
    """A figure and what stands below it."""

    name: str
    """Of its files."""
    title: str
    caption: str
    figure: Figure


def group_looks(group: Group) -> dict[str, Look]:
    """The look of each of the group's codecs, in their order."""
    found = looks(group.codecs)
    return {codec: found[codec] for codec in group.codecs}


def uncertified(group: Group) -> bool:
    """Whether a finished run lacks two passing certificates, so that something is drawn hollow."""
    return any(result.ok and not result.certified for result in group.results)


def hollow_patch() -> Patch:
    """What the legend says about hollow bars."""
    return Patch(facecolor="none", edgecolor=INK, ls=HOLLOW_DASH, label="hollow: not certified")


def codec_legend(group: Group) -> list[Handle]:
    """A line and marker for each codec."""
    handles: list[Handle] = [
        Line2D([], [], color=look.colour, ls=look.dash, marker=look.marker, label=codec)
        for codec, look in group_looks(group).items()
    ]
    if uncertified(group):
        handles.append(Line2D([], [], color=MUTED, ls="none", marker="o", mfc=PAPER, label="hollow: not certified"))
    return handles


def link_words(profile: LinkProfile) -> str:
    """'↑80 Mbit/s ↓80 Mbit/s, RTT 20 ms'."""
    pipes = [pipe for pipe in (profile.up, profile.down) if pipe]
    if not pipes:
        return "unshaped"
    up, down = (units.format_rate(pipe.rate_bps) if pipe else "unshaped" for pipe in (profile.up, profile.down))
    loss = max(pipe.loss for pipe in pipes)
    round_trip = units.format_time(sum(pipe.delay_ns for pipe in pipes))
    return f"↑{up} ↓{down}, RTT {round_trip}" + (f", loss {100 * loss:.2g} %" if loss else "")


def columns_for(panels: int) -> int:
    """Panels side by side: at most three, and four as two by two."""
    return 2 if panels == 4 else min(panels, 3)


def canvas(
    title: str, panel_height: float, legend: Sequence[Handle], settings: str, panels: int, *, columns: int, left: float = 0.7
) -> tuple[Figure, list[Axes]]:
    """A figure with so many empty panels, row by row; `left` is the room for the labels of the first column."""
    rows = math.ceil(panels / columns)
    foot = [line for text in settings.splitlines() for line in textwrap.wrap(text, _SETTINGS_CHARACTERS)]
    widths = [len(str(handle.get_label())) + 7 for handle in legend]
    per_line = len(legend) if sum(widths) <= _LEGEND_CHARACTERS else max(1, _LEGEND_CHARACTERS // max(widths))
    top = 0.88 + 0.22 * math.ceil(len(legend) / per_line)
    bottom = 0.62 + 0.14 * len(foot)
    height = top + bottom + rows * panel_height + (rows - 1) * _BETWEEN_ROWS
    figure = Figure(figsize=(WIDTH, height))
    figure.text(0.12 / WIDTH, 1 - 0.1 / height, title, size=12, weight="bold", va="top")
    figure.text(0.12 / WIDTH, 0.1 / height, "\n".join(foot), size=7.2, color=MUTED, va="bottom", linespacing=1.35)
    figure.legend(
        handles=list(legend), ncols=per_line, loc="upper left", bbox_to_anchor=(0.08 / WIDTH, 1 - 0.37 / height),
        columnspacing=1.6, handlelength=2.6, borderaxespad=0.0,
    )  # fmt: skip
    grid = figure.add_gridspec(
        rows, columns, left=left / WIDTH, right=1 - 0.15 / WIDTH, top=1 - top / height, bottom=bottom / height,
        wspace=0.24 if columns == 2 else 0.16, hspace=_BETWEEN_ROWS / panel_height,
    )  # fmt: skip
    return figure, [figure.add_subplot(grid[i // columns, i % columns]) for i in range(panels)]


def profile_panels(
    group: Group, title: str, panel_height: float, legend: Sequence[Handle], settings: str, *, left: float = 0.7
) -> tuple[Figure, dict[str, Axes]]:
    """One panel per profile, with its name and numbers above it."""
    names = list(group.profiles)
    figure, axes = canvas(title, panel_height, legend, settings, len(names), columns=columns_for(len(names)), left=left)
    for name, one in zip(names, axes, strict=True):
        one.set_title(name, pad=18)
        words = link_words(group.profiles[name])
        one.annotate(words, (0, 1), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points", size=7.8, color=MUTED)
    return figure, dict(zip(names, axes, strict=True))

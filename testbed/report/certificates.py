"""Compares requested with measured links: a figure of all certificates of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from testbed.records import Measurement
from testbed.report.canvas import Drawing, Handle, canvas, group_looks, hover, name_rows, note, shortened
from testbed.report.collect import Group
from testbed.report.style import INK, MUTED, PAPER, RULE, Look

_PANELS = {
    "rate and goodput": ("rate", "goodput"),
    "delay and round trip": ("delay", "rtt"),
    "messages after a pause": ("message",),
    "queue of a full buffer": ("queue",),
    "losses and bursts": ("loss", "burst"),
}
"""Title of a panel -> its quantities."""
_MARKERS = {"up": "^", "down": "v", "both": "o"}
_ROW, _ROOM = 0.36, 0.25
"""Height of a network's row, and of everything around the rows, in inches."""


class LinkRatio(NamedTuple):
    """One quantity of one link, measured once."""

    network: str
    codec: str
    """Codec of the run."""
    quantity: str
    direction: str
    ratio: float
    """measured / requested"""
    tolerance: float
    """Largest difference of the ratio from 1 that is below the probe's resolution."""
    passed: bool


def _ratio(network: str, codec: str, measurement: Measurement) -> LinkRatio | None:
    """Return the ratio of a measurement; None if nothing was requested, or 0."""
    if not measurement.expected or measurement.measured is None:
        return None
    ratio, tolerance = (value / measurement.expected for value in (measurement.measured, measurement.tolerance or 0.0))
    passed = measurement.verdict == "PASS"
    return LinkRatio(network, codec, measurement.quantity, measurement.direction, ratio, tolerance, passed)


def link_ratios(group: Group) -> Iterator[LinkRatio]:
    """Yield the ratio of every measurement with a requested value, in both certificates of every run."""
    for (network, codec), entry in group.cells.items():
        for result in entry.results:
            for _, certificate in result.taken:
                for measurement in certificate.measurements:
                    if (point := _ratio(network, codec, measurement)) is not None:
                        yield point


def _panel(axes: Axes, networks: Sequence[str], ratios: Sequence[LinkRatio], looks: Mapping[str, Look]) -> None:
    axes.axvline(1.0, color=INK, lw=1.0, ls=(0, (2, 2)))
    for y, network in enumerate(networks):
        here = [point for point in ratios if point.network == network]
        # Tolerances differ between quantities and sizes; draw the narrow bars on top.
        for width in sorted({round(point.tolerance, 4) for point in here}, reverse=True):
            axes.barh(y, 2 * width, 0.8, left=1 - width, color=RULE, alpha=0.5, lw=0)
        for number, point in enumerate(here):
            offset = 0.7 * ((number + 0.5) / len(here) - 0.5)
            colour = looks[point.codec].colour
            face = colour if point.passed else PAPER
            marker, what = _MARKERS[point.direction], f"{point.quantity} {point.direction}"
            (mark,) = axes.plot(point.ratio, y + offset, marker, color=colour, mfc=face, ms=3.2, mew=0.7)
            hover(mark, f"{network}, {what}: measured / requested {point.ratio:.5f} ({point.codec})")
        if not here:
            note(axes, "nothing asked", (1, y), (4, 0), size=7, color=MUTED, va="center")
    reach = 1.12 * max(max(abs(point.ratio - 1), point.tolerance) for point in ratios) or 0.01
    axes.set_xlim(1 - reach, 1 + reach)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def _legend(group: Group, ratios: Sequence[LinkRatio], looks: Mapping[str, Look]) -> list[Handle]:
    words = {"up": "up", "down": "down", "both": "both ways"}
    legend: list[Handle] = [Patch(facecolor=looks[codec].colour, label=codec) for codec in group.codecs]
    legend += [
        Line2D([], [], color=INK, ls="none", marker=_MARKERS[way], ms=4, label=word)
        for way, word in words.items()
        if any(point.direction == way for point in ratios)
    ]
    legend.append(Patch(facecolor=RULE, alpha=0.5, label="exact, to the probe's resolution"))
    if not all(point.passed for point in ratios):
        legend.append(Line2D([], [], color=MUTED, ls="none", marker="o", ms=4, mfc=PAPER, label="hollow: failed"))
    return legend


def _finding(ratios: Sequence[LinkRatio]) -> str:
    """Return the accuracy of the links, as a title."""
    failed = [point for point in ratios if not point.passed]
    if failed:
        networks = ", ".join(shortened(name, 20) for name in dict.fromkeys(point.network for point in failed))
        return f"{len(failed)} of {len(ratios)} measured quantities of links differ from the request ({networks})"
    furthest = max(ratios, key=lambda point: abs(point.ratio - 1))
    where, off = f"{furthest.quantity}, {shortened(furthest.network, 20)}", 100 * abs(furthest.ratio - 1)
    return f"Links match the requested values: the worst of {len(ratios)} quantities is {off:.2g} % off ({where})"


def asked_against_measured(group: Group, settings: str) -> Drawing | None:
    """Draw one panel per kind of quantity, one row per shaped network; None if no link is shaped."""
    every = list(link_ratios(group))
    chosen = {title: [ratio for ratio in every if ratio.quantity in wanted] for title, wanted in _PANELS.items()}
    panels = {title: ratios for title, ratios in chosen.items() if ratios}
    if not panels:
        return None
    known = {point.network for ratios in panels.values() for point in ratios}
    networks = [name for name in group.networks if name in known]
    looks = group_looks(group)
    legend = _legend(group, [point for ratios in panels.values() for point in ratios], looks)
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    title = _finding([point for ratios in panels.values() for point in ratios])
    height = _ROOM + _ROW * len(networks)
    figure, axes = canvas(title, height, legend, settings, len(panels), columns=columns)
    for number, (panel, (kind, ratios)) in enumerate(zip(axes, panels.items(), strict=True)):
        name_rows(panel, [shortened(name, 20) if number % columns == 0 else "" for name in networks])
        _panel(panel, networks, ratios, looks)
        panel.set_title(kind, size=9)
        panel.set_xlabel("measured / requested", size=8)
    caption = (
        "Each mark is one quantity of one link, measured before or after a run, in the colour of its codec; repeated "
        "first attempts are omitted. Grey: exact to the probe's resolution; marks outside pass if they "
        "change the step time by less than 2 %. Unshaped links have no requested values."
    )
    if any(entry.cell.compute.dilation > 1 for entry in group.entries):
        caption += " The links are those of the lab, including dilation."
    return Drawing("links", title, caption, figure)

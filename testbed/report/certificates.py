"""Links as they were asked for against links as they were measured, from the certificates of all runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.table import Table
from rich.text import Text

from testbed.records import Certificate, Measurement
from testbed.report.canvas import Drawing, Handle, canvas, group_looks, shortened
from testbed.report.collect import Group
from testbed.report.numbers import MISSING
from testbed.report.style import INK, MUTED, PAPER, RULE, Look

_PANELS = {
    "rate and goodput": ("rate", "goodput"),
    "delay and round trip": ("delay", "rtt"),
    "messages after a pause": ("message",),
    "queue of a full buffer": ("queue",),
    "losses and bursts": ("loss", "burst"),
}
"""Title -> quantities."""
_MARKERS = {"up": "^", "down": "v", "both": "o"}
_ROW, _ROOM = 0.36, 0.25
"""Height of a network's row, and of what stands around the rows; inches."""


class LinkRatio(NamedTuple):
    """One quantity of one link, measured once."""

    network: str
    codec: str
    """Of the run."""
    quantity: str
    direction: str
    ratio: float
    """measured / asked"""
    tolerance: float
    """Of the ratio."""
    passed: bool


def _ratio(network: str, codec: str, one: Measurement) -> LinkRatio | None:
    """None where nothing was asked, or 0 was: there is no ratio then."""
    if not one.expected or one.measured is None:
        return None
    tolerance = (one.tolerance or 0.0) / one.expected
    return LinkRatio(
        network, codec, one.quantity, one.direction, one.measured / one.expected, tolerance, one.verdict == "PASS"
    )


def link_ratios(group: Group) -> Iterator[LinkRatio]:
    """Every measurement that something was asked of, in both certificates of every run."""
    for (network, codec), entry in group.cells.items():
        for result in entry.results:
            both = result.certificates
            for certificate in () if both is None else (both.before, both.after):
                for one in () if certificate is None else certificate.measurements:
                    if (point := _ratio(network, codec, one)) is not None:
                        yield point


def _panel(axes: Axes, networks: Sequence[str], found: Sequence[LinkRatio], looks: Mapping[str, Look]) -> None:
    axes.axvline(1.0, color=INK, lw=1.0, ls=(0, (2, 2)))
    for y, network in enumerate(networks):
        here = [point for point in found if point.network == network]
        # Quantities and sizes differ in what is accepted; the narrow bars lie on top.
        for width in sorted({round(point.tolerance, 4) for point in here}, reverse=True):
            axes.barh(y, 2 * width, 0.8, left=1 - width, color=RULE, alpha=0.5, lw=0)
        for number, point in enumerate(here):
            offset = 0.7 * ((number + 0.5) / len(here) - 0.5)
            colour = looks[point.codec].colour
            face = colour if point.passed else PAPER
            axes.plot(point.ratio, y + offset, _MARKERS[point.direction], color=colour, mfc=face, ms=3.2, mew=0.7)
        if not here:
            axes.annotate(
                "nothing asked", (1, y), xytext=(4, 0), textcoords="offset points", size=7, color=MUTED, va="center"
            )
    axes.set_ylim(len(networks) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    reach = 1.12 * max(max(abs(point.ratio - 1), point.tolerance) for point in found) or 0.01
    axes.set_xlim(1 - reach, 1 + reach)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def _legend(group: Group, found: Sequence[LinkRatio], looks: Mapping[str, Look]) -> list[Handle]:
    words = {"up": "up", "down": "down", "both": "both ways"}
    legend: list[Handle] = [Patch(facecolor=looks[codec].colour, label=codec) for codec in group.codecs]
    legend += [
        Line2D([], [], color=INK, ls="none", marker=_MARKERS[way], ms=4, label=word)
        for way, word in words.items()
        if any(point.direction == way for point in found)
    ]
    legend.append(Patch(facecolor=RULE, alpha=0.5, label="accepted"))
    if not all(point.passed for point in found):
        legend.append(Line2D([], [], color=MUTED, ls="none", marker="o", ms=4, mfc=PAPER, label="hollow: failed"))
    return legend


def asked_against_measured(group: Group, settings: str) -> Drawing | None:
    """A panel a kind of quantity, a row a shaped network; None where no certificate asked for anything."""
    every = list(link_ratios(group))
    chosen = {title: [one for one in every if one.quantity in quantities] for title, quantities in _PANELS.items()}
    panels = {title: found for title, found in chosen.items() if found}
    if not panels:
        return None
    known = {point.network for found in panels.values() for point in found}
    networks = [name for name in group.networks if name in known]
    looks = group_looks(group)
    legend = _legend(group, [point for found in panels.values() for point in found], looks)
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    title, left = "Links: asked against measured", 0.3 + 0.075 * min(20, max(map(len, networks)))
    height = _ROOM + _ROW * len(networks)
    figure, axes = canvas(title, height, legend, settings, len(panels), columns=columns, left=left, between=0.75)
    for number, (one, (kind, found)) in enumerate(zip(axes, panels.items(), strict=True)):
        _panel(one, networks, found, looks)
        one.set_title(kind, size=9)
        one.set_yticks(
            range(len(networks)), [shortened(name, 20) if number % columns == 0 else "" for name in networks]
        )
        one.set_xlabel("measured / asked", size=8)
    caption = (
        "Each mark is one quantity of one link, measured before or after a run of the codec whose colour it has; first attempts "
        "that were repeated are left out. Grey: what is accepted. Unshaped links ask for nothing."
    )
    if any(entry.cell.compute.dilation > 1 for entry in group.entries):
        caption += " The links are those of the lab, dilation included."
    return Drawing("links", title, caption, figure)


_SHOWN = {"bit/s": (1e-6, "Mbit/s"), "share": (100.0, "%")}
"""Unit of a record -> how it is shown."""


def measurement_cells(one: Measurement) -> tuple[str, str, str]:
    """(asked, measured, tolerance) with the unit; '-' where nothing was asked or found."""

    factor, unit = _SHOWN.get(one.unit, (1.0, one.unit))

    def text(value: float | None, digits: int) -> str:
        return MISSING if value is None else f"{value * factor:.{digits}g} {unit}"

    tolerance = text(one.tolerance, 2)
    return text(one.expected, 4), text(one.measured, 4), tolerance if tolerance == MISSING else f"±{tolerance}"


def certificate_table(certificate: Certificate) -> Table:
    """Asked against measured, one row a quantity, for the terminal; what must be known about them stands below."""
    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", caption_justify="left", caption_style=""
    )
    for title in ("link", "", "quantity", "asked", "measured", "tolerance", "n", "verdict"):
        numeric = title in ("asked", "measured", "tolerance", "n")
        # Only the quantity's detail gives way on a narrow terminal.
        table.add_column(title, justify="right" if numeric else "left", overflow="fold", no_wrap=title != "quantity")
    notes: dict[str, list[str]] = {}
    for one in certificate.measurements:
        verdict = Text(one.verdict, style="green" if one.verdict == "PASS" else "bold red")
        quantity = f"{one.quantity}, {one.detail}" if one.detail else one.quantity
        direction = "" if one.direction == "both" else one.direction
        table.add_row(one.link, direction, Text(quantity), *measurement_cells(one), str(one.samples), verdict)
        if one.note:
            notes.setdefault(one.note, []).append(
                " ".join(part for part in (one.link, direction, one.quantity) if part)
            )
    if notes:
        table.caption = Text("\n".join(f"{', '.join(dict.fromkeys(who))}: {note}" for note, who in notes.items()))
    return table


def certificate_summary(name: str, certificate: Certificate) -> str:
    """The verdict in a line, and why."""
    failed = [one for one in certificate.measurements if one.verdict == "FAIL"]
    measured = f"{len(certificate.measurements)} quantities in {certificate.seconds:.1f} s, {certificate.form} form"
    lines = [f"{name}: {certificate.verdict}, {measured}"]
    for one in failed:
        asked, found, tolerance = measurement_cells(one)
        lines.append(
            f"  {one.link} {one.direction} {one.quantity}: asked {asked} {tolerance}, found {found}: {one.note}"
        )
    if certificate.rejected:
        first = ", ".join(dict.fromkeys(f"{one.link} {one.direction} {one.quantity}" for one in certificate.rejected))
        lines.append(f"  measured twice; out of tolerance the first time: {first}")
    return "\n".join(lines)

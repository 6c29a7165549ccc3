"""Links asked for against links measured: a figure of all certificates of a sweep, and one certificate as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from rich.table import Table
from rich.text import Text

from testbed.records import BOUND, Certificate, Measurement, RunCertificates
from testbed.report.canvas import Drawing, Handle, canvas, group_looks, hover, name_rows, note, shortened
from testbed.report.collect import Group
from testbed.report.numbers import MISSING, percent
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
"""The height of a network's row, and of what stands around the rows, in inches."""


class LinkRatio(NamedTuple):
    """One quantity of one link, measured once."""

    network: str
    codec: str
    """The codec of the run."""
    quantity: str
    direction: str
    ratio: float
    """measured / asked"""
    tolerance: float
    """The largest difference of the ratio from 1 that the probe cannot tell from none."""
    passed: bool


def _ratio(network: str, codec: str, measurement: Measurement) -> LinkRatio | None:
    """Return the ratio of a measurement; None where nothing was asked, or 0."""
    if not measurement.expected or measurement.measured is None:
        return None
    ratio, tolerance = (value / measurement.expected for value in (measurement.measured, measurement.tolerance or 0.0))
    passed = measurement.verdict == "PASS"
    return LinkRatio(network, codec, measurement.quantity, measurement.direction, ratio, tolerance, passed)


def link_ratios(group: Group) -> Iterator[LinkRatio]:
    """Yield the ratio of every measurement with something asked, in both certificates of every run."""
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
        # Quantities and sizes differ in what is accepted; the narrow bars lie on top.
        for width in sorted({round(point.tolerance, 4) for point in here}, reverse=True):
            axes.barh(y, 2 * width, 0.8, left=1 - width, color=RULE, alpha=0.5, lw=0)
        for number, point in enumerate(here):
            offset = 0.7 * ((number + 0.5) / len(here) - 0.5)
            colour = looks[point.codec].colour
            face = colour if point.passed else PAPER
            marker, what = _MARKERS[point.direction], f"{point.quantity} {point.direction}"
            (mark,) = axes.plot(point.ratio, y + offset, marker, color=colour, mfc=face, ms=3.2, mew=0.7)
            hover(mark, f"{network}, {what}: measured / asked {point.ratio:.5f} ({point.codec})")
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
    legend.append(Patch(facecolor=RULE, alpha=0.5, label="exact, as far as the probe can tell"))
    if not all(point.passed for point in ratios):
        legend.append(Line2D([], [], color=MUTED, ls="none", marker="o", ms=4, mfc=PAPER, label="hollow: failed"))
    return legend


def _finding(ratios: Sequence[LinkRatio]) -> str:
    """Say how true the links were."""
    failed = [point for point in ratios if not point.passed]
    if failed:
        networks = ", ".join(shortened(name, 20) for name in dict.fromkeys(point.network for point in failed))
        return f"{len(failed)} of {len(ratios)} measured quantities of links are not what was asked ({networks})"
    furthest = max(ratios, key=lambda point: abs(point.ratio - 1))
    where, off = f"{furthest.quantity}, {shortened(furthest.network, 20)}", 100 * abs(furthest.ratio - 1)
    return f"Links are what was asked: the furthest of {len(ratios)} quantities is {off:.2g} % off ({where})"


def asked_against_measured(group: Group, settings: str) -> Drawing | None:
    """Draw one panel per kind of quantity, one row per shaped network; None where no certificate asked for anything."""
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
        panel.set_xlabel("measured / asked", size=8)
    caption = (
        "Each mark is one quantity of one link, measured before or after a run of the codec whose colour it has; first "
        "attempts that were repeated are left out. Grey: exact as far as the probe can tell; what lies outside passes "
        "if it moves the step by less than 2 %. Unshaped links ask for nothing."
    )
    if any(entry.cell.compute.dilation > 1 for entry in group.entries):
        caption += " The links are those of the lab, dilation included."
    return Drawing("links", title, caption, figure)


_SHOWN = {"bit/s": (1e-6, "Mbit/s"), "share": (100.0, "%")}
"""Unit of a record -> the factor and unit that are shown."""


def measurement_cells(measurement: Measurement) -> tuple[str, str]:
    """Return (asked, measured) with their unit; '-' where nothing was asked or measured."""
    factor, unit = _SHOWN.get(measurement.unit, (1.0, measurement.unit))

    def text(value: float | None, digits: int) -> str:
        return MISSING if value is None else f"{value * factor:.{digits}g} {unit}"

    return text(measurement.expected, 4), text(measurement.measured, 4)


def share_text(share: float | None) -> str:
    """Write a bound: '0.31 %', '< 0.01 %', '-'."""
    if share is None:
        return MISSING
    return "0 %" if share == 0 else "< 0.01 %" if share < 1e-4 else f"{share * 100:.2g} %"


def run_bound_words(certificates: RunCertificates) -> str:
    """Say in sentences what all that was found wrong does to a run's step; empty where nothing is known."""
    words, during = [], certificates.during
    if certificates.bound is not None:
        ends = [c.bound for c in (certificates.before, certificates.after) if c is not None and c.bound is not None]
        told = f"All that was found moves the step by at most {share_text(certificates.bound)}: deviations of the links"
        when = " before and ".join(map(share_text, ends)) + " after the run"
        words.append(f"{told} {when if len(ends) > 1 else f'{share_text(ends[0])}, on the virtual clock'}")
        if during is not None and during.bound is not None:
            words[-1] += f", lateness {share_text(during.bound)} while it lasted"
    if during is not None:
        what = "packets left the relay" if during.source == "relay" else "the sampler's sleeps ended"
        late = f"{during.mean_ms:.2f} ms late on average, {during.p99_ms:.1f} ms in the 99th percentile"
        words.append(f"Meanwhile {what} {late}; {share_text(during.stolen)} of the processors' time was stolen")
    return "".join(f"{sentence}. " for sentence in words).rstrip()


def certificate_table(certificate: Certificate) -> Table:
    """Make a table for the terminal: asked against measured, one row per quantity, with notes below."""
    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", caption_justify="left", caption_style=""
    )
    for title in ("link", "", "quantity", "asked", "measured", "moves a step", "n", "verdict"):
        numeric = title in ("asked", "measured", "moves a step", "n")
        # Only the quantity's detail gives way on a narrow terminal.
        table.add_column(title, justify="right" if numeric else "left", overflow="fold", no_wrap=title != "quantity")
    notes: dict[str, list[str]] = {}
    for measurement in certificate.measurements:
        verdict = Text(measurement.verdict, style="green" if measurement.verdict == "PASS" else "bold red")
        quantity = f"{measurement.quantity}, {measurement.detail}" if measurement.detail else measurement.quantity
        direction = "" if measurement.direction == "both" else measurement.direction
        table.add_row(
            measurement.link,
            direction,
            Text(quantity),
            *measurement_cells(measurement),
            share_text(measurement.bound),
            str(measurement.samples),
            verdict,
        )
        if measurement.note:
            notes.setdefault(measurement.note, []).append(
                " ".join(part for part in (measurement.link, direction, measurement.quantity) if part)
            )
    if notes:
        table.caption = Text("\n".join(f"{', '.join(dict.fromkeys(who))}: {note}" for note, who in notes.items()))
    return table


def _furthest(certificate: Certificate) -> float | None:
    """Return the largest deviation of a certificate, as a share of what was expected."""
    shares = [abs(m.measured / m.expected - 1) for m in certificate.measurements if m.expected and m.measured]
    return max(shares, default=None)


def certificate_summary(name: str, certificate: Certificate) -> str:
    """Say the verdict in a line, and why."""
    failed = [measurement for measurement in certificate.measurements if measurement.verdict == "FAIL"]
    amount = f"{len(certificate.measurements)} quantities in {certificate.seconds:.1f} s, {certificate.form} form"
    if certificate.clock == "virtual":
        amount = f"{len(certificate.measurements)} quantities on the virtual clock, taken at {certificate.taken_at}"
    lines = [f"{name}: {certificate.verdict}, {amount}"]
    lines += [f"  by construction, {words}" for words in certificate.by_construction]
    if certificate.clock == "virtual" and (worst := _furthest(certificate)) is not None:
        lines.append(f"  furthest from the ideal: {percent(worst, '{:.3f}')}")
    if certificate.step:
        if certificate.bound is None:
            lines.append("  there is no bound: something could not be measured")
        else:
            within = "within" if certificate.bound <= BOUND else "more than"
            moved, most = share_text(certificate.bound), share_text(BOUND)
            lines.append(f"  what all deviations together move a step by, at most: {moved} ({within} {most})")
            lines.append(f"  the step: {certificate.step}")
    for measurement in failed:
        asked, measured = measurement_cells(measurement)
        lines.append(
            f"  {measurement.link} {measurement.direction} {measurement.quantity}: asked {asked}, measured {measured}: "
            f"{measurement.note}"
        )
    if certificate.rejected:
        first = ", ".join(dict.fromkeys(f"{one.link} {one.direction} {one.quantity}" for one in certificate.rejected))
        lines.append(f"  measured twice; in the worse attempt failed: {first}")
    return "\n".join(lines)

"""The layout of every figure: the finding and the legend on top, panels in a grid, a line or two of small print below.

Matplotlib's constrained layout reserves space for labels and titles, so that nothing collides.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple
from xml.sax.saxutils import escape

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from testbed import paths, units
from testbed.errors import ResultsError
from testbed.report import style
from testbed.report.collect import Group, Links
from testbed.report.remarks import CONTROL, labelled, remark
from testbed.report.style import INK, MUTED, PAPER, Look, looks

Handle = Line2D | Patch
WIDTH = 10.0
_LEGEND_CHARACTERS = 125
"""Number of legend characters that fit above the panels."""
_FINDING_CHARACTERS = 100
_FOOT_CHARACTERS = 160
"""Number of characters of the finding, and of the small print, that fit on a line."""
_PANEL_CHARACTERS = 156
"""Number of small characters that fit above all panels of a row."""
_TITLE_CHARACTERS = 114
"""Number of title characters that fit above all panels of a row."""
_FINDING_LINE, _LEGEND_LINE, _FOOT_LINE = 0.24, 0.22, 0.14
"""Heights of lines, in inches."""
_ROW_EXTRA = 0.78
"""Height of a panel's title, ticks and axis label, in inches."""
_APART = 8
"""Largest ratio of the panels' time ranges for which they share a time axis."""
HOLLOW_DASH = (0, (3, 2))
_HOVER = "hover: "
_HOVERED = re.compile(rb'<g id="hover: ([^"]*)">')
_NO_DATE: Any = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


class Drawing(NamedTuple):
    """A figure with its title and caption."""

    name: str
    """The stem of its files."""
    title: str
    """Its finding, in a sentence."""
    caption: str
    """How to read it."""
    figure: Figure


def group_looks(group: Group) -> dict[str, Look]:
    """Return the look of each of the group's codecs, in their order."""
    every = looks(group.palette)
    return {codec: every[codec] for codec in group.codecs}


def hollow_words(group: Group) -> str:
    """Return the legend text that explains hollow marks; empty if there are none."""
    finished = [entry for entry in group.entries if entry.ok]
    doubts = {entry.doubt for entry in finished}
    reasons = [doubt for doubt in ("not certified", "overruns", "contended") if doubt in doubts]
    return f"hollow: {', '.join(reasons)}" if reasons else ""


def hollow_patches(group: Group) -> list[Handle]:
    """Return the legend entries for hollow bars, and for negative controls."""
    words = hollow_words(group)
    patches: list[Handle] = [Patch(facecolor="none", edgecolor=INK, ls=HOLLOW_DASH, label=words)] if words else []
    if controls := [codec for codec in group.codecs if remark(codec) == CONTROL]:
        patches.append(Line2D([], [], ls="none", label=f"{CONTROL}: {', '.join(controls)}"))
    return patches


def codec_legend(group: Group) -> list[Handle]:
    """Return a line and marker for each codec."""
    handles: list[Handle] = [
        Line2D([], [], color=look.colour, ls=look.dash, marker=look.marker, label=labelled(codec))
        for codec, look in group_looks(group).items()
    ]
    if words := hollow_words(group):
        handles.append(Line2D([], [], color=MUTED, ls="none", marker="o", mfc=PAPER, label=words))
    return handles


def link_words(links: Links) -> str:
    """Describe links: '↑80 Mbit/s ↓80 Mbit/s, RTT 20 ms', or '↑9 to 80 Mbit/s …' if they differ."""
    if not any(link.shaped for link in links):
        return "unshaped"
    up = _span([link.up.rate_bps if link.up else None for link in links], units.format_rate)
    down = _span([link.down.rate_bps if link.down else None for link in links], units.format_rate)
    pipes = [[pipe for pipe in (link.up, link.down) if pipe] for link in links]
    round_trips = [sum(pipe.delay_ns for pipe in pair) for pair in pipes if pair]
    words = f"↑{up} ↓{down}, RTT {_span(round_trips, units.format_time)}"
    loss = max(pipe.mean_loss for pair in pipes for pipe in pair)
    words += f", loss {'up to ' if len(links) > 1 else ''}{100 * loss:.2g} %" if loss else ""
    return words + (", varying" if any(link.varies for link in links) else "")


def _span(values: Sequence[int | None], text: Callable[[int], str]) -> str:
    """Format a range from minimum to maximum, with a common unit once; None is unshaped."""
    known = sorted({value for value in values if value is not None})
    shown = [text(value) for value in dict.fromkeys((*known[:1], *known[-1:]))]
    if len(shown) == 2 and shown[0].split()[-1] == shown[1].split()[-1]:
        shown[0] = shown[0].split()[0]
    return " or ".join([" to ".join(shown)] * bool(shown) + ["unshaped"] * (None in values))


def columns_for(panels: int) -> int:
    """Return the number of panels per row: at most three, but four panels as two by two."""
    return 2 if panels == 4 else min(panels, 3)


def shortened(name: str, characters: int) -> str:
    """Shorten a network's name to a number of characters: 'cable+lte+…+cable'."""
    parts = name.split("+")
    while len(name) > characters and len(parts) > 2:
        del parts[len(parts) // 2]
        name = "+".join([*parts[: len(parts) // 2], "…", *parts[len(parts) // 2 :]])
    return name


def canvas(
    title: str, panel_height: float, legend: Sequence[Handle], foot: str, panels: int, *, columns: int, extra: float = 0
) -> tuple[Figure, list[Axes]]:
    """Make a figure with empty panels, row by row.

    `title` is the finding, `foot` the small print. `panel_height` is the approximate height of a panel's axes, in
    inches; `extra` is the height of unusual content above or below each.
    """
    rows = math.ceil(panels / columns)
    finding = textwrap.wrap(title, _FINDING_CHARACTERS)
    small = [line for text in foot.splitlines() for line in textwrap.wrap(text, _FOOT_CHARACTERS)]
    per_line = _legend_columns([len(str(handle.get_label())) + 7 for handle in legend])
    head = 0.13 + _FINDING_LINE * len(finding)
    top = head + 0.06 + _LEGEND_LINE * math.ceil(len(legend) / max(1, per_line))
    bottom = 0.12 + _FOOT_LINE * len(small)
    height = top + bottom + rows * (panel_height + _ROW_EXTRA + extra)
    figure = Figure(figsize=(WIDTH, height))
    figure.set_layout_engine(
        "constrained", rect=(0, bottom / height, 1, 1 - (top + bottom) / height), w_pad=0.09, h_pad=0.06
    )
    above: Any = {"size": 12, "weight": "bold", "va": "top", "linespacing": 1.25}
    below: Any = {"size": 7.2, "color": MUTED, "va": "bottom", "linespacing": 1.35}
    for y, lines, how in ((1 - 0.1 / height, finding, above), (0.09 / height, small, below)):
        figure.text(0.12 / WIDTH, y, "\n".join(lines), **how).set_in_layout(False)
    if legend:
        figure.legend(
            handles=list(legend), ncols=per_line, loc="upper left", bbox_to_anchor=(0.08 / WIDTH, 1 - head / height),
            columnspacing=1.6, handlelength=2.6, borderaxespad=0.0,
        ).set_in_layout(False)  # fmt: skip
    grid = figure.add_gridspec(rows, columns)
    return figure, [figure.add_subplot(grid[i // columns, i % columns]) for i in range(panels)]


def _legend_columns(widths: Sequence[int]) -> int:
    """Return the number of legend columns that fit; entries fill the columns one after the other."""
    for columns in range(len(widths), 1, -1):
        long, short = divmod(len(widths), columns)
        sizes = [long + 1] * short + [long] * (columns - short)
        ends = list(itertools.accumulate(sizes))
        if sum(max(widths[end - size : end]) for size, end in zip(sizes, ends, strict=True)) <= _LEGEND_CHARACTERS:
            return columns
    return 1


def _wrapped(words: str, characters: int) -> list[str]:
    """Wrap words into lines that never separate a number from its unit."""
    return textwrap.wrap(re.sub(r"(\d) (\D)", "\\1\u00a0\\2", words), characters)


def network_panels(
    group: Group, title: str, panel_height: float, legend: Sequence[Handle], foot: str
) -> tuple[Figure, dict[str, Axes]]:
    """Make one panel per network, with its name and numbers above it."""
    names = list(group.networks)
    columns = columns_for(len(names))
    words = [_wrapped(link_words(group.networks[name]), _PANEL_CHARACTERS // columns) for name in names]
    more = max(map(len, words)) - 1
    figure, axes = canvas(title, panel_height, legend, foot, len(names), columns=columns, extra=0.14 * (more + 1))
    for name, lines, panel in zip(names, words, axes, strict=True):
        panel.set_title(shortened(name, _TITLE_CHARACTERS // columns), pad=18 + 10 * more)
        small_print(panel, "\n".join(lines), 5)
    return figure, dict(zip(names, axes, strict=True))


def note(axes: Axes, words: str, at: tuple[float, float], offset: tuple[float, float], **how: Any) -> None:
    """Write text next to a position in a panel; `offset` is in points of the page."""
    axes.annotate(words, at, xytext=offset, textcoords="offset points", **how)


def small_print(axes: Axes, words: str, above: float) -> None:
    """Write a panel's numbers `above` points above it."""
    note(axes, words, (0, 1), (0, above), xycoords="axes fraction", size=7.8, color=MUTED)


def name_rows(axes: Axes, names: Sequence[str], every: int = 1) -> None:
    """Divide a panel into rows from top to bottom, and label each, or every `every`-th."""
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_yticks(range(0, len(names), every), names[::every])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def share_axis(lengths: Mapping[str, float]) -> tuple[dict[str, float], bool]:
    """Return the length of each panel's axis, and whether they are equal: all have the maximum, unless a panel would
    then be unreadable.
    """
    most, least = max(lengths.values()), min((each for each in lengths.values() if each), default=0.0)
    shared = most <= _APART * least
    return {name: most if shared else length for name, length in lengths.items()}, shared


def hover(artist: Artist, words: str) -> None:
    """Attach a tooltip to a mark; an SVG shows it when the pointer rests on the mark."""
    artist.set_gid(_HOVER + words)


def render_figure(figure: Figure, kind: Literal["png", "svg"], paper: str) -> bytes:
    """Render a figure on paper of that colour. The same figure gives the same bytes."""
    target = io.BytesIO()
    figure.savefig(target, format=kind, facecolor=paper, metadata=_NO_DATE[kind])
    content = target.getvalue()
    return content if kind == "png" else re.sub(_HOVERED, rb'<g class="mark"><title>\1</title>', content)


def save_drawing(drawing: Drawing, folder: Path, stem: str) -> str:
    """Write STEM.png and STEM.svg into an existing folder; return the SVG. The same figure gives the same bytes."""
    with style.applied():
        if (engine := drawing.figure.get_layout_engine()) is not None:  # once: it takes a third of the drawing time
            engine.execute(drawing.figure)
            drawing.figure.set_layout_engine("none")
        beside = os.fork()  # in parallel: each takes a third of a second
        if beside == 0:
            status = 1
            try:
                _write(folder / f"{stem}.png", render_figure(drawing.figure, "png", style.PAPER))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        try:
            svg = render_figure(drawing.figure, "svg", "none")
        finally:
            _, status = os.waitpid(beside, 0)
    if status:
        raise ResultsError(f"cannot draw {folder / stem}.png: see above")
    _write(folder / f"{stem}.svg", svg)
    return svg.decode()


def _write(path: Path, content: bytes) -> None:
    with os.fdopen(paths.create(path), "wb") as file:
        file.write(content)
    paths.give_to_user(path)


def inline_svg(svg: str, prefix: str, title: str) -> str:
    """Convert an SVG file to an element of a page, without prologue, with unique ids, and with colours that follow a
    dark page.

    Ink becomes the colour of the page's text; paper and rules become the page's custom properties.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<(metadata|style)[^>]*>.*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'((?:xlink:)?href=")#', rf"\1#{prefix}-", body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    names = {INK: "currentColor", PAPER: "var(--paper)", style.RULE: "var(--rule)", MUTED: "var(--muted)"}
    for colour, name in names.items():
        body = body.replace(colour, name)
    for size in ("width", "height"):
        body = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", body, count=1)
    return body.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)

"""Draws the links' traffic during a run of programs in the nodes of a lab."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from testbed.exec.order import COUNTERS, ExecResult
from testbed.records import Sample
from testbed.report.canvas import Drawing, inline_svg, save_drawing
from testbed.report.style import looks
from testbed.report.utilisation import draw_busiest, fullest, series_of
from testbed.results import read_lines

_FIGURE = "utilisation"


def draw(folder: Path, result: ExecResult) -> tuple[Markup | None, str]:
    """Save the figure, and return it as SVG with its caption; None with fewer than two samples, or without traffic."""
    samples = list(read_lines(folder / COUNTERS, Sample))
    every = series_of(samples, result.lab, result.order.links)
    if not any(one.carried_bps.any() for one in every):
        return None, ""
    title = f"Traffic of the links: {fullest(every)}"
    foot = f"clock {result.order.clock}, engine {result.lab.engine}; IP packets with their headers"
    figure, _ = draw_busiest(every, title, foot, looks(["exec"])["exec"], began="the programs")
    caption = (
        "IP packets, including acknowledgements. Dashed: the profile's rate, where it is less than five times the "
        "traffic. Marks: dropped packets."
    )
    if (figures := folder / "figures").is_symlink():  # a program's, which root would follow
        figures.unlink()
    figures.mkdir(exist_ok=True)
    svg = save_drawing(Drawing(_FIGURE, title, caption, figure), figures, _FIGURE)
    return Markup(inline_svg(svg, _FIGURE, title)), caption

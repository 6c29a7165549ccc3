"""Every figure of a report: drawn, written as PNG and SVG, and prepared to stand inside a page."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

from matplotlib.figure import Figure

from testbed import paths
from testbed.report import gantt, style
from testbed.report.asked import asked_against_measured
from testbed.report.bars import bytes_per_step, efficiency, step_time
from testbed.report.canvas import Drawing
from testbed.report.collect import Group
from testbed.report.lines import loss_against_steps, loss_against_time
from testbed.report.utilisation import utilisation

_NO_DATE: Any = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}


def draw(group: Group, settings: str, *, same_maths: bool) -> list[Drawing]:
    """All figures of a group, in the order in which they are read.

    `settings` stands below each picture. `same_maths`: each codec's losses are the same over every network.
    """
    with style.applied():
        links = asked_against_measured(group, settings)
        return [
            step_time(group, settings),
            loss_against_time(group, settings),
            loss_against_steps(group, settings, same_maths=same_maths),
            bytes_per_step(group, settings),
            efficiency(group, settings),
            *gantt.usual(group, settings),
            *utilisation(group, settings),
            *([] if links is None else [links]),
        ]


def render(figure: Figure, kind: Literal["png", "svg"], paper: str) -> bytes:
    """A picture on paper of that colour. The same figure gives the same bytes."""
    target = io.BytesIO()
    figure.savefig(target, format=kind, facecolor=paper, metadata=_NO_DATE[kind])
    return target.getvalue()


def save(drawing: Drawing, folder: Path, stem: str) -> str:
    """Write STEM.png and STEM.svg into an existing folder; returns the SVG. The same figure gives the same bytes."""
    with style.applied():
        pictures = {"png": render(drawing.figure, "png", style.PAPER), "svg": render(drawing.figure, "svg", "none")}
    for kind, content in pictures.items():
        path = folder / f"{stem}.{kind}"
        path.write_bytes(content)
        paths.give_to_user(path)
    return pictures["svg"].decode()


def inline(svg: str, prefix: str, title: str) -> str:
    """An SVG file as an element of a page: no prologue, ids of its own, and colours that follow a dark page.

    Ink becomes the colour of the page's text; paper and rules become the page's custom properties.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'((?:xlink:)?href=")#', rf"\1#{prefix}-", body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    for colour, name in (
        (style.INK, "currentColor"),
        (style.PAPER, "var(--paper)"),
        (style.RULE, "var(--rule)"),
        (style.MUTED, "var(--muted)"),
    ):
        body = body.replace(colour, name)
    body = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)
    return body.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)

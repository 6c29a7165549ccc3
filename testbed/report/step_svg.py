"""Draws one step of a run as a small SVG for its cell's page, fast enough for sweeps with hundreds of cells.

The page's style sheet (html/style.css) sets the colours, by the class of each bar.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

from matplotlib.ticker import MaxNLocator

from testbed.metrics import PipelineStep
from testbed.report.gantt import Bar, bars, row_names
from testbed.spec import Cell

_WIDTH, _LEFT, _ROW, _FOOT = 960, 70, 24, 34
"""Sizes in units of the picture, which are pixels on a wide screen."""
_DIGIT = 7


def step_svg(step: PipelineStep, cell: Cell, faults: Iterable[tuple[int, int, str]] = ()) -> str:
    """Draw a step as an SVG element: the actions of each node, and below them the frames between stages; `faults`:
    begin, end and words of each, drawn behind them.
    """
    stages, dilation = len(step.records), cell.compute.dilation
    names, every = row_names(cell), list(bars(step, cell))
    first = min([step.begin_ns, *(bar.begin_ns for bar in every)])
    scale = (_WIDTH - _LEFT - 2) / (step.end_ns - first)

    def x(moment_ns: float) -> float:
        return _LEFT + scale * (min(max(moment_ns, first), step.end_ns) - first)

    height = _ROW * len(names)
    drawn = [
        f'<g><title>{escape(words)}</title><rect class="fault" x="{x(begin_ns):.1f}" y="0" '
        f'width="{x(end_ns) - x(begin_ns):.1f}" height="{height}"/></g>'
        for begin_ns, end_ns, words in faults
        if x(end_ns) > x(begin_ns)
    ]
    unit_ns = 1e6 * dilation
    for tick in MaxNLocator(10).tick_values((first - step.begin_ns) / unit_ns, (step.end_ns - step.begin_ns) / unit_ns):
        at = step.begin_ns + tick * unit_ns
        if first <= at <= step.end_ns:
            drawn.append(f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="0" y2="{height}"/>')
            drawn.append(f'<text x="{x(at):.1f}" y="{height + 14}" text-anchor="middle">{tick:g}</text>')
    drawn.append(f'<line x1="0" x2="{_WIDTH}" y1="{_ROW * stages}" y2="{_ROW * stages}"/>')
    drawn += [f'<text x="0" y="{_ROW * (row + 0.5) + 4:.0f}">{name}</text>' for row, name in enumerate(names)]
    drawn += [text for bar in every for text in _drawn(bar, x(bar.begin_ns), x(bar.end_ns))]
    foot = f'<text x="{_WIDTH / 2:.0f}" y="{height + 30}" text-anchor="middle">time since the step began, ms</text>'
    return (
        f'<svg class="gantt" role="img" aria-label="One step, stage by stage" viewBox="0 0 {_WIDTH} {height + _FOOT}">'
        f"{''.join(drawn)}{foot}</svg>"
    )


def _drawn(bar: Bar, left: float, right: float) -> list[str]:
    width, y = max(right - left, 0.3), _ROW * (bar.row + 0.5)
    high = max(_ROW * bar.height, 1.0)
    kind = "wait" if bar.kind == "queued" else bar.kind
    shape = f'class="{kind}" x="{left:.1f}" y="{y - high / 2:.1f}" width="{width:.1f}" height="{high:.1f}"'
    drawn = [f'<g class="mark"><title>{escape(bar.words)}</title><rect {shape}/></g>']
    if bar.number and high > 12 and width > _DIGIT * len(bar.number) + 3:
        where = f'x="{left + width / 2:.1f}" y="{y + 4:.1f}"'
        drawn.append(f'<text class="on" {where} text-anchor="middle">{bar.number}</text>')
    return drawn

"""Draws steps of a trace as a Gantt chart: each lane's work and waits, and the messages in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from testbed import units
from testbed.report import style
from testbed.report.canvas import Drawing, Handle, canvas, name_rows
from testbed.report.style import INK, MUTED, PAPER
from testbed.trace.format import RECEIVE, SEND, WAIT, WORK, Trace
from testbed.trace.played import PlayedLane

_COLOURS = ("#0072b2", "#d55e00", "#009e73", *style.OTHERS, "#5b6770")
_MOST_MESSAGES = 300
"""Maximum number of message lines; more would hide the chart, so then none are drawn."""
_TALLEST, _ROW = 9.0, 0.34
"""Maximum height of all rows, and preferred height of a row, in inches."""
_BAR = 0.72
"""Height of a bar, as a share of its row."""
_MOST_NAMES = 60
"""Maximum number of row names."""

_Point = tuple[float, float]
"""Milliseconds since the first drawn step began, and the row."""


@dataclass
class _Shapes:
    """The shapes of the drawn steps."""

    span_ns: int = 0
    work: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """By label and row: begin and length in ms."""
    waits: list[tuple[_Point, _Point]] = field(default_factory=list)
    messages: list[tuple[_Point, _Point]] = field(default_factory=list)
    """From the first byte's departure to the last byte's arrival, without messages that cross a step boundary."""


def _shapes(trace: Trace, lanes: Sequence[PlayedLane], first: int, last: int) -> _Shapes:
    spans = [(lane.starts[first], lane.starts[last]) for lane in trace.lanes]
    begins = [played.begin_ns[begin] for played, (begin, end) in zip(lanes, spans, strict=True) if end > begin]
    ends = [played.end_ns[end - 1] for played, (begin, end) in zip(lanes, spans, strict=True) if end > begin]
    zero = min(begins, default=0)
    shapes = _Shapes(span_ns=max(ends, default=0) - zero)
    departures: dict[tuple[int, int, int], _Point] = {}
    arrivals: dict[tuple[int, int, int], _Point] = {}
    for row, (lane, played, span) in enumerate(zip(trace.lanes, lanes, spans, strict=True)):
        for at in range(*span):
            kind, begin, end = lane.kind[at], (played.begin_ns[at] - zero) / 1e6, (played.end_ns[at] - zero) / 1e6
            if kind == WORK:
                shapes.work[lane.label[at], row].append((begin, end - begin))
            elif kind in (RECEIVE, WAIT) and end > begin:
                shapes.waits.append(((begin, row), (end, row)))
            if kind == SEND:
                departures[lane.node, lane.peer[at], lane.tag[at]] = ((played.first_byte_ns[at] - zero) / 1e6, row)
            elif kind == RECEIVE:
                arrivals[lane.peer[at], lane.node, lane.tag[at]] = ((played.last_byte_ns[at] - zero) / 1e6, row)
    shapes.messages = [(departures[key], arrivals[key]) for key in departures if key in arrivals]
    return shapes


def trace_chart(trace: Trace, lanes: Sequence[PlayedLane], first: int, last: int, how: str, settings: str) -> Drawing:
    """Draw steps `first` to `last` (exclusive), as they were played.

    `how` ends the title ("if messages take no time", "over cable"); `settings` is the text below the chart.
    """
    shapes = _shapes(trace, lanes, first, last)
    labels = sorted({label for label, _ in shapes.work})
    colours = {label: _COLOURS[place % len(_COLOURS)] for place, label in enumerate(labels)}
    few = 0 < len(shapes.messages) <= _MOST_MESSAGES
    legend: list[Handle] = [Patch(facecolor=colours[label], label=trace.labels[label]) for label in labels]
    legend += [Line2D([], [], color=MUTED, lw=2, label="waits")] * bool(shapes.waits)
    legend += [Line2D([], [], color=INK, lw=0.8, marker=".", ms=5, label="message, and its arrival")] * few
    steps = f"Step {first} takes" if last == first + 1 else f"Steps {first} to {last - 1} take"
    title = f"{steps} {units.format_time(shapes.span_ns)} {how}"
    names = _row_names(trace)
    height = min(_ROW, _TALLEST / len(names))
    figure, (axes,) = canvas(title, 0.1 + height * len(names), legend, settings, 1, columns=1)
    thickness = 72 * height * _BAR
    axes.add_collection(LineCollection(shapes.waits, colors=MUTED, linewidths=thickness / 6))
    for (label, row), bars in shapes.work.items():
        edge = min(0.6, thickness / 20)
        axes.broken_barh(bars, (row - _BAR / 2, _BAR), facecolors=colours[label], edgecolors=PAPER, linewidths=edge)
    if few:
        axes.add_collection(LineCollection(shapes.messages, colors=INK, linewidths=0.8, zorder=3))
        axes.plot(*zip(*(end for _, end in shapes.messages), strict=True), ".", color=INK, ms=5)
    axes.set_xlim(0, max(shapes.span_ns / 1e6, 1e-6))
    name_rows(axes, names, every=-(-len(names) // _MOST_NAMES))
    axes.set_xlabel("time since the step began, ms")
    axes.xaxis.set_major_locator(MaxNLocator(10))
    hidden = f" {len(shapes.messages):,} messages are not drawn." if shapes.messages and not few else ""
    return Drawing("trace", title, f"Rows are lanes, colours are labels of work.{hidden}", figure)


def _row_names(trace: Trace) -> list[str]:
    """Name each lane by its node, and by its own name if the node has several."""
    owners = [lane.node for lane in trace.lanes]
    return [
        trace.nodes[lane.node] + (f", {lane.name}" if owners.count(lane.node) > 1 else "") for lane in trace.lanes
    ] or [""]

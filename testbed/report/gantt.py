"""Draws one step of a run as a Gantt chart: the actions of each stage, and the frames in flight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from testbed.errors import ResultsError
from testbed.metrics import PipelineStep, align, steady
from testbed.metrics.spans import Activity, flights, spans
from testbed.report.canvas import Drawing, Handle, canvas, group_looks, hover, name_rows, shortened
from testbed.report.collect import BASELINE, Group
from testbed.report.entry import Result
from testbed.report.numbers import seconds
from testbed.report.style import INK, MUTED, PAPER, Look
from testbed.spec import Cell

_ROW = 0.36
"""Height of a row, in inches."""
_KINDS: dict[Activity, str] = {
    "forward": "forward",
    "backward": "backward",
    "local": "local step",
    "encode": "encode, decode",
    "update": "update",
    "wire": "waits: input in flight",
    "wait": "waits for another stage",
}
"""Legend text of each kind of bar."""
_DIGIT = 0.075
"""Width of a digit on a bar, in inches."""
_LANES = 4
"""Maximum number of frames of one boundary drawn below each other; further ones overlap."""
_MOST_NUMBERED = 2
"""Maximum number of lanes in a row that are high enough for a number."""
_AXES = 8.6
"""Width of the time axis, in inches."""


def _mixed(colour: str, other: str, share: float) -> str:
    red, green, blue = ((1 - share) * a + share * b for a, b in zip(to_rgb(colour), to_rgb(other), strict=True))
    return to_hex((red, green, blue))


def _fills(look: Look) -> dict[Activity, str]:
    """Return shades of the codec's colour for forward and backward, ink for the codec's work, pale for waiting."""
    return {
        "forward": _mixed(look.colour, PAPER, 0.35),
        "backward": _mixed(look.colour, INK, 0.25),
        "local": _mixed(look.colour, INK, 0.25),
        "encode": INK,
        "decode": INK,
        "update": MUTED,
        "wire": _mixed(look.colour, PAPER, 0.78),
        "wait": MUTED,
        "synchronise": MUTED,
    }


class Bar(NamedTuple):
    """A time span in the row of a stage, or of the frames from one stage to another."""

    row: float
    """Nodes from 0; then a pipeline's boundaries, the first stage's first, each in both directions. Simultaneous frames
    lie below each other in their row."""
    height: float
    """As a share of a row; 0 for a line."""
    begin_ns: int
    end_ns: int
    kind: Activity | Literal["queued"]
    """Activity; for a frame its direction, or 'queued' while it waited for the previous frame."""
    number: str
    """Its micro-batch, if it fits; otherwise empty."""
    words: str
    """Description with duration."""


def step_kinds(cell: Cell) -> list[tuple[Activity, str]]:
    """Return the kinds of bars in a cell's steps, with their legend texts."""
    others = {"forward", "backward", "local"} - set(cell.parallelism.computes)
    return [(kind, label) for kind, label in _KINDS.items() if kind not in others]


def row_names(cell: Cell) -> list[str]:
    """Name the rows of a step's bars."""
    return [*cell.node_names, *(f"{a} to {b}" for a, b in _boundaries(cell))]


def _boundaries(cell: Cell) -> list[tuple[int, int]]:
    """Return the boundaries that frames of a pipeline cross. Workers' messages overlap, so they have no rows."""
    lefts = range(cell.pipeline.stages - 1)
    return [pair for left in lefts for pair in ((left, left + 1), (left + 1, left))]


def bars(step: PipelineStep, cell: Cell) -> Iterator[Bar]:
    """Yield the actions of each node in a step, and the frames in flight; bars have lab times, texts emulated times."""
    dilation = cell.compute.dilation

    def said(what: str, begin_ns: int, end_ns: int) -> str:
        lasted, after = (value / 1e9 / dilation for value in (end_ns - begin_ns, begin_ns - step.begin_ns))
        return f"{what}: {seconds(lasted)}, {1e3 * after:.1f} ms after the step began"

    stages = len(step.records)
    for stage, record in enumerate(step.records):
        for span in spans(record):
            computes = span.activity in ("forward", "backward")
            of = "" if span.microbatch is None else f" of {cell.parallelism.counts} {span.microbatch}"
            words = said(f"{cell.node_names[stage]}, {span.activity}{of}", span.begin_ns, span.end_ns)
            height = 0.12 if span.activity in ("wait", "synchronise") else 0.66
            number = str(span.microbatch) if computes else ""
            yield Bar(stage, height, span.begin_ns, span.end_ns, span.activity, number, words)
    every = list(flights(step.records))
    for row, pair in enumerate(_boundaries(cell), start=stages):
        here = sorted((f for f in every if (f.sender, f.receiver) == pair), key=lambda f: f.sent.first_byte_ns)
        lanes = _lanes([(flight.sent.first_byte_ns, flight.end_ns) for flight in here])
        used = max(lanes, default=0) + 1
        for flight, lane in zip(here, lanes, strict=True):
            y, sent = row + 0.72 * ((lane + 0.5) / used - 0.5), flight.sent
            name = f"{pair[0]} to {pair[1]}, {flight.direction} of micro-batch {sent.microbatch}, {sent.frame_bytes} B"
            if sent.first_byte_ns > sent.queued_ns:
                words = said(f"{name}, waiting for the previous frame", sent.queued_ns, sent.first_byte_ns)
                yield Bar(y, 0.0, sent.queued_ns, sent.first_byte_ns, "queued", "", words)
            number = str(sent.microbatch) if used <= _MOST_NUMBERED else ""
            words = said(name, sent.first_byte_ns, flight.end_ns)
            yield Bar(y, 0.66 / used, sent.first_byte_ns, flight.end_ns, flight.direction, number, words)


def median_step(steps: Sequence[PipelineStep]) -> PipelineStep | None:
    """Return the measured step whose duration is nearest to the median; None if there is none."""
    chosen = steady(steps)
    if not chosen:
        return None
    middle = float(np.median([step.seconds for step in chosen]))
    return min(chosen, key=lambda step: abs(step.seconds - middle))


def _lanes(times: Sequence[tuple[float, float]]) -> list[int]:
    """Assign each (begin, end), ordered by begin, to the first free lane, or to the last one if none is free."""
    free = [float("-inf")] * _LANES
    chosen = []
    for begin, end in times:
        lane = next((number for number, until in enumerate(free) if until <= begin), _LANES - 1)
        free[lane] = max(free[lane], end)
        chosen.append(lane)
    return chosen


def _draw_bar(axes: Axes, bar: Bar, begin: float, end: float, colour: str, **how: Any) -> None:
    """Draw a bar, with its number if it fits."""
    corner = begin, bar.row - bar.height / 2
    drawn = Rectangle(corner, end - begin, bar.height, facecolor=colour, **{"lw": 0, **how})
    axes.add_artist(drawn)  # barh would find the panel's limits, which are stated, anew for each bar
    hover(drawn, bar.words)
    left, right = axes.get_xlim()
    if bar.number and (end - begin) * (_AXES / (right - left)) > _DIGIT * len(bar.number) + 0.03:
        ink = INK if sum(to_rgb(colour)) > 1.7 else PAPER
        where = ((begin + end) / 2, bar.row)
        axes.text(*where, bar.number, ha="center", va="center_baseline", size=6.5, color=ink)


def gantt(result: Result, look: Look, settings: str, name: str) -> Drawing:
    """Draw the measured step whose duration is nearest to the median.

    ResultsError if the run has no measured step.
    """
    cell, stages = result.cell, result.cell.nodes
    step = median_step(align(result.records))
    if step is None:
        raise ResultsError(f"{result.run.folder} has no measured step to draw")
    fills = _fills(look)
    *filled, (wait, waits) = step_kinds(cell)
    legend: list[Handle] = [Patch(facecolor=fills[kind], label=label) for kind, label in filled]
    legend.append(Line2D([], [], color=fills[wait], lw=3, label=waits))
    title = f"{cell.codec} over {shortened(cell.network, 40)}: {_finding(result, step)}"
    inches = 0.1 + _ROW * len(row_names(cell))
    figure, (axes,) = canvas(title, inches, legend, settings, 1, columns=1)

    def at(moment_ns: int) -> float:
        return (moment_ns - step.begin_ns) / (1e6 * cell.compute.dilation)

    axes.set_xlim(min(0.0, at(min(record.start_ns for record in step.records))), at(step.end_ns))
    for bar in bars(step, cell):
        begin, end = at(bar.begin_ns), at(bar.end_ns)
        if bar.kind == "queued":
            axes.plot([begin, end], [bar.row, bar.row], color=MUTED, lw=0.8, solid_capstyle="butt")
        else:
            edge = {"lw": 0.6, "edgecolor": PAPER} if bar.row > stages - 0.5 else {}
            _draw_bar(axes, bar, begin, end, fills[bar.kind], **edge)
    name_rows(axes, row_names(cell))
    axes.axhline(stages - 0.5, color=MUTED, lw=0.8)
    axes.set_xlabel("time since the step began, ms")
    axes.xaxis.set_major_locator(MaxNLocator(10))
    return Drawing(name, title, step_words(result, step), figure)


def _finding(result: Result, step: PipelineStep) -> str:
    """Return the shares of a step that stages compute and wait."""
    split, lasts = result.measured.split, seconds(step.seconds / result.cell.compute.dilation)
    total = sum(split.model_dump().values()) if split else 0.0
    if split is None or not total:
        return f"step {step.number}, {lasts}"
    compute, wire, wait = (100 * part / total for part in (split.compute_s, split.wire_s, split.wait_s))
    who = f"{result.cell.parallelism.unit}s"
    return f"in {lasts} {who} compute {compute:.0f} %, wait {wire:.0f} % for the wire, {wait:.0f} % for one another"


def step_words(result: Result, step: PipelineStep) -> str:
    """Name the step, and explain how to read it."""
    seconds = step.seconds / result.cell.compute.dilation
    stands = "" if result.sound else ", which is unreliable"
    early = (
        " A stage that had finished the previous step began early, left of 0."
        if step.begin_ns > min(step.free_ns)
        else ""
    )
    which = f"The measured step nearest to the median, {1e3 * seconds:.0f} ms, of run {result.run.number}{stands}."
    if result.cell.parallelism.unit != "stage":
        early = early.replace("stage", "node")
        return f"{which} Actions of each node; it waits for the messages of others.{early}"
    return (
        f"{which} Numbers are micro-batches. Above: the actions of each stage. Below: frames between stages, "
        "activations in the shade of forward and gradients in that of backward, from the first byte handed to the "
        f"kernel to the last byte received; a thin line in front: waiting for the previous frame.{early}"
    )


def usual(group: Group, settings: str) -> list[Drawing]:
    """Draw fp32 and the fastest other codec over the slowest network with a finished run."""
    looks = group_looks(group)
    for network in reversed(group.networks):
        timed = [entry for entry in group.finished(network) if entry.measured.step_s is not None]
        others = sorted((e for e in timed if e.cell.codec != BASELINE), key=lambda entry: entry.measured.step_s or 0.0)
        chosen = [entry for entry in timed if entry.cell.codec == BASELINE] + others[:1]
        if chosen:
            return [
                gantt(entry.typical, looks[entry.cell.codec], settings, f"gantt-{number}")
                for number, entry in enumerate(chosen, start=1)
                # None is whole where a node was lost in its first step.
                if median_step(align(entry.typical.records)) is not None
            ]
    return []

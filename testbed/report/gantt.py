"""One step of a run as a Gantt chart: what each stage did, and which frames were in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from testbed.errors import ResultsError
from testbed.metrics import PipelineStep, align, steady
from testbed.metrics.spans import Activity, flights, spans
from testbed.report.canvas import Drawing, Handle, canvas, group_looks
from testbed.report.collect import BASELINE, Group
from testbed.report.entry import Result
from testbed.report.style import INK, MUTED, PAPER, Look

_ROW = 0.36
"""The height of a row, in inches."""
_DIGIT = 0.075
"""The width of a digit on a bar, in inches."""
_LANES = 4
"""How many frames of one boundary are drawn below each other; further ones lie on top of each other."""
_MOST_NUMBERED = 2
"""The largest number of lanes in a row that are still high enough for a number."""
_AXES = 8.6
"""The width of the time axis, in inches."""


def _mixed(colour: str, other: str, share: float) -> str:
    red, green, blue = ((1 - share) * a + share * b for a, b in zip(to_rgb(colour), to_rgb(other), strict=True))
    return to_hex((red, green, blue))


def _fills(look: Look) -> dict[Activity, str]:
    """Return shades of the codec's colour for forward and backward, ink for the codec's own work, pale for waiting."""
    return {
        "forward": _mixed(look.colour, PAPER, 0.35),
        "backward": _mixed(look.colour, INK, 0.25),
        "encode": INK,
        "decode": INK,
        "update": MUTED,
        "wire": _mixed(look.colour, PAPER, 0.78),
        "wait": MUTED,
        "synchronise": MUTED,
    }


def median_step(steps: Sequence[PipelineStep]) -> PipelineStep | None:
    """Return the counted step whose duration is nearest to their median; None where there is none."""
    chosen = steady(steps)
    if not chosen:
        return None
    middle = float(np.median([step.seconds for step in chosen]))
    return min(chosen, key=lambda step: abs(step.seconds - middle))


def _lanes(times: Sequence[tuple[float, float]]) -> list[int]:
    """Give each (begin, end), in order of their begin, the first lane that is free then; the last one where none is."""
    free = [float("-inf")] * _LANES
    chosen = []
    for begin, end in times:
        lane = next((number for number, until in enumerate(free) if until <= begin), _LANES - 1)
        free[lane] = max(free[lane], end)
        chosen.append(lane)
    return chosen


class _Chart:
    """Bars on a time axis in milliseconds of the emulated world."""

    def __init__(self, axes: Axes, step: PipelineStep, dilation: int) -> None:
        self.axes = axes
        self._zero, self._unit = step.begin_ns, 1e6 * dilation
        right = self.at(step.end_ns)
        left = min(0.0, self.at(min(record.start_ns for record in step.records)))
        axes.set_xlim(left, right)
        self._inches = _AXES / (right - left)

    def at(self, moment_ns: int) -> float:
        return (moment_ns - self._zero) / self._unit

    def bar(self, y: float, height: float, begin_ns: int, end_ns: int, colour: str, text: str = "", **how: Any) -> None:
        """Draw a bar; `text` is left out where it does not fit."""
        begin, end = self.at(begin_ns), self.at(end_ns)
        self.axes.barh(y, end - begin, height, left=begin, color=colour, **{"lw": 0, **how})
        if text and (end - begin) * self._inches > _DIGIT * len(text) + 0.03:
            ink = INK if sum(to_rgb(colour)) > 1.7 else PAPER
            self.axes.text((begin + end) / 2, y, text, ha="center", va="center_baseline", size=6.5, color=ink)

    def rows(self, labels: Iterable[str], stages: int) -> None:
        names = list(labels)
        self.axes.set_yticks(range(len(names)), names)
        self.axes.set_ylim(len(names) - 0.45, -0.55)
        self.axes.tick_params(axis="y", length=0)
        self.axes.grid(axis="y", visible=False)
        self.axes.spines["left"].set_visible(False)
        self.axes.axhline(stages - 0.5, color=MUTED, lw=0.8)


def gantt(result: Result, look: Look, settings: str, name: str) -> Drawing:
    """Draw the measured step whose duration is nearest to the median.

    ResultsError where the run has no measured step.
    """
    cell, stages = result.cell, result.cell.pipeline.stages
    step = median_step(align([result.run.steps(stage) for stage in range(stages)]))
    if step is None:
        raise ResultsError(f"{result.run.folder} has no measured step, so there is none to draw")
    boundaries = [pair for left in range(stages - 1) for pair in ((left, left + 1), (left + 1, left))]
    fills = _fills(look)
    legend: list[Handle] = [
        Patch(facecolor=fills["forward"], label="forward"),
        Patch(facecolor=fills["backward"], label="backward"),
        Patch(facecolor=fills["encode"], label="encode, decode"),
        Patch(facecolor=fills["update"], label="update"),
        Patch(facecolor=fills["wire"], label="waits: input under way"),
        Line2D([], [], color=fills["wait"], lw=3, label="waits for another stage"),
    ]
    title = f"Step {step.number} of {cell.codec} over {cell.network}"
    inches = 0.1 + _ROW * (stages + len(boundaries))
    figure, (axes,) = canvas(title, inches, legend, settings, 1, columns=1, left=1.0)
    chart = _Chart(axes, step, cell.compute.dilation)
    for stage, record in enumerate(step.records):
        for span in spans(record):
            text = str(span.microbatch) if span.activity in ("forward", "backward") else ""
            height = 0.12 if span.activity in ("wait", "synchronise") else 0.66
            chart.bar(stage, height, span.begin_ns, span.end_ns, fills[span.activity], text)
    for row, pair in enumerate(boundaries, start=stages):
        _frames(chart, row, step, pair, fills)
    chart.rows([f"stage {stage}" for stage in range(stages)] + [f"{a} to {b}" for a, b in boundaries], stages)
    axes.set_xlabel("time since the step began, ms")
    axes.xaxis.set_major_locator(MaxNLocator(10))
    return Drawing(name, title, _caption(result, step), figure)


def _frames(chart: _Chart, row: int, step: PipelineStep, pair: tuple[int, int], fills: dict[Activity, str]) -> None:
    """Draw the frames from one stage to another; several at once lie below each other."""
    sent_here = [flight for flight in flights(step.records) if (flight.sender, flight.receiver) == pair]
    sent_here.sort(key=lambda flight: flight.sent.first_byte_ns)
    lanes = _lanes([(flight.sent.first_byte_ns, flight.end_ns) for flight in sent_here])
    used = max(lanes, default=0) + 1
    for flight, lane in zip(sent_here, lanes, strict=True):
        y, sent = row + 0.72 * ((lane + 0.5) / used - 0.5), flight.sent
        queued = [chart.at(sent.queued_ns), chart.at(sent.first_byte_ns)]
        chart.axes.plot(queued, [y, y], color=MUTED, lw=0.8, solid_capstyle="butt")
        edge = {"lw": 0.6, "edgecolor": PAPER}
        number = str(sent.microbatch) if used <= _MOST_NUMBERED else ""
        chart.bar(y, 0.66 / used, sent.first_byte_ns, flight.end_ns, fills[flight.direction], number, **edge)


def _caption(result: Result, step: PipelineStep) -> str:
    seconds = step.seconds / result.cell.compute.dilation
    stands = "" if result.sound else ", which is not to be relied on"
    early = (
        " A stage that was done with the step before began early, left of 0."
        if step.begin_ns > min(step.free_ns)
        else ""
    )
    return (
        f"The measured step nearest to the median, {1e3 * seconds:.0f} ms, of run {result.run.number}{stands}. Numbers "
        "are micro-batches. Above: what each stage did. Below: frames from one stage to another, activations in the "
        "shade of forward and gradients in that of backward, from the first byte handed to the kernel to the last "
        f"byte received; a thin line in front: the frame waited for the one before it.{early}"
    )


def usual(group: Group, settings: str) -> list[Drawing]:
    """Draw fp32 and the fastest other codec over the slowest network on which a run finished."""
    looks = group_looks(group)
    for network in reversed(group.networks):
        timed = [entry for entry in group.finished(network) if entry.measured.step_s is not None]
        others = sorted((e for e in timed if e.cell.codec != BASELINE), key=lambda entry: entry.measured.step_s or 0.0)
        chosen = [entry for entry in timed if entry.cell.codec == BASELINE] + others[:1]
        if chosen:
            return [
                gantt(entry.typical, looks[entry.cell.codec], settings, f"gantt-{number}")
                for number, entry in enumerate(chosen, start=1)
            ]
    return []

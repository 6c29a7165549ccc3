"""Loss against training time and against steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from testbed.metrics import LossPoint
from testbed.report.canvas import Drawing, canvas, codec_legend, columns_for, group_looks, network_panels
from testbed.report.collect import BASELINE, Curves, Group, Result
from testbed.report.style import MUTED, PAPER, Look

AllCurves = Mapping[tuple[str, str], Curves]
"""(network, codec) -> the curves of its finished run."""


def window(points: Sequence[LossPoint]) -> int:
    """How many steps a smoothed training loss averages over: odd, about a fifteenth of all."""
    return len(points) // 30 * 2 + 1


def smooth(points: Sequence[LossPoint]) -> list[LossPoint]:
    """Each loss as the mean of the steps around it (a mean of past steps alone would lag behind); fewer at the ends."""
    half = window(points) // 2
    smoothed = []
    for index, point in enumerate(points):
        near = points[max(0, index - half) : index + half + 1]
        smoothed.append(point._replace(loss=sum(one.loss for one in near) / len(near)))
    return smoothed


def _words(curves: AllCurves) -> str:
    widths = sorted({window(curve.train) for curve in curves.values()})
    if not widths or widths == [1]:
        return "Lines: training loss of each step."
    return f"Lines: training loss, mean of {' or '.join(str(w) for w in widths)} steps (pale: each step)."


def _plot(axes: Axes, curve: Curves, result: Result, look: Look, *, time: bool) -> None:
    for points, alpha, width in ((curve.train, 0.3, 0.8), (smooth(curve.train), 1.0, 1.7)):
        x = [point.seconds if time else point.step for point in points]
        axes.plot(x, [point.loss for point in points], color=look.colour, ls=look.dash, alpha=alpha, lw=width)
    x = [point.seconds if time else point.step for point in curve.validation]
    _mark(axes, x, [point.loss for point in curve.validation], result, look)


def _mark(axes: Axes, x: Sequence[float], y: Sequence[float], result: Result, look: Look) -> None:
    face = look.colour if result.certified else PAPER
    axes.plot(x, y, ls="none", marker=look.marker, color=look.colour, mfc=face, mew=1.2, zorder=3)


def loss_against_time(group: Group, curves: AllCurves, settings: str) -> Drawing:
    """Loss against training time, one panel per network."""
    found, title = group_looks(group), "Loss against training time"
    figure, panels = network_panels(group, title, 2.45, codec_legend(group), settings)
    losses = [point.loss for curve in curves.values() for point in (*curve.train, *curve.validation)]
    for index, (network, axes) in enumerate(panels.items()):
        for result in group.finished(network):
            _plot(axes, curves[network, result.cell.codec], result, found[result.cell.codec], time=True)
        axes.set_xlabel("training time, s")
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        if losses:
            margin = 0.04 * (max(losses) - min(losses)) or 0.5
            axes.set_ylim(min(losses) - margin, max(losses) + margin)
        if index % columns_for(len(panels)) == 0:
            axes.set_ylabel("loss, nats per token")
    caption = (
        f"{_words(curves)} Markers: validation loss, with the codec in place. Time is the sum of the training steps, without "
        "evaluations. The panels share the loss axis; their time axes differ."
    )
    return Drawing("loss-time", title, caption, figure)


def loss_against_steps(group: Group, curves: AllCurves, settings: str, *, same_maths: bool) -> Drawing:
    """Loss against steps, and how far each codec is from fp32.

    With `same_maths` (each codec's losses are the same over every network) a codec is drawn once, else every run is drawn.
    """
    found, title = group_looks(group), "Loss against steps"
    figure, (left, right) = canvas(title, 2.75, codec_legend(group), settings, 2, columns=2)
    runs = [(group.cells[key], curve) for key, curve in curves.items()]
    first: dict[str, tuple[Result, Curves]] = {}
    for result, curve in runs:
        if result.cell.codec not in first or (result.certified and not first[result.cell.codec][0].certified):
            first[result.cell.codec] = (result, curve)
    base = first[BASELINE][1] if BASELINE in first else Curves([], [])
    train = {point.step: point.loss for point in smooth(base.train)}
    validation = {point.step: point.loss for point in base.validation}
    for result, curve in first.values() if same_maths else runs:
        look = found[result.cell.codec]
        _plot(left, curve, result, look, time=False)
        line = [(point.step, point.loss - train[point.step]) for point in smooth(curve.train) if point.step in train]
        marks = [(point.step, point.loss - validation[point.step]) for point in curve.validation if point.step in validation]
        right.plot([x for x, _ in line], [y for _, y in line], color=look.colour, ls=look.dash)
        _mark(right, [x for x, _ in marks], [y for _, y in marks], result, look)
    left.set_title("loss")
    left.set_ylabel("loss, nats per token")
    right.set_title("difference from fp32 (above 0 is worse)")
    if not train:
        right.text(0.5, 0.5, "no finished fp32 run to compare with", transform=right.transAxes, ha="center", color=MUTED)
    for axes in (left, right):
        axes.set_xlabel("optimiser steps")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    networks = ""
    if not same_maths:
        networks = " The losses of a codec differ between networks, so every run is drawn."
    elif len(group.networks) > 1:
        networks = " The losses of a codec are bit for bit the same over every network, so each codec is drawn once."
    return Drawing("loss-steps", title, f"{_words(curves)} Markers: validation loss.{networks}", figure)

"""Figures of the loss over training time and over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from testbed.metrics import LossPoint, RunSteps, bands
from testbed.records import FLOORS
from testbed.report.canvas import (
    Drawing,
    Handle,
    canvas,
    codec_legend,
    columns_for,
    group_looks,
    hover,
    network_panels,
    share_axis,
)
from testbed.report.collect import BASELINE, Group
from testbed.report.entry import Entry
from testbed.report.findings import loss_finding, time_finding
from testbed.report.plots import level
from testbed.report.style import MUTED, PAPER, Look


class CombinedCurve(NamedTuple):
    """The combined curves of an entry's runs, with the band of its seeds."""

    steps: list[int]
    seconds: list[float]
    """Median over all runs."""
    low: list[float]
    losses: list[float]
    """Median over the seeds."""
    high: list[float]
    seeds: int


def window(points: Sequence[LossPoint]) -> int:
    """Return the smoothing window of a training loss in steps: an odd number, about a fifteenth of all."""
    return len(points) // 30 * 2 + 1


def smooth(points: Sequence[LossPoint]) -> list[LossPoint]:
    """Replace each loss by the mean of the surrounding steps, fewer at the ends; a trailing mean would lag behind."""
    half = window(points) // 2
    smoothed = []
    for index, point in enumerate(points):
        near = points[max(0, index - half) : index + half + 1]
        smoothed.append(point._replace(loss=sum(other.loss for other in near) / len(near)))
    return smoothed


def combine_curves(runs: Sequence[RunSteps], curves: Sequence[Sequence[LossPoint]]) -> CombinedCurve:
    """Combine one curve of each run. Runs of a seed have equal losses, so each seed counts once in the band."""
    band = bands(list({run.seed: curve for run, curve in zip(runs, curves, strict=True)}.values()))
    moments: dict[int, list[float]] = {}
    for curve in curves:
        for point in curve:
            moments.setdefault(point.step, []).append(point.seconds)
    return CombinedCurve(
        band.steps, [median(moments[step]) for step in band.steps], band.low, band.median, band.high, band.curves
    )


def differences(
    curves: Sequence[Sequence[LossPoint]], runs: Sequence[RunSteps], base: Mapping[int, Mapping[int, float]]
) -> list[list[LossPoint]]:
    """Return the difference of each curve from the same seed in `base` (seed -> step -> loss); empty if missing."""
    less = []
    for run, curve in zip(runs, curves, strict=True):
        known = base.get(run.seed, {})
        less.append([point._replace(loss=point.loss - known[point.step]) for point in curve if point.step in known])
    return less


def floors(group: Group) -> dict[str, list[float]]:
    """Return the known floors of a group's texts, by name: a single one each if all runs learned the same text."""
    known: dict[str, set[float]] = {}
    for entry in group.entries:
        for name, floor in entry.measured.floors.items() if entry.ok else ():
            known.setdefault(name, set()).add(floor)
    return {name: sorted(values) for name, values in known.items()}


def draw_floors(axes: Axes, floors: Mapping[str, Sequence[float]]) -> None:
    """Draw the floors within the axis as labelled lines; a model with a loss above one has learned no more than its
    table.
    """
    low, high = axes.get_ylim()
    for name, values in floors.items():
        for floor in values:
            if low <= floor <= high:
                level(axes, floor, f"{name} floor {floor:.2f}")


def floor_words(floors: Mapping[str, Sequence[float]]) -> str:
    """Explain the lines of the floors, for a caption; empty if no floor is known."""
    return "".join(
        f" {name.capitalize()} floor: {' or '.join(f'{floor:.2f}' for floor in values)} nats, the loss of a model that "
        f"knows only {FLOORS[name]}."
        for name, values in floors.items()
    )


def _key(group: Group) -> list[Handle]:
    """Return the legend of lines, pale lines, bands and markers."""
    runs = [run for entry in group.entries if entry.ok for run in entry.steps]
    widths = sorted({window(run.train) for run in runs})
    seeds = max((len({run.seed for run in entry.steps}) for entry in group.entries if entry.ok), default=1)
    mean = "" if not widths or widths == [1] else f", mean of {' or '.join(map(str, widths))} steps"
    key: list[Handle] = [Line2D([], [], color=MUTED, label=f"training loss{mean}")]
    if seeds > 1:
        band = f"lowest to highest of {seeds} seeds; the line is the median"
        key.append(Patch(facecolor=MUTED, alpha=0.3, label=band))
    elif mean:
        key.append(Line2D([], [], color=MUTED, alpha=0.45, lw=0.8, label="each step"))
    key.append(Line2D([], [], color=MUTED, ls="none", marker="o", label="validation loss"))
    return key


def _plot(axes: Axes, entry: Entry, look: Look, *, time: bool) -> None:
    runs = entry.steps
    line = combine_curves(runs, [smooth(run.train) for run in runs])
    if line.seeds == 1:
        raw = combine_curves(runs, [run.train for run in runs])
        axes.plot(raw.seconds if time else raw.steps, raw.losses, color=look.colour, ls=look.dash, alpha=0.3, lw=0.8)
    _draw(axes, line, combine_curves(runs, [run.validation for run in runs]), entry, look, time=time)


def _draw(axes: Axes, train: CombinedCurve, line: CombinedCurve, entry: Entry, look: Look, *, time: bool) -> None:
    """Draw a curve of training with the band of its seeds, and a mark for each validation."""
    along = train.seconds if time else train.steps
    if train.seeds > 1:
        axes.fill_between(along, train.low, train.high, color=look.colour, alpha=0.18, lw=0)
    axes.plot(along, train.losses, color=look.colour, ls=look.dash)
    face = look.colour if entry.sound else PAPER
    x = line.seconds if time else line.steps
    if line.seeds > 1:
        axes.vlines(x, line.low, line.high, color=look.colour, lw=1.0)
    for step, moment, place, loss in zip(line.steps, line.seconds, x, line.losses, strict=True):
        (mark,) = axes.plot(place, loss, look.marker, color=look.colour, mfc=face, mew=1.2, zorder=3)
        hover(mark, f"{entry.name}, after {step} steps, {moment:.2f} s: {loss:.4f}")


def loss_against_time(group: Group, foot: str) -> Drawing:
    """Draw the loss over training time, one panel per network."""
    looks, title = group_looks(group), time_finding(group)
    runs = [run for entry in group.entries if entry.ok for run in entry.steps]
    losses = [point.loss for run in runs for point in (*run.train, *run.validation)]
    ends = {
        network: [run.train[-1].seconds for entry in group.finished(network) for run in entry.steps if run.train]
        for network in group.networks
    }
    lengths, shared = share_axis({network: max(several, default=0.0) for network, several in ends.items()})
    if not shared:
        foot = f"Each panel has its own time axis. {foot}"
    figure, panels = network_panels(group, title, 2.2, [*codec_legend(group), *_key(group)], foot)
    for index, (network, axes) in enumerate(panels.items()):
        for entry in group.finished(network):
            _plot(axes, entry, looks[entry.cell.codec], time=True)
        axes.set_xlabel("training time, s")
        axes.set_xlim(0, 1.03 * lengths[network] or None)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        if losses:
            margin = 0.04 * (max(losses) - min(losses)) or 0.5
            axes.set_ylim(min(losses) - margin, max(losses) + margin)
        draw_floors(axes, floors(group))
        if index % columns_for(len(panels)) == 0:
            axes.set_ylabel(f"loss, nats per {group.token}")
        else:
            axes.tick_params(labelleft=False)
    caption = (
        "Validation runs with the codec in place. Time is the sum of the training steps, without evaluations. "
        f"The panels share the loss axis{' and the time axis' if shared else ''}.{floor_words(floors(group))}"
    )
    return Drawing("loss-time", title, caption, figure)


def loss_against_steps(group: Group, foot: str, *, same_maths: bool) -> Drawing:
    """Draw the loss over steps, and its difference from fp32, seed by seed.

    With `same_maths` (each codec's losses are equal over every network) each codec is drawn once, otherwise every
    entry.
    """
    looks, title = group_looks(group), loss_finding(group)
    figure, (left, right) = canvas(title, 2.75, [*codec_legend(group), *_key(group)], foot, 2, columns=2)
    finished = [entry for entry in group.entries if entry.ok]
    first: dict[str, Entry] = {}
    for entry in finished:
        if entry.cell.codec not in first or (entry.sound and not first[entry.cell.codec].sound):
            first[entry.cell.codec] = entry
    base = first[BASELINE].steps if BASELINE in first else ()
    train = {run.seed: {point.step: point.loss for point in smooth(run.train)} for run in base}
    validation = {run.seed: {point.step: point.loss for point in run.validation} for run in base}
    for entry in first.values() if same_maths else finished:
        look, runs = looks[entry.cell.codec], entry.steps
        _plot(left, entry, look, time=False)
        line = combine_curves(runs, differences([smooth(run.train) for run in runs], runs, train))
        marks = combine_curves(runs, differences([run.validation for run in runs], runs, validation))
        _draw(right, line, marks, entry, look, time=False)
    draw_floors(left, floors(group))
    left.set_title("loss")
    left.set_ylabel(f"loss, nats per {group.token}")
    right.set_title("difference from fp32 (above 0 is worse)")
    if not train:
        how: Any = {"transform": right.transAxes, "ha": "center", "color": MUTED}
        right.text(0.5, 0.5, "no finished fp32 run to compare with", **how)
    for axes in (left, right):
        axes.set_xlabel("optimiser steps")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    networks = ""
    if not same_maths:
        networks = " The losses of a codec differ between networks, so every run is drawn."
    elif len(group.networks) > 1:
        networks = " The losses of a codec are bit-identical over all networks, so each codec is drawn once."
    words = f"Validation runs with the codec in place.{networks}{floor_words(floors(group))}"
    return Drawing("loss-steps", title, words, figure)

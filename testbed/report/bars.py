"""Bar charts of a step: the breakdown of its time, its bytes, and its efficiency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from testbed.report import numbers, tables
from testbed.report.canvas import (
    HOLLOW_DASH,
    Drawing,
    Handle,
    columns_for,
    group_looks,
    hollow_patches,
    hover,
    name_rows,
    network_panels,
    note,
    share_axis,
)
from testbed.report.collect import Group
from testbed.report.entry import OVERRUNS, Entry
from testbed.report.findings import bytes_finding, efficiency_finding, step_finding
from testbed.report.style import INK, MUTED, PAPER, Look

_PARTS = (
    ("compute", 1.0, "compute"),
    ("encode and decode", 0.62, "encode, decode"),
    ("wire", 0.36, "wire: input in flight"),
    ("wait", 0.14, "wait: for another stage"),
)
"""Name, opacity in the codec's colour, and legend text, in the order of Split's fields."""
_REFERENCE: Any = {"color": INK, "ls": (0, (2, 2)), "lw": 1.2}
"""Style of the reference line."""
_SLIVER = 0.02
"""Share of the axis below which encoding and decoding are too thin to see, and are written as text."""
_LONGEST_NAME = 20
_ROOM_FOR_NUMBERS = 1.55
"""Length of an axis relative to its longest bar."""


def _panels(group: Group, title: str, legend: Sequence[Handle], foot: str) -> tuple[Figure, dict[str, Axes]]:
    """Make one panel per network, with the same codecs from top to bottom."""
    height = 0.35 + 0.34 * len(group.codecs)
    figure, panels = network_panels(group, title, height, [*legend, *hollow_patches(group)], foot)
    names = [codec if len(codec) <= _LONGEST_NAME else "…" + codec[1 - _LONGEST_NAME :] for codec in group.codecs]
    for index, axes in enumerate(panels.values()):
        name_rows(axes, names if index % columns_for(len(panels)) == 0 else [""] * len(names))
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure, panels


def _bars(group: Group, network: str, axes: Axes, number: str) -> Iterator[tuple[int, Entry]]:
    """Yield the row and the entry of each bar of a panel, if it has this number of Summary; label the others as lacking
    it.
    """
    for y, codec in enumerate(group.codecs):
        entry = group.baseline(network, codec)
        if entry is None or getattr(entry.measured, number) is None:
            note(axes, "no finished run", (0, y), (4, 0), va="center", size=8, color=MUTED, style="italic")
        else:
            yield y, entry


def _bar(
    axes: Axes,
    y: int,
    ends: Sequence[float],
    opacities: Sequence[float],
    look: Look,
    words: Sequence[str],
    *,
    hollow: bool,
) -> None:
    """Draw a stacked bar from 0; `ends`: the ends of its parts, `words`: their tooltips."""
    for (begin, end), opacity, said in zip(pairwise((0.0, *ends)), opacities, words, strict=True):
        if end <= begin:
            continue
        if hollow:
            how: dict[str, Any] = {"fill": False, "edgecolor": look.colour, "lw": 1.1, "ls": HOLLOW_DASH}
        else:
            how = {"color": look.colour, "alpha": opacity, "lw": 0}
        (part,) = axes.barh(y, end - begin, 0.62, left=begin, **how)
        hover(part, said)
    if not hollow:
        for end in ends[:-1]:
            axes.plot([end, end], [y - 0.31, y + 0.31], color=PAPER, lw=0.8, solid_capstyle="butt")


def _number(axes: Axes, y: int, x: float, text: str, small: str = "") -> None:
    """Write text behind a bar, and smaller text below it."""
    how: dict[str, Any] = {"va": "center", "bbox": {"facecolor": PAPER, "edgecolor": "none", "pad": 0.6}}
    note(axes, text, (x, y), (6, 4 if small else 0), size=8.5, **how)
    if small:
        note(axes, small, (x, y), (6, -6), size=6.8, color=MUTED, **how)


def _longest(entry: Entry) -> float:
    """Return the maximum of an entry's step, its ideal and the end of its interval, in seconds."""
    summary = entry.measured
    return max(summary.step_s or 0.0, summary.ideal_step_s or 0.0, *(summary.step_interval_s or ()))


def step_time(group: Group, foot: str) -> Drawing:
    """Draw the breakdown of the step time, one panel per network."""
    looks, title = group_looks(group), step_finding(group)
    legend: list[Handle] = [Patch(facecolor=INK, alpha=opacity, label=meant) for _, opacity, meant in _PARTS]
    legend.append(Line2D([], [], color=INK, marker="|", ls="none", ms=11, mew=2, label="ideal step"))
    lengths, shared = share_axis(
        {name: max(map(_longest, group.finished(name)), default=0.0) for name in group.networks}
    )
    unit, name = (1.0, "s") if max(lengths.values()) >= 10 else (1e3, "ms")
    if not shared:
        foot = f"Each panel has its own time axis, from 0. {foot}"
    figure, panels = _panels(group, title, legend, foot)
    for network, axes in panels.items():
        end = _ROOM_FOR_NUMBERS * (lengths[network] or 1.0) * unit
        for y, entry in _bars(group, network, axes, "step_s"):
            _step_bar(axes, y, group, network, entry, looks[entry.cell.codec], unit, name, end)
        axes.set_xlim(0, end)
        axes.set_xlabel(f"median step, {name}")
    caption = (
        "Bar: the median step with its 95 % interval, and in brackets the speed-up over fp32 (~: not separable); its "
        "parts are the shares of all measured steps, averaged over the stages. Wire: waiting for an input in flight. "
        "Wait: waiting for an input that was not sent yet, or for other stages at the end of the step. Small print "
        "behind a bar: encoding and decoding, if too thin to see. Vertical line: the ideal step, with the same compute "
        "and bytes over links that match their profile exactly."
        f"{_overruns(group)}"
    )
    return Drawing("step-time", title, caption, figure)


def _step_bar(
    axes: Axes, y: int, group: Group, network: str, entry: Entry, look: Look, unit: float, name: str, end: float
) -> None:
    """Draw the step of an entry: its parts, its ideal, its interval and its number."""
    summary, split = entry.measured, entry.measured.split
    step_s = summary.step_s or 0.0
    parts = (split.compute_s, split.codec_s, split.wire_s, split.wait_s) if split else (0.0, 0.0, 0.0, step_s)
    ends = [sum(parts[: i + 1]) * unit for i in range(len(parts))]
    words = [
        f"{entry.cell.codec} over {network}, {part}: {numbers.seconds(value)}, "
        f"{numbers.percent(value / sum(parts))} of the step of {numbers.seconds(step_s)}"
        for (part, _, _), value in zip(_PARTS, parts, strict=True)
    ]
    _bar(axes, y, ends, [opacity for _, opacity, _ in _PARTS], look, words, hollow=not entry.sound)
    if summary.ideal_step_s is not None:
        axes.plot([summary.ideal_step_s * unit] * 2, [y - 0.4, y + 0.4], color=INK, lw=2, solid_capstyle="butt")
    if (interval := summary.step_interval_s) is not None:
        axes.plot([each * unit for each in interval], [y, y], color=INK, lw=1.1, marker="|", ms=4, mew=1.1)
    gain = tables.gain(group, network, entry)
    text = f"{numbers.three(ends[-1])} {name}" + ("" if gain == numbers.MISSING else f"  ({gain})")
    text += f" {tables.NOTED}" if entry.overruns > OVERRUNS else ""
    small = f"codec {numbers.seconds(parts[1])}" if 0 < parts[1] * unit < _SLIVER * end else ""
    _number(axes, y, max(ends[-1], _longest(entry) * unit), text, small)


def _overruns(group: Group) -> str:
    """Name the codecs whose maths was too slow for the emulated device, for a caption; empty if there are none."""
    late = [f"{entry.name} ({entry.overruns:.1%})" for entry in group.entries if entry.overruns > OVERRUNS]
    return f" {tables.NOTED} Actions that overran the emulated device: {', '.join(late)}." if late else ""


def bytes_per_step(group: Group, foot: str) -> Drawing:
    """Draw payload and wire bytes per step against the raw tensors, one panel per network."""
    looks, title = group_looks(group), bytes_finding(group)
    legend: list[Handle] = [
        Patch(facecolor=INK, label="payload"),
        Patch(facecolor=INK, alpha=0.36, label="added on the wire (headers, ACKs, resent)"),
        Line2D([], [], **_REFERENCE, label="raw fp32 tensors"),
    ]
    figure, panels = _panels(group, title, legend, foot)
    done = [entry.measured for entry in group.entries if entry.ok]
    moved = [(s.raw_bytes_per_step, s.payload_bytes_per_step, s.wire_bytes_per_step) for s in done]
    largest = max((value or 0.0 for several in moved for value in several), default=0.0) or 1.0
    unit, name = numbers.byte_unit([largest])
    for network, axes in panels.items():
        for raw in {entry.measured.raw_bytes_per_step for entry in group.finished(network)}:
            if raw:
                axes.axvline(raw / unit, **_REFERENCE)
        for y, entry in _bars(group, network, axes, "payload_bytes_per_step"):
            summary = entry.measured
            payload, wire = summary.payload_bytes_per_step or 0.0, summary.wire_bytes_per_step
            ends = [payload / unit, (payload if wire is None else wire) / unit]
            who = f"{entry.cell.codec} over {network}"
            words = (
                f"{who}, payload: {numbers.size(payload)} per step",
                f"{who}, on the wire: {numbers.size(wire)} per step, of which payload {numbers.size(payload)}",
            )
            _bar(axes, y, ends, (1.0, 0.36), looks[entry.cell.codec], words, hollow=not entry.sound)
            ratio = "" if summary.compression_ratio is None else f"  ({numbers.three(summary.compression_ratio)}x)"
            counted = "wire not counted" if wire is None else f"{numbers.three(wire / unit)} {name}"
            _number(axes, y, max(ends), counted + ratio)
        axes.set_xlim(0, largest / unit * _ROOM_FOR_NUMBERS)
        axes.set_xlabel(f"{name} per step, all stages")
    caption = (
        "Means over the measured steps; all stages, both directions. The number is from the interface counters; in "
        "brackets the compression ratio, raw fp32 tensors to payload. All panels have the same axis, from 0."
    )
    return Drawing("bytes", title, caption, figure)


def efficiency(group: Group, foot: str) -> Drawing:
    """Draw the efficiency of each median step, relative to the physical limit, one panel per network."""
    looks, title = group_looks(group), efficiency_finding(group)
    figure, panels = _panels(group, title, [Line2D([], [], **_REFERENCE, label="the ideal")], foot)
    for network, axes in panels.items():
        axes.axvline(1.0, **_REFERENCE)
        for y, entry in _bars(group, network, axes, "efficiency"):
            share = entry.measured.efficiency or 0.0
            ideal = numbers.seconds(entry.measured.ideal_step_s)
            words = (f"{entry.cell.codec} over {network}: {share:.4f}, an ideal step takes {ideal}",)
            _bar(axes, y, [share], [1.0], looks[entry.cell.codec], words, hollow=not entry.sound)
            _number(axes, y, max(share, 1.0), f"{share:.3f}")
        axes.set_xlim(0, 1.28)
        axes.set_xlabel("ideal / measured")
    caption = (
        "Median of the ratios of the steps. The ideal is the critical path of the schedule, from the measured compute "
        "and codec times, the bytes sent, and the profile's rate and delay. The gap to 1 is TCP, packet loss and host "
        "overhead."
    )
    return Drawing("efficiency", title, caption, figure)

"""A figure of the links' traffic over time in a run, against their requested rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.errors import SpecError
from testbed.profiles import LinkProfile
from testbed.profiles.timeline import timeline
from testbed.records import LabRecord, LinkCounters, Sample
from testbed.report.canvas import Drawing, Handle, canvas, group_looks, shortened, small_print
from testbed.report.collect import BASELINE, Group
from testbed.report.entry import Result
from testbed.report.style import INK, Look

Floats = NDArray[np.float64]
_MOST_POINTS = 400
"""Maximum number of points per panel; longer runs are averaged over more samples."""
_MOST_LINKS = 8
_PANEL_HEIGHT = 0.95
_TALLEST = 5
"""A requested rate of more than this multiple of the largest carried one is not drawn: the traffic would be too low to
see."""


class Series(NamedTuple):
    """One direction of a link, in intervals."""

    link: str
    way: LinkDirection
    profile: LinkProfile
    edges_s: Floats
    """Boundaries of the intervals since the links began to vary, in emulated time."""
    carried_bps: Floats
    asked_bps: Floats | None
    """Mean requested rate in each interval; None if nothing was requested, or the file of a trace is missing."""
    dropped: NDArray[np.int64]

    @property
    def mean_bps(self) -> float:
        """The mean over all intervals."""
        return self._mean(self.carried_bps)

    @property
    def mean_asked_bps(self) -> float | None:
        """The mean requested rate; None as above."""
        return None if self.asked_bps is None else self._mean(self.asked_bps)

    @property
    def share(self) -> float | None:
        """Carried share of the requested rate; None as above."""
        return None if (asked := self.mean_asked_bps) is None else self.mean_bps / asked

    def _mean(self, rates: Floats) -> float:
        lengths = np.diff(self.edges_s)
        return float((rates * lengths).sum() / lengths.sum())


def _asked(profile: LinkProfile, way: LinkDirection, edges_ns: Sequence[int]) -> Floats | None:
    """Return the requested rate in full-size IP packets, regardless of the layer that the profile counts."""
    pipe = profile.pipe(way)
    if pipe is None:
        return None
    try:
        line = timeline(pipe)
    except SpecError:
        return None
    ip_share = profile.mtu / (profile.mtu + profile.overhead_bytes)
    pairs = pairwise(edges_ns)
    return np.array([line.bits_between(begin, end) * 1e9 / (end - begin) * ip_share for begin, end in pairs])


def _percent(share: float) -> str:
    """Write a share with what a small one needs: 0.79 -> '79 %', 0.0039 -> '0.39 %'."""
    return f"{100 * share:.2g} %" if share < 0.095 else f"{100 * share:.0f} %"


def _dropped(count: LinkCounters) -> int:
    return count.dropped_buffer + (count.dropped_loss or 0)


def series(result: Result) -> list[Series]:
    """Return every direction of every link of a run, in order; empty with fewer than two samples."""
    return series_of(
        list(result.run.samples()), result.run.lab, result.cell.links, dilation=result.cell.compute.dilation
    )


def series_of(
    samples: Sequence[Sample], record: LabRecord, links: Sequence[LinkProfile], *, dilation: float = 1.0
) -> list[Series]:
    """Return every direction of every sampled link, in order; empty with fewer than two samples."""
    if len(samples) < 2:
        return []
    step = math.ceil((len(samples) - 1) / _MOST_POINTS)
    chosen = [*samples[::step], *([samples[-1]] if (len(samples) - 1) % step else [])]
    origin = samples[0].at_ns if record.played_at_ns is None else record.played_at_ns
    edges_ns = [max(0, sample.at_ns - origin) for sample in chosen]
    edges = np.array(edges_ns) / (1e9 * dilation)
    every = []
    for name, profile in zip((link.name for link in record.links), links, strict=True):
        for way in LINK_DIRECTIONS:
            counts = [sample.links[name][way] for sample in chosen]
            carried = 8 * np.diff([count.bytes for count in counts]) / np.diff(edges)
            dropped = np.diff([_dropped(count) for count in counts])
            asked = _asked(profile, way, edges_ns)
            shown = None if asked is None else asked * dilation
            every.append(Series(name, way, profile, edges, carried, shown, dropped))
    return every


def _best_known(group: Group, network: str) -> Result | None:
    """Return the run to show: fp32, which loads the links most, or the first finished codec."""
    typical = [entry.typical for entry in group.finished(network)]
    finished = [result for result in typical if (result.run.folder / "counters.jsonl").exists()]
    return next((result for result in finished if result.cell.codec == BASELINE), finished[0] if finished else None)


def _draw_series(axes: Axes, shown: Series, look: Look, *, hollow: bool) -> None:
    """Draw the carried and the requested rate of a direction."""
    unit = 1e6
    carried = shown.carried_bps / unit
    if hollow:
        axes.stairs(carried, shown.edges_s, color=look.colour, lw=0.9)
    else:
        axes.stairs(carried, shown.edges_s, fill=True, color=look.colour, alpha=0.75, lw=0)
    top = float(carried.max(initial=0.0))
    asked = 0.0 if shown.asked_bps is None else float(shown.asked_bps.max()) / unit
    beyond = 0 < top < asked / _TALLEST
    if shown.asked_bps is not None and not beyond:
        axes.stairs(shown.asked_bps / unit, shown.edges_s, baseline=None, color=INK, lw=1.0, ls=(0, (4, 1.5)))
        top = max(top, asked)
    top = 1.18 * (top or 1.0)
    axes.set_ylim(0, top)
    axes.set_xlim(0, float(shown.edges_s[-1]))
    middles = (shown.edges_s[1:] + shown.edges_s[:-1]) / 2
    hit = shown.dropped > 0
    axes.plot(middles[hit], np.full(int(hit.sum()), 0.94 * top), ls="none", marker="|", ms=6, mew=0.9, color=INK)
    axes.set_title(f"{shown.link} {shown.way}: {shown.profile.name}", size=9, pad=15)
    unknown = "unshaped" if shown.profile.pipe(shown.way) is None else "the file of its trace is missing"
    words = [f"mean {shown.mean_bps / unit:.3g} Mbit/s", unknown]
    if shown.share is not None and shown.mean_asked_bps is not None:
        words[1] = f"{_percent(shown.share)} of {shown.mean_asked_bps / unit:.3g} requested"
    if total := int(shown.dropped.sum()):
        words.append(f"{total:,} dropped")
    small_print(axes, ", ".join(words), 4)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.tick_params(labelsize=7.5)


def _busiest(every: Sequence[Series]) -> list[Series]:
    """Return the links with the most traffic, in their original order."""
    moved: dict[str, float] = {}
    for series in every:
        moved[series.link] = moved.get(series.link, 0.0) + series.mean_bps
    kept = set(sorted(moved, key=moved.__getitem__, reverse=True)[:_MOST_LINKS])
    return [series for series in every if series.link in kept]


def utilisation(group: Group, settings: str) -> Iterator[Drawing]:
    """Draw one figure per network with a finished run that has counters: a row per link, `up` next to `down`."""
    for number, network in enumerate(group.networks, start=1):
        result = _best_known(group, network)
        everything = series(result) if result is not None else []
        if result is None or not everything:
            continue
        hollow, look = not result.sound, group_looks(group)[result.cell.codec]
        title = f"{result.cell.codec} over {shortened(network, 40)}: {fullest(everything)}"
        figure, shown = draw_busiest(everything, title, settings, look, hollow=hollow)
        caption = _caption(result, len(everything) // 2, len(shown) // 2, shown)
        yield Drawing(f"utilisation-{number}", title, caption, figure)


def draw_busiest(
    every: Sequence[Series], title: str, foot: str, look: Look, *, hollow: bool = False, began: str = "the run"
) -> tuple[Figure, list[Series]]:
    """Draw the links with the most traffic, a row per link, `up` next to `down`; returns the figure and what it shows.

    `hollow`: the links were not certified; `began`: what the time is counted from.
    """
    shown = _busiest(every)
    carried = Patch(facecolor="none", edgecolor=look.colour) if hollow else Patch(facecolor=look.colour, alpha=0.75)
    carried.set_label("carried, hollow: not certified" if hollow else "carried")
    legend: list[Handle] = [
        carried,
        Line2D([], [], color=INK, lw=1.0, ls=(0, (4, 1.5)), label="rate asked"),
        Line2D([], [], color=INK, ls="none", marker="|", ms=7, mew=1.0, label="packets dropped"),
    ]
    figure, panels = canvas(title, _PANEL_HEIGHT, legend, foot, len(shown), columns=2)
    for axes, one in zip(panels, shown, strict=True):
        _draw_series(axes, one, look, hollow=hollow)
        if one.way == "up":
            axes.set_ylabel("Mbit/s", size=8)
    for axes in panels[-2:]:
        axes.set_xlabel(f"time since {began} began, s", size=8)
    return figure, shown


def fullest(every: Sequence[Series]) -> str:
    """Name the fullest link and direction."""
    shares = [(one.share, one) for one in every if one.share is not None]
    if not shares:
        most = max(every, key=lambda one: one.mean_bps)
        return f"{most.link} {most.way} carries most, {most.mean_bps / 1e6:.3g} Mbit/s"
    share, most = max(shares, key=lambda pair: pair[0])
    return f"the fullest link is {most.link} {most.way}, {_percent(share)} of its rate on average"


def _caption(result: Result, links: int, shown: int, shown_series: Sequence[Series]) -> str:
    width = float(np.median(np.diff(shown_series[0].edges_s)))
    star = result.cell.topology == "star"
    way = "up leads to the hub, down to the stage" if star else "up leads towards the last stage, down back"
    more = "" if shown == links else f" Shows the {shown} of {links} links with the most traffic."
    stands = "certified" if result.certified else "not certified"
    return (
        f"IP packets, including acknowledgements, averaged over {width:.2g} s; {way}. Dashed: the profile's rate at "
        "that moment. Marks on top: packets dropped by a full buffer or by the loss model. Run "
        f"{result.run.number} of {result.cell.codec}, engine {result.measured.engine}, {stands}; it begins with "
        f"connecting and ends with the last evaluation.{more}"
    )

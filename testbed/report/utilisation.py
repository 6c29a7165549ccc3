"""A figure of what the links of a run carried over time, against what they were asked to carry."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.errors import SpecError
from testbed.profiles import LinkProfile
from testbed.profiles.timeline import timeline
from testbed.records import LinkCounters, Sample
from testbed.report.canvas import Drawing, Handle, canvas, group_looks, shortened, small_print
from testbed.report.collect import BASELINE, Group
from testbed.report.entry import Result
from testbed.report.style import INK, Look

Floats = NDArray[np.float64]
_MOST_POINTS = 400
"""How many points a panel can show; longer runs are averaged over more samples."""
_MOST_LINKS = 8
_PANEL_HEIGHT = 0.95


class Series(NamedTuple):
    """One direction of a link, in intervals."""

    link: str
    way: LinkDirection
    profile: LinkProfile
    edges_s: Floats
    """Where intervals begin and end, from the moment at which the links were played; all in emulated time."""
    carried_bps: Floats
    asked_bps: Floats | None
    """The mean over each interval; None where nothing was asked, or the file of a trace is gone."""
    dropped: NDArray[np.int64]

    @property
    def mean_bps(self) -> float:
        """The mean over all intervals."""
        lengths = np.diff(self.edges_s)
        return float((self.carried_bps * lengths).sum() / lengths.sum())

    @property
    def share(self) -> float | None:
        """The share of what was asked; None as above."""
        if self.asked_bps is None:
            return None
        lengths = np.diff(self.edges_s)
        return self.mean_bps * float(lengths.sum() / (self.asked_bps * lengths).sum())


def _asked(profile: LinkProfile, way: LinkDirection, edges_ns: Sequence[int]) -> Floats | None:
    """Return the rate asked for, in IP packets of full size whatever layer the profile counts."""
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


def _dropped(count: LinkCounters) -> int:
    return count.dropped_buffer + (count.dropped_loss or 0)


def series(result: Result) -> list[Series]:
    """Return every direction of every link of a run, in order; empty where fewer than two samples were taken."""
    samples = list(result.run.samples())
    if len(samples) < 2:
        return []
    step = math.ceil((len(samples) - 1) / _MOST_POINTS)
    chosen: list[Sample] = samples[::step] if (len(samples) - 1) % step == 0 else [*samples[::step], samples[-1]]
    record = result.run.lab
    origin = samples[0].at_ns if record.played_at_ns is None else record.played_at_ns
    edges_ns = [max(0, sample.at_ns - origin) for sample in chosen]
    factor = result.cell.compute.dilation
    edges = np.array(edges_ns) / (1e9 * factor)
    every = []
    for name, profile in zip((link.name for link in record.links), result.cell.links, strict=True):
        for way in LINK_DIRECTIONS:
            counts = [sample.links[name][way] for sample in chosen]
            carried = 8 * np.diff([count.bytes for count in counts]) / np.diff(edges)
            dropped = np.diff([_dropped(count) for count in counts])
            asked = _asked(profile, way, edges_ns)
            shown = None if asked is None else asked * factor
            every.append(Series(name, way, profile, edges, carried, shown, dropped))
    return every


def _best_known(group: Group, network: str) -> Result | None:
    """Return the run to show: fp32, which loads the links most, or the first codec that finished."""
    typical = [entry.typical for entry in group.finished(network)]
    finished = [result for result in typical if (result.run.folder / "counters.jsonl").exists()]
    return next((result for result in finished if result.cell.codec == BASELINE), finished[0] if finished else None)


def _panel(axes: Axes, shown: Series, look: Look, *, hollow: bool) -> None:
    unit = 1e6
    carried = shown.carried_bps / unit
    if hollow:
        axes.stairs(carried, shown.edges_s, color=look.colour, lw=0.9)
    else:
        axes.stairs(carried, shown.edges_s, fill=True, color=look.colour, alpha=0.75, lw=0)
    top = float(carried.max(initial=0.0))
    if shown.asked_bps is not None:
        axes.stairs(shown.asked_bps / unit, shown.edges_s, baseline=None, color=INK, lw=1.0, ls=(0, (4, 1.5)))
        top = max(top, float(shown.asked_bps.max()) / unit)
    top = 1.18 * (top or 1.0)
    axes.set_ylim(0, top)
    axes.set_xlim(0, float(shown.edges_s[-1]))
    middles = (shown.edges_s[1:] + shown.edges_s[:-1]) / 2
    hit = shown.dropped > 0
    axes.plot(middles[hit], np.full(int(hit.sum()), 0.94 * top), ls="none", marker="|", ms=6, mew=0.9, color=INK)
    axes.set_title(f"{shown.link} {shown.way}: {shown.profile.name}", size=9, pad=15)
    unknown = "unshaped" if shown.profile.pipe(shown.way) is None else "its trace's file is gone"
    share = unknown if shown.share is None else f"{100 * shown.share:.0f} % of asked"
    words = [f"mean {shown.mean_bps / unit:.3g} Mbit/s", share]
    if total := int(shown.dropped.sum()):
        words.append(f"{total:,} dropped")
    small_print(axes, ", ".join(words), 4)
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_locator(MaxNLocator(8))
    axes.tick_params(labelsize=7.5)


def _busiest(every: Sequence[Series]) -> list[Series]:
    """Return the links that carried most, in their own order."""
    moved: dict[str, float] = {}
    for series in every:
        moved[series.link] = moved.get(series.link, 0.0) + series.mean_bps
    kept = set(sorted(moved, key=moved.__getitem__, reverse=True)[:_MOST_LINKS])
    return [series for series in every if series.link in kept]


def utilisation(group: Group, settings: str) -> Iterator[Drawing]:
    """Draw one figure per network that has a finished run with counters: a row for each link, `up` beside `down`."""
    for number, network in enumerate(group.networks, start=1):
        result = _best_known(group, network)
        everything = series(result) if result is not None else []
        if result is None or not everything:
            continue
        shown = _busiest(everything)
        hollow, look = not result.sound, group_looks(group)[result.cell.codec]
        carried = Patch(facecolor="none", edgecolor=look.colour) if hollow else Patch(facecolor=look.colour, alpha=0.75)
        carried.set_label("carried, hollow: not certified" if hollow else "carried")
        legend: list[Handle] = [
            carried,
            Line2D([], [], color=INK, lw=1.0, ls=(0, (4, 1.5)), label="rate asked"),
            Line2D([], [], color=INK, ls="none", marker="|", ms=7, mew=1.0, label="packets dropped"),
        ]
        title = f"{result.cell.codec} over {shortened(network, 40)}: {_finding(everything)}"
        figure, panels = canvas(title, _PANEL_HEIGHT, legend, settings, len(shown), columns=2)
        for axes, panel_series in zip(panels, shown, strict=True):
            _panel(axes, panel_series, look, hollow=hollow)
            if panel_series.way == "up":
                axes.set_ylabel("Mbit/s", size=8)
        for axes in panels[-2:]:
            axes.set_xlabel("time since the run began, s", size=8)
        caption = _caption(result, len(everything) // 2, len(shown) // 2, shown)
        yield Drawing(f"utilisation-{number}", title, caption, figure)


def _finding(every: Sequence[Series]) -> str:
    """Say which direction of which link is the fullest."""
    shares = [(one.share, one) for one in every if one.share is not None]
    if not shares:
        fullest = max(every, key=lambda one: one.mean_bps)
        return f"{fullest.link} {fullest.way} carries most, {fullest.mean_bps / 1e6:.3g} Mbit/s"
    share, fullest = max(shares, key=lambda pair: pair[0])
    return f"the fullest link is {fullest.link} {fullest.way}, {100 * share:.0f} % of its rate on average"


def _caption(result: Result, links: int, shown: int, shown_series: Sequence[Series]) -> str:
    width = float(np.median(np.diff(shown_series[0].edges_s)))
    star = result.cell.topology == "star"
    way = "up leads to the hub, down to the stage" if star else "up leads towards the last stage, down back"
    more = "" if shown == links else f" The {shown} of {links} links that carried most."
    stands = "certified" if result.certified else "not certified"
    return (
        f"IP packets, acknowledgements too, mean of each {width:.2g} s; {way}. Dashed: the rate that the profile asks "
        "for at that moment. Marks on top: packets were dropped, by a full buffer or by the loss model. Run "
        f"{result.run.number} of {result.cell.codec}, engine {result.measured.engine}, {stands}; it begins with "
        f"connecting and ends with the last evaluation.{more}"
    )

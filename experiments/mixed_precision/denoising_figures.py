"""Tables, verdicts and the figure of denoising.csv and denoising_sensitivity.csv, for figures.py."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas
from matplotlib import colormaps
from matplotlib.figure import Figure

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, plots, style
from testbed.report.canvas import note
from testbed.report.claim_rows import Facts
from testbed.report.claims import EXACT
from testbed.report.numbers import markdown_table

CELLS = {"layers": "each layer", "steps": "each group of steps", "both": "each layer in each group of steps"}
SEARCHES = {"alone": "sum of each alone", "together": "all measured together"}
LOOKS = {"layers": ("#e69f00", "s"), "steps": ("#009e73", "^"), "both": ("#d55e00", "D")}
SHOWN = 2
"""Bits at which sensitivities are shown."""


class Denoising(NamedTuple):
    """Both tables."""

    settings: Any
    sensitivity: Any

    @property
    def steps(self) -> list[int]:
        """Return the numbers of denoising steps."""
        return sorted(set(self.settings.steps))

    @property
    def budgets(self) -> list[int]:
        """Return the uniform widths whose bytes were searched for."""
        return sorted(set(self.settings[self.settings.search != "uniform"].budget), reverse=True)

    def setting(self, steps: int, cells: str, search: str, budget: int) -> Any:
        """Return the rows of a setting, one for each seed; none where it was not searched for."""
        wanted = {"steps": steps, "cells": cells, "search": search, "budget": budget}
        return experiments.matching(self.settings, wanted)

    def gain(self, steps: int, cells: str, search: str, budget: int) -> Judgement:
        """Judge that a setting that was found errs less than the uniform one with as many bytes or more."""
        pair = self.setting(steps, cells, search, budget), self.setting(steps, "all", "uniform", budget)
        ours, base = (experiments.by_seed(rows, "relative_l2") for rows in pair)
        return judge("speed_up", ours, base, 1.0)

    def searched(self) -> Iterator[tuple[int, int, str, str]]:
        """Yield steps, budget, cells and search of what was found."""
        for steps in self.steps:
            for budget in self.budgets:
                for cells in CELLS:
                    for search in SEARCHES:
                        if len(self.setting(steps, cells, search, budget)):
                            yield steps, budget, cells, search


def denoising(folder: Path) -> Denoising:
    """Read the tables."""
    return Denoising(*(pandas.read_csv(folder / f"{name}.csv") for name in ("denoising", "denoising_sensitivity")))


def answer(all_: Denoising) -> str:
    """Return the answer in a sentence."""
    most = max(all_.steps)
    gains = [(all_.gain(most, "both", "alone", budget), budget) for budget in all_.budgets]
    said = " and ".join(f"{found.value:.2f} ({budget} bits)" for found, budget in gains)
    return f"A diffusion sampler's layers and steps are not: bits for each make errors {said} times smaller."


# ------------------------------------------------------------------ tables
def settings_table(all_: Denoising) -> str:
    """Return what the searches found, beside uniform widths."""
    rows = []
    for steps in all_.steps:
        for bits in sorted(set(all_.settings[all_.settings.search == "uniform"].budget), reverse=True):
            rows.append([str(steps), str(bits), "", "uniform", *_numbers(all_.setting(steps, "all", "uniform", bits))])
            for found in all_.searched():
                if found[:2] == (steps, bits):
                    cells, search = found[2:]
                    gain = all_.gain(steps, cells, search, bits)
                    numbers = _numbers(all_.setting(steps, cells, search, bits))
                    smaller, ends = experiments.times_smaller(gain, "{:.3f}")
                    words = f"{smaller} ({ends})"
                    rows.append([str(steps), str(bits), CELLS[cells], SEARCHES[search], *numbers[:-1], words])
    headings = [
        "steps", "budget", "bits for", "search", "bits", "MB per worker", "sum", "together", "relative L2",
        "error vs uniform",
    ]  # fmt: skip
    return markdown_table(headings, rows, right=[headings[0], headings[1], *headings[5:]])


def _numbers(rows: Any) -> list[str]:
    first = rows.iloc[0]
    errors = [first.predicted, first.searched, rows.relative_l2.mean()]
    return [f"`{first.widths}`", f"{first.sent_bytes / 1e6:.3f}", *(f"{error:.5f}" for error in errors), ""]


def sensitivity_table(all_: Denoising) -> str:
    """Return the error of images where one layer in one group of steps alone has a codec."""
    frame = all_.sensitivity[all_.sensitivity.bits == SHOWN]
    layers = sorted(set(frame.layer))
    floors = all_.sensitivity[all_.sensitivity.layer < 0].set_index("steps").relative_l2
    rows = [
        [str(steps), _span(all_, int(steps), int(group)), f"{1e4 * floors[steps]:.2f}",
         *(f"{1e4 * part[part.layer == layer].relative_l2.iloc[0]:.2f}" for layer in layers)]
        for (steps, group), part in frame.groupby(["steps", "group"])
    ]  # fmt: skip
    headings = ["steps", "in steps", "nowhere", *(f"layer {layer}" for layer in layers)]
    return markdown_table(headings, rows, right=headings)


def _span(all_: Denoising, steps: int, first: int) -> str:
    frame = all_.sensitivity[(all_.sensitivity.steps == steps) & (all_.sensitivity.layer >= 0)]
    firsts = sorted(set(frame.group))
    last = [*firsts, steps][firsts.index(first) + 1] - 1
    return f"{first}" if last == first else f"{first} to {last}"


# ------------------------------------------------------------------ claims
def gains(folder: Path) -> Iterator[Facts]:
    """Yield, for each budget and for what may have bits of its own, how much less images err with bits that were
    searched than with uniform ones.
    """
    all_ = denoising(folder)
    for steps, budget, (cells, words) in itertools.product(all_.steps, all_.budgets, CELLS.items()):
        found = all_.gain(steps, cells, "alone", budget)
        widths, uniform = (
            all_.setting(steps, *setting, budget).widths.iloc[0] for setting in ((cells, "alone"), ("all", "uniform"))
        )
        same = widths == uniform
        ours, interval = experiments.times_smaller(found, "{:.3f}")
        judged = "it finds the uniform setting itself" if same else "judged on images that the search did not see"
        yield {
            "lower": False if same else {"holds": True, "fails": False}.get(found.verdict or ""),
            "words": words,
            "budget": budget,
            "steps": steps,
            "less": ours,
            "interval": EXACT if same else f"{interval}, 95 %, {found.n} seeds",
            "shown": f"{judged}; {_differ(all_, steps, cells)}",
        }


def adds_up(folder: Path, factor: float) -> Iterator[Facts]:
    """Yield, for each number of steps, how many settings err by the sum of what they change, within a factor."""
    all_ = denoising(folder)
    for steps in all_.steps:
        rows = all_.settings[(all_.settings.steps == steps) & (all_.settings.search != "uniform")]
        ratios = ((rows.searched / rows.predicted) ** 2).groupby([rows.cells, rows.search, rows.budget]).first()
        yield {**share_within(ratios, factor), "steps": steps}


def share_within(ratios: Any, factor: float) -> dict[str, Any]:
    """Return which share of ratios is within a factor of 1, and from where to where they go."""
    inside = ratios.between(1 / factor, factor)
    ends = f"{ratios.min():.2f} to {ratios.max():.2f} times the sum"
    return {"value": 100 * inside.mean(), "count": len(ratios), "all": bool(inside.all()), "interval": ends}


def _differ(all_: Denoising, steps: int, cells: str) -> str:
    """Say how far what may have bits of its own differs at `SHOWN` bits, in squared error per step."""
    frame = all_.sensitivity[(all_.sensitivity.bits == SHOWN) & (all_.sensitivity.steps == steps)]
    firsts = sorted(set(frame.group))
    lengths = dict(zip(firsts, (b - a for a, b in zip(firsts, [*firsts[1:], steps], strict=True)), strict=True))
    floors = all_.sensitivity[(all_.sensitivity.layer < 0) & (all_.sensitivity.steps == steps)]
    squares = (frame.relative_l2**2 - floors.relative_l2.iloc[0] ** 2) / frame.group.map(lengths)
    keys = {"layers": [frame.layer], "steps": [frame.group], "both": [frame.layer, frame.group]}[cells]
    means = squares.groupby(keys).mean()
    return f"squared errors per step differ {means.max() / means.min():.1f} times at {SHOWN} bits"


# ------------------------------------------------------------------ figure
def draw(all_: Denoising) -> Figure:
    """Draw error against bytes for each number of steps, and how sensitive layers and steps are."""
    figure, ((*row, last),) = plots.panels(1, len(all_.steps) + 1, (4.2 * (len(all_.steps) + 1), 3.9))
    for axes, steps in zip(row, all_.steps, strict=True):
        rows = all_.settings[all_.settings.steps == steps]
        uniform = rows[rows.search == "uniform"].groupby("budget")[["sent_bytes", "relative_l2"]].mean()
        axes.plot(uniform.sent_bytes / 1e6, uniform.relative_l2, color=style.INK, marker="o", label="uniform")
        for bits, each in uniform.iterrows():
            at = each.sent_bytes / 1e6, each.relative_l2
            note(axes, f"{bits} bit{'s' if bits != 1 else ''}", at, (5, 4), size=8)
        for cells, (colour, marker) in LOOKS.items():
            part = rows[(rows.cells == cells) & (rows.search == "alone")]
            means = part.groupby("budget")[["sent_bytes", "relative_l2"]].mean()
            look = {"color": colour, "marker": marker, "ls": "none", "mfc": "none"}
            axes.plot(means.sent_bytes / 1e6, means.relative_l2, label=f"bits for {CELLS[cells]}", **look)
        axes.set(title=f"{steps} denoising steps", yscale="log", xlabel="MB per worker and request")
        axes.margins(0.15)
    row[0].set_ylabel("relative L2 error of images")
    most = max(all_.steps)
    frame = all_.sensitivity[(all_.sensitivity.bits == SHOWN) & (all_.sensitivity.steps == most)]
    layers = sorted(set(frame.layer))
    for layer in layers:
        part, colour = frame[frame.layer == layer].sort_values("group"), colormaps["viridis"](layer / len(layers))
        spans = [_span(all_, most, int(group)) for group in part.group]
        last.plot(spans, part.relative_l2, marker="o", color=colour)
        note(last, f"layer {layer}", (len(part) - 1, part.relative_l2.iloc[-1]), (6, -3), size=8)
    last.set(title=f"{SHOWN} bits in one place alone", xlabel=f"of {most} denoising steps", ylim=(0, None))
    last.margins(x=0.2)
    plots.finish(figure, title(all_), row[0], fontsize=8)
    return figure


def title(all_: Denoising) -> str:
    """Return what the figure shows."""
    gains = [
        all_.gain(steps, cells, search, budget)
        for steps, budget, cells, search in all_.searched()
        if (cells, search) == ("both", "alone")
    ]
    least, most = (pick(found.value for found in gains) for pick in (min, max))
    sure = "" if all(found.verdict == "holds" for found in gains) else ", not all of it resolved"
    return f"For equal bytes, bits for each layer and step make errors {least:.2f} to {most:.2f} times smaller{sure}"

"""Draws the figures and generates the tables of local_steps_or_codec: `python
experiments/local_steps_or_codec/figures.py`.

This reads curves.csv and tuning.csv, which train.py writes into the output folder, and cells.csv, which
`python -m testbed predict local_steps_or_codec` writes into the results; it copies the latter.
"""

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from methods import METHODS

from testbed.codecs.catalogue.codec_spec import parse_codec
from testbed.devices import rates_of
from testbed.errors import ResultsError
from testbed.metrics.curves import LossPoint
from testbed.metrics.verdicts import Judgement, judge
from testbed.predict.shapes import model_on_device
from testbed.replay.workers import device_coding, worker_coding_ns
from testbed.report import experiments, floors, plots, predicted, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent, span
from testbed.spec import DataParallelSpec
from testbed.workloads.models import shapes_of

HERE = Path(__file__).resolve().parent
ALL_REDUCE, BF16 = "all-reduce fp32", "all-reduce bf16"
EQUAL, BITS_NEAR = 0.02, 2e-3
"""Nats that count as no worse; and the largest relative deviation of a cell's bits from the counted ones."""
LOCAL, CODEC, BOTH, NEITHER = "local steps", "codec", "both", "neither"
FAMILIES = {
    "all-reduce": (NEITHER, "#767d86"),
    "DiLoCo": (LOCAL, "#0072b2"),
    "Streaming DiLoCo": (BOTH, "#56b4e9"),
    "SparseLoCo": (BOTH, "#009e73"),
    "top-k": (CODEC, "#e69f00"),
    "DD-EF": (CODEC, "#d55e00"),
    "DeMo": (CODEC, "#cc79a7"),
    "PowerSGD": (CODEC, "#7b4fa3"),
    "1-bit Adam": (CODEC, "#8c6d31"),
}
"""How a family saves bytes, and its colour."""
_LINK = re.compile(r"link\((\d+)(M|G)bit, (\d+)ms")

BySeed = Mapping[int, float]


class Link(NamedTuple):
    """The link of every worker, in both directions."""

    rate_mbps: int
    delay_ms: int
    """One way."""

    @property
    def words(self) -> str:
        return f"{self.rate_mbps} Mbit/s, {self.delay_ms} ms"


class Row(NamedTuple):
    """A line of methods.csv, which train.py describes."""

    method: str
    family: str
    exchange: str
    workers: int
    local_steps: int
    values: int
    message_bytes: float
    dense_first: int

    @property
    def bits(self) -> float:
        """Bits of a message per parameter."""
        return 8 * self.message_bytes / self.values


class Results(NamedTuple):
    """The measurements."""

    rows: dict[str, Row]
    """The trained methods, by name."""
    curves: dict[str, dict[int, list[LossPoint]]]
    """Curves by method and seed; a step is one batch of every worker."""
    tuning: Any
    target: float
    batch_s: dict[tuple[str, Link], float]
    """Played time of an exchange, divided by its local steps."""
    compute_s: float
    """Compute time of a batch."""
    codec_share: dict[str, float]
    """A worker's time for codecs on its device, divided by its compute time."""

    @property
    def links(self) -> list[Link]:
        return sorted({link for _, link in self.batch_s})

    def batches(self, name: str) -> BySeed:
        """Return each seed's batches to the target; empty if one does not reach it."""
        return {seed: each.steps for seed, each in experiments.crossings(self.curves[name], self.target).items()}

    def seconds(self, name: str, link: Link) -> BySeed:
        """Return each seed's seconds to the target; empty as above."""
        first, each_s = self.rows[name].dense_first, self.batch_s[name, link]
        dense_s = self.batch_s[ALL_REDUCE, link] if first else 0.0
        return {
            seed: min(batches, first) * dense_s + max(0, batches - first) * each_s
            for seed, batches in self.batches(name).items()
        }

    def last(self, name: str) -> BySeed:
        """Return each seed's loss after all batches."""
        return {seed: points[-1].loss for seed, points in self.curves[name].items()}

    def sent_bits(self, name: str, batches: float | None = None) -> float:
        """Return the bits per parameter that a worker sends per batch: the mean over `batches`, by default over all
        of them.
        """
        row = self.rows[name]
        copies = 2 * (row.workers - 1) / row.workers if row.exchange == "all-reduce" else row.workers - 1
        bits = copies * row.bits / row.local_steps
        if not row.dense_first:
            return bits
        if batches is None:
            batches = max(point.step for points in self.curves[name].values() for point in points)
        dense = min(1.0, row.dense_first / batches)
        return dense * self.sent_bits(ALL_REDUCE) + (1 - dense) * bits

    def kind(self, name: str) -> str:
        """Return how a method saves bytes."""
        return FAMILIES[self.rows[name].family][0]

    def colour(self, name: str) -> str:
        """Return the colour of a method's family."""
        return FAMILIES[self.rows[name].family][1]

    def reached(self) -> list[str]:
        """Return the methods whose seeds all reach the target."""
        return [name for name in self.rows if self.batches(name)]


@functools.lru_cache(maxsize=2)
def results(folder: Path) -> Results:
    """Read the CSVs. ResultsError if cells.csv has other methods or bits than the trainings."""
    tuning, cells = (pandas.read_csv(folder / name) for name in ("tuning.csv", predicted.FILE))
    rows = {row.method: Row(*row) for row in pandas.read_csv(folder / "methods.csv").itertuples(index=False)}
    batch_s = {}
    for cell in cells.to_dict("records"):
        name, found = cell["label.method"], _LINK.match(cell["links"])
        if name not in rows:
            continue
        if found is None or abs(cell["bits"] / rows[name].bits - 1) > BITS_NEAR:
            raise ResultsError(
                f"{folder}: {name} was played with {cell['bits']} bits per parameter over {cell['links']}, and sends "
                f"{rows[name].bits:.4f}; put these into cells.toml and run predict again"
            )
        link = Link(int(found[1]) * (1000 if found[2] == "G" else 1), int(found[3]))
        batch_s[name, link] = cell["step_s"] / rows[name].local_steps
    if missing := sorted(set(rows) - {name for name, _ in batch_s}):
        raise ResultsError(f"{folder}: {', '.join(missing)} were trained and not played; run predict again")
    compute_s = float((cells.compute_s / cells.local_iterations.fillna(1)).min())
    shares = codec_shares(compute_s)
    curves = experiments.tuned_curves(folder)
    return Results(rows, curves, tuning, float(tuning.target.iloc[0]), batch_s, compute_s, shares)


def codec_shares(compute_s: float) -> dict[str, float]:
    """Return codecs' share of a step on the device of cells.toml, from their bytes moved and operations."""
    asked = tomllib.loads((HERE / "cells.toml").read_text(encoding="utf8"))["cell"]
    size, device, _ = model_on_device(asked["model"], asked["device"], asked["precision"])
    shares = {}
    for row in METHODS:
        method = row.method
        data = DataParallelSpec(
            workers=method.workers,
            exchange=row.exchange,
            staleness=(method.staleness,),
            local_steps=(method.local_steps,),
            outer=method.outer,
            streaming=method.streaming,
        )
        codecs = [parse_codec(method.codec)] * method.workers
        coding = device_coding(data, codecs, shapes_of(size), rates_of(device))
        each_ns = [worker_coding_ns(data, messages) for messages in coding]
        shares[row.name] = sum(each_ns) / len(each_ns) / 1e9 / (method.local_steps * compute_s)
    return shares


def best(found: Results, link: Link, kinds: Iterable[str]) -> str:
    """Return the method of these kinds that reaches the target first, averaged over its seeds."""
    return next(name for name in _ranked(found, link) if found.kind(name) in kinds)


def against(found: Results, link: Link, ours: str, base: str, effect: float | None = None) -> Judgement:
    """Judge how many times as soon one method reaches the target as another."""
    return judge("time_to_loss", found.seconds(ours, link), found.seconds(base, link), effect)


# ------------------------------------------------------------------ tables
def methods_table(folder: Path) -> Any:
    """Return the training results of each method, independent of the link."""
    found, rows = results(folder), []
    for name, row in found.rows.items():
        chosen = found.tuning[(found.tuning.method == name) & found.tuning.chosen].iloc[0]
        outer = f", {chosen.outer_rate:g}" if row.family.endswith("DiLoCo") else ""
        batches = found.batches(name)
        rows.append(
            {
                "method": name,
                "rates": f"{chosen.learning_rate:g}{outer}",
                "bits of a message": f"{row.bits:.3g}",
                "bits sent per batch": f"{found.sent_bits(name):.3g}",
                "codecs / compute time": percent(found.codec_share[name], "{:.2g}"),
                "batches to the target": experiments.mean_words(batches, "{:.0f}") if batches else "not all seeds",
                "bits sent until then": f"{_sent_until(found, name):.4g}" if batches else "",
                "last loss": experiments.mean_words(found.last(name), "{:.3f}"),
            }
        )
    return pandas.DataFrame(rows)


def _sent_until(found: Results, name: str) -> float:
    """Return the bits per parameter that a worker has sent when it reaches the target."""
    batches = experiments.mean_of(found.batches(name))
    return found.sent_bits(name, batches) * batches


@experiments.table
def links_table(folder: Path) -> Any:
    """Return, for each link, the first method of each kind, and how many times as soon as bf16 all-reduce it reaches
    the target.
    """
    found = results(folder)
    base = baseline(found)
    for link in found.links:
        firsts = {kind: best(found, link, [kind]) for kind in (LOCAL, CODEC, BOTH)}
        first, second = _ranked(found, link)[:2]
        judged = against(found, link, first, second)
        yield {
            "link": link.words,
            "all-reduce": f"{experiments.mean_of(found.seconds(base, link)):.0f} s",
            **{kind: f"{name}: {against(found, link, name, base).value:.1f}x" for kind, name in firsts.items()},
            "first": f"{first}, {judged.value:.2f} times as soon as {second} ({judged.interval_words})",
        }


def _ranked(found: Results, link: Link) -> list[str]:
    return sorted(found.reached(), key=lambda name: experiments.mean_of(found.seconds(name, link)))


def baseline(found: Results) -> str:
    """Return the baseline of comparisons: the all-reduce with the fewest bytes."""
    return BF16 if BF16 in found.rows else ALL_REDUCE


# ------------------------------------------------------------------ claims
def loss(folder: Path, pairs: Sequence[Sequence[str]], bound: float) -> Iterator[Facts]:
    """Yield, for each trained pair, the difference of the first's and the second's last loss."""
    found = results(folder)
    for ours, base in pairs:
        if {ours, base} <= found.rows.keys():
            judged = judge("loss", found.last(ours), found.last(base), bound)
            fewer = found.sent_bits(base) / found.sent_bits(ours)
            steps, last = (max(found.rows[name].local_steps for name in (ours, base)), found.last(base))
            more = {"base": base, "fewer": fewer, "steps": steps}
            yield experiments.loss_facts(
                judged, experiments.mean_of(last), experiments.tuned_pair_s(HERE), EQUAL, **more
            )


def everywhere(folder: Path, kinds: Sequence[Sequence[str]], base: Sequence[str]) -> Facts:
    """Return how many times as soon the best of some kinds reaches the target as the best of others, on the link with
    the smallest gain; with several `kinds`, the slowest of their bests counts.
    """
    found = results(folder)
    judged = {}
    for link in found.links:
        names = [best(found, link, each) for each in kinds]
        slowest = max(names, key=lambda name: experiments.mean_of(found.seconds(name, link)))
        judged[link] = against(found, link, slowest, best(found, link, base), 1.0)
    verdicts, ends = ([getattr(each, of) for each in judged.values()] for of in ("verdict", "interval"))
    low, high = (None, None) if None in ends else map(min, zip(*ends, strict=True))
    open_ = [each for each in judged.values() if each.verdict == "not resolved"] if "fails" not in verdicts else []
    least = min(judged, key=lambda link: judged[link].value)
    at = judged[least]
    return {
        "value": at.value, "low": low, "high": high, "most": max(each.value for each in judged.values()),
        "interval": f"{experiments.interval_words(at)}, at {least.words}, the smallest",
        "links": len(judged), "sooner": verdicts.count("holds"), "later": verdicts.count("fails"),
        "parameters": next(iter(found.rows.values())).values,
        "unresolved": f"; {experiments.more_seeds(open_[0], experiments.tuned_pair_s(HERE))}" if open_ else "",
    }  # fmt: skip


# ------------------------------------------------------------------ the README
def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    found, base = results(folder), baseline(results(folder))
    winners: dict[str, list[Link]] = {}
    for link in found.links:
        winners.setdefault(_ranked(found, link)[0], []).append(link)
    said = []
    for name, links in sorted(winners.items(), key=lambda item: -len(item[1])):
        gains = [against(found, link, name, base).value for link in links]
        where = links[0].words if len(links) == 1 else f"{len(links)} of {len(found.links)} links"
        said.append(f"{name} on {where} ({span(gains, '{:.1f}'.format)} times as soon as {base})")
    reached = {name: _sent_until(found, name) for name in found.reached()}
    least = min(reached, key=lambda name: reached[name])
    return (
        f"First at a loss of {found.target:g} nats: {'; '.join(said)}. With fewest bytes: {least}, "
        f"{reached[base] / reached[least]:.0f} times fewer than {base}, in "
        f"{experiments.mean_of(found.batches(least)) / experiments.mean_of(found.batches(base)):.1f} times as many "
        "batches."
    )


# ------------------------------------------------------------------ figures
def draw_map(folder: Path) -> Figure:
    """Draw the first method to reach the target over each link, and its lead."""
    found = results(folder)
    rates, delays = (sorted({link[place] for link in found.links}) for place in range(2))
    figure, ((axes,),) = plots.panels(1, 1, (9.2, 1.2 + 0.9 * len(delays)))
    for link in found.links:
        x, y = rates.index(link.rate_mbps), delays.index(link.delay_ms)
        ranked = _ranked(found, link)
        first, gain = ranked[0], against(found, link, ranked[0], baseline(found)).value
        other = next((name for name in ranked if found.kind(name) != found.kind(first)), first)
        axes.add_patch(Rectangle((x, y), 1, 1, color=found.colour(first), alpha=0.3, lw=0))
        then = f"then {other}: {against(found, link, other, baseline(found)).value:.1f}x"
        centred: Any = {"ha": "center", "va": "center"}
        axes.text(x + 0.5, y + 0.68, first, weight="bold", **centred)
        axes.text(x + 0.5, y + 0.42, f"{gain:.1f}x all-reduce", size=8.5, **centred)
        axes.text(x + 0.5, y + 0.2, then, size=8, color=style.MUTED, **centred)
    names = list(dict.fromkeys(_ranked(found, link)[0] for link in found.links))
    axes.set_title(f"First at a loss of {found.target:g} nats: {', '.join(names)}")
    plots.cells(axes, rates, delays, "each worker's link, Mbit/s", "one-way delay, ms")
    return figure


def draw_curves(folder: Path) -> Figure:
    """Draw losses against batches and against bits sent: means over seeds."""
    found = results(folder)
    figure, (row,) = plots.panels(1, 2, (9.2, 4.2), sharey=True)
    dashes: dict[str, int] = {}
    for name, method in found.rows.items():
        dash = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)))[dashes.setdefault(method.family, 0)]
        dashes[method.family] += 1
        points = list(found.curves[name].values())
        batches = [point.step for point in points[0] if all(point.step in {p.step for p in each} for each in points)]
        losses = [float(np.mean([p.loss for each in points for p in each if p.step == step])) for step in batches]
        look = {"color": found.colour(name), "ls": dash, "lw": 1.3}
        row[0].plot(batches, losses, label=name, **look)
        row[1].plot([found.sent_bits(name, step) * step for step in batches], losses, **look)
    lowest = min(found.rows, key=lambda name: experiments.mean_of(found.last(name)))
    least = min(found.reached(), key=lambda name: _sent_until(found, name))
    for axes in row:
        axes.axhline(found.target, color=style.MUTED, lw=0.8)
        floors.draw_floors(axes, HERE)
    row[0].set(xlabel="batches of every worker", title=f"Equal tokens: {lowest} is lowest")
    row[0].set_ylabel("validation loss, nats")
    row[1].set(xlabel="bits sent by a worker, per parameter", title=f"Equal bytes: {least} is first", xscale="log")
    plots.finish(figure, legend=row[0], at="lower center", columns=5)
    return figure


BLOCKS = {"answer": answer, "links": links_table, "methods": methods_table}
FIGURES = {"map": draw_map, "curves": draw_curves}


if __name__ == "__main__":
    publishing.run(globals())

"""Draw the figures of local_steps_or_codec and make its tables: `python experiments/local_steps_or_codec/figures.py`.

This reads curves.csv and tuning.csv, which train.py writes into the output folder, and cells.csv, which
`python -m testbed predict local_steps_or_codec` writes into the results; it copies the latter.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
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
from testbed.metrics.statistics import of_differences
from testbed.metrics.time_to_loss import crossing
from testbed.metrics.verdicts import Judgement, Verdict, judge
from testbed.play.replicas import device_coding, worker_coding_ns
from testbed.play.shapes import model_on_device
from testbed.report import experiments, predicted, style
from testbed.report.claims import Claim, claims_table
from testbed.spec import DataParallelSpec
from testbed.workloads.models import shapes_of

HERE = Path(__file__).resolve().parent
COMMAND = "python experiments/local_steps_or_codec/train.py"
ALL_REDUCE, BF16 = "all-reduce fp32", "all-reduce bf16"
EQUAL, BITS_NEAR = 0.02, 2e-3
"""Nats that count as no worse; and how far a cell's bits may be from those that were counted, as a share."""
TUNING_SEEDS = 2
"""With which each rate was tried: tuned_text.FULL."""
LOCAL, CODEC, BOTH, NEITHER = "local steps", "codec", "both", "neither"
KINDS = {
    "all-reduce": NEITHER,
    "DiLoCo": LOCAL,
    "Streaming DiLoCo": BOTH,
    "SparseLoCo": BOTH,
    "top-k": CODEC,
    "DD-EF": CODEC,
    "DeMo": CODEC,
    "PowerSGD": CODEC,
    "1-bit Adam": CODEC,
}
"""What a family saves bytes by."""
COLOURS = {
    "all-reduce": "#767d86",
    "DiLoCo": "#0072b2",
    "Streaming DiLoCo": "#56b4e9",
    "SparseLoCo": "#009e73",
    "top-k": "#e69f00",
    "DD-EF": "#d55e00",
    "DeMo": "#cc79a7",
    "PowerSGD": "#7b4fa3",
    "1-bit Adam": "#8c6d31",
}
_LINK = re.compile(r"link\((\d+)(M|G)bit, (\d+)ms")

BySeed = Mapping[int, float]


class Link(NamedTuple):
    """Every worker's, both ways."""

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
        """Of a message, per parameter."""
        return 8 * self.message_bytes / self.values


class Results(NamedTuple):
    """What was measured."""

    rows: dict[str, Row]
    """By name, those that were trained."""
    curves: dict[str, dict[int, list[LossPoint]]]
    """By method and seed; a step is a batch of every worker."""
    tuning: Any
    target: float
    batch_s: dict[tuple[str, Link], float]
    """Played: an exchange over its local steps."""
    compute_s: float
    """Of a batch."""
    codec_share: dict[str, float]
    """Time that a worker's device would spend with codecs, over that in which it computes."""

    @property
    def links(self) -> list[Link]:
        return sorted({link for _, link in self.batch_s})

    def batches(self, name: str) -> BySeed:
        """Return each seed's batches to the target; nothing where one of them does not get there."""
        met = {seed: crossing(points, self.target) for seed, points in self.curves[name].items()}
        return {} if None in met.values() else {seed: each.steps for seed, each in met.items() if each is not None}

    def seconds(self, name: str, link: Link) -> BySeed:
        """Return each seed's seconds to the target; nothing as above."""
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
        """Return the bits per parameter that a worker puts on its link for a batch: the mean over so many; None: over
        all.
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

    def reached(self) -> list[str]:
        """Return the methods all of whose seeds get to the target."""
        return [name for name in self.rows if self.batches(name)]


@functools.lru_cache(maxsize=2)
def results(folder: Path) -> Results:
    """Read the CSVs. ResultsError where cells.csv has other methods or bits than were trained."""
    curves, tuning, cells = (pandas.read_csv(folder / name) for name in ("curves.csv", "tuning.csv", predicted.FILE))
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
    points = {
        str(name): {
            int(seed): [LossPoint(row.batches, 0.0, row.loss) for row in each.itertuples()]
            for seed, each in part.groupby("seed")
        }
        for name, part in curves.groupby("method")
    }
    compute_s = float((cells.compute_s / cells.local_iterations.fillna(1)).min())
    shares = codec_shares(compute_s)
    return Results(rows, points, tuning, float(tuning.target.iloc[0]), batch_s, compute_s, shares)


def codec_shares(compute_s: float) -> dict[str, float]:
    """Return what codecs would take of a step on the device that cells.toml emulates, by what they move and compute."""
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
    """Return the method of these kinds that gets to the target first, in the mean of its seeds."""
    chosen = [name for name in found.reached() if KINDS[found.rows[name].family] in kinds]
    return min(chosen, key=lambda name: experiments.mean_of(found.seconds(name, link)))


def against(found: Results, link: Link, ours: str, base: str, effect: float | None = None) -> Judgement:
    """Judge how many times as soon one method gets to the target as another."""
    return judge("time_to_loss", found.seconds(ours, link), found.seconds(base, link), effect)


# ------------------------------------------------------------------ tables
def methods_table(folder: Path) -> Any:
    """Return how each method trains, whatever the link."""
    found, rows = results(folder), []
    for name, row in found.rows.items():
        tried = found.tuning[found.tuning.method == name]
        chosen = tried[tried.chosen].iloc[0]
        batches, last = found.batches(name), of_differences(list(found.last(name).values()), "seed")
        rates = f"{chosen.learning_rate:g}"
        if row.family.endswith("DiLoCo"):
            rates += f", {chosen.outer_rate:g}"
        reached = _sent_until(found, name) if batches else math.nan
        rows.append(
            {
                "method": name,
                "rates": rates,
                "bits of a message": f"{row.bits:.3g}",
                "bits sent per batch": f"{found.sent_bits(name):.3g}",
                "codecs, of computing": f"{100 * found.codec_share[name]:.2g} %",
                "batches to the target": experiments.mean_words(batches, "{:.0f}") if batches else "not all seeds",
                "bits sent until then": f"{reached:.4g}" if batches else "",
                "last loss": experiments.mean_words(found.last(name), "{:.3f}") if last else "",
            }
        )
    return pandas.DataFrame(rows)


def _sent_until(found: Results, name: str) -> float:
    """Return the bits per parameter that a worker has sent when it reaches the target."""
    batches = experiments.mean_of(found.batches(name))
    return found.sent_bits(name, batches) * batches


def links_table(folder: Path) -> Any:
    """Return, for each link, the first of each kind, and how many times as soon as bf16 all-reduce it is."""
    found, rows = results(folder), []
    for link in found.links:
        row: dict[str, object] = {
            "link": link.words,
            "all-reduce": f"{experiments.mean_of(found.seconds(baseline(found), link)):.0f} s",
        }
        for kind in (LOCAL, CODEC, BOTH):
            name = best(found, link, [kind])
            row[kind] = f"{name}: {against(found, link, name, baseline(found)).value:.1f}x"
        first, second = _ranked(found, link)[:2]
        judged = against(found, link, first, second)
        row["first"] = f"{first}, {judged.value:.2f} times as soon as {second} ({judged.interval_words})"
        rows.append(row)
    return pandas.DataFrame(rows)


def _ranked(found: Results, link: Link) -> list[str]:
    return sorted(found.reached(), key=lambda name: experiments.mean_of(found.seconds(name, link)))


def baseline(found: Results) -> str:
    """Return what others are compared with: the all-reduce with fewest bytes."""
    return BF16 if BF16 in found.rows else ALL_REDUCE


# ------------------------------------------------------------------ claims
def seed_s() -> float:
    """Return how long one more seed of two methods takes."""
    return 2 * experiments.tuned_training_s(HERE, TUNING_SEEDS)


def claims(folder: Path) -> list[Claim]:
    """Return what was published and what we asked, and what became of it."""
    found, rows = results(folder), []

    def loss(claim: str, source: str, published: str, ours: str, base: str, effect: float, more: str) -> None:
        if not {ours, base} <= found.rows.keys():
            return
        judged = judge("loss", found.last(ours), found.last(base), effect)
        why = experiments.shown_words(judged, experiments.mean_of(found.last(base)), seed_s(), EQUAL)
        fewer = found.sent_bits(base) / found.sent_bits(ours)
        rows.append(
            Claim(
                claim=claim,
                source=source,
                published=published,
                ours=f"{judged.value:+.3f} nats after equal tokens, {fewer:.3g} times fewer bits sent than {base}",
                interval=experiments.interval_words(judged),
                verdict=judged.verdict or "not resolved",
                why=f"{why}; {more}",
                command=COMMAND,
            )
        )

    small = "a model of 17,408 parameters, 4 workers, rates tuned for the time to the target"
    for steps in (8, 32):
        loss(
            f"DiLoCo with {steps} local steps loses at most {EQUAL} nats to synchronous training",
            "DiLoCo, arXiv 2311.08105, abstract",
            "as well as synchronous training with 500 times less communication",
            f"DiLoCo {steps}", ALL_REDUCE, EQUAL, small,
        )  # fmt: skip
    for steps in (8, 32):
        loss(
            f"SparseLoCo with {steps} local steps has at most DiLoCo's loss with as many",
            "SparseLoCo, arXiv 2508.15706, abstract",
            "outperforms full-precision DiLoCo with 1 to 3 % of the values in 2 bits",
            f"SparseLoCo {steps}", f"DiLoCo {steps}", 0.0, small,
        )  # fmt: skip
    for steps in (8, 32):
        loss(
            f"Streaming DiLoCo with {steps} local steps loses at most {EQUAL} nats to DiLoCo with as many",
            "Streaming DiLoCo, arXiv 2501.18512, abstract",
            "similar quality with two orders of magnitude less bandwidth",
            f"Streaming DiLoCo {steps}", f"DiLoCo {steps}", EQUAL, f"4 fragments, int4; {small}",
        )  # fmt: skip
    for kept in (32,):
        loss(
            f"DeMo with {kept} of 1,024 coefficients loses at most {EQUAL} nats to AdamW",
            "DeMo, arXiv 2411.19870, abstract",
            "comparable loss with up to 85 times less data",
            f"DeMo {kept}", ALL_REDUCE, EQUAL, small,
        )  # fmt: skip
    for rank in (4,):
        loss(
            f"PowerSGD of rank {rank} loses at most {EQUAL} nats to dense gradients",
            "PowerSGD, arXiv 1905.13727, abstract",
            "test performance on par with SGD",
            f"PowerSGD {rank}", ALL_REDUCE, EQUAL, f"rank {rank} of 32; {small}",
        )  # fmt: skip
    loss(
        f"1-bit Adam loses at most {EQUAL} nats to Adam",
        "1-bit Adam, arXiv 2102.02888, abstract",
        "the same convergence with up to 5 times less communication",
        "1-bit Adam", ALL_REDUCE, EQUAL, f"the first 64 of 448 batches are sent dense; {small}",
    )  # fmt: skip
    rows.append(
        _everywhere(found, "Local steps with a codec reach the loss sooner than the best of all others", [BOTH])
    )
    rows.append(_everywhere(found, "Local steps alone reach it sooner than the best codec alone", [LOCAL], [CODEC]))
    rows.append(_everywhere(found, "Every kind of saving reaches it sooner than bf16 all-reduce", None, [NEITHER]))
    return rows


def _everywhere(found: Results, claim: str, ours: list[str] | None, base: list[str] | None = None) -> Claim:
    """Return a claim about all links: the best of some kinds against the best of others. `ours` None: each of them, of
    which the slowest counts.
    """
    judged = {}
    for link in found.links:
        others = base or [kind for kind in (LOCAL, CODEC, BOTH, NEITHER) if kind not in (ours or [])]
        kinds = [[kind] for kind in (LOCAL, CODEC, BOTH)] if ours is None else [ours]
        names = [best(found, link, kind) for kind in kinds]
        slowest = max(names, key=lambda name: experiments.mean_of(found.seconds(name, link)))
        judged[link] = against(found, link, slowest, best(found, link, others), 1.0)
    verdicts = [each.verdict for each in judged.values()]
    least = min(judged, key=lambda link: judged[link].value)
    verdict: Verdict = "holds" if set(verdicts) == {"holds"} else "fails" if "fails" in verdicts else "not resolved"
    values = [each.value for each in judged.values()]
    unsure = [each for each in judged.values() if each.verdict == "not resolved"] if verdict == "not resolved" else []
    return Claim(
        claim=f"{claim}, on every link",
        source="ours",
        ours=f"{min(values):.2f} to {max(values):.2f} times as soon over {len(values)} links",
        interval=f"{judged[least].interval_words}, 95 %, {judged[least].n} seeds, at {least.words}, where it is least",
        verdict=verdict,
        why=f"sooner on {verdicts.count('holds')} links and later on {verdicts.count('fails')} of {len(verdicts)}; "
        f"steps of a model of {next(iter(found.rows.values())).values:,} parameters, seconds of one of 10 million"
        + "".join(f"; {experiments.more_seeds(each, seed_s())}" for each in unsure[:1]),
        command=COMMAND,
    )


# ------------------------------------------------------------------ the README
def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    return {
        "answer": experiments.prose(answer(folder)),
        "claims": claims_table(claims(folder)),
        "links": experiments.markdown_of(links_table(folder)),
        "methods": experiments.markdown_of(methods_table(folder)),
    }


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
        said.append(f"{name} on {where} ({_range(gains, '{:.1f}')} times as soon as {base})")
    reached = {name: _sent_until(found, name) for name in found.reached()}
    least = min(reached, key=lambda name: reached[name])
    return (
        f"First at a loss of {found.target:g} nats: {'; '.join(said)}. With fewest bytes: {least}, "
        f"{reached[base] / reached[least]:.0f} times fewer than {base}, in "
        f"{experiments.mean_of(found.batches(least)) / experiments.mean_of(found.batches(base)):.1f} times as many "
        "batches."
    )


def _range(values: list[float], form: str = "{:.2f}") -> str:
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"


# ------------------------------------------------------------------ figures
def draw_map(folder: Path) -> Figure:
    """Draw who gets to the target first over which link, and by how much."""
    found = results(folder)
    rates, delays = (sorted({link[place] for link in found.links}) for place in range(2))
    figure = Figure(figsize=(9.2, 1.2 + 0.9 * len(delays)), layout="constrained")
    axes = figure.subplots()
    for link in found.links:
        x, y = rates.index(link.rate_mbps), delays.index(link.delay_ms)
        ranked = _ranked(found, link)
        first, gain = ranked[0], against(found, link, ranked[0], baseline(found)).value
        kind = KINDS[found.rows[first].family]
        other = next((name for name in ranked if KINDS[found.rows[name].family] != kind), first)
        axes.add_patch(Rectangle((x, y), 1, 1, color=COLOURS[found.rows[first].family], alpha=0.3, lw=0))
        axes.text(x + 0.5, y + 0.68, first, ha="center", va="center", weight="bold")
        axes.text(x + 0.5, y + 0.42, f"{gain:.1f}x all-reduce", ha="center", va="center", fontsize=8.5)
        then = f"then {other}: {against(found, link, other, baseline(found)).value:.1f}x"
        axes.text(x + 0.5, y + 0.2, then, ha="center", va="center", fontsize=8, color=style.MUTED)
    names = list(dict.fromkeys(_ranked(found, link)[0] for link in found.links))
    axes.set(
        xlim=(0, len(rates)),
        ylim=(0, len(delays)),
        xlabel="each worker's link, Mbit/s",
        ylabel="one-way delay, ms",
        title=f"First at a loss of {found.target:g} nats: {', '.join(names)}",
    )
    axes.grid(visible=False)
    axes.set_xticks([place + 0.5 for place in range(len(rates))], list(map(str, rates)))
    axes.set_yticks([place + 0.5 for place in range(len(delays))], list(map(str, delays)))
    return figure


def draw_curves(folder: Path) -> Figure:
    """Draw losses against batches and against what was sent: means over seeds."""
    found = results(folder)
    figure = Figure(figsize=(9.2, 4.2), layout="constrained")
    row = figure.subplots(1, 2, sharey=True)
    dashes: dict[str, int] = {}
    for name, method in found.rows.items():
        dash = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)))[dashes.setdefault(method.family, 0)]
        dashes[method.family] += 1
        points = list(found.curves[name].values())
        batches = [point.step for point in points[0] if all(point.step in {p.step for p in each} for each in points)]
        losses = [float(np.mean([p.loss for each in points for p in each if p.step == step])) for step in batches]
        look = {"color": COLOURS[method.family], "ls": dash, "lw": 1.3}
        row[0].plot(batches, losses, label=name, **look)
        row[1].plot([found.sent_bits(name, step) * step for step in batches], losses, **look)
    lowest = min(found.rows, key=lambda name: experiments.mean_of(found.last(name)))
    least = min(found.reached(), key=lambda name: _sent_until(found, name))
    for axes in row:
        axes.axhline(found.target, color=style.MUTED, lw=0.8)
    row[0].set(
        xlabel="batches of every worker", ylabel="validation loss, nats", title=f"Equal tokens: {lowest} is lowest"
    )
    row[1].set(xlabel="bits sent by a worker, per parameter", title=f"Equal bytes: {least} is first", xscale="log")
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def main() -> int:
    """Write the figures, cells.csv, claims.csv and the README's blocks."""
    from_folder, output = experiments.folders(HERE.name, "Figures, claims and the README's blocks.")
    (output / predicted.FILE).write_bytes((from_folder / predicted.FILE).read_bytes())
    experiments.draw_and_publish(HERE, output, {"map": draw_map, "curves": draw_curves}, blocks, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draws the figure and generates the tables of newer_methods: `python experiments/newer_methods/figures.py`.

This reads runs.csv, which train.py writes into the output folder, and cells.csv, which
`python -m testbed predict newer_methods` writes into the results; it copies the latter.
"""

import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
from matplotlib.figure import Figure

from testbed.codecs.catalogue.codec_spec import parse_codec
from testbed.metrics.verdicts import judge
from testbed.report import experiments, floors, plots, predicted, publishing
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent, span

HERE = Path(__file__).resolve().parent
PARAMETERS, FP32 = 17_408, 32
STAGES = "stages, "
COLOURS = {
    "DiLoCo": "#0072b2",
    "DiLoCo, 30 steps": "#56b4e9",
    "DiLoCo, 2 bits": "#7b4fa3",
    "MuLoCo, 2 bits": "#d55e00",
    "NoLoCo": "#009e73",
    "all-reduce": "#767d86",
    "top-k": "#e69f00",
    "ARC-Top-K": "#cc79a7",
    "TSR-Adam": "#332288",
    "TSR-Adam, 20 local": "#882255",
    "PowerSGD": "#999933",
    "top-k, 3.5 %": "#aa4499",
    "stages, bf16": "#767d86",
    "stages, PowerSGD": "#e69f00",
    "stages, rvq": "#d55e00",
}
ABOVE = {"DiLoCo": -2.5, "DiLoCo, 2 bits": 1.3, "NoLoCo": 1.3, "DiLoCo, 30 steps": -1.2, "PowerSGD": 1.7}
"""Labelled above or below, so many lines away; the others on their right."""
EQUAL = 0.05
"""Nats that count as no worse: more than five seeds can detect (`power`)."""
EARLIER = "local_steps_or_codec"


@functools.lru_cache(maxsize=2)
def results(folder: Path) -> Any:
    """Return the runs that count."""
    runs = pandas.read_csv(folder / "runs.csv")
    return runs[runs.use == "result"]


def losses(folder: Path, method: str) -> dict[int, float]:
    """Return the last loss by seed; empty for a method without runs."""
    return experiments.by_seed(results(folder), "loss", method=method)


def of(folder: Path, method: str, column: str) -> float:
    """Return a number that all runs of a method share."""
    runs = results(folder)
    return float(runs[runs.method == method][column].iloc[0])


def pair_s() -> float:
    """Return the time of one more seed of two methods."""
    return 2 * float(experiments.training_s(HERE, "runs.csv"))


def fewer(folder: Path, ours: str, base: str) -> str:
    """Return in words how many bits one method sends, against another: between stages, per message."""
    column = "bits" if ours.startswith(STAGES) else "sent_bits"
    times = of(folder, base, column) / of(folder, ours, column)
    return f"{times:.3g} times fewer bits" if times > 1 else f"{1 / times:.3g} times more bits"


# ------------------------------------------------------------------ claims
def loss(folder: Path, ours: str, base: str, bound: float = 0.0, share: float | None = None) -> Facts | None:
    """Return the difference of two methods' last losses; its bound may be a `share` of the base's loss."""
    both = losses(folder, ours), losses(folder, base)
    if not all(both):
        return None
    mean = experiments.mean_of(both[1])
    judged = judge("loss", *both, bound if share is None else share * mean)
    return experiments.loss_facts(judged, mean, pair_s(), EQUAL, fewer=fewer(folder, ours, base), ours=ours, base=base)


def smaller(folder: Path) -> Facts:
    """Return how many times smaller than fp32 the messages of Covenant's round are: by the numbers of cells.toml, and
    by the formula of our codec.
    """
    bits = float(tomllib.loads((HERE / "cells.toml").read_text(encoding="utf8"))["cell"]["bits"])
    ours = parse_codec("ef-decay(topk-chunk(0.0156), 0.95)").nominal_bits
    value = FP32 / bits
    return {"value": value, "low": value, "high": value, "codec": FP32 / ours}


def round_s(folder: Path, seconds: float) -> Facts:
    """Return the communication of a predicted round, and the rate at which it would take `seconds`."""
    cell = predicted.cells(folder).iloc[0]
    value, ideal = (float(took - cell.no_network_s) for took in (cell.step_s, cell.ideal_s))
    utilised, needed = float(cell.no_network_s / cell.step_s), value / seconds
    facts = {"value": value, "low": value, "high": value, "ideal": ideal, "published": seconds, "needed": needed}
    return {**facts, "utilised": utilised, "round": float(cell.step_s)}


# ------------------------------------------------------------------ the README
def power(folder: Path) -> str:
    """Return what five seeds detect, by the spread of an earlier experiment with this model and text."""
    curves = experiments.tuned_curves(HERE.parent / EARLIER)
    last = {name: {seed: points[-1].loss for seed, points in each.items()} for name, each in curves.items()}
    pairs = (("DiLoCo 8", "all-reduce fp32"), ("SparseLoCo 8", "DiLoCo 8"), ("Streaming DiLoCo 32", "DiLoCo 32"))
    found = [judge("loss", last[ours], last[base], 0.0).detectable for ours, base in pairs]
    assert None not in found
    least = span([each for each in found if each is not None], "{:.3f}".format)
    return experiments.prose(
        f"Computed before the trainings, from the spread of [{EARLIER}](../{EARLIER}/README.md) with the same model "
        f"and text: five seeds detect {least} nats between two methods with 80 % power. So {EQUAL:g} nats count as no "
        "worse."
    )


@experiments.table
def methods(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield every method: what it sends, and its loss."""
    runs = results(folder)
    for name in runs.method.unique():
        sent = of(folder, name, "sent_bits")
        yield {
            "method": name,
            "learning rate": f"{of(folder, name, 'learning_rate'):g}",
            "bits sent per exchange, or per value between stages": f"{of(folder, name, 'bits'):.3g}",
            "bits sent per batch": f"{sent:.3g}" if sent else "",
            "last loss": experiments.mean_words(losses(folder, name), "{:.3f}"),
        }


def answer(folder: Path) -> str:
    """Return the answer in three lines."""
    said = []
    for ours, base in (
        ("MuLoCo, 2 bits", "DiLoCo"),
        ("NoLoCo", "DiLoCo"),
        ("stages, rvq", "stages, bf16"),
        ("ARC-Top-K", "top-k"),
        ("TSR-Adam", "all-reduce"),
    ):
        if (facts := loss(folder, ours, base)) is not None:
            name, than = ours.removeprefix(STAGES), base.removeprefix(STAGES)
            said.append(f"{name} {experiments.with_ends(facts['judgement'])} against {than}, {facts['fewer']}")
    return experiments.prose(
        f"**Answer.** At {PARAMETERS:,} parameters and {int(results(folder).batches.max())} batches, in nats: "
        f"{'; '.join(said)}."
    )


def covenant(folder: Path) -> str:
    """Return the predicted round beside the published one."""
    facts = round_s(folder, 70.0)
    return experiments.prose(
        f"Predicted over 1 Gbit/s: a round of {facts['round']:.0f} s, of which {facts['value']:.0f} s are "
        f"communication ({facts['ideal']:.0f} s by formula), so peers compute {percent(facts['utilised'], '{:.1f}')} "
        "of the time. Published: 70 s and 94.5 %. With the same messages, 70 s need links about "
        f"{facts['needed']:.2g} times as fast."
    )


# ------------------------------------------------------------------ figures
def draw(folder: Path) -> Figure:
    """Draw the losses against the bits sent, of workers and of stages."""
    figure, (row,) = plots.panels(1, 2, (10.6, 4.8))
    names = list(results(folder).method.unique())
    for axes, column, inside in (
        (row[0], "sent_bits", [name for name in names if not name.startswith(STAGES)]),
        (row[1], "bits", [name for name in names if name.startswith(STAGES)]),
    ):
        for name in inside:
            values, x = losses(folder, name), of(folder, name, column)
            mean, line = experiments.mean_of(values), ABOVE.get(name, 0)
            axes.plot([x] * len(values), list(values.values()), "o", ms=4, alpha=0.45, color=COLOURS[name], mew=0)
            axes.plot([x], [mean], "D", ms=6, color=COLOURS[name])
            axes.annotate(
                name.removeprefix(STAGES), (x, mean), (0, 14 * line) if line else (9, 0), textcoords="offset points",
                va="center", ha="center" if line else "left", color=COLOURS[name],
            )  # fmt: skip
        places = sorted({float(f"{of(folder, name, column):.2g}") for name in inside})
        axes.set_xscale("log")
        axes.set_xlim(places[0] / 1.5, places[-1] * 1.9)
        kept = [place for place, after in zip(places, [*places[1:], 1e9], strict=True) if after / place > 1.41]
        plots.ticks(axes.xaxis, kept, "{:g}".format)
        axes.set_ylabel("validation loss, nats")
        floors.draw_floors(axes, HERE, corner=(0, 1))
    row[0].set_title(_title(folder, "MuLoCo, 2 bits", "DiLoCo", "MuLoCo"))
    row[1].set_title(_title(folder, "stages, rvq", "stages, bf16", "rvq"))
    row[0].set_xlabel("bits that a worker sends, per batch and parameter")
    row[1].set_xlabel("bits per value between stages")
    plots.finish(figure)
    return figure


def _title(folder: Path, ours: str, base: str, name: str) -> str:
    """Return what the numbers of a pair support."""
    facts = loss(folder, ours, base)
    if facts is None:
        return name
    judged = facts["judgement"]
    assert judged.interval is not None
    times, than = facts["fewer"], base.removeprefix(STAGES)
    if judged.interval.low > 0:
        return f"{name}: {times} than {than}, {judged.value:.2f} nats above"
    if judged.interval.high < 0:
        return f"{name}: {times} than {than}, {-judged.value:.2f} nats below"
    return f"{name}: {times} than {than}, loss not told apart"


BLOCKS = {"answer": answer, "power": power, "methods": methods, "covenant": covenant}
FIGURES = {"loss": draw}


if __name__ == "__main__":
    publishing.run(globals())

"""Draws the figure and generates the tables of diloco_scale from runs.csv, which train.py writes into the output
folder: `python experiments/diloco_scale/figures.py`. The trainings of a GPU count if there are any. Numbers of the
small model are from the tables of local_steps_or_codec and newer_methods.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.metrics import statistics
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, floors, plots, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.numbers import listed

HERE = Path(__file__).resolve().parent
BASELINE = "all-reduce"
SMALL = 17_408
SIZES = {"cpu": "0.43 M", "cuda": "14 M"}
"""Parameters by device."""
EQUAL = 0.02
"""Nats that count as no worse, as in local_steps_or_codec; fixed before the trainings."""
EARLIER, NEWER = (HERE.parent / name for name in ("local_steps_or_codec", "newer_methods"))
NAMES = {"all-reduce": "all-reduce fp32", "DeMo": "DeMo 32", "PowerSGD": "PowerSGD 4"}
"""Methods that local_steps_or_codec names otherwise."""
COLOURS = {
    "all-reduce": style.INK,
    "DiLoCo": "#0072b2",
    "DiLoCo, 2 bits": "#56b4e9",
    "SparseLoCo": "#d55e00",
    "DeMo": "#009e73",
    "PowerSGD": "#7b4fa3",
    "1-bit Adam": "#e69f00",
}
SEEDS = 3


class Pair(NamedTuple):
    """Two methods whose order the small model has."""

    ours: str
    base: str


@functools.lru_cache(maxsize=4)
def results(folder: Path, use: str = "result") -> Any:
    """Return the trainings of the larger form that has counting ones."""
    rows = pandas.read_csv(folder / "runs.csv")
    known = rows[rows.use == "result"].device.unique()
    return rows[(rows.device == ("cuda" if "cuda" in known else "cpu")) & (rows.use == use)]


def losses(folder: Path, method: str, use: str = "result") -> dict[int, float]:
    """Return the last loss by seed; empty for a method without runs."""
    return experiments.by_seed(results(folder, use), "loss", method=method)


def pairs(folder: Path) -> list[Pair]:
    """Return the pairs to compare: each method with the one that it is a change of."""
    found = []
    for name in results(folder).method.unique():
        family, steps = split(name)
        if name != BASELINE:
            found.append(Pair(name, BASELINE if family == "DiLoCo" or not steps else f"DiLoCo {steps}"))
    return [pair for pair in found if losses(folder, pair.base)]


def split(method: str) -> tuple[str, str]:
    """Return a method's family, and its local steps, if any."""
    digits = "".join(filter(str.isdigit, method.partition(",")[0]))
    steps = digits if method.startswith(("DiLoCo", "SparseLoCo")) else ""
    return method.replace(f" {steps}", "") if steps else method, steps


def difference(folder: Path, pair: Pair, bound: float = 0.0) -> Judgement | None:
    """Judge that a method ends at most `bound` nats above another."""
    sides = losses(folder, pair.ours), losses(folder, pair.base)
    return judge("loss", *sides, bound) if all(sides) else None


@functools.cache
def small(pair: Pair) -> Judgement | None:
    """Return the same difference of the small model; None if it was not trained so. Two bits were with 20 steps."""
    if pair.ours.endswith("2 bits"):
        runs = pandas.read_csv(NEWER / "runs.csv")
        runs = runs[runs.use == "result"]
        return judge(
            "loss", *(experiments.by_seed(runs, "loss", method=name) for name in ("DiLoCo, 2 bits", "DiLoCo")), 0.0
        )
    curves = experiments.tuned_curves(EARLIER)
    names = [NAMES.get(name, name) for name in pair]
    if not all(name in curves for name in names):
        return None
    return judge("loss", *({seed: points[-1].loss for seed, points in curves[name].items()} for name in names), 0.0)


def way(judgement: Judgement | None) -> int:
    """Return 1 if ours is above, -1 if it is below, 0 if the interval has both."""
    if judgement is None or judgement.interval is None:
        return 0
    return int(judgement.interval.low > 0) - int(judgement.interval.high < 0)


def pair_s(folder: Path) -> float:
    """Return the time of one more seed of two methods."""
    return 2 * experiments.takes_s(HERE, "train.py", len(results(folder)))


def scale(folder: Path) -> str:
    """State the size of the trainings."""
    runs = results(folder)
    return f"{SIZES[runs.device.iloc[0]]} parameters, {int(runs.batches.max())} batches"


# ---------------------------------------------------------------------- claims
def order(folder: Path, ours: str, base: str, bound: float = 0.0) -> Facts | None:
    """Return the difference of two methods' last losses, beside that of the small model."""
    pair = Pair(ours, base)
    found, before = difference(folder, pair, bound), small(pair)
    if found is None:
        return None
    mean = experiments.mean_of(losses(folder, base))
    said = "not trained" if before is None else experiments.with_ends(before)
    return experiments.loss_facts(found, mean, pair_s(folder), EQUAL, small=said, scale=scale(folder))


# ---------------------------------------------------------------------- the README
def power(folder: Path) -> str:
    """Return what the seeds can detect, by the spread of the pilots."""
    pilots = pandas.concat([results(folder, "tuning"), results(folder, "pilot")])
    chosen = results(folder, "pilot")[["method", "learning_rate"]].drop_duplicates()
    wide = pilots.merge(chosen).pivot_table(index="seed", columns="method", values="loss").dropna(axis=1)
    spread = wide.sub(wide[BASELINE], axis=0).drop(columns=BASELINE)
    sd = math.sqrt(float(np.mean(spread.var(ddof=1))))
    return experiments.prose(
        f"Computed before the trainings that count, from {len(wide)} other seeds with half the batches: the difference "
        f"of a method from {BASELINE} has a standard deviation of {sd:.4f} nats over seeds, pooled over methods, so "
        f"{SEEDS} seeds detect {statistics.detectable(sd / math.sqrt(SEEDS), SEEDS - 1):.3f} nats with 80 % power."
    )


@experiments.table
def methods(folder: Path) -> Iterator[Mapping[str, str]]:
    """Yield every method: its rate, what it sends, and its loss."""
    runs = results(folder)
    for name in runs.method.unique():
        row = runs[runs.method == name].iloc[0]
        yield {
            "method": name,
            "learning rate": f"{row.learning_rate:g}",
            "bits per parameter of a message": f"{row.bits:.3g}",
            "bits sent per batch": f"{row.sent_bits:.3g}",
            "last loss": experiments.mean_words(losses(folder, name), "{:.3f}"),
        }


@experiments.table
def orders(folder: Path) -> Iterator[Mapping[str, str]]:
    """Yield every pair: its difference here and with the small model."""
    for pair in pairs(folder):
        here, before = difference(folder, pair), small(pair)
        assert here is not None
        yield {
            "method": pair.ours,
            "against": pair.base,
            f"with {SMALL:,} parameters": "" if before is None else experiments.with_ends(before),
            "here": experiments.with_ends(here),
            "order": _kept(way(before), way(here)),
        }


def _kept(before: int, here: int) -> str:
    if not before:
        return "was open" + (", now above" if here > 0 else ", now below" if here < 0 else "")
    return "holds" if before == here else "turned" if here else "not resolved"


def found(folder: Path) -> tuple[str, list[str]]:
    """Return how many orders of the small model hold, in words, and the pairs whose order turned."""
    rows = orders(folder)
    known = rows[~rows.order.str.startswith("was open")]
    counts = {word: int((known.order == word).sum()) for word in ("holds", "turned", "not resolved")}
    turned = [f"{row.method} against {row.against}" for row in known[known.order == "turned"].itertuples()]
    kept = f"{counts['holds']} of {len(known)} orders of {SMALL:,} parameters hold with {scale(folder)}"
    rest = [
        f"{counts[word]} {verb}" for word, verb in (("turned", "turn"), ("not resolved", "are open")) if counts[word]
    ]
    return ", ".join([kept, *rest]), turned


def answer(folder: Path) -> str:
    """Return the answer in three lines."""
    words, turned = found(folder)
    two = difference(folder, Pair("DiLoCo 32, 2 bits", "DiLoCo 32"))
    said = (
        "" if two is None else f" Two bits with feedback end {experiments.with_ends(two)} nats above DiLoCo with fp32."
    )
    return experiments.prose(f"**Answer.** {words}{f'; {listed(turned)} turned' if turned else ''}.{said}")


# ---------------------------------------------------------------------- the figure
def draw(folder: Path) -> Figure:
    """Draw the losses against the bits sent, and the differences here beside those of the small model."""
    figure, ((left, right),) = plots.panels(1, 2, (9.6, 4.4))
    _against_bits(left, folder)
    _differences(right, folder)
    plots.finish(figure, found(folder)[0])
    return figure


def _against_bits(axes: Axes, folder: Path) -> None:
    runs, seen = results(folder), list[tuple[float, float]]()
    for name in runs.method.unique():
        values, x = losses(folder, name), float(runs[runs.method == name].sent_bits.iloc[0])
        mean, colour = experiments.mean_of(values), COLOURS[split(name)[0]]
        axes.plot([x] * len(values), list(values.values()), "o", ms=3.5, alpha=0.45, color=colour, mew=0)
        axes.plot([x], [mean], "D", ms=5.5, color=colour)
        axes.annotate(
            name, (x, mean), (6, 5 if "2 bits" in name else -3), textcoords="offset points", size=7.5, color=colour
        )
        seen.append((x, mean))
    axes.set_xscale("log")
    places = [x for x, _ in seen]
    axes.set_xlim(min(places) / 1.6, max(places) * 6)
    axes.set(xlabel="bits that a worker sends, per batch and parameter", ylabel="validation loss, nats per character")
    floors.draw_floors(axes, HERE, corner=(1, 1))
    axes.set_title("losses, and what is sent")


def _differences(axes: Axes, folder: Path) -> None:
    rows = pairs(folder)
    for place, pair in enumerate(rows):
        colour = COLOURS[split(pair.ours)[0]]
        plots.estimates(axes, [(place - 0.14, small(pair))], colour, hollow=True, across=True)
        plots.estimates(axes, [(place + 0.14, difference(folder, pair))], colour, across=True)
    axes.axvline(0, color=style.INK, lw=0.9)
    axes.set_yticks(range(len(rows)), [f"{pair.ours} - {pair.base}" for pair in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("difference of last losses, nats per character")
    axes.set_title(f"hollow: {SMALL:,} parameters; full: {SIZES[results(folder).device.iloc[0]]}")


def blocks(folder: Path) -> Mapping[str, Any]:
    """Return the blocks of the README."""
    return {"answer": answer(folder), "power": power(folder), "methods": methods(folder), "orders": orders(folder)}


FIGURES = {"orders": draw}


if __name__ == "__main__":
    publishing.run(globals())

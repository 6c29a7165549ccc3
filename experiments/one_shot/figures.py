"""Draws the figure and generates the tables of one_shot: `python experiments/one_shot/figures.py`.

This reads losses.csv, bits.csv, checkpoint.csv and power.csv from the output folder, which train.py writes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lsq
import pandas
import train
from matplotlib.figure import Figure

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, plots, publishing, style
from testbed.report.canvas import name_rows
from testbed.report.claim_rows import Facts

HERE = Path(__file__).resolve().parent
ONE_SHOT, ALONE, FOUND, PLAIN, BEFORE = "one-shot", train.ALONE, "searched", "plain", "checkpoint"
SEARCHES = {"alone": "each layer's weights and inputs alone, summed", "together": "all layers measured together"}
COLOURS = {"alone": "#e69f00", "together": "#0072b2"}


def tables(folder: Path) -> tuple[Any, Any]:
    """Return bits.csv and losses.csv."""
    return pandas.read_csv(folder / "bits.csv"), pandas.read_csv(folder / "losses.csv")


def losses(folder: Path, arm: str, setting: str, budget: int) -> dict[int, float]:
    """Return by seed the loss of an arm at a setting."""
    _, every = tables(folder)
    return experiments.by_seed(every, "loss", use="result", arm=arm, setting=setting, budget=budget)


def against(
    folder: Path, ours: tuple[str, str, int], base: tuple[str, str, int], bound: float = 0.0
) -> Judgement | None:
    """Judge whether an arm at a setting is at most `bound` nats above another; None if one of them is missing."""
    a, b = losses(folder, *ours), losses(folder, *base)
    return judge("loss", a, b, bound) if a and b else None


def seed_s() -> float:
    """Return the time of one more seed of all arms."""
    _, every = tables(HERE)
    passes = every.drop_duplicates(["use", "arm", "seed"]).passes
    counted = every[every.use == "result"].drop_duplicates(["arm", "seed"]).passes.sum() / len(train.SEEDS)
    return experiments.takes_s(HERE, "train.py", 1) * counted / (passes.sum() + 2 * train.PRETRAINED)


def _facts(folder: Path, found: Judgement | None, base: tuple[str, str, int], **more: Any) -> Facts | None:
    values = losses(folder, *base)
    if found is None:
        return None
    return experiments.loss_facts(found, experiments.mean_of(values), seed_s(), train.BOUND, **more)


# ------------------------------------------------------------------ claims
def searches(folder: Path) -> Iterator[Facts]:
    """Yield for each search and budget what the one-shot model loses less than with uniform bits."""
    for budget in train.BUDGETS:
        for name, words in SEARCHES.items():
            base = (ONE_SHOT, "uniform", budget)
            facts = _facts(folder, against(folder, (ONE_SHOT, name, budget), base), base, budget=budget, how=words)
            if facts is not None:
                yield facts


def compared(folder: Path, ours: list[Any], base: list[Any], bound: float = 0.0) -> Facts | None:
    """Return what an arm loses more than another: each is an arm, a setting and its bits."""
    one, two = (ours[0], ours[1], ours[2]), (base[0], base[1], base[2])
    return _facts(folder, against(folder, one, two, bound), two)


# ------------------------------------------------------------------ the README
def arms(folder: Path) -> Any:
    """Return the loss of every arm at every setting, means over seeds."""
    _, every = tables(folder)
    rows = []
    for (arm, setting, budget), part in every[every.use == "result"].groupby(["arm", "setting", "budget"], sort=False):
        rows.append(
            {
                "trained": {BEFORE: "not", PLAIN: "without rounding", ONE_SHOT: "for all widths, one-shot",
                            ALONE: "for 3 bits", FOUND: "for the bits that were found"}[str(arm)],
                "passes": int(part.passes.iloc[0]),
                "judged at": "no rounding" if not budget else f"{setting}, {budget} bits",
                "loss": f"{part.loss.mean():.4f}",
                "lowest, highest": f"{part.loss.min():.4f}, {part.loss.max():.4f}",
            }
        )  # fmt: skip
    return pandas.DataFrame(rows)


def found_bits(folder: Path) -> Any:
    """Return the bits that searches found."""
    rows, _ = tables(folder)
    return pandas.DataFrame(
        {
            "seed": rows.seed.map(str),
            "search": rows.search,
            "budget": rows.budget.map(str),
            "mean bits": rows.mean_bits.map("{:.2f}".format),
            "weights and inputs of each layer": [
                " ".join(f"{one}/{two}" for one, two in train.bits_of(text)) for text in rows.bits
            ],
        }
    )


def power(folder: Path) -> str:
    """Return what the pilot said in advance."""
    if not (folder / "power.csv").is_file():
        return "The pilot was not run."
    row = pandas.read_csv(folder / "power.csv").iloc[0]
    needed = "more than 10,000" if pandas.isna(row.needed) else f"{row.needed:.0f}"
    return experiments.prose(
        f"In advance: {row.pairs:.0f} pilot seeds, whose differences ({row.comparison}) spread by {row.spread:.4f} "
        f"nats, asked for {needed} pairs to detect {train.BOUND:g} nats with 80 % power; the {row.planned:.0f} that "
        f"were planned detect {row.detectable:.3g}. A spread of {row.pairs:.0f} numbers is itself uncertain."
    )


def answer(folder: Path) -> str:
    """Return the answer in three lines."""
    curve = pandas.read_csv(folder / "checkpoint.csv")
    parts = []
    for budget in sorted(train.BUDGETS):
        found = against(folder, (ONE_SHOT, "together", budget), (ONE_SHOT, "uniform", budget))
        if found is not None:
            parts.append(f"{experiments.with_ends(found)} nats at {budget} bits")
    alone = against(folder, (ONE_SHOT, "uniform", 3), (ALONE, "uniform", 3))
    learned = against(folder, (PLAIN, "plain", 0), (BEFORE, "plain", 0))
    assert alone is not None
    assert learned is not None
    return (
        f"From a checkpoint that still learns ({curve.loss.iloc[-1]:.2f} nats; as many further steps without rounding "
        f"change it by {learned.value:+.3f}), bits found in one shot change the loss, against uniform ones, by "
        f"{' and '.join(parts)}. Without retraining, the model for all widths is {alone.value:+.3f} nats from one "
        f"trained for 3 bits alone."
    )


def draw(folder: Path) -> Figure:
    """Draw the checkpoint's curve, and what found bits lose against uniform ones."""
    curve = pandas.read_csv(folder / "checkpoint.csv")
    figure, (row,) = plots.panels(1, 2, (9.6, 3.4))
    row[0].plot(curve.batches, curve.loss, "o-", color="#767d86")
    end = curve.batches.iloc[-1] + train.STEPS
    for place, (arm, setting, bits, colour, words) in enumerate(
        (
            (PLAIN, "plain", 0, style.INK, "no rounding"),
            (ALONE, "uniform", 3, "#0072b2", "for 3 bits, at 3"),
            (ONE_SHOT, "uniform", 3, "#d55e00", "one-shot, at 3"),
            (ONE_SHOT, "uniform", 2, "#e69f00", "one-shot, at 2"),
        )
    ):
        values = losses(folder, arm, setting, bits)
        at = [end + 9 * (place - 1.5)] * len(values)
        row[0].plot(at, list(values.values()), "_", ms=8, mew=1.5, color=colour, label=words)
    row[0].set(xlabel="batches", ylabel="held-out loss, nats", title="the checkpoint, and what goes on from it")
    row[0].legend(loc="upper right", fontsize=8, facecolor=style.PAPER, framealpha=1, frameon=True, edgecolor="none")
    names = []
    for place, (budget, name) in enumerate((budget, name) for budget in train.BUDGETS for name in SEARCHES):
        found = against(folder, (ONE_SHOT, name, budget), (ONE_SHOT, "uniform", budget))
        plots.estimates(row[1], [(place, found)], COLOURS[name], across=True, width=1.6)
        names.append(f"{budget} bits, {name}")
    row[1].axvline(0, color=style.INK, lw=0.9)
    plots.ticks(row[1].xaxis, (-0.06, -0.04, -0.02, 0, 0.02))
    row[1].set(xlabel="loss vs uniform bits, nats", title="found bits of the one-shot model")
    name_rows(row[1], names)
    plots.finish(figure, _finding(folder))
    return figure


def _finding(folder: Path) -> str:
    found = against(folder, (ONE_SHOT, "together", 3), (ONE_SHOT, "uniform", 3))
    assert found is not None
    return f"Bits found in one shot change the loss by {experiments.with_ends(found)} nats at 3 bits on average"


BLOCKS = {"answer": answer, "power": power, "arms": arms, "bits": found_bits}
FIGURES = {"losses": draw}
assert set(train.BUDGETS) < set(lsq.WIDTHS)

if __name__ == "__main__":
    publishing.run(globals())

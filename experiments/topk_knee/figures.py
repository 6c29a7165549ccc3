"""Generates the figure, CSVs, claims and README blocks of topk_knee.

python -m testbed sweep topk_knee
python experiments/topk_knee/figures.py [--results results/topk_knee] [--output experiments/topk_knee]

Everything else is computed from the CSVs of `experiment_tables` and grid.csv (every training, including [tune]).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from testbed.metrics.verdicts import Judgement, judge
from testbed.records import TrainingRecord
from testbed.report import experiment_tables, experiment_verdicts, experiments, floors, plots, publishing, style
from testbed.report.canvas import Handle, canvas
from testbed.report.claim_rows import Facts
from testbed.report.experiment_tables import Tables
from testbed.report.numbers import percent
from testbed.results import read_json
from testbed.sweep import trainings

HERE = Path(__file__).resolve().parent
BASELINE = "bf16"
SAME_LOSS = 0.01
"""Share of bf16's loss: the most that "does not harm" may mean."""
TRAINING_S = 11.8
"""Seconds of one core for one training of 60 steps: measured on 2026-11-23."""
SHARES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
KNEE = 0.1
"""The published knee, and the share at which error feedback is tried."""
MASKS = {"topk-shared": "the activations' positions", "topk": "its own positions"}
"""Codec -> positions at which the gradient is sent."""
FEEDBACKS = {"{}": "none", "ef({})": "EF", "ef21({})": "EF21"}
WITH, WITHOUT = "validation_loss", "uncompressed_loss"
GRID = "grid.csv"
_LOOKS = {"topk-shared": ("#0072b2", "o"), "topk": ("#d55e00", "D")}


def arm(mask: str, share: float, feedback: str = "{}") -> str:
    """Return the codec of an arm, as in seeds.csv."""
    return feedback.format(f"{mask}({share:g}, sample)")


def _percent(share: float) -> str:
    return percent(share, "{:g}")


class Losses(NamedTuple):
    """The final losses of each arm, by seed: with the codec in place and with fp32 at the boundaries."""

    seeds: Any
    """Rows of seeds.csv: a codec at one rate."""

    def of(self, codec: str, column: str = WITH) -> Mapping[int, float]:
        """Return an arm's losses by seed; empty if it was not run."""
        return experiments.by_seed(self.seeds, column, codec=codec)

    def mean(self, codec: str, column: str = WITH) -> float:
        """Return an arm's mean loss."""
        return experiments.mean_of(self.of(codec, column))

    @property
    def bound(self) -> float:
        """`SAME_LOSS` in nats."""
        return SAME_LOSS * self.mean(BASELINE)

    def above(
        self,
        codec: str,
        column: str = WITH,
        base: str = BASELINE,
        base_column: str | None = None,
        bound: float | None = None,
    ) -> Judgement | None:
        """Judge whether an arm's loss is at most the bound above another's; None if either was not run."""
        ours, than = self.of(codec, column), self.of(base, base_column or column)
        return judge("loss", ours, than, self.bound if bound is None else bound) if ours and than else None


def chosen(tables: Tables) -> Losses:
    """Return the runs at each arm's chosen rate, or at its stated one if none was chosen."""
    stated = tables.seeds.stated.astype(bool)
    tuned = set(tables.seeds.codec[~stated])
    return Losses(tables.seeds[~stated | ~tables.seeds.codec.isin(tuned)])


# ---------------------------------------------------------------------- claims
def costs(
    folder: Path,
    codec: str,
    base: str = BASELINE,
    column: str = WITH,
    base_column: str | None = None,
    share: float = SAME_LOSS,
    largest: bool = False,
) -> Facts | None:
    """Judge an arm's loss against another's, at their best rates or at the grid's largest, at which the weights move
    furthest; this takes two seeds. The bound is a share of bf16's loss.
    """
    losses, tried = chosen(experiment_tables.read_tables(folder)), pandas.read_csv(folder / GRID)
    rate, loss = tried.rate.max(), losses.mean(BASELINE)
    at = Losses(tried[tried.rate == rate]) if largest else losses
    found = at.above(codec, column, base, base_column, share * loss)
    if found is None or (largest and found.n < 2):
        return None
    return experiments.loss_facts(found, loss, 2 * TRAINING_S, rate=rate)


def inference(folder: Path, largest: bool = False) -> Iterator[Facts]:
    """Yield the loss of each kind of top-k when the model is evaluated without it."""
    for mask, where in MASKS.items():
        codec = arm(mask, KNEE)
        if facts := costs(folder, codec, codec, WITHOUT, WITH, largest=largest):
            yield {**facts, "codec": codec, "where": where}


def fed(folder: Path, share: float, base: str = "", column: str = WITH) -> Iterator[Facts]:
    """Yield the loss of each kind of error feedback vs another arm's, or vs no feedback."""
    losses = chosen(experiment_tables.read_tables(folder))
    for mask, where in MASKS.items():
        plain = arm(mask, KNEE)
        for feedback, name in list(FEEDBACKS.items())[1:]:
            facts = costs(folder, arm(mask, KNEE, feedback), base or plain, column, share=share)
            control = losses.above(plain, column)
            if facts is None or control is None:
                continue
            ends, raises = facts["judgement"].interval, facts["shown"]
            if ends is not None and ends.low > 0:
                raises = f"{name} raises the loss, both at their best rates and evaluated with top-k"
            yield {**facts, "where": where, "name": name, "control": control, "raises": raises}


# ---------------------------------------------------------------------- tables
def _difference(found: Judgement | None) -> str | None:
    return found and experiments.with_ends(found)


def _ordered(losses: Losses) -> list[str]:
    """Return the arms: the baselines, top-k from the largest share on, then with error feedback."""
    every = [BASELINE, "fp32", *(arm(mask, share) for mask in MASKS for share in SHARES)]
    every += [arm(mask, KNEE, feedback) for feedback in FEEDBACKS for mask in MASKS]
    return [codec for codec in dict.fromkeys(every) if losses.of(codec)]


@experiments.table
def knee_table(tables: Tables) -> Any:
    """Return a row for each arm: its rate and its differences from bf16, with and without its codec."""
    losses = chosen(tables)
    for codec in _ordered(losses):
        runs, found = losses.seeds[losses.seeds.codec == codec], losses.above(codec)
        first = runs.iloc[0]
        yield {
            "codec": codec,
            "rate": f"{first['optimiser.learning_rate']:g}{' *' if isinstance(first['mark'], str) else ''}",
            "validation loss": f"{runs[WITH].mean():.3f}",
            "vs bf16": None if codec == BASELINE else _difference(found),
            "at most 1 %": None if found is None or codec == BASELINE else found.words,
            "evaluated without, vs bf16": None if codec == BASELINE else _difference(losses.above(codec, WITHOUT)),
            "seeds": len(runs),
        }


def grid(results: Path) -> Any:
    """Return a row for each training, including [tune]: codec, rate, seed and both final losses."""
    rows = []
    for folder in sorted((results / trainings.FOLDER).glob("[!.]*")):
        recipe = read_json(folder / "training.json", TrainingRecord).recipe
        last = {step.phase: step.loss for step in trainings.load_training(folder)[-1]}
        what = (recipe.codec, recipe.optimiser.learning_rate, recipe.training.seed)
        rows.append((*what, last["evaluation"], last["uncompressed"]))
    return pandas.DataFrame(rows, columns=["codec", "rate", "seed", WITH, WITHOUT]).sort_values(
        ["codec", "rate", "seed"]
    )


@experiments.table
def rates_table(tables: Tables, folder: Path) -> Any:
    """Return the mean losses of each arm at each rate of the grid, with its codec and without, over the seeds of
    [tune].
    """
    tried = pandas.read_csv(folder / GRID)
    tried = tried[tried.seed.isin(tables.tuning.seed)].groupby(["codec", "rate"])[[WITH, WITHOUT]].mean()
    rates = sorted({rate for _, rate in tried.index})
    for codec in _ordered(chosen(tables)):
        means = tried.loc[codec]
        best = means[WITH].idxmin()
        row: dict[str, str | None] = {"codec": codec}
        for rate in rates:
            said = None if rate not in means.index else f"{means[WITH][rate]:.3f}, {means[WITHOUT][rate]:.3f}"
            row[f"{rate:g}"] = f"**{said}**" if rate == best else said
        yield row


# ---------------------------------------------------------------------- figure
def draw(tables: Tables) -> Figure:
    """Draw top-k's cost against the kept share, and the effect of error feedback at the knee."""
    losses = chosen(tables)
    handles: list[Handle] = [
        Line2D([], [], color=colour, marker=marker, label=f"gradient at {MASKS[mask]}")
        for mask, (colour, marker) in _LOOKS.items()
    ]
    hollow: Any = {"color": style.INK, "marker": "o", "mfc": style.PAPER, "ls": ":"}
    handles.append(Line2D([], [], label="evaluated without top-k", **hollow))
    figure, (left, right) = canvas(_title(losses), 3.1, handles, _foot(tables), 2, columns=2)
    for mask, (colour, marker) in _LOOKS.items():
        for column, dash in ((WITH, "-"), (WITHOUT, ":")):
            shares = [(share, losses.above(arm(mask, share), column)) for share in SHARES]
            fed = [losses.above(arm(mask, KNEE, feedback), column) for feedback in FEEDBACKS]
            hollow = column == WITHOUT
            plots.estimates(left, shares, colour, marker, line=dash, hollow=hollow, width=1)
            plots.estimates(right, enumerate(fed), colour, marker, hollow=hollow, width=1)
    for panel in (left, right):
        panel.axhline(0, color=style.INK, lw=0.9)
        plots.level(panel, losses.bound, f"1 % of bf16's loss, {losses.bound:.3f}")
    left.set(xscale="log", xlabel="values kept by top-k", ylabel="validation loss vs bf16, nats per token")
    floors.draw_floors(left, HERE, losses.mean(BASELINE), corner=(0, 1), label=0.4)
    plots.ticks(left.xaxis, SHARES, _percent)
    left.set_xlim(1.2 * SHARES[0], SHARES[-1] / 1.2)
    right.set_xticks(range(len(FEEDBACKS)), list(FEEDBACKS.values()))
    right.set(xlim=(-0.4, len(FEEDBACKS) - 0.6), xlabel=f"error feedback, {_percent(KNEE)} kept")
    return figure


def knee(losses: Losses) -> float | None:
    """Return the smallest share that, like all larger ones, is within the bound; None if the largest is not."""
    last = None
    for share in SHARES:
        found = losses.above(arm("topk-shared", share))
        if found is None:
            continue
        if found.verdict != "holds":
            break
        last = share
    return last


def _title(losses: Losses) -> str:
    found, at = knee(losses), losses.above(arm("topk-shared", KNEE))
    where = "no share costs less than 1 % of the loss" if found is None else (
        f"top-k of {_percent(found)} costs less than 1 % of the loss"
    )  # fmt: skip
    cost = "" if at is None else f", {_percent(KNEE)} costs {percent(at.value / losses.mean(BASELINE))}"
    return f"From learned weights {where}{cost}"


def _foot(tables: Tables) -> str:
    counts = tables.seeds.groupby("codec").seed.nunique()
    return (
        f"Means of {counts.max()} seeds and 95 % intervals of their differences from bf16; each arm at its best rate "
        "of one grid, or at a stated one (README)."
    )


# ---------------------------------------------------------------------- README
def answer(tables: Tables) -> str:
    """Return the answer in three lines or so."""
    losses = chosen(tables)
    found, at = knee(losses), losses.above(arm("topk-shared", KNEE))
    if at is None:
        return ""
    where = "at no share" if found is None else f"at {_percent(found)} of the values"
    own = losses.above(arm("topk", KNEE))
    text = (
        f"**Answer.** Trained further from weights with nothing left to learn here, top-k stays within 1 % of bf16's "
        f"loss {where}; "
        f"at {_percent(KNEE)} it costs {_difference(at)} nats"
        + ("" if own is None else f", and {_difference(own)} with the gradient at its own positions")
        + "."
    )
    fed = [arm("topk-shared", KNEE, feedback) for feedback in FEEDBACKS]
    if all(losses.of(codec) for codec in fed):
        costs = [
            ", ".join(f"{losses.mean(codec, column) - losses.mean(BASELINE, column):+.3f}" for codec in fed)
            for column in (WITH, WITHOUT)
        ]
        text += f" Without error feedback, with EF and with EF21: {costs[0]}; evaluated without top-k: {costs[1]}."
    return experiments.prose(text)


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README, from the CSVs of a folder."""
    tables = experiment_tables.read_tables(folder)
    said = (experiment_verdicts.floor_sentence(tables.seeds), experiment_verdicts.tuning_sentence(tables.tuning))
    return {
        "answer": answer(tables),
        "knee": knee_table(tables),
        "rates": rates_table(tables, folder),
        "remarks": "\n\n".join(experiments.prose(words) for words in said if words),
    }


FIGURES = {"knee": lambda folder: draw(experiment_tables.read_tables(folder))}


def write(results: Path, output: Path) -> None:
    """Write the CSVs of a sweep's results."""
    experiment_tables.write_tables(results, output)
    grid(results).to_csv(output / GRID, index=False, lineterminator="\n")


if __name__ == "__main__":
    publishing.run(globals())

"""Make the figure, the CSVs, the claims and the README's blocks of topk_knee.

python -m testbed sweep topk_knee
python experiments/topk_knee/figures.py [--results results/topk_knee] [--output experiments/topk_knee]

All else follows from the CSVs of `experiment_tables`, grid.csv (every training, those of [tune] among them) and
published.csv.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from testbed.metrics.verdicts import Judgement, judge
from testbed.records import TrainingRecord
from testbed.report import claim_rows, experiment_tables, experiment_verdicts, experiments, style
from testbed.report.canvas import Handle, canvas
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table
from testbed.report.experiment_tables import Tables
from testbed.report.numbers import percent
from testbed.results import read_json
from testbed.sweep import trainings

HERE = Path(__file__).resolve().parent
BASELINE = "bf16"
SAME_LOSS = 0.01
"""Of bf16's loss: what "does not harm" may mean at most."""
TRAINING_S = 11.8
"""Of one core, for one training of 60 steps: measured on 2026-11-23."""
SHARES = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
KNEE = 0.1
"""The share at which the published knee is, and at which error feedback is tried."""
MASKS = {"topk-shared": "the activations' positions", "topk": "its own positions"}
"""Codec -> where the gradient is sent."""
FEEDBACKS = {"{}": "none", "ef({})": "EF", "ef21({})": "EF21"}
WITH, WITHOUT = "validation_loss", "uncompressed_loss"
GRID = "grid.csv"
_LOOKS = {"topk-shared": ("#0072b2", "o"), "topk": ("#d55e00", "D")}


def arm(mask: str, share: float, feedback: str = "{}") -> str:
    """Return the codec of an arm, as seeds.csv names it."""
    return feedback.format(f"{mask}({share:g}, sample)")


def _percent(share: float) -> str:
    return percent(share, "{:g}")


class Losses(NamedTuple):
    """The final losses of each arm, by seed: with the codec in place and with fp32 at the boundaries."""

    seeds: Any
    """Rows of seeds.csv: a codec at one rate."""

    def of(self, codec: str, column: str = WITH) -> Mapping[int, float]:
        """Return an arm's losses by seed; empty where it was not run."""
        rows = self.seeds[self.seeds.codec == codec]
        return dict(zip(rows.seed.tolist(), rows[column].astype(float).tolist(), strict=True))

    def mean(self, codec: str, column: str = WITH) -> float:
        """Return an arm's mean loss."""
        values = self.of(codec, column).values()
        return sum(values) / len(values)

    @property
    def bound(self) -> float:
        """`SAME_LOSS` in nats."""
        return SAME_LOSS * self.mean(BASELINE)

    def above(self, codec: str, column: str = WITH) -> Judgement | None:
        """Judge that an arm's loss is at most the bound above bf16's; None where either was not run."""
        ours, base = self.of(codec, column), self.of(BASELINE, column)
        return judge("loss", ours, base, self.bound) if ours and base else None


def chosen(tables: Tables) -> Losses:
    """Return the runs at the rate that was chosen for each arm, or stated where none was."""
    stated = tables.seeds.stated.astype(bool)
    tuned = set(tables.seeds.codec[~stated])
    return Losses(tables.seeds[~stated | ~tables.seeds.codec.isin(tuned)])


# ---------------------------------------------------------------------- claims
def claims(folder: Path) -> list[Claim]:
    """Return what seeds.csv and grid.csv say of the published claims; those whose arms they lack are left out."""
    return claim_rows.claims(globals(), folder)


def compared(
    folder: Path,
    codec: str,
    base: str = BASELINE,
    bound: float = SAME_LOSS,
    of: tuple[str, str] = (WITH, WITH),
    at_largest: bool = False,
) -> Facts | None:
    """Return how far one arm's loss is above another's, each at its best rate or both at the largest of the grid; `of`:
    which loss of either; `bound`: a share of bf16's loss. None where either was not run, or has one seed of the grid.
    """
    losses = chosen(experiment_tables.read_tables(folder))
    whole, arms, tried = losses.mean(BASELINE), losses, pandas.read_csv(folder / GRID)
    if at_largest:
        arms = Losses(tried[tried.rate == tried.rate.max()])
    ours, theirs = (arms.of(*side) for side in zip((codec, base), of, strict=True))
    if min(len(ours), len(theirs)) < 1 + at_largest:
        return None
    found = judge("loss", ours, theirs, bound * whole)
    shown = experiments.shown_words(found, whole, 2 * TRAINING_S)
    about = {"bound": found.effect, "shown": shown, "codec": codec, "rate": tried.rate.max()}
    return {"judgement": found, "part": found.value / whole, **about}


def without(folder: Path, at_largest: bool = False) -> Iterator[Facts]:
    """Yield how far each mask's loss is above its own when it is evaluated without top-k."""
    for mask, where in MASKS.items():
        codec = arm(mask, KNEE)
        facts = compared(folder, codec, codec, of=(WITHOUT, WITH), at_largest=at_largest)
        if facts is not None:
            yield {**facts, "where": where}


def fed(folder: Path) -> Iterator[Facts]:
    """Yield how far each mask's loss with each error feedback is above that without."""
    for mask, where in MASKS.items():
        for feedback, name in FEEDBACKS.items():
            facts = compared(folder, arm(mask, KNEE, feedback), arm(mask, KNEE), -SAME_LOSS)
            if name == "none" or facts is None:
                continue
            interval = facts["judgement"].interval
            raised = f"{name} raises the loss, both at their best rates and evaluated with top-k"
            yield {**facts, "where": where, "name": name} | (
                {"shown": raised} if interval is not None and interval.low > 0 else {}
            )


def plain(folder: Path) -> Iterator[Facts]:
    """Yield how far each mask's loss with each error feedback is above bf16's when it is evaluated without top-k."""
    for mask, where in MASKS.items():
        control = compared(folder, arm(mask, KNEE), of=(WITHOUT, WITHOUT))
        for feedback, name in FEEDBACKS.items():
            facts = compared(folder, arm(mask, KNEE, feedback), of=(WITHOUT, WITHOUT))
            if name != "none" and facts is not None and control is not None:
                yield {**facts, "where": where, "name": name, "control": control["judgement"].value}


# ---------------------------------------------------------------------- tables
def _difference(found: Judgement | None) -> str | None:
    if found is None:
        return None
    spread = "" if found.interval is None else f" ({found.interval.low:+.3f} to {found.interval.high:+.3f})"
    return f"{found.value:+.3f}{spread}"


def _ordered(losses: Losses) -> list[str]:
    """Return the arms: the baselines, top-k from the largest share on, then with error feedback."""
    every = [BASELINE, "fp32", *(arm(mask, share) for mask in MASKS for share in SHARES)]
    every += [arm(mask, KNEE, feedback) for feedback in FEEDBACKS for mask in MASKS]
    return [codec for codec in dict.fromkeys(every) if losses.of(codec)]


def knee_table(tables: Tables) -> Any:
    """Return a row for each arm: its rate and its differences from bf16, with and without its codec."""
    losses, rows = chosen(tables), []
    for codec in _ordered(losses):
        runs, found = losses.seeds[losses.seeds.codec == codec], losses.above(codec)
        first = runs.iloc[0]
        rows.append(
            {
                "codec": codec,
                "rate": f"{first['optimiser.learning_rate']:g}{' *' if isinstance(first['mark'], str) else ''}",
                "validation loss": f"{runs[WITH].mean():.3f}",
                "vs bf16": None if codec == BASELINE else _difference(found),
                "at most 1 %": None if found is None or codec == BASELINE else found.words,
                "evaluated without, vs bf16": None if codec == BASELINE else _difference(losses.above(codec, WITHOUT)),
                "seeds": len(runs),
            }
        )
    return pandas.DataFrame(rows)


def grid(results: Path) -> Any:
    """Return a row for each training, those of [tune] among them: codec, rate, seed and both final losses."""
    rows = []
    for folder in sorted((results / trainings.FOLDER).glob("[!.]*")):
        recipe = read_json(folder / "training.json", TrainingRecord).recipe
        last = {step.phase: step.loss for step in trainings.load_training(folder)[-1]}
        rows.append(
            {
                "codec": recipe.codec,
                "rate": recipe.optimiser.learning_rate,
                "seed": recipe.training.seed,
                WITH: last["evaluation"],
                WITHOUT: last["uncompressed"],
            }
        )
    return pandas.DataFrame(rows).sort_values(["codec", "rate", "seed"])


def rates_table(tables: Tables, folder: Path) -> Any:
    """Return the mean losses of each arm at each rate of the grid, with its codec and without, over the seeds of
    [tune].
    """
    tried = pandas.read_csv(folder / GRID)
    tried = tried[tried.seed.isin(tables.tuning.seed)].groupby(["codec", "rate"])[[WITH, WITHOUT]].mean()
    rates = sorted({rate for _, rate in tried.index})
    rows = []
    for codec in _ordered(chosen(tables)):
        means = tried.loc[codec]
        best = means[WITH].idxmin()
        row = {"codec": codec}
        for rate in rates:
            said = None if rate not in means.index else f"{means[WITH][rate]:.3f}, {means[WITHOUT][rate]:.3f}"
            row[f"{rate:g}"] = f"**{said}**" if rate == best else said
        rows.append(row)
    return pandas.DataFrame(rows)


# ---------------------------------------------------------------------- figure
def draw(tables: Tables) -> Figure:
    """Draw what top-k costs against the share that it keeps, and what error feedback changes at the knee."""
    losses = chosen(tables)
    handles: list[Handle] = [
        Line2D([], [], color=colour, marker=marker, label=f"gradient at {MASKS[mask]}")
        for mask, (colour, marker) in _LOOKS.items()
    ]
    handles.append(
        Line2D(
            [],
            [],
            color=style.INK,
            marker="o",
            mfc=style.PAPER,
            ls=":",
            label="evaluated without top-k",
        )
    )
    figure, (left, right) = canvas(_title(losses), 3.1, handles, _foot(tables), 2, columns=2)
    for mask, (colour, marker) in _LOOKS.items():
        for column, dash in ((WITH, "-"), (WITHOUT, ":")):
            found = {share: losses.above(arm(mask, share), column) for share in SHARES}
            points = [(share, one) for share, one in found.items() if one is not None]
            _line(left, points, colour, marker, dash, filled=column == WITH)
            points = [
                (place, one)
                for place, feedback in enumerate(FEEDBACKS)
                if (one := losses.above(arm(mask, KNEE, feedback), column)) is not None
            ]
            _line(right, points, colour, marker, "none", filled=column == WITH)
    for panel in (left, right):
        panel.axhline(0, color=style.INK, lw=0.9)
        panel.axhline(losses.bound, color=style.MUTED, lw=0.9, ls=(0, (6, 3)))
        panel.annotate(
            f"1 % of bf16's loss, {losses.bound:.3f}", (1, losses.bound), xycoords=("axes fraction", "data"),
            xytext=(0, 2), textcoords="offset points", ha="right", size=7.5, color=style.MUTED,
        )  # fmt: skip
    left.set_xscale("log")
    left.xaxis.set_major_locator(FixedLocator(SHARES))
    left.xaxis.set_minor_locator(NullLocator())
    left.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    left.set_xlim(1.2 * SHARES[0], SHARES[-1] / 1.2)
    left.set_xlabel("values kept by top-k")
    left.set_ylabel("validation loss vs bf16, nats per token")
    right.set_xticks(range(len(FEEDBACKS)), list(FEEDBACKS.values()))
    right.set_xlim(-0.4, len(FEEDBACKS) - 0.6)
    right.set_xlabel(f"error feedback, {_percent(KNEE)} kept")
    return figure


def _line(
    panel: Axes, points: list[tuple[float, Judgement]], colour: str, marker: str, dash: str, *, filled: bool
) -> None:
    if not points:
        return
    x, found = zip(*points, strict=True)
    face = colour if filled else style.PAPER
    panel.plot(x, [one.value for one in found], color=colour, marker=marker, mfc=face, ls=dash)
    for place, one in points:
        if one.interval is not None:
            panel.plot([place] * 2, one.interval, color=colour, lw=1)


def knee(losses: Losses) -> float | None:
    """Return the smallest share that is within the bound, with all larger ones; None where the largest is not."""
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
    where = "at none of the shares" if found is None else f"at {_percent(found)} of the values"
    own = losses.above(arm("topk", KNEE))
    text = (
        f"**Answer.** Trained further from weights that have learned, top-k stays within 1 % of bf16's loss {where}; "
        f"at {_percent(KNEE)} it costs {_difference(at)} nats"
        + ("" if own is None else f", and {_difference(own)} with the gradient at positions of its own")
        + "."
    )
    fed = {name: arm("topk-shared", KNEE, feedback) for feedback, name in FEEDBACKS.items()}
    fed = {name: codec for name, codec in fed.items() if losses.of(codec)}
    if len(fed) == len(FEEDBACKS):
        costs = [", ".join(_nats(losses, codec, column) for codec in fed.values()) for column in (WITH, WITHOUT)]
        text += f" Without error feedback, with EF and with EF21: {costs[0]}; evaluated without top-k: {costs[1]}."
    return experiments.prose(text)


def _nats(losses: Losses, codec: str, column: str) -> str:
    found = losses.above(codec, column)
    return "" if found is None else f"{found.value:+.3f}"


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README, from the CSVs of a folder."""
    tables = experiment_tables.read_tables(folder)
    said = (experiment_verdicts.floor_sentence(tables.seeds), experiment_verdicts.tuning_sentence(tables.tuning))
    return {
        "answer": answer(tables),
        "claims": claims_table(claims(folder)),
        "knee": experiments.markdown_of(knee_table(tables)),
        "rates": experiments.markdown_of(rates_table(tables, folder)),
        "remarks": "\n\n".join(experiments.prose(words) for words in said if words),
    }


def main() -> None:
    """Write the CSVs, the figure and the claims; put the generated blocks into the README, and print them."""
    results, output = experiments.folders(HERE.name, "Figure, CSVs, claims and the README's blocks.")
    experiment_tables.write_tables(results, output)
    grid(results).to_csv(output / GRID, index=False, lineterminator="\n")
    experiments.draw_and_publish(
        HERE, output, {"knee": lambda folder: draw(experiment_tables.read_tables(folder))}, blocks, claims
    )


if __name__ == "__main__":
    main()

"""Draws the figures and generates the tables of mixed_precision: `python experiments/mixed_precision/figures.py`.

This reads sensitivity.csv, settings.csv and losses.csv from the output folder, which search.py and train.py write, what
denoising.py writes (`denoising_figures`).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import denoising_figures
import pandas
from denoising_figures import share_within
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, floors, plots, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import EXACT
from testbed.report.numbers import markdown_table

HERE = Path(__file__).resolve().parent
NAMES = {"gpt2-mini-trained": "GPT-2 mini, trained", "smollm2-135m": "SmolLM2-135M", "gpt2-nano": "GPT-2 nano, random"}
COSTS = {"bytes": "the same bytes", "seconds": "the same seconds over unequal links"}
SEARCHES = {"together": "all boundaries measured together", "alone": "sum of each boundary alone"}
ARMS = {
    "none": ("no codec", "#767d86", "o"),
    "4": ("4 bits", "#e69f00", "D"),
    "2": ("2 bits", "#d55e00", "v"),
    "1": ("1 bit", "#cc79a7", "^"),
    "drawn": ("all widths, drawn", "#56b4e9", "s"),
    "one-shot": ("all widths, one-shot", "#0072b2", "P"),
}
UNCODED = 0
USABLE = 1.0
"""Nats above no codec beyond which the model no longer works, so a search has no goal."""


class Measured(NamedTuple):
    """All tables."""

    sensitivity: Any
    settings: Any
    losses: Any

    @property
    def models(self) -> list[str]:
        """Return the models that were searched."""
        return [name for name in NAMES if name in set(self.settings.model)]

    def setting(self, model: str, search: str, budget: int, cost: str = "both") -> Any:
        """Return the rows of a setting, one for each batch."""
        wanted = {"model": model, "search": search, "budget": budget, "cost": cost}
        return experiments.matching(self.settings, wanted)

    def budgets(self, model: str) -> list[int]:
        """Return the budgets that the search had, in bits."""
        rows = self.settings[(self.settings.model == model) & (self.settings.search == "together")]
        return sorted(set(rows.budget.astype(int)), reverse=True)

    def usable(self, model: str) -> list[int]:
        """Return the budgets, except the largest, at which the model with uniform widths still works."""
        most = self.setting(model, "none", -1).loss.mean() + USABLE
        return [each for each in self.budgets(model)[1:] if self.setting(model, "uniform", each).loss.mean() < most]

    def found(self, model: str, budget: int, cost: str = "") -> str:
        """Return the widths that the search found for a cost; without a cost, the uniform ones."""
        rows = self.setting(model, "together", budget, cost) if cost else self.setting(model, "uniform", budget)
        return str(rows.widths.iloc[0])

    def gain(self, model: str, search: str, budget: int, cost: str) -> Judgement:
        """Judge whether a found setting loses less than the uniform one with the same budget, over batches."""
        ours, base = (
            dict(zip(rows.batch, rows.loss, strict=True))
            for rows in (self.setting(model, search, budget, cost), self.setting(model, "uniform", budget))
        )
        return judge("loss", ours, base, 0.0)

    def of_arm(self, arm: str, bits: int) -> Mapping[int, float]:
        """Return an arm's losses by seed, with `bits` at every boundary."""
        return experiments.by_seed(self.losses, "loss", arm=arm, bits=bits)

    def mean(self, arm: str, bits: int) -> float:
        """Return the mean of these."""
        return experiments.mean_of(self.of_arm(arm, bits))

    @property
    def widths(self) -> list[int]:
        """Return the widths at which the trained models were evaluated, no codec first."""
        return sorted(set(self.losses.bits), key=lambda bits: -(bits or 99))


def measured(folder: Path) -> Measured:
    """Read the tables."""
    return Measured(*(pandas.read_csv(folder / f"{name}.csv") for name in ("sensitivity", "settings", "losses")))


def span(found: Judgement, what: str) -> str:
    """Return an interval and its basis."""
    return f"one of the {what}" if found.interval is None else experiments.sure_words(found, "{:+.4f}", what)


# ------------------------------------------------------------------ tables
def sensitivity_table(all_: Measured) -> str:
    """Return the cost of each width at each single boundary."""
    widths = sorted(set(all_.sensitivity.bits), reverse=True)
    rows = [
        [NAMES[model], str(boundary), *(f"{part.divergence[part.bits == bits].iloc[0]:.2g}" for bits in widths)]
        for model in all_.models
        for boundary, part in all_.sensitivity[all_.sensitivity.model == model].groupby("boundary")
    ]
    headings = ["model", "boundary", *(f"{bits} bits" for bits in widths)]
    return markdown_table(headings, rows, right=headings[1:])


def settings_table(all_: Measured) -> str:
    """Return the widths that the searches found, next to uniform ones."""
    arms = [("uniform", "", "uniform"), *((search, cost, SEARCHES[search]) for cost in COSTS for search in SEARCHES)]
    rows = []
    for model in all_.models:
        for budget, (search, cost, words) in itertools.product(all_.budgets(model), arms):
            row = all_.setting(model, search, budget, cost or "both").iloc[0]
            numbers = [f"{row.bits:.2f}", f"{1000 * row.seconds:.1f}", f"{row.predicted:.2g}", f"{row.divergence:.2g}"]
            gain = f"{all_.gain(model, search, budget, cost).value:+.4f}" if cost else ""
            rows.append([NAMES[model], str(budget), cost, words, f"`{row.widths}`", *numbers, gain])
    headings = ["model", "budget", "cost", "search", "bits", "per value", "ms", "sum", "together", "loss"]
    return markdown_table(headings, rows, right=headings[5:])


def training_table(all_: Measured) -> str:
    """Return the loss of each trained model at each width."""
    rows = [
        [words, str(int(all_.losses.passes[all_.losses.arm == arm].iloc[0])),
         *(f"{all_.mean(arm, bits):.4f}" for bits in all_.widths)]
        for arm, words in [("untrained", "before"), *((arm, look[0]) for arm, look in ARMS.items())]
        if arm in set(all_.losses.arm)
    ]  # fmt: skip
    headings = ["trained with", "passes", *("no codec" if not bits else f"{bits} bits" for bits in all_.widths)]
    return markdown_table(headings, rows, right=headings[1:])


# ------------------------------------------------------------------ claims
def seed_s() -> float:
    """Return the time of one more seed of two models."""
    return 2 * experiments.training_s(HERE, "losses.csv", "arm", "seed")


def searched(folder: Path) -> Iterator[Facts]:
    """Yield, for each model and cost, whether the search's widths lose less than uniform ones at all budgets."""
    all_ = measured(folder)
    for model, (cost, where) in itertools.product(all_.models, COSTS.items()):
        if not (budgets := all_.usable(model)):
            continue
        gains = {budget: all_.gain(model, "together", budget, cost) for budget in budgets}
        same = [budget for budget in budgets if all_.found(model, budget, cost) == all_.found(model, budget)]
        verdicts = {"fails" if budget in same else gains[budget].verdict for budget in budgets}
        others = [span(gains[budget], "batches") for budget in budgets if budget not in same]
        yield {
            "lower": {"holds": True, "fails": False}.get(verdicts.pop() or "") if len(verdicts) == 1 else None,
            "model": NAMES[model],
            "where": where,
            "gains": ", ".join(f"{gains[budget].value:+.4f} at {budget} bits" for budget in budgets),
            "same": " and ".join(map(str, same)) or "no",
            "most": budgets[0],
            "spread": spread(all_, model, budgets[0]),
            "interval": "; ".join(others) or EXACT,
        }


def adds_up(folder: Path, factor: float) -> Iterator[Facts]:
    """Yield, for each model, how many settings cost the sum of their boundaries' costs, within a factor."""
    all_ = measured(folder)
    rows = all_.settings[(all_.settings.predicted > 0) & (all_.settings.batch == 0)]
    for model in all_.models:
        part = rows[rows.model == model]
        yield {**share_within(part.divergence / part.predicted, factor), "model": NAMES[model]}


def for_all_widths(folder: Path, widths: Sequence[int], within: float) -> Iterator[Facts]:
    """Yield, for some widths (0: no codec), the loss of the model for all widths above that of one trained for it
    alone.
    """
    all_ = measured(folder)
    for bits in widths:
        alone = str(bits or "none")
        if {"one-shot", alone} <= set(all_.losses.arm):
            found = judge("loss", all_.of_arm("one-shot", bits), all_.of_arm(alone, bits), within)
            yield _judged(found, all_.mean(alone, bits), bits)


def parts(folder: Path) -> Facts | None:
    """Return the mean over widths of the one-shot model's loss above that of a model with drawn widths."""
    all_ = measured(folder)
    if not {"one-shot", "drawn"} <= set(all_.losses.arm):
        return None
    ours, base = (
        {
            seed: sum(all_.of_arm(arm, bits)[seed] for bits in all_.widths if bits) / (len(all_.widths) - 1)
            for seed in all_.of_arm(arm, UNCODED)
        }
        for arm in ("one-shot", "drawn")
    )
    return _judged(judge("loss", ours, base, 0.0), all_.mean("drawn", 8))


def _judged(found: Judgement, loss: float, bits: int = 0) -> Facts | None:
    return experiments.loss_facts(found, loss, seed_s(), interval=span(found, "seeds"), bits=bits)


of_layers_and_steps, of_layers_and_steps_add_up = denoising_figures.gains, denoising_figures.adds_up


def spread(all_: Measured, model: str, bits: int) -> str:
    """Compare the spread of boundaries at a width with the effect of the next smaller width."""
    rows = all_.sensitivity[all_.sensitivity.model == model]
    here = rows[rows.bits == bits].divergence
    below = rows[rows.bits == rows.bits[rows.bits < bits].max()].divergence
    return (
        f"boundaries differ by a factor of {here.max() / here.min():.1f}, and the next smaller width costs "
        f"{below.mean() / here.mean():.0f} times as much"
    )


# ------------------------------------------------------------------ words
def answer(folder: Path) -> str:
    """Return the answer in three lines; the tables have every number."""
    all_, same = measured(folder), list[str]()
    for model in all_.models:
        uniform = {
            budget: all(all_.found(model, budget, cost) == all_.found(model, budget) for cost in COSTS)
            for budget in all_.usable(model)
        }
        same.append(f"at {' or '.join(str(each) for each in uniform if uniform[each]) or 'no'} bits ({NAMES[model]})")
    said = (
        "**Answer.** Boundaries are about equally sensitive: for equal bytes, or seconds over unequal links, a search "
        f"finds uniform widths {' and '.join(same)}. {denoising_figures.answer(denoising_figures.denoising(folder))}"
    )
    if worse := [
        f"{each['judgement'].value:+.4f} at {each['bits']}" for each in for_all_widths(folder, (4, 2, 1), 0.0)
    ]:
        alone = "one for each alone, which 60 steps barely change"
        said += f" Loss of one model for all widths vs {alone}: {', '.join(worse)} bits."
    return said


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    all_, denoising = measured(folder), denoising_figures.denoising(folder)
    return {
        "answer": experiments.prose(answer(folder)),
        "settings": settings_table(all_),
        "sensitivity": sensitivity_table(all_),
        "training": training_table(all_),
        "denoising": denoising_figures.settings_table(denoising),
        "denoising-sensitivity": denoising_figures.sensitivity_table(denoising),
    }


# ------------------------------------------------------------------ figure
def _search_panel(axes: Axes, all_: Measured, model: str) -> None:
    rows = all_.settings[all_.settings.model == model]
    floor = rows[rows.search == "none"].loss.mean()
    uniform = rows[rows.search == "uniform"].groupby("bits").loss.mean() - floor
    axes.plot(uniform.index, uniform, color=style.INK, marker="o", label="uniform")
    for search, (colour, marker) in {"together": ("#0072b2", "P"), "alone": ("#d55e00", "x")}.items():
        for cost, filled, alpha in (("bytes", colour, 1.0), ("seconds", "none", 0.6)):
            part = rows[(rows.search == search) & (rows.cost == cost)].groupby("widths")[["bits", "loss"]].mean()
            face: dict[str, Any] = {} if marker == "x" else {"mfc": filled}
            axes.plot(part.bits, part.loss - floor, color=colour, marker=marker, ls="none",
                      label=f"greedy, {SEARCHES[search]}; equal {cost}", **face, alpha=alpha)  # fmt: skip
    axes.set_title(NAMES[model])
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_xlabel("bits per value, scales included")


def _training_panel(axes: Axes, all_: Measured) -> None:
    for arm, (words, colour, marker) in ARMS.items():
        if arm in set(all_.losses.arm):
            rows = all_.losses[all_.losses.arm == arm]
            plots.curve(
                axes, rows.assign(at=rows.bits.map(all_.widths.index)), "at", "loss", colour, words, marker=marker
            )
    axes.set_xticks(range(len(all_.widths)), ["none" if not bits else str(bits) for bits in all_.widths])
    axes.set_title("trained on with ...")
    axes.set_xlabel("bits of every boundary in the evaluation")
    axes.set_ylabel("held-out loss, nats")
    floors.draw_floors(axes, HERE, label=0.45)


def draw(all_: Measured) -> Figure:
    """Draw the searches' results for each model, and the trained models at each width."""
    figure, ((*searched, trained),) = plots.panels(1, len(all_.models) + 1, (11.5, 4.4))
    for axes, model in zip(searched, all_.models, strict=True):
        _search_panel(axes, all_, model)
    searched[0].set_ylabel("held-out loss above no codec, nats")
    _training_panel(trained, all_)
    trained.legend(fontsize=8)
    finding = "For equal bytes a search finds uniform widths; one model for all widths is a compromise"
    plots.finish(figure, finding, searched[0], columns=3, fontsize=8)
    return figure


FIGURES = {
    "widths": lambda folder: draw(measured(folder)),
    "denoising": lambda folder: denoising_figures.draw(denoising_figures.denoising(folder)),
}


if __name__ == "__main__":
    publishing.run(globals())

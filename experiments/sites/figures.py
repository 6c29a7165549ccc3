"""Draws the figure and generates the tables of sites: `python experiments/sites/figures.py`.

This reads curves.csv and layouts.csv, which train.py writes into the output folder, and cells.csv and rounds.csv, which
`python -m testbed predict sites` writes into the results; it copies the latter two.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import rounds
from layouts import CHURN, LATE
from matplotlib.figure import Figure

from testbed.errors import ResultsError
from testbed.metrics.curves import LossPoint
from testbed.metrics.time_to_loss import TargetCrossing
from testbed.metrics.verdicts import judge
from testbed.predict import churned
from testbed.predict.scenarios import load_scenario, load_scenarios
from testbed.report import experiments, plots, predicted, publishing
from testbed.report.canvas import name_rows, note
from testbed.report.claim_rows import Facts

HERE = Path(__file__).resolve().parent
DATA, PIPELINE, HYBRID = "data parallel", "pipeline", "hybrid"
COLOURS = {DATA: "#0072b2", PIPELINE: "#d55e00", HYBRID: "#009e73"}
EQUAL, BITS_NEAR = 0.02, 2e-3
"""Nats that count as no worse; and the largest relative deviation of a cell's bits from the counted ones."""

BySeed = Mapping[int, float]


def kind(layout: str) -> str:
    """Return a layout's kind, one of three ways to train."""
    return next((each for each in (DATA, PIPELINE) if layout.startswith(each)), HYBRID)


class Results(NamedTuple):
    """The measurements."""

    layouts: Any
    """layouts.csv, by name."""
    curves: dict[str, dict[int, list[LossPoint]]]
    """Curves by layout and seed; a step is one batch of every replica."""
    target: float
    cells: Any
    """Cells of the trained layouts, with `batch_s`: the step time divided by its batches."""
    trainings: rounds.Trainings
    """Cells with churn."""

    def batches(self, name: str) -> BySeed:
        """Return each seed's batches to the target; empty if one does not reach it. `name`: a layout, or one with
        churn.
        """
        return {seed: each.steps for seed, each in self._met(name).items()}

    def seconds(self, name: str) -> BySeed:
        """Return each seed's seconds to the target; empty as above."""
        if name.endswith(CHURN):
            return {seed: each.seconds for seed, each in self._met(name).items()}
        (batch_s,) = self.cells.batch_s[self.cells["label.method"] == name]
        return {seed: batches * batch_s for seed, batches in self.batches(name).items()}

    def steps(self, name: str) -> Mapping[int, list[rounds.Step]]:
        """Return the steps of a layout with churn, by seed, until it reaches the target."""
        local_steps = self.layouts.loc[name.removesuffix(CHURN)].local_steps
        steps = self.trainings[name.removesuffix(CHURN)]
        return {seed: steps[seed][: math.ceil(batches / local_steps)] for seed, batches in self.batches(name).items()}

    def churned(self) -> list[str]:
        """Return the layouts with churn whose steps were played, in the order in which they reach the target, those
        that do not reach it last.
        """
        trained = self.layouts.index
        names = [
            f"{name}{CHURN}"
            for name in self.trainings
            if f"{name}{CHURN}" in trained or (name in trained and self.layouts.loc[name].workers == 1)
        ]
        return sorted(names, key=lambda name: experiments.mean_of(self.seconds(name) or {0: math.inf}))

    def _met(self, name: str) -> Mapping[int, TargetCrossing]:
        base = name.removesuffix(CHURN)
        curves = self.curves[name if name in self.curves else base]  # a pipeline's losses are those without churn
        if name != base:
            local_steps = self.layouts.loc[base].local_steps
            curves = {
                seed: [
                    point._replace(seconds=self.trainings[base][seed][point.step // local_steps - 1].end_s)
                    for point in points
                ]
                for seed, points in curves.items()
            }
        return experiments.crossings(curves, self.target)

    def last(self, name: str) -> BySeed:
        """Return each seed's loss after all batches."""
        return {seed: points[-1].loss for seed, points in self.curves[name].items()}

    def played(self, scenario: str) -> list[str]:
        """Return the layouts at a scenario's sites that reach the target, in that order."""
        names = self.cells["label.method"][self.cells.scenario == scenario]
        return sorted(
            (name for name in names if self.batches(name)), key=lambda name: experiments.mean_of(self.seconds(name))
        )


def results(folder: Path) -> Results:
    """Read a folder's CSVs. ResultsError if cells.csv has other bits than the trainings, or rounds.csv other
    absences.
    """
    curves, cells = experiments.tuned_curves(folder), predicted.cells(folder)
    layouts = pandas.read_csv(folder / "layouts.csv", dtype={"absences": str})  # a digest may look like a number
    cells = cells[cells["label.method"].isin(layouts.layout)]
    layouts = layouts.set_index("layout")
    trained = {*layouts.index, *curves}
    for name, away in rounds.absences(folder).items():
        if f"{name}{CHURN}" in trained and layouts.absences.get(f"{name}{CHURN}") != rounds.digest(away):
            raise ResultsError(
                f"{folder}: {name} was trained with other absences than it was played with; rerun train.py"
            )
    for cell in cells.to_dict("records"):
        layout = layouts.loc[cell["label.method"]]
        if layout.workers > 1 and abs(cell["bits"] / layout.bits - 1) > BITS_NEAR:
            raise ResultsError(
                f"{folder}: {cell['label.method']} was played with {cell['bits']} bits per parameter, and sends "
                f"{layout.bits}; put these into cells.toml and run predict again"
            )
    cells = cells.assign(batch_s=cells.step_s / cells.local_steps.fillna(1))
    target = float(pandas.read_csv(folder / "tuning.csv").target.iloc[0])
    return Results(layouts, curves, target, cells, rounds.trainings(folder))


# ------------------------------------------------------------------ tables
@experiments.table
def times_table(folder: Path) -> Any:
    """Return, for each layout at its sites, the time of a batch, and the time to the loss."""
    found = results(folder)
    for scenario in dict.fromkeys(found.cells.scenario):
        names = found.cells["label.method"][found.cells.scenario == scenario]
        order = found.played(scenario)
        for name in [*order, *(name for name in names if name not in order)]:
            (cell,) = found.cells[found.cells["label.method"] == name].to_dict("records")
            share = cell["no_network_s"] / cell["step_s"]
            batches, seconds = found.batches(name), found.seconds(name)
            yield {
                "scenario": scenario,
                "layout": name,
                "sequences per batch": f"{found.layouts.loc[name].sequences * 8:.0f}",
                "seconds per batch": f"{cell['batch_s']:.3g}",
                "of it without links": f"{share:.0%}",
                "above the floor": f"{cell['step_s'] / cell['formula_s'] - 1:.1%}",
                f"batches to {found.target:g} nats": experiments.mean_words(batches, "{:.0f}")
                if batches
                else "not all seeds",
                "seconds": experiments.mean_words(seconds, "{:.0f}") if seconds else "",
            }


def losses_table(folder: Path) -> Any:
    """Return the loss after equal batches of every layout that was trained."""
    found = results(folder)
    tuning = pandas.read_csv(folder / "tuning.csv")
    rates = tuning[tuning.chosen].set_index("method").learning_rate
    return pandas.DataFrame(
        {
            "layout": name,
            "replicas": found.layouts.loc[name].workers,
            "rate": f"{rates[name]:g}",
            "last loss": experiments.mean_words(found.last(name), "{:.3f}"),
        }
        for name in found.curves
    )


def churn_table(folder: Path) -> Any:
    """Return the effect of churn on each layout: batches and seconds to the target with and without it, and their
    parts.
    """
    found, rows = results(folder), []
    for name in found.churned():
        base = name.removesuffix(CHURN)
        with_churn, without = found.seconds(name), found.seconds(base)
        row = {"layout": base, "batches without churn": experiments.mean_words(found.batches(base), "{:.0f}")}
        if with_churn and without:
            steps = [step for each in found.steps(name).values() for step in each]
            spent_s = sum(step.waited_s + step.lasts_s for step in steps)
            judged = judge("time_to_loss", without, with_churn)
            row |= {
                "with": experiments.mean_words(found.batches(name), "{:.0f}"),
                "seconds without": experiments.mean_words(without, "{:.0f}"),
                "seconds with churn": experiments.mean_words(with_churn, "{:.0f}"),
                "times as long": f"{judged.value:.2f} ({judged.interval_words})",
                "of it waiting": f"{sum(step.waited_s for step in steps) / spent_s:.0%}",
                "steps with all replicas": f"{np.mean([not step.away for step in steps]):.0%}",
                "with one that returns": f"{np.mean([bool(step.returning) for step in steps]):.0%}",
            }
        else:
            row |= {"with": "not all seeds"}
        rows.append(row)
    return pandas.DataFrame(rows).fillna("")


def in_turn(folder: Path) -> str:
    """Return the deviation of sums of separately played steps from trainings played continuously."""
    said = []
    for name, by_seed in results(folder).trainings.items():
        offs = []
        for steps in by_seed.values():
            late_s, end_s, farthest = 0.0, 0.0, 0.0
            for step in steps:
                if step.in_turn_s is not None:
                    late_s, end_s = late_s + step.in_turn_s - step.lasts_s, step.end_s
                    farthest = max(farthest, abs(late_s) / end_s)
            if end_s:
                offs.append(farthest)
        if offs:
            said.append(f"{max(offs):.1%} at most in {len(offs)} of {len(by_seed)} trainings of {name}")
    words = f"If played as one continuous trace, steps begin within {'; '.join(said)} of the times stated here."
    return experiments.prose(words)


@experiments.table
def scenarios_table(folder: Path) -> Any:
    """Return the scenarios, and the sources of their numbers."""
    for name, scenario in load_scenarios().items():
        sites = [
            f"{sites.count} x {sites.devices} {sites.device} on `{sites.link}`"
            + (f", {sites.within} within" if sites.within else "")
            + (f", present for {sites.stays} and away for {sites.away} on average" if sites.stays else "")
            for sites in scenario.sites
        ]
        what = {
            "scenario": name,
            "sites": "; ".join(sites),
            "server": f"`{scenario.server}`",
            "source": scenario.source,
        }
        yield what


# ------------------------------------------------------------------ claims
def loss(folder: Path, codec: str, base: str, effect: float) -> Facts | None:
    """Return the loss of two cut replicas above another arm's after equal tokens; None if either was not run."""
    found, ours = results(folder), f"hybrid, {codec}, full batches"
    if not {ours, base} <= found.curves.keys():
        return None
    judged = judge("loss", found.last(ours), found.last(base), effect)
    return experiments.loss_facts(judged, experiments.mean_of(found.last(base)), experiments.tuned_pair_s(HERE), EQUAL)


def _sooner(found: Results, ours: str | None, base: str | None, why: str, effect: float = 1.0) -> Facts | None:
    """Return how many times as soon one layout reaches the loss as another; None if one does not."""
    if ours is None or base is None or not found.seconds(ours) or not found.seconds(base):
        return None
    judged = judge("time_to_loss", found.seconds(ours), found.seconds(base), effect)
    shown = experiments.open_words(why, judged, experiments.tuned_pair_s(HERE))
    return {"judgement": judged, "bound": effect, "ours": ours, "base": base, "shown": shown, "loss": found.target}


def _best(order: Sequence[str]) -> dict[str, str | None]:
    return {each: next((name for name in order if kind(name) == each), None) for each in COLOURS}


def hybrids(folder: Path, sizes: str) -> Iterator[Facts]:
    """Yield for each scenario how many times as soon the best hybrid reaches the loss as the other two kinds."""
    found = results(folder)
    for scenario in dict.fromkeys(found.cells.scenario):
        best = _best(found.played(scenario))
        for other in (DATA, PIPELINE):
            if (facts := _sooner(found, best[HYBRID], best[other], sizes)) is not None:
                yield {**facts, "scenario": scenario, "other": other}


def late(folder: Path) -> Iterator[Facts]:
    """Yield whether hiding the exchange behind the next step's batches pays."""
    found = results(folder)
    times = found.cells.set_index("label.method").batch_s
    for name in (name for name in found.curves if name.endswith(LATE)):
        base = name.removesuffix(LATE)
        if not found.seconds(name) or not found.seconds(base):
            continue
        share = times[name] / times[base]
        more = experiments.mean_of(found.batches(name)) / experiments.mean_of(found.batches(base))
        why = f"a batch takes {share:.2f} of the time, and the loss {more:.2f} times the batches"
        if (facts := _sooner(found, name, base, why)) is not None:
            yield facts


def churned_order(folder: Path, why: str) -> Iterator[Facts]:
    """Yield how many times as soon the best of each kind reaches the loss with churn as the next one."""
    found = results(folder)
    best = _best(found.churned())
    for ours, base in ((HYBRID, PIPELINE), (DATA, HYBRID)):
        if (facts := _sooner(found, best[ours], best[base], why)) is not None:
            yield {**facts, "kind": ours, "other": base}


def churn_costs(folder: Path, why: str) -> Iterator[Facts]:
    """Yield how many times as soon each layout reaches the loss with churn as without."""
    found, share = results(folder), _share()
    for name in found.churned():
        if (facts := _sooner(found, name, name.removesuffix(CHURN), why, share)) is not None:
            longer = 1 / facts["judgement"].value
            yield {**facts, "there": f"{share:.0%}", "most": 1 / share, "longer": longer}


# ------------------------------------------------------------------ the README
def answer(folder: Path) -> str:
    """Return the first layout in each scenario with its lead, and the effect of churn on the layout that is then first
    and on the one that suffers most.
    """
    found, said = results(folder), []
    for scenario in dict.fromkeys(found.cells.scenario):
        order = found.played(scenario)
        if not order:
            continue
        first = order[0]
        others = {kind(name): name for name in reversed(order) if kind(name) != kind(first)}
        parts = []
        for other in sorted(others.values(), key=order.index):
            judged = judge("time_to_loss", found.seconds(first), found.seconds(other))
            parts.append(f"{judged.value:.2f}x as soon as {other} ({judged.interval_words})")
        said.append(f"{scenario.capitalize()}: {first}, {', '.join(parts)}.")
    slower = {
        name: judge("time_to_loss", without, with_churn)
        for name in found.churned()
        if (with_churn := found.seconds(name)) and (without := found.seconds(name.removesuffix(CHURN)))
    }
    if len(slower) > 1:
        most = max(slower, key=lambda name: slower[name].value)
        words = [f"{kind(name)} {slower[name].value:.2f}x ({slower[name].interval_words})" for name in (*slower, most)]
        said.append(f"If homes come and go: {words[0]}, {words[-1]} as long.")
    return f"First at {found.target:g} nats. {' '.join(said)}"


def _share() -> float:
    """Return the share of time in which a home is present."""
    (churn,) = {device.churn for device in load_scenario("community").devices()}
    assert churn is not None
    return churn.share


# ------------------------------------------------------------------ figure
def draw(folder: Path) -> Figure:
    """Draw the seconds to the loss of each layout, a panel for each scenario, and one for sites that come and go."""
    found = results(folder)
    panels = {scenario.capitalize(): found.played(scenario) for scenario in dict.fromkeys(found.cells.scenario)}
    panels["Community, where homes come and go"] = [name for name in found.churned() if found.seconds(name)]
    panels = {title: order for title, order in panels.items() if order}
    counts = [len(order) for order in panels.values()]
    size = (9.2, 0.9 + 0.42 * (sum(counts) + len(counts)))
    figure, every = plots.panels(len(panels), 1, size, height_ratios=counts)
    for axes, (title, order) in zip(every[:, 0], panels.items(), strict=True):
        for row, name in enumerate(order):
            seconds, base = found.seconds(name), name.removesuffix(CHURN)
            value = experiments.mean_of(seconds)
            axes.plot(list(seconds.values()), [row] * len(seconds), "|", color=COLOURS[kind(name)], ms=9)
            axes.plot(value, row, "o", color=COLOURS[kind(name)])
            said = f"{value:,.0f} s"
            if base != name and (without := found.seconds(base)):
                said += f", {judge('time_to_loss', without, seconds).value:.2f}x those without churn"
            note(axes, said, (max(seconds.values()), row), (6, 0), va="center", size=8.5)
        name_rows(axes, [name.removesuffix(CHURN) for name in order])
        ends = [seconds for name in order for seconds in found.seconds(name).values()]
        axes.set(title=f"{title}: {order[0].removesuffix(CHURN)} is first", xscale="log")
        axes.set_xlim(0.8 * min(ends), (15 if order[0].endswith(CHURN) else 1.5) * max(ends))
        plots.ticks(axes.xaxis, (300, 400, 500, 2000, 5000, 10_000, 20_000, 50_000, 100_000), "{:,.0f}".format)
    every[-1, 0].set_xlabel(f"seconds to a loss of {found.target:g} nats (marks: seeds)")
    return figure


FIGURES = {"sites": draw}
BLOCKS = {"answer": answer, "times": times_table, "churn": churn_table, "moments": in_turn, "losses": losses_table,
          "scenarios": scenarios_table}  # fmt: skip


def write(results: Path, output: Path) -> None:
    """Copy the results of `predict` for sites with churn."""
    publishing.copy(churned.FILE, results, output)


if __name__ == "__main__":
    publishing.run(globals())

"""Draw the figure of sites and make its tables: `python experiments/sites/figures.py`.

This reads curves.csv and layouts.csv, which train.py writes into the output folder, and cells.csv and rounds.csv, which
`python -m testbed predict sites` writes into the results; it copies the latter two.
"""

from __future__ import annotations

import math
import sys
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
from testbed.metrics.time_to_loss import TargetCrossing, crossing
from testbed.metrics.verdicts import judge
from testbed.play.scenarios import load_scenario, load_scenarios
from testbed.report import claim_rows, experiments, predicted, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table
from testbed.sweep import churned

HERE = Path(__file__).resolve().parent
DATA, PIPELINE, HYBRID = "data parallel", "pipeline", "hybrid"
COLOURS = {DATA: "#0072b2", PIPELINE: "#d55e00", HYBRID: "#009e73"}
WHOLE = "hybrid, a pipeline per site"
"""Four replicas whose numbers no codec touches."""
EQUAL, BITS_NEAR = 0.02, 2e-3
"""Nats that count as no worse; and how far a cell's bits may be from those that were counted, as a share."""
TUNING_SEEDS = 2
"""With which each rate was tried: tuned_text.FULL."""

BySeed = Mapping[int, float]


def kind(layout: str) -> str:
    """Return which of the three ways to train a layout is."""
    return next((each for each in (DATA, PIPELINE) if layout.startswith(each)), HYBRID)


class Results(NamedTuple):
    """What was measured."""

    layouts: Any
    """layouts.csv, by name."""
    curves: dict[str, dict[int, list[LossPoint]]]
    """By layout and seed; a step is a batch of every replica."""
    target: float
    cells: Any
    """Of the layouts that were trained, with `batch_s`: a step over its batches."""
    trainings: rounds.Trainings
    """Those whose sites come and go."""

    def batches(self, name: str) -> BySeed:
        """Return each seed's batches to the target; nothing where one of them does not get there. `name`: a layout, or
        one with churn.
        """
        return {seed: each.steps for seed, each in self._met(name).items()}

    def seconds(self, name: str) -> BySeed:
        """Return each seed's seconds to the target; nothing as above."""
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
        """Return the layouts with churn of which steps were played, the first to reach the target first, those that do
        not last.
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
        met = {seed: crossing(points, self.target) for seed, points in curves.items()}
        return {} if None in met.values() else {seed: each for seed, each in met.items() if each is not None}

    def last(self, name: str) -> BySeed:
        """Return each seed's loss after all batches."""
        return {seed: points[-1].loss for seed, points in self.curves[name].items()}

    def played(self, scenario: str) -> list[str]:
        """Return the layouts at a scenario's sites that reach the target, the first to get there first."""
        names = self.cells["label.method"][self.cells.scenario == scenario]
        return sorted(
            (name for name in names if self.batches(name)), key=lambda name: experiments.mean_of(self.seconds(name))
        )


def results(folder: Path) -> Results:
    """Read a folder's CSVs. ResultsError where cells.csv has other bits than were trained, or rounds.csv other
    absences.
    """
    curves, layouts, cells = (
        pandas.read_csv(folder / name, dtype={"absences": str})  # a digest may look like a number
        for name in ("curves.csv", "layouts.csv", predicted.FILE)
    )
    cells = cells[cells["label.method"].isin(layouts.layout)]
    layouts = layouts.set_index("layout")
    trained = {*layouts.index, *curves.method}
    for name, away in rounds.absences(folder).items():
        if f"{name}{CHURN}" in trained and layouts.absences.get(f"{name}{CHURN}") != rounds.digest(away):
            raise ResultsError(
                f"{folder}: {name} was trained with other absences than were played; run train.py, which trains again"
            )
    for cell in cells.to_dict("records"):
        layout = layouts.loc[cell["label.method"]]
        if layout.workers > 1 and abs(cell["bits"] / layout.bits - 1) > BITS_NEAR:
            raise ResultsError(
                f"{folder}: {cell['label.method']} was played with {cell['bits']} bits per parameter, and sends "
                f"{layout.bits}; put these into cells.toml and run predict again"
            )
    cells = cells.assign(batch_s=cells.step_s / cells.local_steps.fillna(1))
    points = {
        str(name): {
            int(seed): [LossPoint(row.batches, 0.0, row.loss) for row in each.itertuples()]
            for seed, each in part.groupby("seed")
        }
        for name, part in curves.groupby("method", sort=False)
    }
    target = float(pandas.read_csv(folder / "tuning.csv").target.iloc[0])
    return Results(layouts, points, target, cells, rounds.trainings(folder))


# ------------------------------------------------------------------ tables
def times_table(folder: Path) -> Any:
    """Return, for each layout at its sites, how long a batch takes, and how long the loss."""
    found, rows = results(folder), []
    for scenario in dict.fromkeys(found.cells.scenario):
        names = found.cells["label.method"][found.cells.scenario == scenario]
        order = found.played(scenario)
        for name in [*order, *(name for name in names if name not in order)]:
            (cell,) = found.cells[found.cells["label.method"] == name].to_dict("records")
            share = cell["no_network_s"] / cell["step_s"]
            batches, seconds = found.batches(name), found.seconds(name)
            rows.append(
                {
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
            )
    return pandas.DataFrame(rows)


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
    """Return what churn does to each layout: batches and seconds to the target with and without, and where they go."""
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
    """Return how far moments that are sums of steps played alone are from those of trainings played in turn."""
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
    return f"Played in turn, as one trace, steps begin within {'; '.join(said)} of where they stand here."


def scenarios_table() -> Any:
    """Return the scenarios, and where their numbers come from."""
    rows = []
    for name, scenario in load_scenarios().items():
        sites = [
            f"{sites.count} x {sites.devices} {sites.device} on `{sites.link}`"
            + (f", {sites.within} within" if sites.within else "")
            + (f", there for {sites.stays} and away for {sites.away} on average" if sites.stays else "")
            for sites in scenario.sites
        ]
        what = {
            "scenario": name,
            "sites": "; ".join(sites),
            "server": f"`{scenario.server}`",
            "source": scenario.source,
        }
        rows.append(what)
    return pandas.DataFrame(rows)


# ------------------------------------------------------------------ claims
def seed_s() -> float:
    """Return how long one more seed of two methods takes."""
    return 2 * experiments.tuned_training_s(HERE, TUNING_SEEDS)


def claims(folder: Path) -> list[Claim]:
    """Return what was published and what we asked, and what became of it."""
    return claim_rows.claims(globals(), folder)


def loss(folder: Path, codec: str, base: str, effect: float) -> Facts | None:
    """Return how far the loss of two replicas cut is above another's after equal tokens; None where one was not run."""
    found, ours = results(folder), f"hybrid, {codec}, full batches"
    if not {ours, base} <= found.curves.keys():
        return None
    judged = judge("loss", found.last(ours), found.last(base), effect)
    shown = experiments.shown_words(judged, experiments.mean_of(found.last(base)), seed_s(), EQUAL)
    return {"judgement": judged, "shown": shown}


def _sooner(found: Results, ours: str | None, base: str | None, why: str, effect: float = 1.0) -> Facts | None:
    """Return how many times as soon one layout reaches the loss as another; None where one does not."""
    if ours is None or base is None or not found.seconds(ours) or not found.seconds(base):
        return None
    judged = judge("time_to_loss", found.seconds(ours), found.seconds(base), effect)
    shown = experiments.open_words(why, judged, seed_s())
    return {"judgement": judged, "bound": effect, "ours": ours, "base": base, "shown": shown}


def _best(order: Sequence[str]) -> dict[str, str | None]:
    return {each: next((name for name in order if kind(name) == each), None) for each in COLOURS}


def hybrids(folder: Path, sizes: str) -> Iterator[Facts]:
    """Yield for each scenario how many times as soon as the other two the best hybrid reaches the loss."""
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
    """Yield how many times as soon as the next the best of each way to train reaches the loss with churn."""
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
def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    return {
        "answer": experiments.prose(answer(folder)),
        "claims": claims_table(claims(folder)),
        "times": experiments.markdown_of(times_table(folder)),
        "churn": experiments.markdown_of(churn_table(folder)),
        "moments": experiments.prose(in_turn(folder)),
        "losses": experiments.markdown_of(losses_table(folder)),
        "scenarios": experiments.markdown_of(scenarios_table()),
    }


def answer(folder: Path) -> str:
    """Return which layout is first in each scenario, and by how much; and what churn does to the one that is then first
    and to the one that suffers most.
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
        said.append(f"Homes that come and go: {words[0]}, {words[-1]} as long.")
    return f"First at {found.target:g} nats. {' '.join(said)}"


def _share() -> float:
    """Return the share of time in which a home is there."""
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
    figure = Figure(figsize=(9.2, 0.9 + 0.42 * (sum(counts) + len(counts))), layout="constrained")
    every: Sequence[Any] = np.atleast_1d(figure.subplots(len(panels), 1, height_ratios=counts))
    for axes, (title, order) in zip(every, panels.items(), strict=True):
        for row, name in enumerate(reversed(order)):
            seconds, base = found.seconds(name), name.removesuffix(CHURN)
            value = experiments.mean_of(seconds)
            axes.barh(row, value, color=COLOURS[kind(name)], height=0.7)
            axes.plot(list(seconds.values()), [row] * len(seconds), "|", color=style.MUTED, ms=7)
            said = f"{value:,.0f} s"
            if base != name and (without := found.seconds(base)):
                said += f", {judge('time_to_loss', without, seconds).value:.2f}x those without churn"
            axes.annotate(
                said, (max(seconds.values()), row), (6, 0),
                textcoords="offset points", va="center", fontsize=8.5,
            )  # fmt: skip
        axes.set_yticks(range(len(order)), [name.removesuffix(CHURN) for name in reversed(order)])
        axes.set(title=f"{title}: {order[0].removesuffix(CHURN)} is first")
        axes.set_xlim(
            0, (1.6 if order[0].endswith(CHURN) else 1.1) * max(max(found.seconds(n).values()) for n in order)
        )
        axes.grid(visible=False, axis="y")
    every[-1].set_xlabel(f"seconds to a loss of {found.target:g} nats (marks: seeds)")
    return figure


def main() -> int:
    """Write the figure, cells.csv, rounds.csv, claims.csv and the README's blocks."""
    from_folder, output = experiments.folders(HERE.name, "Figure, claims and the README's blocks.")
    for name in (predicted.FILE, churned.FILE):
        (output / name).write_bytes((from_folder / name).read_bytes())
    experiments.draw_and_publish(HERE, output, {"sites": draw}, blocks, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())

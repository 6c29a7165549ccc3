"""Draw the figures of deco_sgd and make its tables: `python experiments/deco_sgd/figures.py`.

This reads runs.csv and choices.csv from the output folder, which train.py writes, and published.csv.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from testbed.metrics.statistics import difference, of_differences
from testbed.metrics.verdicts import Judgement, judge
from testbed.policies.cycle import steady_cycle_s
from testbed.policies.deco import NOISE_FACTORS
from testbed.report import claim_rows, experiments, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table
from testbed.report.numbers import percent

HERE = Path(__file__).resolve().parent
VALUES, COMPUTE_S, FIXED_RATE, RESOLUTION = 10_000_000, 0.1, 0.1, 4
"""The model whose steps are timed, as in train.py; the learning rate that is the same for all pairs; and the steps
between two looks at the loss."""
DSGD, DECO, ORACLE, BEST_STATIC = "D-SGD", "DeCo-SGD", "best pair of each network", "best pair of all networks"
STATIC = "better static pair"
STATICS = {"static (0.1, 1)": (0.1, 1), "static (0.01, 1)": (0.01, 1)}
COLOURS = {
    DSGD: "#767d86",
    "D-EF-SGD": "#56b4e9",
    "DD-SGD": "#cc79a7",
    **dict(zip(STATICS, ("#e69f00", "#b3a000"), strict=True)),
    BEST_STATIC: "#0072b2",
    DECO: "#d55e00",
    ORACLE: "#1b1f24",
}
RATIO_COLOURS = ("#767d86", "#0072b2", "#009e73", "#e69f00", "#d55e00")

Pair = tuple[float, int]
"""Ratio and staleness."""
BySeed = Mapping[int, float]
Choose = Callable[[Any], BySeed]
"""Of a pair's steps, by learning rate and seed: each seed's; nothing where one does not get there."""


class Results(NamedTuple):
    """What train.py measured."""

    steps: dict[Pair, Any]
    """Steps to the target: a row per learning rate, a column per seed, NaN where it was not reached."""
    bits: dict[float, float]
    """Of a message per parameter, by ratio."""
    choices: dict[tuple[int, int], Pair]
    """DeCo-SGD's, by Mbit/s and ms."""

    @property
    def grid(self) -> list[Pair]:
        """The pairs that every ratio and staleness has: not those that were chosen."""
        ratios = {ratio for ratio, staleness in self.steps if staleness == 0}
        return [pair for pair in self.steps if pair[0] in ratios]


def results(folder: Path) -> Results:
    """Read the CSVs."""
    runs, chosen = (pandas.read_csv(folder / name) for name in ("runs.csv", "choices.csv"))
    return Results(
        {
            (float(ratio), int(staleness)): part.pivot(index="learning_rate", columns="seed", values="steps")
            for (ratio, staleness), part in runs.groupby(["ratio", "staleness"])
        },
        dict(runs.groupby("ratio").bits.first()),
        {(row.rate_mbps, row.delay_ms): (row.ratio, row.staleness) for row in chosen.itertuples()},
    )


def tuned(steps: Any) -> BySeed:
    """Return each seed's steps with the learning rate that is best for the other seeds; nothing where a seed does not
    get there with it, or no learning rate brings all others there.
    """
    found, values = {}, steps.to_numpy(float)
    for column, seed in enumerate(steps.columns):
        mean = np.delete(values, column, axis=1).mean(axis=1)
        if np.isnan(mean).all() or math.isnan(value := values[np.nanargmin(mean), column]):
            return {}
        found[int(seed)] = float(value)
    return found


def fixed(steps: Any) -> BySeed:
    """Return each seed's steps with the fixed learning rate; nothing where one does not get there."""
    row = steps.loc[FIXED_RATE] if FIXED_RATE in steps.index else None
    return {} if row is None or row.isna().any() else {int(seed): float(value) for seed, value in row.items()}


MODES: dict[str, Choose] = {"tuned": tuned, f"fixed at {FIXED_RATE:g}": fixed}
"""How the learning rate of a pair is chosen."""


def cycle_s(found: Results, network: tuple[int, int], pair: Pair) -> float:
    """Return the steady cycle of a worker's steps over a link of (Mbit/s, ms one way)."""
    rate_mbps, delay_ms = network
    busy_s = VALUES * found.bits[pair[0]] / (1e6 * rate_mbps)
    return steady_cycle_s(COMPUTE_S, busy_s, busy_s + delay_ms / 1e3, pair[1])


def seconds(found: Results, choose: Choose, network: tuple[int, int], pair: Pair) -> BySeed:
    """Return each seed's seconds to the target."""
    cycle = cycle_s(found, network, pair)
    return {seed: cycle * steps for seed, steps in choose(found.steps[pair]).items()}


def arms(found: Results, choose: Choose) -> dict[tuple[int, int], dict[str, Pair]]:
    """Return, by network, the pair of each arm. The best ones are chosen in hindsight, by the mean time of seeds."""
    networks = list(found.choices)
    times = {
        (network, pair): experiments.mean_of(taken)
        for network, pair in itertools.product(networks, found.steps)
        if (taken := seconds(found, choose, network, pair))
    }
    reached = [pair for pair in found.steps if (networks[0], pair) in times]
    grid = [pair for pair in found.grid if pair in reached]
    overall = min(grid, key=lambda pair: sum(math.log(times[network, pair]) for network in networks))

    def best(network: tuple[int, int], pairs: list[Pair]) -> Pair:
        return min(pairs, key=lambda pair: times[network, pair])

    return {
        network: {
            DSGD: (1.0, 0),
            "D-EF-SGD": best(network, [pair for pair in grid if pair[1] == 0 and pair[0] < 1]),
            "DD-SGD": best(network, [pair for pair in grid if pair[0] == 1 and pair[1] > 0]),
            **{name: pair for name, pair in STATICS.items() if pair in reached},
            STATIC: best(network, [pair for pair in STATICS.values() if pair in reached]),
            BEST_STATIC: overall,
            **({DECO: found.choices[network]} if found.choices[network] in reached else {}),
            ORACLE: best(network, reached),
        }
        for network in networks
    }


def against(
    found: Results, choose: Choose, network: tuple[int, int], ours: Pair, base: Pair, effect: float | None
) -> Judgement:
    """Judge how many times as soon one pair gets to the target as another."""
    return judge("time_to_loss", seconds(found, choose, network, ours), seconds(found, choose, network, base), effect)


# ------------------------------------------------------------------ tables
def pairs_table(folder: Path) -> Any:
    """Return the mean steps to the target by ratio and staleness, with tuned learning rates and with the fixed one."""
    found, rows = results(folder), []
    for ratio in sorted({ratio for ratio, _ in found.grid}, reverse=True):
        row: dict[str, object] = {"ratio": f"{ratio:g}", "bits": f"{found.bits[ratio]:.3g}"}
        for name, choose in (("tuned", tuned), ("fixed", fixed)):
            for staleness in sorted({staleness for _, staleness in found.grid}):
                steps = choose(found.steps[ratio, staleness])
                row[f"{name}, {staleness}"] = f"{experiments.mean_of(steps):.0f}" if steps else "never"
        rows.append(row)
    return pandas.DataFrame(rows)


def networks_table(folder: Path) -> Any:
    """Return, for each network, the speed-up of each arm over D-SGD in time to the target, and its pair."""
    found, rows = results(folder), []
    for name, choose in MODES.items():
        for network, chosen in arms(found, choose).items():
            row: dict[str, object] = {
                "learning rate": name,
                "link": f"{network[0]} Mbit/s",
                "delay": f"{network[1]} ms",
            }
            row["D-SGD"] = f"{experiments.mean_of(seconds(found, choose, network, chosen[DSGD])):.0f} s"
            for arm, pair in chosen.items():
                if arm not in (DSGD, STATIC):
                    times = against(found, choose, network, pair, chosen[DSGD], None).value
                    row[arm] = f"{times:.2f}x" + ("" if arm in STATICS else f" ({pair[0]:.3g}, {pair[1]})")
            rows.append(row)
    return pandas.DataFrame(rows)


def predictions(found: Results, choose: Choose) -> dict[str, list[float]]:
    """Return how far steps are from what each law predicts of ratio and staleness apart, as shares, by law."""
    steps = {pair: experiments.mean_of(taken) for pair in found.grid if (taken := choose(found.steps[pair]))}
    off: dict[str, list[float]] = {"sum": [], "product": [], "larger": []}
    for (ratio, staleness), value in steps.items():
        if ratio == 1 or staleness == 0 or not {(ratio, 0), (1.0, staleness), (1.0, 0)} <= steps.keys():
            continue
        compressed, delayed, neither = steps[ratio, 0], steps[1.0, staleness], steps[1.0, 0]
        off["sum"].append(value / (compressed + delayed - neither) - 1)
        off["product"].append(value / (compressed * delayed / neither) - 1)
        off["larger"].append(value / max(compressed, delayed) - 1)
    return off


def correlations(found: Results, choose: Choose, factor: str) -> BySeed:
    """Return, by seed, the rank correlation of a noise factor with the steps of pairs where all seeds get there."""
    taken = {pair: steps for pair in found.grid if (steps := choose(found.steps[pair]))}
    noise = [NOISE_FACTORS[factor](*pair) for pair in taken]
    return {
        seed: float(spearmanr(noise, [steps[seed] for steps in taken.values()]).statistic)
        for seed in next(iter(taken.values()))
    }


def laws_table(folder: Path) -> Any:
    """Return how well each law says the steps of pairs, with tuned learning rates and the fixed one."""
    found = results(folder)
    rows: list[tuple[str, str, int, str]] = []
    for name, choose in MODES.items():
        for law, off in predictions(found, choose).items():
            spread = f"{percent(min(off), '{:+.0f}')} to {percent(max(off), '{:+.0f}')}"
            middle = percent(float(np.median(np.abs(off))), "{:.0f}")
            rows.append((name, f"{law} of the two costs", len(off), f"{middle} in the median, {spread}"))
        reached = sum(bool(choose(found.steps[pair])) for pair in found.grid)
        for factor in NOISE_FACTORS:
            estimate = of_differences(list(correlations(found, choose, factor).values()), "seed")
            said = f"rank correlation {estimate.value:.2f} ({_interval(estimate.interval)})"
            rows.append((name, f"phi, {factor}", reached, said))
    return pandas.DataFrame(rows, columns=["learning rate", "law", "pairs", "how far off"])


# ------------------------------------------------------------------ claims
def amplification(found: Results, choose: Choose) -> tuple[BySeed, BySeed, int] | None:
    """Return what compression costs in steps without staleness, by seed and as a mean over ratios, and with the most
    at which all pairs get there; and that staleness.
    """
    ratios = sorted({ratio for ratio, _ in found.grid if ratio < 1})
    taken = {pair: choose(found.steps[pair]) for pair in found.grid}
    for staleness in sorted({staleness for _, staleness in found.grid if staleness}, reverse=True):
        if not all(taken[ratio, late] for ratio in (*ratios, 1.0) for late in (0, staleness)):
            continue
        alone, delayed = (
            {
                seed: float(np.mean([taken[ratio, late][seed] - dense for ratio in ratios]))
                for seed, dense in taken[1.0, late].items()
            }
            for late in (0, staleness)
        )
        return alone, delayed, staleness
    return None


def claims(folder: Path) -> list[Claim]:
    """Return what is claimed of DeCo-SGD, and what became of it."""
    return claim_rows.claims(globals(), folder)


def sooner(folder: Path, base: str, effect: float, least: bool = False) -> Iterator[Facts]:
    """Yield, for each way to choose learning rates, how many times as soon DeCo-SGD's pair gets to the target as
    another arm's, over all networks; judged where it is most, or `least`.
    """
    found = results(folder)
    for name, choose in MODES.items():
        judged = compared(found, choose, base, effect)
        network = (min if least else max)(judged, key=lambda each: judged[each].value)
        verdicts = [each.verdict for each in judged.values()]
        ratio, staleness = next(iter(arms(found, choose).values()))[base]
        yield {
            "judgement": judged[network],
            "mode": name,
            "range": _range([each.value for each in judged.values()]),
            "networks": len(judged),
            "sooner": verdicts.count("holds"),
            "later": verdicts.count("fails"),
            "pair": f"ratio {ratio:g} and staleness {staleness}",
            "interval": f"{experiments.interval_words(judged[network])}, at {_words(network)}",
            "open": _open(judged[network]),
        }


def amplified(folder: Path) -> Iterator[Facts]:
    """Yield, for each way to choose learning rates, what compression costs in steps with staleness and without."""
    found = results(folder)
    for name, choose in MODES.items():
        if (parts := amplification(found, choose)) is None:
            continue
        alone, late, staleness = parts
        growth, judged = difference(late, alone), judge("loss", alone, late, -RESOLUTION)
        factors = [(1 - ratio / 2) ** -staleness for ratio in {ratio for ratio, _ in found.grid if ratio < 1}]
        shown = "" if growth.detectable is None else f"; would have shown {growth.detectable:.0f} steps"
        yield {
            "judgement": judged,
            "bound": judged.effect,
            "mode": name,
            "staleness": staleness,
            "factors": f"{min(factors):.2f} to {max(factors):.2f}",
            "alone": experiments.mean_of(alone),
            "late": experiments.mean_of(late),
            "interval": f"difference {_interval(growth.estimate.interval, '{:+.0f}')}, 95 %, {len(alone)} seeds",
            "dense": [np.mean(list(choose(found.steps[1.0, each]).values())) for each in (0, staleness)],
            "resolution": RESOLUTION,
            "open": shown + _open(judged),
        }


def _open(judged: Judgement) -> str:
    return f"; {_seeds(judged)}" if judged.verdict == "not resolved" else ""


def compared(found: Results, choose: Choose, base: str, effect: float) -> dict[tuple[int, int], Judgement]:
    """Judge, by network, how many times as soon DeCo-SGD's pair gets to the target as another arm's."""
    return {
        network: against(found, choose, network, chosen[DECO], chosen[base], effect)
        for network, chosen in arms(found, choose).items()
        if DECO in chosen
    }


def _seeds(judged: Judgement) -> str:
    """Say how many seeds it would take, where one more is that of every pair and rate; a difference is in steps."""
    more_s = experiments.training_s(HERE, "runs.csv", "seed")
    return experiments.more_seeds(judged, more_s, unit="steps")


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _interval(ends: Any, form: str = "{:.2f}") -> str:
    return "one seed" if ends is None else " to ".join(map(form.format, ends))


def _words(network: tuple[int, int]) -> str:
    return f"{network[0]} Mbit/s, {network[1]} ms one way"


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    return {
        "answer": experiments.prose(answer(folder)),
        "claims": claims_table(claims(folder)),
        "networks": experiments.markdown_of(networks_table(folder)),
        "pairs": experiments.markdown_of(pairs_table(folder)),
        "laws": experiments.markdown_of(laws_table(folder)),
    }


def answer(folder: Path) -> str:
    """Return the answer in three lines; the claims and the table of networks have every number."""
    found = results(folder)
    published = pandas.read_csv(folder / "published.csv").value
    said = {
        name: [_range([each.value for each in compared(found, choose, base, 1.0).values()]) for base in (DSGD, STATIC)]
        for name, choose in MODES.items()
    }
    (first, (dsgd, static)), *others = said.items()
    also = "".join(f"; with one {name}, {' and '.join(ranges)} times" for name, ranges in others)
    return (
        f"With a {first} learning rate DeCo-SGD's pairs reach the loss {dsgd} times as soon as D-SGD (published: up to "
        f"{published[0]:g}) and {static} times as soon as the better of two static pairs (published: up to "
        f"{published[1]:g}){also}."
    )


# ------------------------------------------------------------------ figures
def draw_steps(folder: Path) -> Figure:
    """Draw the steps to the target against staleness, a line for each ratio."""
    found = results(folder)
    stalenesses = sorted({staleness for _, staleness in found.grid})
    figure = Figure(figsize=(9.2, 3.4), layout="constrained")
    row = figure.subplots(1, 2, sharey=True)
    for axes, (mode, choose) in zip(row, MODES.items(), strict=True):
        for colour, ratio in zip(RATIO_COLOURS, sorted({r for r, _ in found.grid}, reverse=True), strict=False):
            points = [
                (stalenesses.index(staleness), list(steps.values()))
                for staleness in stalenesses
                if (steps := choose(found.steps[ratio, staleness]))
            ]
            for x, values in points:
                axes.plot([x, x], [min(values), max(values)], color=colour, lw=1, alpha=0.7)
            axes.plot([x for x, _ in points], [np.mean(v) for _, v in points], "o-", color=colour, label=f"{ratio:g}")
        ends = [steps for late in stalenesses if (steps := choose(found.steps[1.0, late]))]
        title = f"Learning rate {mode}"
        if len(ends) > 1:
            title += f": {experiments.mean_of(ends[-1]) / experiments.mean_of(ends[0]):.1f} times the steps"
        axes.set(title=title, xlabel="staleness, steps", yscale="log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else "")
        axes.set_xticks(range(len(stalenesses)), list(map(str, stalenesses)))
    row[0].set_ylabel("steps to the target loss")
    figure.legend(
        *row[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=5,
        title="ratio: share of the values that is sent",
    )
    return figure


def draw_time(folder: Path) -> Figure:
    """Draw, for each network, how many times as soon as D-SGD each arm reaches the target."""
    found = results(folder)
    names = [name for name in COLOURS if name != DSGD]
    figure = Figure(figsize=(9.2, 6.4), layout="constrained")
    column = figure.subplots(len(MODES), 1, sharex=True, sharey=True)
    for axes, (mode, choose) in zip(column, MODES.items(), strict=True):
        networks = arms(found, choose)
        axes.axhline(1, color=style.MUTED, lw=1)
        for place, name in enumerate(names):
            shift = 0.1 * (place - len(names) / 2 + 0.5)
            points = {
                x + shift: against(found, choose, network, chosen[name], chosen[DSGD], None)
                for x, (network, chosen) in enumerate(networks.items())
                if name in chosen
            }
            for x, judged in points.items():
                if judged.interval is not None:
                    axes.plot([x, x], judged.interval, color=COLOURS[name], lw=1.1)
            marker, values = {DECO: "D", ORACLE: "_"}.get(name, "o"), [judged.value for judged in points.values()]
            axes.plot(list(points), values, marker, color=COLOURS[name], label=name)
        verdicts = [each.verdict for each in compared(found, choose, BEST_STATIC, 1.0).values()]
        sooner, later = (verdicts.count(verdict) for verdict in ("holds", "fails"))
        axes.set(
            yscale="log",
            ylabel="D-SGD's time over the arm's",
            title=f"Learning rate {mode}: DeCo-SGD is sooner than the best fixed pair on {sooner} of {len(verdicts)} "
            f"networks, later on {later}",
        )
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axes.set_xticks(range(len(networks)), [f"{rate} Mbit/s\n{delay} ms" for rate, delay in networks])
    figure.legend(*column[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure


if __name__ == "__main__":
    _, written = experiments.folders(HERE.name, "Figures, claims and the README's blocks.")
    experiments.draw_and_publish(HERE, written, {"time": draw_time, "steps": draw_steps}, blocks, claims)

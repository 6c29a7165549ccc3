"""Draws the figures and generates the tables of deco_sgd: `python experiments/deco_sgd/figures.py`.

This reads runs.csv and choices.csv from the output folder, which train.py writes, and published.csv.
"""

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
from testbed.report import experiments, plots, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent, span

HERE = Path(__file__).resolve().parent
VALUES, COMPUTE_S, FIXED_RATE, RESOLUTION = 10_000_000, 0.1, 0.1, 4
"""The model whose steps are timed, as in train.py; the learning rate common to all pairs; and the steps between two
evaluations of the loss."""
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
"""Selects from a pair's steps, by learning rate and seed, each seed's; empty if one does not reach the target."""


class Results(NamedTuple):
    """Measurements of train.py."""

    steps: dict[Pair, Any]
    """Steps to the target: a row per learning rate, a column per seed, NaN where it was not reached."""
    bits: dict[float, float]
    """Bits of a message per parameter, by ratio."""
    choices: dict[tuple[int, int], Pair]
    """DeCo-SGD's pair, by Mbit/s and ms."""

    @property
    def grid(self) -> list[Pair]:
        """The pairs of the full grid of ratios and staleness, without chosen ones."""
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
    """Return each seed's steps at the learning rate that is best for the other seeds; empty if a seed does not reach
    the target with it, or no learning rate lets all others reach it.
    """
    found, values = {}, steps.to_numpy(float)
    for column, seed in enumerate(steps.columns):
        mean = np.delete(values, column, axis=1).mean(axis=1)
        if np.isnan(mean).all() or math.isnan(value := values[np.nanargmin(mean), column]):
            return {}
        found[int(seed)] = float(value)
    return found


def fixed(steps: Any) -> BySeed:
    """Return each seed's steps with the fixed learning rate; empty if one does not reach the target."""
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
    """Return, by network, the pair of each arm. The best ones are chosen in hindsight, by the seeds' mean time."""
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
    """Judge how many times as soon one pair reaches the target as another."""
    return judge("time_to_loss", seconds(found, choose, network, ours), seconds(found, choose, network, base), effect)


# ------------------------------------------------------------------ tables
@experiments.table
def pairs_table(folder: Path) -> Any:
    """Return the mean steps to the target by ratio and staleness, with tuned learning rates and with the fixed one."""
    found = results(folder)
    for ratio in sorted({ratio for ratio, _ in found.grid}, reverse=True):
        row: dict[str, object] = {"ratio": f"{ratio:g}", "bits": f"{found.bits[ratio]:.3g}"}
        for name, choose in (("tuned", tuned), ("fixed", fixed)):
            for staleness in sorted({staleness for _, staleness in found.grid}):
                steps = choose(found.steps[ratio, staleness])
                row[f"{name}, {staleness}"] = f"{experiments.mean_of(steps):.0f}" if steps else "never"
        yield row


@experiments.table
def networks_table(folder: Path) -> Any:
    """Return, for each network, the speed-up of each arm over D-SGD in time to the target, and its pair."""
    found = results(folder)
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
            yield row


def predictions(found: Results, choose: Choose) -> dict[str, list[float]]:
    """Return the relative deviation of steps from each law's prediction from ratio and staleness separately, by law."""
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
    """Return, by seed, the rank correlation of a noise factor with the steps of pairs with which all seeds reach the
    target.
    """
    taken = {pair: steps for pair in found.grid if (steps := choose(found.steps[pair]))}
    noise = [NOISE_FACTORS[factor](*pair) for pair in taken]
    return {
        seed: float(spearmanr(noise, [steps[seed] for steps in taken.values()]).statistic)
        for seed in next(iter(taken.values()))
    }


def laws_table(folder: Path) -> Any:
    """Return how well each law predicts the steps of pairs, with tuned learning rates and the fixed one."""
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
            said = f"rank correlation {experiments.with_ends(estimate, '{:.2f}', 'one seed')}"
            rows.append((name, f"phi, {factor}", reached, said))
    return pandas.DataFrame(rows, columns=["learning rate", "law", "pairs", "how far off"])


# ------------------------------------------------------------------ claims
def amplification(found: Results, choose: Choose) -> tuple[BySeed, BySeed, int] | None:
    """Return the cost of compression in steps without staleness, by seed and as a mean over ratios, and with the
    largest staleness with which all pairs reach the target; and that staleness.
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


def sooner(folder: Path, base: str, effect: float, least: bool = False) -> Iterator[Facts]:
    """Yield, for each way to choose learning rates, how many times as soon DeCo-SGD's pair reaches the target as
    another arm's, over all networks; judged on the network with the largest gain, or with the `least`.
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
            "range": span((each.value for each in judged.values()), "{:.2f}".format),
            "networks": len(judged),
            "sooner": verdicts.count("holds"),
            "later": verdicts.count("fails"),
            "pair": f"ratio {ratio:g} and staleness {staleness}",
            "interval": f"{experiments.interval_words(judged[network])}, at {_words(network)}",
            "open": _open(judged[network]),
        }


def amplified(folder: Path) -> Iterator[Facts]:
    """Yield, for each way to choose learning rates, the cost of compression in steps with and without staleness."""
    found = results(folder)
    for name, choose in MODES.items():
        if (parts := amplification(found, choose)) is None:
            continue
        alone, late, staleness = parts
        growth, judged = difference(late, alone), judge("loss", alone, late, -RESOLUTION)
        factors = [(1 - ratio / 2) ** -staleness for ratio in {ratio for ratio, _ in found.grid if ratio < 1}]
        shown = "" if growth.detectable is None else f"; can detect {growth.detectable:.0f} steps"
        yield {
            "judgement": judged,
            "bound": judged.effect,
            "mode": name,
            "staleness": staleness,
            "factors": f"{min(factors):.2f} to {max(factors):.2f}",
            "alone": experiments.mean_of(alone),
            "late": experiments.mean_of(late),
            "interval": f"difference {experiments.ends_words(growth.estimate, '{:+.0f}')}, 95 %, {len(alone)} seeds",
            "dense": [np.mean(list(choose(found.steps[1.0, each]).values())) for each in (0, staleness)],
            "resolution": RESOLUTION,
            "open": shown + _open(judged),
        }


def _open(judged: Judgement) -> str:
    return f"; {_seeds(judged)}" if judged.verdict == "not resolved" else ""


def compared(found: Results, choose: Choose, base: str, effect: float) -> dict[tuple[int, int], Judgement]:
    """Judge, by network, how many times as soon DeCo-SGD's pair reaches the target as another arm's."""
    return {
        network: against(found, choose, network, chosen[DECO], chosen[base], effect)
        for network, chosen in arms(found, choose).items()
        if DECO in chosen
    }


def _seeds(judged: Judgement) -> str:
    """Describe the seeds needed; one more seed means one of every pair and rate; a difference is in steps."""
    more_s = experiments.training_s(HERE, "runs.csv", "seed")
    return experiments.more_seeds(judged, more_s, unit="steps")


def _words(network: tuple[int, int]) -> str:
    return f"{network[0]} Mbit/s, {network[1]} ms one way"


def answer(folder: Path) -> str:
    """Return the answer in three lines; the claims and the table of networks have every number."""
    found = results(folder)
    published = pandas.read_csv(folder / "published.csv").value
    said = {
        name: [
            span((each.value for each in compared(found, choose, base, 1.0).values()), "{:.2f}".format)
            for base in (DSGD, STATIC)
        ]
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
    figure, (row,) = plots.panels(1, 2, (9.2, 3.4), sharey=True)
    for axes, (mode, choose) in zip(row, MODES.items(), strict=True):
        for colour, ratio in zip(RATIO_COLOURS, sorted({r for r, _ in found.grid}, reverse=True), strict=False):
            points = [
                (place, plots.ErrorBar(experiments.mean_of(steps), (min(steps.values()), max(steps.values()))))
                for place, staleness in enumerate(stalenesses)
                if (steps := choose(found.steps[ratio, staleness]))
            ]
            plots.estimates(axes, points, colour, label=f"{ratio:g}", line="-")
        ends = [steps for late in stalenesses if (steps := choose(found.steps[1.0, late]))]
        title = f"Learning rate {mode}"
        if len(ends) > 1:
            title += f": {experiments.mean_of(ends[-1]) / experiments.mean_of(ends[0]):.1f} times the steps"
        axes.set(title=title, xlabel="staleness, steps", yscale="log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "25" else "")
        axes.set_xticks(range(len(stalenesses)), list(map(str, stalenesses)))
    row[0].set_ylabel("steps to the target loss")
    title = "ratio: share of the values sent"
    plots.finish(figure, legend=row[0], at="upper center", columns=5, title=title)
    return figure


def draw_time(folder: Path) -> Figure:
    """Draw, for each network, how many times as soon as D-SGD each arm reaches the target."""
    found = results(folder)
    names = [name for name in COLOURS if name != DSGD]
    figure, column = plots.panels(len(MODES), 1, (9.2, 6.4), sharex=True, sharey=True)
    for (axes,), (mode, choose) in zip(column, MODES.items(), strict=True):
        networks = arms(found, choose)
        axes.axhline(1, color=style.MUTED, lw=1)
        for place, name in enumerate(names):
            shift = 0.1 * (place - len(names) / 2 + 0.5)
            points = [
                (x + shift, against(found, choose, network, chosen[name], chosen[DSGD], None))
                for x, (network, chosen) in enumerate(networks.items())
                if name in chosen
            ]
            plots.estimates(axes, points, COLOURS[name], {DECO: "D", ORACLE: "_"}.get(name, "o"), label=name)
        verdicts = [each.verdict for each in compared(found, choose, BEST_STATIC, 1.0).values()]
        sooner, later = (verdicts.count(verdict) for verdict in ("holds", "fails"))
        title = f"Rate {mode}, D-SGD in {experiments.mean_of(choose(found.steps[1.0, 0])):.0f} steps: DeCo-SGD is"
        title += f" sooner than the best fixed pair on {sooner}, later on {later} of {len(verdicts)} networks"
        axes.set(yscale="log", ylabel="D-SGD's time over the arm's", title=title)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axes.set_xticks(range(len(networks)), [f"{rate} Mbit/s\n{delay} ms" for rate, delay in networks])
    plots.finish(
        figure,
        "One rate of 0.1 for all handicaps D-SGD; tuned, DeCo-SGD is later than a fixed pair",
        column[0],
        "lower center",
    )
    return figure


BLOCKS = {"answer": answer, "networks": networks_table, "pairs": pairs_table, "laws": laws_table}
FIGURES = {"time": draw_time, "steps": draw_steps}

if __name__ == "__main__":
    publishing.run(globals())

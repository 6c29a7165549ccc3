"""Draw the figures of deco_varying and make its tables: `python experiments/deco_varying/figures.py`.

This reads timeline.csv, runs.csv and played.csv from the output folder, which train.py and play.py write.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from testbed.metrics.statistics import of_differences
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, style
from testbed.report.claims import Claim, claims_table

HERE = Path(__file__).resolve().parent
COMMAND = "python experiments/deco_varying/train.py"
SOURCE = "DeCo-SGD, arXiv 2507.17346"
DECO, KNOWS, ORACLE = "DeCo-SGD", "DeCo-SGD, told the link", "oracle"
CHOOSERS = (DECO, KNOWS, ORACLE)
COLOURS = {DECO: "#d55e00", KNOWS: "#e69f00", ORACLE: style.INK}
STATIC_COLOUR = "#0072b2"
NEAR, FOLLOWS = 0.02, 0.5
"""How far the model's end of a step may be from the played one, as a share; the rank correlation that is following."""

BySeed = Mapping[int, float]


class Results(NamedTuple):
    """What train.py and play.py measured."""

    timeline: dict[tuple[str, str], Any]
    """By network and arm, a row for each step."""
    steps: dict[tuple[str, str], BySeed]
    """To the target, likewise; nothing where a seed does not get there."""
    rates: dict[tuple[str, str], float]
    """Learning rates."""
    played: Any

    @property
    def networks(self) -> list[str]:
        return list(dict.fromkeys(network for network, _ in self.timeline))

    def arms(self, network: str) -> list[str]:
        """Return the arms that were trained to the target, those that choose first."""
        known = [arm for name, arm in self.timeline if name == network and self.steps[network, arm]]
        return [arm for arm in CHOOSERS if arm in known] + [arm for arm in known if arm not in CHOOSERS]

    def seconds(self, network: str, arm: str) -> BySeed:
        """Return each seed's seconds to the target."""
        ends = np.concatenate([[0.0], self.timeline[network, arm].end_s])
        return {
            seed: float(np.interp(steps, range(len(ends)), ends)) for seed, steps in self.steps[network, arm].items()
        }

    def best_static(self, network: str) -> str:
        """Return the static pair that is there first, in hindsight."""
        static = [arm for arm in self.arms(network) if arm not in CHOOSERS]
        return min(static, key=lambda arm: experiments.mean_of(self.seconds(network, arm)))


@functools.lru_cache(maxsize=2)
def results(folder: Path) -> Results:
    """Read the CSVs."""
    lines, runs, played = (pandas.read_csv(folder / f"{name}.csv") for name in ("timeline", "runs", "played"))
    timeline = {
        (str(network), str(arm)): part for (network, arm), part in lines.groupby(["network", "arm"], sort=False)
    }
    steps, rates = {}, {}
    for network, arm in timeline:
        part = runs[(runs.arm == arm) & runs.chosen & (runs.network.isna() | (runs.network == network))]
        whole = len(part) and not part.steps.isna().any()
        steps[network, arm] = {int(row.seed): float(row.steps) for row in part.itertuples()} if whole else {}
        rates[network, arm] = float(part.learning_rate.iloc[0])
    return Results(timeline, steps, rates, played)


def against(found: Results, network: str, ours: str, base: str, effect: float | None = None) -> Judgement:
    """Judge how many times as soon one arm gets to the target as another."""
    return judge("time_to_loss", found.seconds(network, ours), found.seconds(network, base), effect)


def following(found: Results, network: str, arm: str) -> float:
    """Return the rank correlation of an arm's ratios with the link's rate, over steps of the same moments."""
    part = found.timeline[network, arm]
    return float(spearmanr(part.ratio, part.rate_mbps).statistic)


# ------------------------------------------------------------------ tables
def arms_table(folder: Path) -> Any:
    """Return how each arm does over each link."""
    found, rows = results(folder), []
    for network in found.networks:
        for arm in [arm for name, arm in found.timeline if name == network]:
            part, steps = found.timeline[network, arm], found.steps[network, arm]
            spans = np.diff(np.concatenate([[0.0], part.end_s]))
            row: dict[str, object] = {
                "link": network,
                "arm": arm,
                "ratios": _span(part.ratio, "{:.2g}"),
                "staleness": _span(part.staleness, "{:.0f}"),
                "mean step": f"{spans.mean():.3f} s",
                "learning rate": f"{found.rates[network, arm]:g}",
                "steps to the target": experiments.mean_words(steps, "{:.0f}") if steps else "not all seeds",
                "seconds to it": experiments.mean_words(found.seconds(network, arm), "{:.0f}") if steps else "",
            }
            if steps and arm != DECO and found.steps[network, DECO]:
                judged = against(found, network, DECO, arm)
                row["DeCo-SGD is there"] = f"{judged.value:.2f} times as soon ({judged.interval_words})"
            rows.append(row)
    return pandas.DataFrame(rows).fillna("")


def check_table(folder: Path) -> Any:
    """Return how far the model's ends of steps are from those that were played."""
    found, rows = results(folder), []
    for (network, arm), part in found.played.groupby(["network", "arm"], sort=False):
        off = apart(found, str(network), str(arm))
        rows.append(
            {
                "link": network,
                "arm": arm,
                "steps": len(part) - 1,
                "seconds": f"{part.end_s.iloc[-2]:.1f}",
                "model against played, at the end": _percent(off[-1]),
                "at worst, of the time so far": _percent(max(off, key=abs)),
            }
        )
    return pandas.DataFrame(rows)


def apart(found: Results, network: str, arm: str) -> list[float]:
    """Return, by step, how far the model's end is from the played one, as a share of the time so far. The last played
    step waits for what the model leaves under way, so it does not count.
    """
    part = found.played[(found.played.network == network) & (found.played.arm == arm)].end_s.to_numpy()[:-1]
    ends = found.timeline[network, arm].end_s.to_numpy()[: len(part)]
    return list(ends / part - 1)


# ------------------------------------------------------------------ claims
def claims(folder: Path) -> list[Claim]:
    """Return what we asked of DeCo-SGD, and what became of it."""
    found, rows = results(folder), []
    for network in found.networks:
        value = following(found, network, DECO)
        told = following(found, network, KNOWS)
        rows.append(
            Claim(
                claim=f"DeCo-SGD's ratio follows the rate of {network}: rank correlation of at least {FOLLOWS:g}",
                source=f"ours, after {SOURCE}",
                ours=f"{value:.2f}",
                interval="exact",
                verdict="holds" if value >= FOLLOWS else "fails",
                why=f"over {len(found.timeline[network, DECO])} steps of the same moments; {told:.2f} where it is told "
                "the link's rate when it chooses, since what it chooses holds three or more steps later",
                command=COMMAND,
            )
        )
        for ours, base, claim in (
            (ORACLE, DECO, f"Over {network} DeCo-SGD is not sooner than the oracle"),
            (DECO, found.best_static(network), f"Over {network} DeCo-SGD is sooner than every static pair"),
            (DECO, KNOWS, f"Over {network} DeCo-SGD loses nothing for having to measure the link"),
        ):
            if not (found.steps[network, ours] and found.steps[network, base]):
                continue
            judged = against(found, network, ours, base, 1.0)
            rows.append(
                Claim(
                    claim=claim,
                    source=f"ours, after {SOURCE}",
                    ours=f"{ours} {judged.value:.2f} times as soon as {base}",
                    interval=f"{judged.interval_words}, 95 %, {judged.n} seeds",
                    verdict=judged.verdict or "not resolved",
                    why=_why(judged),
                    command=COMMAND,
                )
            )
    off = [(apart(found, str(network), str(arm))[-1], network, arm) for network, arm in _played(found)]
    worst = max(off, key=lambda each: abs(each[0]))
    rows.append(
        Claim(
            claim=f"The event model's time of the steps that were played is within {_percent(NEAR)} of the guest's",
            source="ours",
            ours=f"{_percent(worst[0])} at most, of {len(off)} plays",
            interval="exact",
            verdict="holds" if abs(worst[0]) <= NEAR else "fails",
            why=f"the worst: {worst[2]} over {worst[1]}",
            command="python experiments/deco_varying/play.py",
        )
    )
    return rows


def seed_s() -> float:
    """Return how long one more seed of two arms takes."""
    return 2 * experiments.training_s(HERE, "runs.csv")


def _why(judged: Judgement) -> str:
    said = "times to a loss of 2.5 nats, each arm at a learning rate of its own"
    return experiments.open_words(said, judged, seed_s())


def _played(found: Results) -> list[tuple[str, str]]:
    return list(found.played.groupby(["network", "arm"], sort=False).groups)


# ------------------------------------------------------------------ the README
def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    return {
        "answer": experiments.prose(answer(folder)),
        "claims": claims_table(claims(folder)),
        "arms": experiments.markdown_of(arms_table(folder)),
        "check": experiments.markdown_of(check_table(folder)),
    }


def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    found, said = results(folder), []
    for network in found.networks:
        static = [arm for arm in found.arms(network) if arm not in CHOOSERS]
        if not found.steps[network, DECO] or not static:
            continue
        best = found.best_static(network)
        judged, oracle = (against(found, network, DECO, base) for base in (best, ORACLE))
        said.append(
            f"over {network} {judged.value:.2f} times ({judged.interval_words}) as soon as the best static pair, "
            f"{best.removeprefix('static ')}, and {oracle.value:.2f} times ({oracle.interval_words}) as soon as the "
            "oracle"
        )
    return f"DeCo-SGD reaches the loss {'; '.join(said)}."


def _span(values: Any, form: str) -> str:
    low, high = form.format(values.min()), form.format(values.max())
    return low if low == high else f"{low} to {high}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# ------------------------------------------------------------------ figures
def draw_choices(folder: Path) -> Figure:
    """Draw the link's rate, what DeCo-SGD takes it for, and the ratios that are chosen, over time."""
    found = results(folder)
    figure = Figure(figsize=(9.2, 4.4), layout="constrained")
    grid = figure.subplots(2, len(found.networks), sharex="col", squeeze=False)
    for column, network in enumerate(found.networks):
        rate, ratio = grid[0][column], grid[1][column]
        part = found.timeline[network, DECO]
        rate.plot(part.end_s, part.rate_mbps, color=style.MUTED, lw=1.2, label="the link")
        known = part[part.known_mbps > 0]
        rate.plot(known.end_s, known.known_mbps, color=COLOURS[DECO], lw=1.2, label="what DeCo-SGD measured")
        rate.set(ylim=(0, None), title=f"{network}: rank correlation {following(found, network, DECO):.2f}")
        for arm in CHOOSERS:
            each = found.timeline[network, arm]
            ratio.step(each.end_s, each.ratio, where="pre", color=COLOURS[arm], lw=1.2, label=arm)
        ratio.set(yscale="log", xlabel="seconds")
    grid[0][0].set_ylabel("Mbit/s")
    grid[1][0].set_ylabel("ratio")
    shown = [axes.get_legend_handles_labels() for axes in (grid[0][0], grid[1][0])]
    figure.legend(
        *([*first, *second] for first, second in zip(*shown, strict=True)), loc="outside upper center", ncols=5
    )
    return figure


def draw_time(folder: Path) -> Figure:
    """Draw the seconds to the target by arm, with intervals over seeds."""
    found = results(folder)
    figure = Figure(figsize=(9.2, 3.2), layout="constrained")
    row = figure.subplots(1, len(found.networks), squeeze=False)[0]
    for axes, network in zip(row, found.networks, strict=True):
        names = sorted(found.arms(network), key=lambda arm: -experiments.mean_of(found.seconds(network, arm)))
        for place, arm in enumerate(names):
            estimate = of_differences(list(found.seconds(network, arm).values()), "seed")
            colour = COLOURS.get(arm, STATIC_COLOUR)
            axes.plot(estimate.value, place, "o", color=colour)
            if estimate.interval is not None:
                axes.plot(estimate.interval, [place, place], color=colour)
        axes.set_yticks(range(len(names)), names)
        first = names[-1]
        axes.set(xlim=(0, None), xlabel="seconds to the target loss", title=f"{network}: {first} is first")
    return figure


def main() -> int:
    """Write the figures, claims.csv and the README's blocks."""
    _, output = experiments.folders(HERE.name, "Figures, claims and the README's blocks.")
    experiments.draw_and_publish(HERE, output, {"choices": draw_choices, "time": draw_time}, blocks, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())

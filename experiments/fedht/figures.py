"""Draw the figure of fedht and make its tables: `python experiments/fedht/figures.py`.

This reads runs.csv and rounds.csv from the output folder, which train.py writes, and published.csv.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure

from testbed.metrics import statistics
from testbed.metrics.statistics import IntervalEstimate
from testbed.metrics.verdicts import Judgement, judge, judge_ratio
from testbed.report import experiments, style
from testbed.report.claims import Claim, Verdict, claims_table

HERE = Path(__file__).resolve().parent
COMMAND = "python experiments/fedht/train.py"
TOP_K, FIXED, FOLLOWING = "top-k", "fixed threshold", "gamma-FedHT"
COLOURS = {TOP_K: "#767d86", FIXED: "#d55e00", FOLLOWING: "#0072b2"}
_TICKS_MB = (0.2, 0.5, 1, 2, 5, 10)
_TICKS_PERCENT = (0.3, 1, 3, 10)
PUBLISHED_GAIN = 7.42
"""Percentage points, at most: published.csv."""
FLAT = 1.5
"""How many times as large or small a share may become to count as the same."""
SOURCE = "gamma-FedHT, INFOCOM 2025 (arXiv 2505.12479, abstract)"


def results(folder: Path) -> Any:
    """Return the runs that count."""
    runs = pandas.read_csv(folder / "runs.csv")
    return runs[runs.use == "result"]


def change(runs: Any, method: str, alpha: float) -> IntervalEstimate:
    """Return how many times as many values are kept late as early, of the middle ratio, over seeds."""
    part = runs[(runs.method == method) & (runs.alpha == alpha)]
    ratios = sorted(set(part.first_ratio))
    part = part[part.first_ratio == ratios[len(ratios) // 2]]
    return statistics.of_ratios(list(part.late / part.early), "seed")


def at_equal_traffic(runs: Any, method: str, alpha: float) -> Judgement | None:
    """Judge, in percentage points, that a method is at least as accurate as top-k at equal traffic: top-k's accuracy is
    taken between its ratios, linear in the logarithm of the bytes, at each of the method's runs that lies between them;
    a seed's number is the mean over these. None where no seed has one.
    """
    ours, base = dict[int, float](), dict[int, float]()
    for seed, part in runs[runs.alpha == alpha].groupby("seed"):
        line = part[part.method == TOP_K].sort_values("payload_mb")
        inside = part[(part.method == method) & part.payload_mb.between(line.payload_mb.min(), line.payload_mb.max())]
        if inside.empty or inside.accuracy.isna().any():
            continue
        other = np.interp(np.log(inside.payload_mb), np.log(line.payload_mb), line.accuracy)
        ours[int(str(seed))], base[int(str(seed))] = float(inside.accuracy.mean()), float(np.mean(other))
    # The sign is turned: a claim of `judge` is that a number is at most another.
    return (
        judge(
            "loss",
            {seed: -100 * value for seed, value in ours.items()},
            {seed: -100 * value for seed, value in base.items()},
            0.0,
        )
        if ours
        else None
    )


def gain_words(found: Judgement) -> tuple[str, str]:
    """Return the gain in accuracy, in percentage points, and its interval."""
    gain = f"{-found.value:+.2f} points"
    if found.interval is None:
        return gain, found.interval_words
    low, high = sorted(-end for end in found.interval)
    return gain, f"{low:+.2f} to {high:+.2f}, 95 %, {found.n} seeds"


def seed_s(methods: int) -> float:
    """Return how long one more seed of all ratios of some methods takes, at one Dirichlet concentration."""
    ratios = results(HERE).groupby("method").first_ratio.nunique().max()
    return methods * ratios * experiments.training_s(HERE, "runs.csv")


def change_words(found: IntervalEstimate) -> tuple[str, str]:
    """Return how many times as many, and the interval."""
    interval = (
        "one seed"
        if found.interval is None
        else f"{found.interval.low:.2f} to {found.interval.high:.2f}, 95 %, {found.n} seeds"
    )
    return f"{found.value:.2f} times as many", interval


def table(folder: Path) -> Any:
    """Return every arm, means over seeds."""
    runs = results(folder)
    rows = [
        {
            "alpha": f"{alpha:g}",
            "method": method,
            "first ratio": f"{ratio:g}",
            "learning rate": f"{part.learning_rate.iloc[0]:g}",
            "kept, early": f"{part.early.mean():.4f}",
            "kept, late": f"{part.late.mean():.4f}",
            "MB": part.payload_mb.mean(),
            "loss": f"{part.loss.mean():.3f}",
            "accuracy": f"{part.accuracy.mean():.3f}",
            "lowest, highest": f"{part.accuracy.min():.3f}, {part.accuracy.max():.3f}",
        }
        for (alpha, method, ratio), part in runs.groupby(["alpha", "method", "first_ratio"])
    ]
    return pandas.DataFrame(rows)


def claims(folder: Path) -> list[Claim]:
    """Return what is claimed of thresholds that follow the stepsize, and what became of it."""
    runs, rows = results(folder), []
    for alpha in sorted(set(runs.alpha)):
        skewed = f"Dirichlet {alpha:g}"
        for method, says in (
            (FIXED, "With a fixed threshold the share of kept values falls while the stepsize decays"),
            (
                FOLLOWING,
                f"With gamma-FedHT the share of kept values stays within {FLAT:g} times while the stepsize decays",
            ),
        ):
            found = change(runs, method, alpha)
            ours, interval = change_words(found)
            verdict: Verdict = "not resolved"
            near = judge_ratio(found, 1.0 if method == FIXED else FLAT)
            if found.interval is not None:
                low, high = found.interval
                if method == FIXED:
                    verdict = "holds" if high < 1 else "fails" if low > 1 else "not resolved"
                elif low >= 1 / FLAT and high <= FLAT:
                    verdict = "holds"
                elif high < 1 / FLAT or low > FLAT:
                    verdict = "fails"
            rows.append(
                Claim(
                    claim=f"{says} ({skewed})",
                    source=SOURCE if method == FIXED else "ours, after gamma-FedHT",
                    ours=ours,
                    interval=interval,
                    verdict=verdict,
                    why="the last five rounds over the sixth to the tenth, geometric mean"
                    + (f"; {experiments.more_seeds(near, seed_s(1))}" if verdict == "not resolved" else ""),
                    command=COMMAND,
                )
            )
        for method in (FOLLOWING, FIXED):
            if (gain := at_equal_traffic(runs, method, alpha)) is None:
                continue
            ours, interval = gain_words(gain)
            rows.append(
                Claim(
                    claim=f"At equal traffic {method} is at least as accurate as top-k ({skewed})",
                    source=SOURCE if method == FOLLOWING else "ours",
                    published="+7.42 points at most" if method == FOLLOWING else "",
                    ours=ours,
                    interval=interval,
                    verdict=gain.verdict or "not resolved",
                    why=experiments.open_words(
                        "top-k's accuracy between its ratios, at the bytes of each run between them",
                        gain,
                        seed_s(2),
                        PUBLISHED_GAIN,
                        "points",
                    ),
                    command=COMMAND,
                )
            )
    return rows


def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    runs = results(folder)
    alpha = min(runs.alpha)
    fixed, following = (change(runs, method, alpha) for method in (FIXED, FOLLOWING))
    last = pandas.read_csv(folder / "rounds.csv")
    fall = last.stepsize.max() / last.stepsize.min()
    gains = [
        f"{' ('.join(gain_words(found))}) at Dirichlet {alpha:g}"
        for alpha in sorted(set(runs.alpha))
        if (found := at_equal_traffic(runs, FOLLOWING, alpha)) is not None
    ]
    return (
        f"While the stepsize falls to a {fall:.3g}th, a fixed threshold keeps {fixed.value:.2f} times as many values "
        f"late as early, one that follows the stepsize {following.value:.2f} times. Against top-k at equal traffic "
        f"gamma-FedHT's accuracy differs by {' and '.join(gains) if gains else 'nothing that was measured'}."
    )


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    return {
        "answer": experiments.prose(answer(folder)),
        "arms": experiments.markdown_of(table(folder)),
        "claims": claims_table(claims(folder)),
    }


def draw(folder: Path) -> Figure:
    """Draw the share of kept values by round, and accuracy against traffic for each skew of the labels."""
    runs, seen = results(folder), pandas.read_csv(folder / "rounds.csv")
    alphas = sorted(set(runs.alpha))
    figure = Figure(figsize=(10.5, 3.7), layout="constrained")
    row = figure.subplots(1, 1 + len(alphas), squeeze=False)[0]
    skewed = seen[seen.alpha == min(alphas)]
    for method, part in skewed.groupby("method", sort=False):
        mean = part.groupby("round").kept.mean()
        row[0].plot(mean.index + 1, 100 * mean, color=COLOURS[str(method)], label=str(method))
    row[0].set(
        title=f"kept values by round, Dirichlet {min(alphas):g}", xlabel="round", ylabel="kept values, %", yscale="log"
    )
    row[0].set_yticks(_TICKS_PERCENT, [f"{tick:g}" for tick in _TICKS_PERCENT])
    row[0].minorticks_off()
    for axes, alpha in zip(row[1:], alphas, strict=True):
        for method, part in runs[runs.alpha == alpha].groupby("method", sort=False):
            arms = part.groupby("first_ratio")[["payload_mb", "accuracy"]]
            mean, low, high = arms.mean(), arms.min(), arms.max()
            axes.plot(mean.payload_mb, 100 * mean.accuracy, "o-", color=COLOURS[str(method)])
            axes.vlines(
                mean.payload_mb, 100 * low.accuracy, 100 * high.accuracy, color=COLOURS[str(method)], lw=1, alpha=0.6
            )
        axes.set(title=f"accuracy against traffic, Dirichlet {alpha:g}", xlabel="sent by all clients, MB", xscale="log")
        axes.set_xticks(_TICKS_MB, [f"{tick:g}" for tick in _TICKS_MB])
        axes.minorticks_off()
        axes.set_xlim(0.8 * runs.payload_mb.min(), 1.25 * runs.payload_mb.max())
        axes.set_ylim(100 * runs.accuracy.min() - 2, 100 * runs.accuracy.max() + 2)
    row[1].set_ylabel("test accuracy, %")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    style.state(figure, _finding(runs))
    return figure


def _finding(runs: Any) -> str:
    fixed, following = (change(runs, method, min(runs.alpha)) for method in (FIXED, FOLLOWING))
    return (
        f"From early to late rounds the share that a fixed threshold keeps goes to {fixed.value:.2f} times, "
        f"gamma-FedHT's to {following.value:.2f}"
    )


def main() -> int:
    """Write the figure, claims.csv and the README's blocks."""
    _, output = experiments.folders(HERE.name, "Figure, claims and the README's blocks.")
    experiments.draw_and_publish(HERE, output, {"thresholds": draw}, blocks, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())

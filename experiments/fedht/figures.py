"""Draws the figure and generates the tables of fedht: `python experiments/fedht/figures.py`.

This reads runs.csv, rounds.csv and times.csv from the output folder, which train.py and play.py write, and
published.csv.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure

from testbed.metrics import statistics
from testbed.metrics.statistics import IntervalEstimate
from testbed.metrics.verdicts import Judgement, judge, judge_ratio
from testbed.report import experiments, plots, publishing
from testbed.report.claim_rows import Facts
from testbed.report.numbers import span

HERE = Path(__file__).resolve().parent
TOP_K, FIXED, FOLLOWING = "top-k", "fixed threshold", "gamma-FedHT"
NETWORKS = {"equal": "equal uplinks", "FedLuck's": "FedLuck's uplinks"}
COLOURS = {TOP_K: "#767d86", FIXED: "#d55e00", FOLLOWING: "#0072b2"}


def results(folder: Path) -> Any:
    """Return the runs that count."""
    runs = pandas.read_csv(folder / "runs.csv")
    return runs[runs.use == "result"]


def change(runs: Any, method: str, alpha: float) -> IntervalEstimate:
    """Return the ratio of values kept late and early, at the middle ratio, over seeds."""
    part = runs[(runs.method == method) & (runs.alpha == alpha)]
    ratios = sorted(set(part.first_ratio))
    part = part[part.first_ratio == ratios[len(ratios) // 2]]
    return statistics.of_ratios(list(part.late / part.early), "seed")


def at_equal_traffic(runs: Any, method: str, alpha: float, cost: str = "payload_mb") -> Judgement | None:
    """Judge, in percentage points, whether a method loses no accuracy to top-k at equal traffic, or time: top-k's
    accuracy is interpolated between its ratios, linearly in the logarithm of the cost, at each of the method's runs in
    between; a seed's number is the mean over these. None if no seed has one.
    """
    ours, base = dict[str, float](), dict[str, float]()
    for seed, part in runs[runs.alpha == alpha].groupby("seed"):
        line = part[part.method == TOP_K].sort_values(cost)
        inside = part[(part.method == method) & part[cost].between(line[cost].min(), line[cost].max())]
        if inside.empty or inside.accuracy.isna().any():
            continue
        other = np.interp(np.log(inside[cost]), np.log(line[cost]), line.accuracy)
        ours[str(seed)], base[str(seed)] = -100 * float(inside.accuracy.mean()), -100 * float(np.mean(other))
    return judge("loss", ours, base, 0.0) if ours else None


def gain_words(found: Judgement) -> tuple[str, str]:
    """Return the gain in accuracy, in percentage points, and its interval."""
    gain = f"{-found.value:+.2f} points"
    if found.interval is None:
        return gain, found.interval_words
    ends = span((-end for end in found.interval), "{:+.2f}".format)
    return gain, f"{ends}, 95 %, {found.n} seeds"


def seed_s(methods: int) -> float:
    """Return the time of one more seed of all ratios of some methods, at one Dirichlet concentration."""
    ratios = results(HERE).groupby("method").first_ratio.nunique().max()
    return float(methods * ratios * experiments.training_s(HERE, "runs.csv"))


def table(folder: Path) -> Any:
    """Return every arm, means over seeds."""
    arms = results(folder).groupby(["alpha", "method", "first_ratio"])
    mean = arms.mean(numeric_only=True).reset_index()
    ends = arms.accuracy.agg(["min", "max"]).reset_index()
    return pandas.DataFrame(
        {
            "alpha": mean.alpha.map("{:g}".format),
            "method": mean.method,
            "first ratio": mean.first_ratio.map("{:g}".format),
            "learning rate": mean.learning_rate.map("{:g}".format),
            "kept, early": mean.early.map("{:.4f}".format),
            "kept, late": mean.late.map("{:.4f}".format),
            "MB": mean.payload_mb,
            "loss": mean.loss.map("{:.3f}".format),
            "accuracy": mean.accuracy.map("{:.3f}".format),
            "lowest, highest": ends["min"].map("{:.3f}, ".format) + ends["max"].map("{:.3f}".format),
        }
    )


def kept(folder: Path, method: str, flat: float = 1.0) -> Iterator[Facts]:
    """Yield, for each skew of the labels, the ratio of values kept late and early, and whether it stays within `flat`
    times.
    """
    runs = results(folder)
    for alpha in sorted(set(runs.alpha)):
        found = change(runs, method, alpha)
        low, high = found.interval or (None, None)
        stays = None
        if low is not None and high is not None:
            inside, outside = low >= 1 / flat and high <= flat, high < 1 / flat or low > flat
            stays = inside if inside or outside else None
        more = f"; {experiments.more_seeds(judge_ratio(found, flat), seed_s(1))}" if stays is None else ""
        ends = {"low": low, "high": high, "interval": experiments.sure_words(found)}
        yield {"alpha": alpha, "value": found.value, **ends, "stays": stays, "unresolved": more}


def lost(folder: Path, method: str, size: float | None = None) -> Iterator[Facts]:
    """Yield, for each skew of the labels, the points of accuracy that a method loses to top-k at equal traffic; `size`:
    the published gain.
    """
    runs = results(folder)
    top_k = 100 * runs[runs.method == TOP_K].groupby(["alpha", "first_ratio"]).accuracy.mean()
    for alpha in sorted(set(runs.alpha)):
        if (found := at_equal_traffic(runs, method, alpha)) is not None:
            gain, interval = gain_words(found)
            more = experiments.open_words("", found, seed_s(2), size, "points")
            facts = {"alpha": alpha, "gain": gain, "interval": interval, "span": float(np.ptp(top_k[alpha]))}
            yield {"judgement": found, "unresolved": more, **facts}


def over_links(folder: Path) -> Any:
    """Return the runs that were played, with their seconds; empty if there are none."""
    runs = results(folder)
    if not (folder / "times.csv").is_file():
        return runs.assign(network="", seconds=0.0, ideal_s=0.0).iloc[:0]
    return runs.merge(pandas.read_csv(folder / "times.csv"), on=["method", "alpha", "first_ratio", "seed"])


def lost_in_time(folder: Path, method: str, size: float | None = None) -> Iterator[Facts]:
    """Yield, for each network, the points of accuracy that a method loses to top-k at equal time."""
    for network, part in over_links(folder).groupby("network", sort=False):
        for alpha in sorted(set(part.alpha)):
            if (found := at_equal_traffic(part, method, alpha, "seconds")) is not None:
                gain, interval = gain_words(found)
                more = experiments.open_words("", found, seed_s(2), size, "points")
                facts = {"network": NETWORKS[str(network)], "alpha": alpha, "gain": gain, "interval": interval}
                yield {"judgement": found, "unresolved": more, **facts}


def times(folder: Path) -> Any:
    """Return the time of the trainings that were played, means over the seeds that all arms have."""
    frame, arm = over_links(folder), ["network", "method", "first_ratio"]
    common = set.intersection(*([set(part.seed) for _, part in frame.groupby(arm)] or [set()]))
    mean = frame[frame.seed.isin(common)].groupby(arm, sort=False).mean(numeric_only=True).reset_index()
    return pandas.DataFrame(
        {
            "network": mean.network.map(NETWORKS),
            "method": mean.method,
            "first ratio": mean.first_ratio.map("{:g}".format),
            "MB": mean.payload_mb,
            "s": mean.seconds.map("{:.1f}".format),
            "s, links alone": mean.ideal_s.map("{:.1f}".format),
            "accuracy": mean.accuracy.map("{:.3f}".format),
        }
    )


def answer(folder: Path) -> str:
    """Return the answer in a few sentences."""
    runs = results(folder)
    alpha = min(runs.alpha)
    fixed, following = (change(runs, method, alpha) for method in (FIXED, FOLLOWING))
    last = pandas.read_csv(folder / "rounds.csv")
    fall = last.stepsize.max() / last.stepsize.min()
    gains = [f"{each['gain']} ({each['interval']}) at Dirichlet {each['alpha']:g}" for each in lost(folder, FOLLOWING)]
    return (
        f"While the stepsize falls to a {fall:.3g}th, a fixed threshold keeps {fixed.value:.2f} times as many values "
        f"late as early, a threshold that follows the stepsize {following.value:.2f} times. Against top-k at equal "
        f"traffic, gamma-FedHT's accuracy differs by {' and '.join(gains) if gains else 'nothing that was measured'}."
    )


def draw(folder: Path) -> Figure:
    """Draw the share of kept values by round, and accuracy against traffic for each skew of the labels."""
    runs, seen = results(folder), pandas.read_csv(folder / "rounds.csv")
    alphas = sorted(set(runs.alpha))
    figure, (row,) = plots.panels(1, 1 + len(alphas), (10.5, 3.7))
    skewed = seen[seen.alpha == min(alphas)]
    for method, part in skewed.groupby("method", sort=False):
        mean = part.groupby("round").kept.mean()
        row[0].plot(mean.index + 1, 100 * mean, color=COLOURS[str(method)], label=str(method))
    row[0].set(
        title=f"kept values by round, Dirichlet {min(alphas):g}", xlabel="round", ylabel="kept values, %", yscale="log"
    )
    plots.ticks(row[0].yaxis, (0.3, 1, 3, 10))
    for axes, alpha in zip(row[1:], alphas, strict=True):
        for method, part in runs[runs.alpha == alpha].groupby("method", sort=False):
            arms = part.groupby("first_ratio")[["payload_mb", "accuracy"]]
            mean, low, high = arms.mean(), arms.min(), arms.max()
            axes.plot(mean.payload_mb, 100 * mean.accuracy, "o-", color=COLOURS[str(method)])
            ends = 100 * low.accuracy, 100 * high.accuracy
            axes.vlines(mean.payload_mb, *ends, color=COLOURS[str(method)], lw=1, alpha=0.6)
        axes.set(title=f"accuracy against traffic, Dirichlet {alpha:g}", xlabel="sent by all clients, MB", xscale="log")
        plots.ticks(axes.xaxis, (0.2, 0.5, 1, 2, 5, 10))
        axes.set_xlim(0.8 * runs.payload_mb.min(), 1.25 * runs.payload_mb.max())
        axes.set_ylim(100 * runs.accuracy.min() - 2, 100 * runs.accuracy.max() + 2)
    row[1].set_ylabel("test accuracy, %")
    plots.finish(figure, _finding(runs), row[0], "lower center", 3)
    return figure


def _finding(runs: Any) -> str:
    fixed, following = (change(runs, method, min(runs.alpha)) for method in (FIXED, FOLLOWING))
    return (
        f"Values kept, late over early rounds: fixed threshold {fixed.value:.2f}x, gamma-FedHT {following.value:.2f}x"
    )


BLOCKS = {"answer": answer, "arms": table, "times": times}
FIGURES = {"thresholds": draw}

if __name__ == "__main__":
    publishing.run(globals())

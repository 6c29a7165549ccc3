"""Draw the figure of fedluck and make its tables: `python experiments/fedluck/figures.py`.

This reads runs.csv and choices.csv from the output folder, which train.py writes, and published.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure

from testbed.metrics import statistics
from testbed.metrics.statistics import IntervalEstimate
from testbed.metrics.verdicts import judge_ratio
from testbed.report import experiments, style
from testbed.report.claims import Claim, claims_table

HERE = Path(__file__).resolve().parent
COMMAND = "python experiments/fedluck/train.py"
PUBLISHED = 0.03
FEDLUCK, FEDAVG, FIXED = "FedLuck", "FedAvg", "periodic, "
BASELINES = (FEDAVG, "FedAsync", "FedBuff", "periodic, 5 steps, 0.1", "periodic, 5 steps, 0.3",
             "periodic, 10 steps, 0.1", "periodic, 10 steps, 0.3")  # fmt: skip
"""As the publication's: synchronous, each by itself, buffered; periodic with 5 or 10 steps and ratios 0.1 or 0.3."""
SOURCE = "ours, after FedLuck, Euro-Par 2024 (arXiv 2407.05125v1, abstract)"
TIME, SENT = "seconds", "sent_mb"
PUBLISHED_CUT = {TIME: 55.0, SENT: 56.0}
COLOURS = {FEDLUCK: "#0072b2", FEDAVG: "#767d86", "FedAsync": "#cc79a7", "FedBuff": "#e69f00", FIXED: "#d55e00"}
LABELS = {FEDLUCK: (-8, 5), "periodic, 5 steps, 0.1": (8, -11), "periodic, 10 steps, 0.3": (8, 1)}
"""Where a method's name is written, in points from its mean; those that are not named: above it to the right."""
_TICKS_S = (20, 30, 50, 70, 100, 150, 200, 500, 1000)
_TICKS_MB = (1, 2, 3, 4, 5, 7, 10, 20, 50)


def results(folder: Path) -> Any:
    """Return the runs that count: of each network and method whose seeds are all there."""
    runs = pandas.read_csv(folder / "runs.csv")
    runs = runs[runs.use == "result"]
    counts = runs.groupby(["straggler", "method"]).seed.transform("count")
    return runs[counts == counts.max()]


def per_seed(runs: Any, method: str, straggler: float, measure: str) -> dict[int, float]:
    """Return a method's numbers by seed; those that did not reach the target are missing."""
    part = runs[(runs.method == method) & (runs.straggler == straggler) & runs[measure].notna()]
    return dict(zip(part.seed.tolist(), part[measure].tolist(), strict=True))


def against(runs: Any, ours: str, theirs: Sequence[str], straggler: float, measure: str) -> IntervalEstimate | None:
    """Return how many times as much the others took as ours, geometric mean over them and over seeds; None where one
    of them did not reach the target with every seed.
    """
    mine = per_seed(runs, ours, straggler, measure)
    others = [per_seed(runs, method, straggler, measure) for method in theirs]
    seeds = sorted(set(runs.seed))
    if not others or any(set(each) != set(seeds) for each in (mine, *others)):
        return None
    ratios = [np.exp(np.mean([np.log(each[seed] / mine[seed]) for each in others])) for seed in seeds]
    return statistics.of_ratios([float(ratio) for ratio in ratios], "seed")


def best_fixed(folder: Path, runs: Any) -> str:
    """Return the fixed choice that took least time in the trials that chose the learning rates."""
    trials = pandas.read_csv(folder / "runs.csv")
    trials = trials[(trials.use == "tuning") & trials.method.isin(set(runs.method))]
    fixed = trials[trials.method.str.startswith(FIXED) & trials.method.str.contains("steps, ")]
    means = fixed.assign(seconds=fixed.seconds.fillna(np.inf)).groupby(["method", "learning_rate"]).seconds.mean()
    return "" if means.empty else str(means.groupby("method").min().idxmin())


def pair_s() -> float:
    """Return how long one more seed of two methods takes."""
    return 2 * experiments.training_s(HERE, "runs.csv")


def cut_words(found: IntervalEstimate) -> tuple[str, str]:
    """Return by how much less ours took, in percent, and the interval."""
    less = f"{100 * (1 / found.value - 1):+.0f} %"
    if found.interval is None:
        return less, "one seed"
    low, high = sorted(100 * (1 / end - 1) for end in found.interval)
    return less, f"{low:+.0f} to {high:+.0f} %, 95 %, {found.n} seeds"


def times_words(found: IntervalEstimate) -> tuple[str, str]:
    """Return how many times as fast, and the interval."""
    if found.interval is None:
        return f"{found.value:.2f} times", "one seed"
    return f"{found.value:.2f} times", f"{found.interval.low:.2f} to {found.interval.high:.2f}, 95 %, {found.n} seeds"


def _claim(
    says: str, found: IntervalEstimate | None, least: float, why: str, *, source: str = "ours", published: str = ""
) -> list[Claim]:
    if found is None:
        return []
    ours, interval = cut_words(found) if source == SOURCE else times_words(found)
    judged = judge_ratio(found, least)
    size = 1 / (1 - PUBLISHED_CUT[TIME] / 100) if published else None
    return [
        Claim(
            claim=says,
            source=source,
            published=published,
            ours=ours,
            interval=interval,
            verdict=judged.verdict or "not resolved",
            why=experiments.open_words(why, judged, pair_s(), size),
            command=COMMAND,
        )
    ]


def claims(folder: Path) -> list[Claim]:
    """Return what is claimed of choosing local steps and ratio together, and what became of it."""
    runs = results(folder)
    shown = [method for method in BASELINES if method in set(runs.method)]
    networks, best = sorted(set(runs.straggler)), best_fixed(folder, runs)
    rows = []
    for measure, what in ((TIME, "time"), (SENT, "uplink traffic")):
        cut = PUBLISHED_CUT[measure]
        published = f"-{cut:g} % on average over the baselines"
        for method in shown:
            rows += _claim(
                f"FedLuck reaches the target accuracy with less {what} than {method}",
                against(runs, FEDLUCK, [method], PUBLISHED, measure),
                1.0,
                "each at its own best learning rate",
                source=SOURCE,
                published=published,
            )
        if len(shown) == len(BASELINES):
            rows += _claim(
                f"FedLuck reaches the target accuracy with {cut:g} % less {what} than the baselines on average",
                against(runs, FEDLUCK, shown, PUBLISHED, measure),
                1 / (1 - cut / 100),
                f"geometric mean over {len(shown)} baselines, each at its own best learning rate",
                source=SOURCE,
                published=published,
            )
    rows += _claim(
        "FedLuck is at least as fast as the best fixed choice", against(runs, FEDLUCK, [best], PUBLISHED, TIME), 1.0,
        f"best in the trials of the learning rates: {best}",
    )  # fmt: skip
    for straggler in networks:
        link = f"straggler's uplink {straggler:g} MB/s"
        rows += _claim(
            f"With alike choices periodic asynchronous rounds are at least as fast as synchronous ones ({link})",
            against(runs, "periodic, 5 steps, 0.1", [FEDAVG], straggler, TIME),
            1.0,
            "5 local steps, ratio 0.1",
        )
    rows += _claim(
        "With FedLuck's choices periodic asynchronous rounds are at least as fast as synchronous ones",
        against(runs, FEDLUCK, ["FedLuck, synchronous"], PUBLISHED, TIME), 1.0, "each at its own best learning rate",
    )  # fmt: skip
    for alone in ("ratio", "steps"):
        rows += _claim(
            f"FedLuck is at least as fast as choosing the {alone} alone",
            against(runs, FEDLUCK, [f"periodic, {alone} chosen"], PUBLISHED, TIME), 1.0,
            "by the same objective; what is not chosen is 5 steps, or ratio 0.1",
        )  # fmt: skip
    rows += _claim(
        "Choosing the ratio alone is at least as fast as choosing the local steps alone",
        against(runs, "periodic, ratio chosen", ["periodic, steps chosen"], PUBLISHED, TIME), 1.0,
        "by the same objective; what is not chosen is 5 steps, and ratio 0.1",
    )  # fmt: skip
    rows += _claim(
        "FedLuck with error feedback is at least as fast as without",
        against(runs, "FedLuck, error feedback", [FEDLUCK], PUBLISHED, TIME), 1.0, "the published runs have none",
    )  # fmt: skip
    return rows + growth(runs, shown, networks)


def growth(runs: Any, shown: Sequence[str], networks: Sequence[float]) -> list[Claim]:
    """Return what became of the gain growing with the straggler."""
    if len(networks) < 2 or not shown:
        return []
    slow, alike = min(networks), max(networks)
    shown = [method for method in shown if per_seed(runs, method, slow, TIME)]
    found = []
    for straggler in (slow, alike):
        mine = per_seed(runs, FEDLUCK, straggler, TIME)
        others = [per_seed(runs, method, straggler, TIME) for method in shown]
        if any(set(each) != set(runs.seed) for each in (mine, *others)):
            return []
        found.append({s: float(np.mean([np.log(each[s] / mine[s]) for each in others])) for s in sorted(mine)})
    ratios = [float(np.exp(found[0][seed] - found[1][seed])) for seed in found[0]]
    return _claim(
        "FedLuck's gain over the baselines grows with the straggler", statistics.of_ratios(ratios, "seed"), 1.0,
        f"gain in time with its uplink at {slow:g} MB/s over that at {alike:g} MB/s, a link like the others'; over "
        + " and ".join(shown),
    )  # fmt: skip


def table(folder: Path) -> Any:
    """Return every method on the published network, means over the seeds that reached the target."""
    runs = results(folder)
    runs = runs[runs.straggler == PUBLISHED]
    rows = []
    for method, part in runs.groupby("method", sort=False):
        reached = part[part.seconds.notna()]
        rows.append(
            {
                "method": method,
                "learning rate": f"{part.learning_rate.iloc[0]:g}",
                "reached": f"{len(reached)} of {len(part)}",
                "s": f"{reached.seconds.mean():.0f}",
                "lowest, highest": f"{reached.seconds.min():.0f}, {reached.seconds.max():.0f}",
                "sent, MB": f"{reached.sent_mb.mean():.2f}",
                "answers, MB": f"{reached.answered_mb.mean():.0f}",
                "server's steps": f"{reached.steps.mean():.0f}",
                "local steps": f"{reached.local_steps.mean():.0f}",
                "staleness": f"{part.staleness.mean():.2f}",
                "stalest": f"{part.stalest.max()}",
            }
        )
    return pandas.DataFrame(rows)


def choices(folder: Path) -> Any:
    """Return what FedLuck chooses over the published network."""
    found = pandas.read_csv(folder / "choices.csv")
    found = found[found.straggler == PUBLISHED]
    return pandas.DataFrame(
        {
            "device": found.device,
            "local step, s": found.step_s.map("{:.3f}".format),
            "dense message, s": found.full_s.map("{:.1f}".format),
            "local steps": found.local_steps,
            "ratio": found.ratio.map("{:g}".format),
            "periods": found.staleness,
        }
    )


def answer(folder: Path) -> str:
    """Return the answer in three lines; the claims and the table of methods have every number."""
    runs = results(folder)
    best, words, seeds = best_fixed(folder, runs), [], 0
    for method in dict.fromkeys((FEDAVG, best)):
        parts = []
        for measure, what in ((TIME, "time"), (SENT, "uplink bytes")):
            if (found := against(runs, FEDLUCK, [method], PUBLISHED, measure)) is not None:
                value, interval = cut_words(found)
                seeds = found.n
                parts.append(f"{value} ({interval.partition(', 95 %')[0]}) {what}")
        words.append(f"{' and '.join(parts)} against {'synchronous rounds' if method == FEDAVG else method}")
    said = f"To the target accuracy FedLuck takes {', and '.join(words)}, the best fixed choice (95 %, {seeds} seeds)."
    means = [against(runs, FEDLUCK, BASELINES, PUBLISHED, measure) for measure in (TIME, SENT)]
    if all(means):
        time, sent = (cut_words(found)[0] for found in means if found is not None)
        said += f" On average over {len(BASELINES)} baselines it takes {time} time and {sent} bytes;"
    return f"{said} published are -55 % and -56 %."


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    return {
        "answer": experiments.prose(answer(folder)),
        "methods": experiments.markdown_of(table(folder)),
        "choices": experiments.markdown_of(choices(folder)),
        "claims": claims_table(claims(folder)),
    }


def _family(method: str) -> str:
    return FIXED if method.startswith(FIXED) else method


def draw(folder: Path) -> Figure:
    """Draw traffic against time to the target for FedLuck and its baselines over the published network."""
    runs = results(folder)
    shown = runs[(runs.straggler == PUBLISHED) & runs.seconds.notna() & runs.method.isin((FEDLUCK, *BASELINES))]
    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    for method, part in shown.groupby("method", sort=False):
        colour, place = COLOURS[_family(str(method))], LABELS.get(str(method), (7, 5))
        x, y = np.exp(np.log(part.seconds).mean()), np.exp(np.log(part.sent_mb).mean())
        axes.plot(part.seconds, part.sent_mb, ".", color=colour, alpha=0.35, ms=5)
        axes.plot(x, y, "o", color=colour, ms=7)
        axes.annotate(
            str(method), (x, y), textcoords="offset points", xytext=place, ha="right" if place[0] < 0 else "left",
            fontsize=8, color=colour, weight="bold",
        )  # fmt: skip
    axes.set(xlabel="time to the target, s", ylabel="sent by all devices, MB", xscale="log", yscale="log")
    for axis, ticks in ((axes.xaxis, _TICKS_S), (axes.yaxis, _TICKS_MB)):
        low, high = axis.get_view_interval()
        axis.set_ticks([tick for tick in ticks if low <= tick <= high])
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    figure.suptitle(_finding(runs, best_fixed(folder, runs)), x=0.01, ha="left", weight="bold", size=10.5)
    return figure


def _finding(runs: Any, best: str) -> str:
    fixed, sync = (against(runs, other, [FEDLUCK], PUBLISHED, TIME) for other in (best, FEDAVG))
    words = [
        f"{found.value:.2f} times that of {what}"
        for found, what in (
            (fixed, f"the best fixed choice ({best.removeprefix(FIXED)})"),
            (sync, "synchronous rounds"),
        )
        if found is not None
    ]
    return "FedLuck's time to the target is " + "\nand ".join(words)


def main() -> int:
    """Write the figure, claims.csv and the README's blocks."""
    _, output = experiments.folders(HERE.name, "Figure, claims and the README's blocks.")
    if output.resolve() != HERE:
        (output / "published.csv").write_bytes((HERE / "published.csv").read_bytes())
    with style.applied():
        experiments.save_figure(draw(output), output, "time")
    experiments.publish(output, blocks(output), claims(output))
    return 0


if __name__ == "__main__":
    sys.exit(main())

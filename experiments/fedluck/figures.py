"""Draw the figure of fedluck and make its tables: `python experiments/fedluck/figures.py`.

This reads runs.csv and choices.csv from the output folder, which train.py writes, and published.csv.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure

from testbed.metrics import statistics
from testbed.metrics.statistics import IntervalEstimate
from testbed.metrics.verdicts import judge_ratio
from testbed.report import claim_rows, experiments
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table

HERE = Path(__file__).resolve().parent
PUBLISHED = 0.03
FEDLUCK, FEDAVG, FIXED = "FedLuck", "FedAvg", "periodic, "
BASELINES = (FEDAVG, "FedAsync", "FedBuff", "periodic, 5 steps, 0.1", "periodic, 5 steps, 0.3",
             "periodic, 10 steps, 0.1", "periodic, 10 steps, 0.3")  # fmt: skip
"""As the publication's: synchronous, each by itself, buffered; periodic with 5 or 10 steps and ratios 0.1 or 0.3."""
TIME, SENT = "seconds", "sent_mb"
PUBLISHED_FACTOR = 1 / (1 - 55 / 100)
"""By 55 % less time."""
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


def log_ratios(runs: Any, ours: str, theirs: Sequence[str], straggler: float, measure: str) -> dict[int, float] | None:
    """Return by seed the mean over the others of the logarithm of how many times as much they took as ours; None where
    one of them did not reach the target with every seed.
    """
    mine = per_seed(runs, ours, straggler, measure)
    others = [per_seed(runs, method, straggler, measure) for method in theirs]
    if not others or any(set(each) != set(runs.seed) for each in (mine, *others)):
        return None
    return {seed: float(np.mean([np.log(each[seed] / mine[seed]) for each in others])) for seed in sorted(mine)}


def against(runs: Any, ours: str, theirs: Sequence[str], straggler: float, measure: str) -> IntervalEstimate | None:
    """Return how many times as much the others took as ours, geometric mean over them and over seeds; None as above."""
    logs = log_ratios(runs, ours, theirs, straggler, measure)
    return None if logs is None else statistics.of_ratios([float(np.exp(each)) for each in logs.values()], "seed")


def best_fixed(folder: Path, runs: Any) -> str:
    """Return the fixed choice that took least time in the trials that chose the learning rates."""
    trials = pandas.read_csv(folder / "runs.csv")
    trials = trials[(trials.use == "tuning") & trials.method.isin(set(runs.method))]
    fixed = trials[trials.method.str.startswith(FIXED) & trials.method.str.contains("steps, ")]
    means = fixed.assign(seconds=fixed.seconds.fillna(np.inf)).groupby(["method", "learning_rate"]).seconds.mean()
    return "" if means.empty else str(means.groupby("method").min().idxmin())


def cut_words(found: IntervalEstimate) -> tuple[str, str]:
    """Return by how much less ours took, in percent, and the interval."""
    less = f"{100 * (1 / found.value - 1):+.0f} %"
    if found.interval is None:
        return less, "one seed"
    low, high = sorted(100 * (1 / end - 1) for end in found.interval)
    return less, f"{low:+.0f} to {high:+.0f} %, 95 %, {found.n} seeds"


def _facts(found: IntervalEstimate, least: float = 1.0, size: float | None = None) -> Facts:
    """Return the facts of a claim that a ratio of times or of bytes is at least so much; `size`: the published one."""
    judged, (less, interval) = judge_ratio(found, least), cut_words(found)
    ends = "one seed"
    if found.interval is not None:
        ends = f"{found.interval.low:.2f} to {found.interval.high:.2f}, 95 %, {found.n} seeds"
    unresolved = experiments.open_words("", judged, 2 * experiments.training_s(HERE, "runs.csv"), size)
    said = {"interval": ends, "less": less, "less_interval": interval}
    return {"judgement": judged, "least": least, "unresolved": unresolved, **said}


def gains(
    folder: Path,
    base: str,
    ours: str = FEDLUCK,
    measure: str = TIME,
    cut: float | None = None,
    *,
    average: bool = False,
    every_network: bool = False,
) -> Iterator[Facts]:
    """Yield how many times as much another method takes as ours: each of the baselines, or on average all of them; the
    best fixed choice; or one that is named. On the published network, or each. `cut`: by how many percent less was
    published, which the average has to reach.
    """
    runs = results(folder)
    named = {"baselines": BASELINES, "best fixed": [best_fixed(folder, runs)]}.get(base, [base])
    least = 1 / (1 - cut / 100) if average and cut else 1.0
    for straggler in sorted(set(runs.straggler)) if every_network else [PUBLISHED]:
        for theirs in [named] if average else [[each] for each in named]:
            if (found := against(runs, ours, theirs, straggler, measure)) is not None:
                facts = _facts(found, least, PUBLISHED_FACTOR if cut else None)
                yield {"base": theirs[0], "straggler": straggler, **facts}


def claims(folder: Path) -> list[Claim]:
    """Return what is claimed of choosing local steps and ratio together, and what became of it."""
    return claim_rows.claims(globals(), folder)


def growth(folder: Path) -> Facts | None:
    """Return how many times as large FedLuck's gain is with the slowest straggler as with one like the others, over
    the baselines that get to the target with it.
    """
    runs = results(folder)
    slow, alike = min(runs.straggler), max(runs.straggler)
    shown = [method for method in BASELINES if per_seed(runs, method, slow, TIME)]
    far, near = (log_ratios(runs, FEDLUCK, shown, straggler, TIME) for straggler in (slow, alike))
    if slow == alike or far is None or near is None:
        return None
    found = statistics.of_ratios([float(np.exp(far[seed] - near[seed])) for seed in far], "seed")
    return {"slow": slow, "alike": alike, "shown": " and ".join(shown), **_facts(found)}


def table(folder: Path) -> Any:
    """Return every method on the published network, means over the seeds that reached the target."""
    runs = results(folder)
    runs = runs[runs.straggler == PUBLISHED]
    every, reached = (frame.groupby("method", sort=False) for frame in (runs, runs[runs.seconds.notna()]))
    mean = reached.mean(numeric_only=True).reindex(runs.method.unique())
    low, high, count = (reached.seconds.agg(of).reindex(mean.index) for of in ("min", "max", "count"))
    return pandas.DataFrame(
        {
            "learning rate": every.learning_rate.first().map("{:g}".format),
            "reached": count.fillna(0).map("{:.0f} of ".format) + every.size().map("{}".format),
            "s": mean.seconds.map("{:.0f}".format),
            "lowest, highest": low.map("{:.0f}, ".format) + high.map("{:.0f}".format),
            "sent, MB": mean.sent_mb.map("{:.2f}".format),
            "answers, MB": mean.answered_mb.map("{:.0f}".format),
            "server's steps": mean.steps.map("{:.0f}".format),
            "local steps": mean.local_steps.map("{:.0f}".format),
            "staleness": every.staleness.mean().map("{:.2f}".format),
            "stalest": every.stalest.max().map("{}".format),
        }
    ).reset_index()


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


def draw(folder: Path) -> Figure:
    """Draw traffic against time to the target for FedLuck and its baselines over the published network."""
    runs = results(folder)
    shown = runs[(runs.straggler == PUBLISHED) & runs.seconds.notna() & runs.method.isin((FEDLUCK, *BASELINES))]
    figure = Figure(figsize=(7.5, 4.4), layout="constrained")
    axes = figure.subplots()
    for method, part in shown.groupby("method", sort=False):
        name = str(method)
        colour, place = COLOURS[FIXED if name.startswith(FIXED) else name], LABELS.get(name, (7, 5))
        x, y = np.exp(np.log(part.seconds).mean()), np.exp(np.log(part.sent_mb).mean())
        axes.plot(part.seconds, part.sent_mb, ".", color=colour, alpha=0.35, ms=5)
        axes.plot(x, y, "o", color=colour, ms=7)
        axes.annotate(
            name, (x, y), textcoords="offset points", xytext=place, ha="right" if place[0] < 0 else "left",
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
    names = {best: f"the best fixed choice ({best.removeprefix(FIXED)})", FEDAVG: "synchronous rounds"}
    ratios = {what: against(runs, other, [FEDLUCK], PUBLISHED, TIME) for other, what in names.items()}
    words = [f"{found.value:.2f} times that of {what}" for what, found in ratios.items() if found is not None]
    return "FedLuck's time to the target is " + "\nand ".join(words)


if __name__ == "__main__":
    _, made = experiments.folders(HERE.name, "Figure, claims and the README's blocks.")
    experiments.draw_and_publish(HERE, made, {"time": draw}, blocks, claims)

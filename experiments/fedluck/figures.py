"""Draws the figure and generates the tables of fedluck: `python experiments/fedluck/figures.py`.

This reads runs.csv and choices.csv from the output folder, which train.py writes, and published.csv.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.figure import Figure

from testbed.metrics import statistics
from testbed.metrics.statistics import IntervalEstimate
from testbed.metrics.verdicts import judge_ratio
from testbed.report import experiments, plots, publishing
from testbed.report.canvas import name_rows
from testbed.report.claim_rows import Facts

HERE = Path(__file__).resolve().parent
PUBLISHED = 0.03
FEDLUCK, FEDAVG, FIXED = "FedLuck", "FedAvg", "periodic, "
BASELINES = (FEDAVG, "FedAsync", "FedBuff", "periodic, 5 steps, 0.1", "periodic, 5 steps, 0.3",
             "periodic, 10 steps, 0.1", "periodic, 10 steps, 0.3")  # fmt: skip
"""As published: synchronous, one at a time, buffered; periodic with 5 or 10 steps and ratios 0.1 or 0.3."""
TIME, SENT = "seconds", "sent_mb"
PUBLISHED_FACTOR = 1 / (1 - 55 / 100)
"""By 55 % less time."""
COLOURS = {FEDLUCK: "#0072b2", "variant of ours": "#e69f00"}


def results(folder: Path) -> Any:
    """Return the runs of each network and method with all seeds."""
    runs = pandas.read_csv(folder / "runs.csv")
    runs = runs[runs.use == "result"]
    counts = runs.groupby(["straggler", "method"]).seed.transform("count")
    return runs[counts == counts.max()]


def per_seed(runs: Any, method: str, straggler: float, measure: str) -> dict[int, float]:
    """Return a method's numbers by seed, without seeds that did not reach the target."""
    return experiments.by_seed(runs, measure, method=method, straggler=straggler)


def log_ratios(runs: Any, ours: str, theirs: Sequence[str], straggler: float, measure: str) -> dict[int, float] | None:
    """Return by seed the mean over the others of the logarithm of the ratio of their cost to ours; None if one of them
    did not reach the target with every seed.
    """
    mine = per_seed(runs, ours, straggler, measure)
    others = [per_seed(runs, method, straggler, measure) for method in theirs]
    if not others or any(set(each) != set(runs.seed) for each in (mine, *others)):
        return None
    return {seed: float(np.mean([np.log(each[seed] / mine[seed]) for each in others])) for seed in sorted(mine)}


def against(runs: Any, ours: str, theirs: Sequence[str], straggler: float, measure: str) -> IntervalEstimate | None:
    """Return the ratio of the others' cost to ours, geometric mean over them and over seeds; None as above."""
    logs = log_ratios(runs, ours, theirs, straggler, measure)
    return None if logs is None else statistics.of_ratios([float(np.exp(each)) for each in logs.values()], "seed")


def best_fixed(folder: Path, runs: Any) -> str:
    """Return the fastest fixed choice in the trials of the learning rates."""
    trials = pandas.read_csv(folder / "runs.csv")
    trials = trials[(trials.use == "tuning") & trials.method.isin(set(runs.method))]
    fixed = trials[trials.method.str.startswith(FIXED) & trials.method.str.contains("steps, ")]
    means = fixed.assign(seconds=fixed.seconds.fillna(np.inf)).groupby(["method", "learning_rate"]).seconds.mean()
    return "" if means.empty else str(means.groupby("method").min().idxmin())


def cut_words(found: IntervalEstimate) -> tuple[str, str]:
    """Return the reduction by ours, in percent, and its interval."""
    less = f"{100 * (1 / found.value - 1):+.0f} %"
    if found.interval is None:
        return less, "one seed"
    low, high = sorted(100 * (1 / end - 1) for end in found.interval)
    return less, f"{low:+.0f} to {high:+.0f} %, 95 %, {found.n} seeds"


def _facts(found: IntervalEstimate, least: float = 1.0, size: float | None = None) -> Facts:
    """Return the facts of a claim that a ratio of times or of bytes is at least `least`; `size`: the published one."""
    judged, (less, interval) = judge_ratio(found, least), cut_words(found)
    unresolved = experiments.open_words("", judged, 2 * experiments.training_s(HERE, "runs.csv"), size)
    said = {"interval": experiments.sure_words(found), "less": less, "less_interval": interval}
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
    """Yield the ratio of another method's cost to ours: for each baseline, or on average over all of them; for the best
    fixed choice; or for a named one. On the published network, or on each. `cut`: the published reduction in percent,
    which the average must reach.
    """
    runs = results(folder)
    named = {"baselines": BASELINES, "best fixed": [best_fixed(folder, runs)]}.get(base, [base])
    least = 1 / (1 - cut / 100) if average and cut else 1.0
    for straggler in sorted(set(runs.straggler)) if every_network else [PUBLISHED]:
        for theirs in [named] if average else [[each] for each in named]:
            if (found := against(runs, ours, theirs, straggler, measure)) is not None:
                facts = _facts(found, least, PUBLISHED_FACTOR if cut else None)
                yield {"base": theirs[0], "straggler": straggler, **facts}


def growth(folder: Path) -> Facts | None:
    """Return the ratio of FedLuck's gain with the slowest straggler and with one like the others, over the baselines
    that reach the target with it.
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
    """Return FedLuck's choices over the published network."""
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


def draw(folder: Path) -> Figure:
    """Draw the time and the traffic to the target of every method over the published network, the fastest first."""
    runs = results(folder)
    shown = runs[(runs.straggler == PUBLISHED) & runs.seconds.notna()]
    names = list(shown.groupby("method").seconds.apply(lambda seconds: np.log(seconds).mean()).sort_values().index)
    figure, (row,) = plots.panels(1, 2, (9.6, 4.6), sharey=True)
    for axes, (measure, words) in zip(row, {TIME: "time to the target, s", SENT: "sent, MB"}.items(), strict=True):
        for place, name in enumerate(names):
            values, kind = shown[shown.method == name][measure], {FEDLUCK: FEDLUCK}.get(name, "variant of ours")
            kind, colour = ("baseline", "#767d86") if name in BASELINES else (kind, COLOURS[kind])
            axes.plot(values, [place] * len(values), "|", color=colour, alpha=0.6)
            axes.plot(np.exp(np.log(values).mean()), place, "o", color=colour, label=kind)
        axes.set(xscale="log", xlabel=f"{words} (marks: seeds)")
        plots.ticks(axes.xaxis, (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500))
        name_rows(axes, names)
    plots.finish(figure, _finding(runs, best_fixed(folder, runs)), row[0], "lower center")
    return figure


def _finding(runs: Any, best: str) -> str:
    names = {best: f"the best fixed choice ({best.removeprefix(FIXED)})", FEDAVG: "synchronous rounds"}
    ratios = {what: against(runs, other, [FEDLUCK], PUBLISHED, TIME) for other, what in names.items()}
    words = [f"{experiments.with_ends(each, '{:.2f}')} times that of {what}" for what, each in ratios.items() if each]
    return "FedLuck's time to the target is " + "\nand ".join(words)


BLOCKS = {"answer": answer, "methods": table, "choices": choices}
FIGURES = {"time": draw}

if __name__ == "__main__":
    publishing.run(globals())

"""Draws the figure and generates the tables of dagc: `python experiments/dagc/figures.py`.

This reads runs.csv and times.csv from the output folder, which train.py and play.py write, and published.csv.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
from matplotlib.figure import Figure

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, plots, publishing, style
from testbed.report.canvas import name_rows
from testbed.report.claim_rows import Facts
from testbed.report.numbers import span

HERE = Path(__file__).resolve().parent
UNIFORM, RULE, RELEASED, INVERSE = "uniform", "share^(2/3)", "released code", "share^(-2/3)"
SAME, ABSOLUTE = "same threshold", "DAGC-A"
BASES = {SAME: None, ABSOLUTE: SAME, UNIFORM: None}
"""What an arm is compared with, where it is not uniform ratios."""
NETWORKS = {"equal": "equal uplinks", "FedLuck's": "FedLuck's uplinks"}
COLOURS = {ABSOLUTE: "#009e73", RULE: "#0072b2", RELEASED: "#e69f00", INVERSE: "#d55e00"}
GROUP = ["feedback", "skew", "mean_ratio"]
LARGEST_GAIN = 1.25
"""Largest published speed-up: published.csv."""
LOOKS = 2
"""At five seeds, and at the ten or thirty that their spread asked for."""


def seed_s() -> float:
    """Return the time of one more seed of two arms."""
    return 2 * experiments.training_s(HERE, "runs.csv")


def results(folder: Path) -> Any:
    """Return the runs that count."""
    runs = pandas.read_csv(folder / "runs.csv")
    return runs[runs.use == "result"]


def chosen(runs: Any, feedback: bool, skew: float, mean: float) -> Any:
    """Return the runs of one setting."""
    return runs[(runs.feedback == feedback) & (runs["skew"] == skew) & (runs.mean_ratio == mean)]


def against(runs: Any, arm: str, base: str = UNIFORM) -> Judgement | None:
    """Judge whether an arm's loss is at most another's in one setting; None if either was not run."""
    ours, theirs = (experiments.by_seed(runs, "loss", arm=each) for each in (arm, base))
    return judge("loss", ours, theirs, 0.0, looks=LOOKS) if ours and theirs else None


def faster(runs: Any, arm: str = RULE, column: str = "rounds_to_target") -> Judgement | None:
    """Judge whether ratios, or thresholds, by share need fewer rounds, or less time, to the target than uniform ones,
    in one setting; None if a run never reached it.
    """
    theirs, looks = BASES.get(arm) or UNIFORM, 1 if arm == ABSOLUTE else LOOKS
    ours, base = (experiments.by_seed(runs, column, arm=each) for each in (arm, theirs))
    every = set(runs[runs.arm == theirs].seed)
    if not every or ours.keys() != every or base.keys() != every:
        return None
    return judge("speed_up", ours, base, 1.0, looks=looks)


def table(folder: Path) -> Any:
    """Return every arm: means over seeds, and its loss vs uniform ratios, or vs the baseline of `BASES`."""
    runs, rows = results(folder), []
    for (feedback, skew, mean), group in runs.groupby(GROUP):
        for arm, part in group.groupby("arm", sort=False):
            base = BASES.get(str(arm), UNIFORM)
            found = None if base is None else against(group, str(arm), base)
            reached = part.rounds_to_target.notna()
            rows.append(
                {
                    "mean ratio": mean,
                    "skew": f"{skew:g}",
                    "feedback": "yes" if feedback else "no",
                    "ratios": arm,
                    "smallest, largest": f"{part.least_ratio.mean():.3g}, {part.largest_ratio.mean():.3g}",
                    "MB": part.payload_mb.mean(),
                    "loss": f"{part.loss.mean():.3f}",
                    "accuracy": f"{part.accuracy.mean():.3f}",
                    "rounds to 70 %": f"{part.rounds_to_target.mean():.1f}"
                    if reached.all()
                    else f"{int(reached.sum())} of {len(part)} reach it",
                    "loss vs uniform (DAGC-A: vs same threshold)": ""
                    if found is None
                    else f"{found.value:+.3f} ({found.interval_words})",
                }
            )
    return pandas.DataFrame(rows).sort_values(
        ["mean ratio", "feedback", "skew"], ascending=[False, True, True], kind="stable"
    )


def times(folder: Path) -> Any:
    """Return the time to the target over each network, means over seeds."""
    rows = []
    for (network, mean, feedback, arm), part in pandas.read_csv(folder / "times.csv").groupby(
        ["network", "mean_ratio", "feedback", "arm"], sort=False
    ):
        rows.append(
            {
                "network": NETWORKS[str(network)],
                "mean ratio": mean,
                "feedback": "yes" if feedback else "no",
                "arm": arm,
                "s per round": f"{part.round_s.mean():.3f}",
                "ideal": f"{part.ideal_s.mean():.3f}",
                "rounds to 70 %": f"{part.rounds.mean():.1f}",
                "s to 70 %": f"{part.seconds.mean():.2f}",
            }
        )
    return pandas.DataFrame(rows)


def sooner(folder: Path, arm: str) -> Iterator[Facts]:
    """Yield for each network and setting by what factor an arm reaches the target sooner."""
    if not (folder / "times.csv").is_file():
        return
    played = pandas.read_csv(folder / "times.csv")
    base = BASES.get(arm) or UNIFORM
    for (network, mean, feedback), group in played.groupby(["network", "mean_ratio", "feedback"], sort=False):
        if (found := faster(group, arm, "seconds")) is not None:
            lasts = [group[group.arm == each].round_s.mean() for each in (arm, base)]
            said = "a round lasts {:.2f} s on average against {:.2f} s".format(*lasts)
            setting = f"{NETWORKS[str(network)]}, mean ratio {mean:g}{', error feedback' * bool(feedback)}"
            said = experiments.open_words(said, found, seed_s(), LARGEST_GAIN)
            yield {"judgement": found, "setting": setting, "said": said, "arm": arm, "base": base}


def fewer(folder: Path, arm: str) -> Iterator[Facts]:
    """Yield by what factor DAGC-A reduces the rounds."""
    for (_, skew, mean), group in results(folder).groupby(GROUP):
        if arm in set(group.arm) and (found := faster(group, arm)) is not None:
            means = [group[group.arm == each].rounds_to_target.mean() for each in (arm, BASES[arm])]
            said = "{:.1f} rounds on average against {:.1f}".format(*means)
            said = experiments.open_words(said, found, seed_s(), 1 / (1 - 0.1665))
            sent = [group[group.arm == each].payload_mb.mean() for each in (arm, BASES[arm])]
            yield {"judgement": found, "skew": skew, "mean": mean, "said": said, "more": sent[0] / sent[1]}


def settings(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield each setting in which DAGC-R's ratios were run, as text, and its runs."""
    for (feedback, skew, mean), group in results(folder).groupby(GROUP):
        if RULE in set(group.arm):
            memory = "with" if feedback else "without"
            words = f"largest client {skew:g} times the smallest, mean ratio {mean:g}, {memory} error feedback"
            yield words, group


def rounds(folder: Path) -> Iterator[Facts]:
    """Yield for each setting by what factor DAGC-R's ratios reduce the rounds, or how many seeds reach the target."""
    for words, group in settings(folder):
        found, reached = faster(group), group.rounds_to_target.notna().groupby(group.arm)
        if found is None:
            late = [f"{reached.sum()[arm]} of {reached.size()[arm]} with {arm} ratios" for arm in (RULE, UNIFORM)]
            ours, said = "not every seed reaches it", f"{'; '.join(late)} reach it"
        else:
            means = [group[group.arm == arm].rounds_to_target.mean() for arm in (RULE, UNIFORM)]
            ours = f"{found.value:.2f} times as fast"
            said = "{:.1f} rounds on average against {:.1f}".format(*means)
            said = experiments.open_words(said, found, seed_s(), LARGEST_GAIN)
        interval = "" if found is None or found.interval is None else experiments.interval_words(found)
        yield {"judgement": found, "setting": words, "ours": ours, "said": said, "interval": interval}


def loss(folder: Path, arm: str, larger: bool = False) -> Iterator[Facts]:
    """Yield for each setting an arm's loss vs uniform ratios; `larger`: the claim is that it is larger."""
    for words, group in settings(folder):
        found, turned = against(group, arm), against(group, UNIFORM, arm)
        if found is not None and turned is not None:
            words_of = turned if larger and found.verdict == "not resolved" else found
            shown = experiments.shown_words(words_of, float(group.loss.mean()), seed_s())
            yield {"judgement": found, "setting": words, "shown": shown}


def answer(folder: Path) -> str:
    """Return the answer in three lines; the claims have every number."""
    runs = results(folder)
    largest, means = max(runs["skew"]), sorted(set(runs.mean_ratio))
    speeds = [
        f"{found.value:.2f} times ({found.interval_words}) at {mean:g}"
        for mean in means
        if (found := faster(chosen(runs, False, largest, mean))) is not None
    ]
    said = ", ".join(speeds) or "not every seed does"
    return (
        f"If the largest client has {largest:g} times the images of the smallest, DAGC-R's ratios reach 70 % accuracy "
        f"in fewer rounds than uniform ones of the same mean: {said} (published: 1.25 at most). "
        f"{_over_links(folder, means[0])}"
    )


def _over_links(folder: Path, mean: float) -> str:
    """Return what the factor is over links."""
    if not (folder / "times.csv").is_file():
        return ""
    played, parts = pandas.read_csv(folder / "times.csv"), []
    for network, words in NETWORKS.items():
        group = played[(played.network == network) & (played.mean_ratio == mean) & ~played.feedback]
        if (found := faster(group, RULE, "seconds")) is not None:
            parts.append(f"{found.value:.2f} over {words}")
    said = ", ".join(parts) or "not every seed reaches it"
    return f"In seconds, at {mean:g}: {said}; a round waits for the longest message."


def draw(folder: Path) -> Figure:
    """Draw each arm's loss vs uniform ratios, a row for each arm and skew and a panel for each mean ratio."""
    runs = results(folder)
    means = sorted(set(runs.mean_ratio), reverse=True)
    arms = [(RULE, False), (RELEASED, False), (INVERSE, False), (RULE, True)]
    rows = [(skew, *arm) for skew in sorted(set(runs["skew"])) for arm in arms]
    rows = [
        row for row in rows if any(against(chosen(runs, row[2], row[0], mean), row[1]) for mean in means if row[0] > 1)
    ]
    figure, (panels,) = plots.panels(1, len(means), (9.2, 3.2), sharey=True)
    for axes, mean in zip(panels, means, strict=True):
        for place, (skew, arm, feedback) in enumerate(rows):
            found = [(place, against(chosen(runs, feedback, skew, mean), arm))]
            plots.estimates(axes, found, COLOURS[arm], hollow=feedback, across=True, width=1.6)
        axes.axvline(0, color=style.INK, lw=0.9)
        axes.set(title=f"mean ratio {mean:g}", xlabel="test loss vs uniform (DAGC-A: vs same threshold)")
        name_rows(axes, [f"{skew:g}x: {arm}{', error feedback' * back}" for skew, arm, back in rows])
    plots.finish(figure, _finding(runs))
    return figure


def draw_times(folder: Path) -> Figure:
    """Draw by what factor DAGC's rules reach the target sooner, in rounds and over each network."""
    runs = results(folder)
    skew = max(runs["skew"])
    played = pandas.read_csv(folder / "times.csv")
    rows = [(RULE, mean) for mean in sorted(set(played.mean_ratio), reverse=True)]
    rows += [(ABSOLUTE, mean) for mean in sorted(set(runs[runs.arm == ABSOLUTE].mean_ratio))]
    places = ("rounds", *NETWORKS)
    rounds: list[Judgement] = []
    seconds: list[Judgement] = []
    figure, (panels,) = plots.panels(1, len(places), (9.2, 2.6), sharey=True)
    for axes, network in zip(panels, places, strict=True):
        for place, (arm, mean) in enumerate(rows):
            if network == "rounds":
                found = faster(chosen(runs, False, skew, mean), arm)
            else:
                part = played[(played.network == network) & (played.mean_ratio == mean) & ~played.feedback]
                found = faster(part, arm, "seconds")
            plots.estimates(axes, [(place, found)], COLOURS[arm], across=True, width=1.6)
            if found is not None:
                (rounds if network == "rounds" else seconds).append(found)
        axes.axvline(1, color=style.INK, lw=0.9)
        axes.set(title=NETWORKS.get(network, "rounds"), xscale="log", xlim=(0.3, 2.5), xlabel="times as fast")
        plots.ticks(axes.xaxis, (0.3, 0.5, 1, 2))
        name_rows(axes, [f"{'DAGC-R' if arm == RULE else arm}, {mean:g}" for arm, mean in rows])
    title = "Not every arm reaches the target"
    if rounds and seconds:
        gains = sum(each.interval is not None and each.interval.low > 1 for each in seconds)
        title = f"To the target {_factors(rounds)} times as fast by rounds, {_factors(seconds)} by time"
        title += f" ({gains} of {len(seconds)} intervals above 1)"
    plots.finish(figure, title)
    return figure


def _factors(found: list[Judgement]) -> str:
    return span([each.value for each in found], "{:.2f}".format)


def _finding(runs: Any) -> str:
    skew = max(runs["skew"])
    ends = [
        f"{-found.value:.2f} ({-found.interval.high:.2f} to {-found.interval.low:.2f})"
        for mean in sorted(set(runs.mean_ratio), reverse=True)
        if (found := against(chosen(runs, False, skew, mean), RULE)) is not None and found.interval is not None
    ]
    return f"Skew {skew:g}: DAGC-R's ratios end {' and '.join(ends)} nats lower"


BLOCKS = {"answer": answer, "arms": table, "times": times}
FIGURES = {"gain": draw, "times": draw_times}

if __name__ == "__main__":
    publishing.run(globals())

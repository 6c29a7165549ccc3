"""Draw the figure of dagc and make its tables: `python experiments/dagc/figures.py`.

This reads runs.csv from the output folder, which train.py writes, and published.csv.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
from matplotlib.figure import Figure

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import claim_rows, experiments, style
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim, claims_table

HERE = Path(__file__).resolve().parent
UNIFORM, RULE, RELEASED, INVERSE = "uniform", "share^(2/3)", "released code", "share^(-2/3)"
COLOURS = {RULE: "#0072b2", RELEASED: "#e69f00", INVERSE: "#d55e00"}
GROUP = ["feedback", "skew", "mean_ratio"]
LARGEST_GAIN = 1.25
"""Times as fast, at most: published.csv."""


def seed_s() -> float:
    """Return how long one more seed of two arms takes."""
    return 2 * experiments.training_s(HERE, "runs.csv")


def results(folder: Path) -> Any:
    """Return the runs that count."""
    runs = pandas.read_csv(folder / "runs.csv")
    return runs[runs.use == "result"]


def chosen(runs: Any, feedback: bool, skew: float, mean: float) -> Any:
    """Return the runs of one setting."""
    return runs[(runs.feedback == feedback) & (runs["skew"] == skew) & (runs.mean_ratio == mean)]


def by_seed(runs: Any, column: str, arm: str) -> dict[int, float]:
    """Return a column of an arm's runs, by seed."""
    return dict(runs[runs.arm == arm].set_index("seed")[column].dropna().astype(float))


def against(runs: Any, arm: str, base: str = UNIFORM) -> Judgement | None:
    """Judge that an arm's loss is at most another's in one setting; None where one of them was not run."""
    ours, theirs = (by_seed(runs, "loss", each) for each in (arm, base))
    return judge("loss", ours, theirs, 0.0) if ours and theirs else None


def faster(runs: Any) -> Judgement | None:
    """Judge that ratios by share need fewer rounds to the target than uniform ones, in one setting; None where a run
    never got there.
    """
    ours, base = (by_seed(runs, "rounds_to_target", arm) for arm in (RULE, UNIFORM))
    every = by_seed(runs, "loss", UNIFORM)
    if not every or ours.keys() != every.keys() or base.keys() != every.keys():
        return None
    return judge("speed_up", ours, base, 1.0)


def table(folder: Path) -> Any:
    """Return every arm: means over seeds, and its loss less that of uniform ratios."""
    runs, rows = results(folder), []
    for (feedback, skew, mean), group in runs.groupby(GROUP):
        for arm, part in group.groupby("arm", sort=False):
            found = None if arm == UNIFORM else against(group, str(arm))
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
                    else f"{int(reached.sum())} of {len(part)} get there",
                    "loss less uniform's": "" if found is None else f"{found.value:+.3f} ({found.interval_words})",
                }
            )
    return pandas.DataFrame(rows).sort_values(
        ["mean ratio", "feedback", "skew"], ascending=[False, True, True], kind="stable"
    )


def settings(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield each setting in which DAGC-R's ratios were run, in words, and its runs."""
    for (feedback, skew, mean), group in results(folder).groupby(GROUP):
        if RULE in set(group.arm):
            memory = "with" if feedback else "without"
            words = f"largest client {skew:g} times the smallest, mean ratio {mean:g}, {memory} error feedback"
            yield words, group


def rounds(folder: Path) -> Iterator[Facts]:
    """Yield for each setting how many times fewer rounds DAGC-R's ratios need, or how many seeds get there."""
    for words, group in settings(folder):
        found, reached = faster(group), group.rounds_to_target.notna().groupby(group.arm)
        if found is None:
            late = [f"{reached.sum()[arm]} of {reached.size()[arm]} with {arm} ratios" for arm in (RULE, UNIFORM)]
            ours, said = "not every seed gets there", f"{'; '.join(late)} get there"
        else:
            means = [group[group.arm == arm].rounds_to_target.mean() for arm in (RULE, UNIFORM)]
            ours = f"{found.value:.2f} times as fast"
            said = "{:.1f} rounds in the mean against {:.1f}".format(*means)
            said = experiments.open_words(said, found, seed_s(), LARGEST_GAIN)
        interval = "" if found is None or found.interval is None else experiments.interval_words(found)
        yield {"judgement": found, "setting": words, "ours": ours, "said": said, "interval": interval}


def loss(folder: Path, arm: str, larger: bool = False) -> Iterator[Facts]:
    """Yield for each setting an arm's loss less that of uniform ratios; `larger`: it is claimed to be larger."""
    for words, group in settings(folder):
        found, turned = against(group, arm), against(group, UNIFORM, arm)
        if found is not None and turned is not None:
            shown = experiments.shown_words(turned if larger else found, float(group.loss.mean()), seed_s())
            yield {"judgement": found, "setting": words, "shown": shown}


def claims(folder: Path) -> list[Claim]:
    """Return what is claimed of ratios by share, and what became of it."""
    return claim_rows.claims(globals(), folder)


def answer(folder: Path) -> str:
    """Return the answer in three lines; the claims have every number."""
    runs = results(folder)
    largest, means = max(runs["skew"]), sorted(set(runs.mean_ratio))
    speeds = [
        f"{found.value:.2f} times ({found.interval_words}) at {mean:g}"
        for mean in means
        if (found := faster(chosen(runs, False, largest, mean))) is not None
    ]

    def taken(arm: str, feedback: bool) -> str:
        rows = chosen(runs, feedback, largest, means[0])
        least = rows[rows.arm == arm].rounds_to_target
        return f"{least.mean():.1f}" if least.notna().all() else "more than all"

    return (
        f"Where the largest client has {largest:g} times the images of the smallest, DAGC-R's ratios reach "
        f"70 % accuracy sooner than uniform ones of the same mean: {', '.join(speeds) or 'not every seed gets there'} "
        f"(published: 1.25 at most). With error feedback uniform ratios take {taken(UNIFORM, True)} rounds, DAGC-R's "
        f"without it {taken(RULE, False)}."
    )


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    return {
        "answer": experiments.prose(answer(folder)),
        "arms": experiments.markdown_of(table(folder)),
        "claims": claims_table(claims(folder)),
    }


def draw(folder: Path) -> Figure:
    """Draw each arm's loss less that of uniform ratios against the skew, a panel for each mean ratio."""
    runs = results(folder)
    means = sorted(set(runs.mean_ratio), reverse=True)
    figure = Figure(figsize=(9.2, 3.9), layout="constrained")
    row = figure.subplots(1, len(means), squeeze=False, sharey=True)[0]
    for axes, mean in zip(row, means, strict=True):
        skews = sorted(set(runs["skew"]))
        axes.axhline(0, color=style.MUTED, lw=1)
        axes.annotate(
            "uniform ratios", (0, 0), xytext=(2, 3), textcoords="offset points", color=style.MUTED, fontsize=8
        )
        for place, (arm, feedback) in enumerate([(RULE, False), (RELEASED, False), (INVERSE, False), (RULE, True)]):
            points = [
                (skews.index(skew) + 0.06 * (place - 1.5), found)
                for skew in skews
                if skew > 1 and (found := against(chosen(runs, feedback, skew, mean), arm)) is not None
            ]
            for x, found in points:
                if found.interval is not None:
                    axes.plot([x, x], found.interval, color=COLOURS[arm], lw=1.1, alpha=0.8)
            places, values = [x for x, _ in points], [found.value for _, found in points]
            mark, fill = ("D", "none") if feedback else ("o-", COLOURS[arm])
            label = f"{arm}, with error feedback" if feedback else arm
            axes.plot(places, values, mark, color=COLOURS[arm], mfc=fill, label=label)
        axes.set_xticks(range(len(skews)), [f"{skew:g}" for skew in skews])
        axes.set(
            title=f"mean ratio {mean:g}",
            xlabel="largest client's images over the smallest's",
            xlim=(-0.3, len(skews) - 0.7),
        )
    row[0].set_ylabel("test loss less uniform's, nats")
    handles, labels = row[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    style.state(figure, _finding(runs))
    return figure


def _finding(runs: Any) -> str:
    skew = max(runs["skew"])
    ends = [
        f"{-found.value:.2f}"
        for mean in sorted(set(runs.mean_ratio), reverse=True)
        if (found := against(chosen(runs, False, skew, mean), RULE)) is not None
    ]
    return f"Where data are skewed {skew:g} times, DAGC-R's ratios end {' and '.join(ends)} nats lower"


if __name__ == "__main__":
    _, written = experiments.folders(HERE.name, "Figure, claims and the README's blocks.")
    experiments.draw_and_publish(HERE, written, {"gain": draw}, blocks, claims)

"""Draw the figure of dagc and make its tables: `python experiments/dagc/figures.py`.

This reads runs.csv from the output folder, which train.py writes, and published.csv.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas
from matplotlib.figure import Figure

from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiments, style
from testbed.report.claims import Claim, claims_table

HERE = Path(__file__).resolve().parent
COMMAND = "python experiments/dagc/train.py"
UNIFORM, RULE, RELEASED, INVERSE = "uniform", "share^(2/3)", "released code", "share^(-2/3)"
COLOURS = {RULE: "#0072b2", RELEASED: "#e69f00", INVERSE: "#d55e00"}
GROUP = ["feedback", "skew", "mean_ratio"]
LARGEST_GAIN = 1.25
"""Times as fast, at most: published.csv."""
SOURCE = "DAGC, INFOCOM 2023 and IEEE TMC 2024 (arXiv 2311.07324, abstract)"


def seed_s() -> float:
    """Return how long one more seed of two arms takes."""
    return 2 * experiments.training_s(HERE, "runs.csv")


def results(folder: Path) -> Any:
    """Return the runs that count."""
    runs = pandas.read_csv(folder / "runs.csv")
    return runs[runs.use == "result"]


def by_seed(runs: Any, column: str, **where: object) -> dict[int, float]:
    """Return a column of the runs that have these values, by seed."""
    for name, value in where.items():
        runs = runs[runs[name] == value]
    return dict(runs.set_index("seed")[column].dropna().astype(float))


def against_uniform(runs: Any, arm: str, feedback: bool, skew: float, mean: float) -> Judgement | None:
    """Judge that an arm's loss is at most that of uniform ratios; None where one of them was not run."""
    where = {"feedback": feedback, "skew": skew, "mean_ratio": mean}
    ours, base = (by_seed(runs, "loss", arm=each, **where) for each in (arm, UNIFORM))
    return judge("loss", ours, base, 0.0) if ours and base else None


def faster(runs: Any, feedback: bool, skew: float, mean: float) -> Judgement | None:
    """Judge that ratios by share need fewer rounds to the target than uniform ones; None where a run never got
    there.
    """
    where = {"feedback": feedback, "skew": skew, "mean_ratio": mean}
    ours, base = (by_seed(runs, "rounds_to_target", arm=each, **where) for each in (RULE, UNIFORM))
    every = by_seed(runs, "loss", arm=UNIFORM, **where)
    if not every or ours.keys() != every.keys() or base.keys() != every.keys():
        return None
    return judge("speed_up", ours, base, 1.0)


def table(folder: Path) -> Any:
    """Return every arm: means over seeds, and its loss less that of uniform ratios."""
    runs, rows = results(folder), []
    for (feedback, skew, mean), group in runs.groupby(GROUP):
        for arm, part in group.groupby("arm", sort=False):
            found = None if arm == UNIFORM else against_uniform(runs, str(arm), feedback, skew, mean)
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


def claims(folder: Path) -> list[Claim]:
    """Return what is claimed of ratios by share, and what became of it."""
    runs, rows = results(folder), []
    for (feedback, skew, mean), group in runs.groupby(GROUP):
        if RULE not in set(group.arm):
            continue
        memory = "with" if feedback else "without"
        setting = f"largest client {skew:g} times the smallest, mean ratio {mean:g}, {memory} error feedback"
        found = faster(runs, feedback, skew, mean)
        late = []
        for arm in (RULE, UNIFORM):
            reached = group[group.arm == arm].rounds_to_target.notna()
            late.append(f"{int(reached.sum())} of {len(reached)} with {arm} ratios")
        rows.append(
            Claim(
                claim=f"DAGC-R's ratios reach 70 % accuracy in fewer rounds than uniform ones ({setting})",
                source=SOURCE,
                published="1.25 times as fast at most",
                ours="not every seed gets there" if found is None else f"{found.value:.2f} times as fast",
                interval=""
                if found is None or found.interval is None
                else f"{found.interval_words}, 95 %, {found.n} seeds",
                verdict="not resolved" if found is None or found.verdict is None else found.verdict,
                why=f"{'; '.join(late)} get there" if found is None else _rounds_words(group, found),
                command=COMMAND,
            )
        )
        loss = against_uniform(runs, RULE, feedback, skew, mean)
        assert loss is not None
        rows.append(
            Claim(
                claim=f"DAGC-R's ratios end at a smaller loss than uniform ones ({setting})",
                source="ours, after DAGC",
                ours=f"{loss.value:+.3f} nats",
                interval=experiments.interval_words(loss),
                verdict=loss.verdict or "not resolved",
                why=experiments.shown_words(loss, float(group.loss.mean()), seed_s()),
                command=COMMAND,
            )
        )
        if (control := against_uniform(runs, INVERSE, feedback, skew, mean)) is not None:
            worse = judge("loss", by_seed(group, "loss", arm=UNIFORM), by_seed(group, "loss", arm=INVERSE), 0.0)
            rows.append(
                Claim(
                    claim=f"The inverse rule, a control, ends at a larger loss than uniform ratios ({setting})",
                    source="ours",
                    ours=f"{control.value:+.3f} nats",
                    interval=experiments.interval_words(control),
                    verdict=worse.verdict or "not resolved",
                    why=experiments.shown_words(worse, float(group.loss.mean()), seed_s()),
                    command=COMMAND,
                )
            )
    return rows


def _rounds_words(group: Any, found: Judgement) -> str:
    ours, base = (group[group.arm == arm].rounds_to_target.mean() for arm in (RULE, UNIFORM))
    return experiments.open_words(f"{ours:.1f} rounds in the mean against {base:.1f}", found, seed_s(), LARGEST_GAIN)


def answer(folder: Path) -> str:
    """Return the answer in three lines; the claims have every number."""
    runs = results(folder)
    largest, means = max(runs["skew"]), sorted(set(runs.mean_ratio))
    speeds = [
        f"{found.value:.2f} times ({found.interval_words}) at {mean:g}"
        for mean in means
        if (found := faster(runs, False, largest, mean)) is not None
    ]

    def rounds(arm: str, feedback: bool) -> str:
        rows = runs[(runs.arm == arm) & (runs.feedback == feedback) & (runs["skew"] == largest)]
        least = rows[rows.mean_ratio == means[0]].rounds_to_target
        return f"{least.mean():.1f}" if least.notna().all() else "more than all"

    return (
        f"Where the largest client has {largest:g} times the images of the smallest, DAGC-R's ratios reach "
        f"70 % accuracy sooner than uniform ones of the same mean: {', '.join(speeds) or 'not every seed gets there'} "
        f"(published: 1.25 at most). With error feedback uniform ratios take {rounds(UNIFORM, True)} rounds, DAGC-R's "
        f"without it {rounds(RULE, False)}."
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
                if skew > 1 and (found := against_uniform(runs, arm, feedback, skew, mean)) is not None
            ]
            for x, found in points:
                if found.interval is not None:
                    axes.plot([x, x], found.interval, color=COLOURS[arm], lw=1.1, alpha=0.8)
            label = f"{arm}, with error feedback" if feedback else arm
            axes.plot(
                [x for x, _ in points],
                [found.value for _, found in points],
                "o-" if not feedback else "D",
                color=COLOURS[arm],
                mfc="none" if feedback else COLOURS[arm],
                label=label,
            )
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
        if (found := against_uniform(runs, RULE, False, skew, mean)) is not None
    ]
    return f"Where data are skewed {skew:g} times, DAGC-R's ratios end {' and '.join(ends)} nats lower"


def main() -> int:
    """Write the figure, claims.csv and the README's blocks."""
    _, output = experiments.folders(HERE.name, "Figure, claims and the README's blocks.")
    experiments.draw_and_publish(HERE, output, {"gain": draw}, blocks, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main())

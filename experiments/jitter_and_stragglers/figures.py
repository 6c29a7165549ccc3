"""Generates the figure, cells.csv, claims.csv and README blocks of jitter_and_stragglers.

python -m testbed sweep jitter_and_stragglers
python experiments/jitter_and_stragglers/figures.py [--results results/jitter_and_stragglers] [--output FOLDER]
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import testbed
from testbed import results
from testbed.metrics.statistics import Interval, of_ratios
from testbed.metrics.verdicts import judge_ratio
from testbed.report import experiments, plots, publishing, style
from testbed.report.claim_rows import Facts

ARM = ["profile", "schedule", "codec"]
WAYS = ["constant", "lognormal, cv 0.1", "lognormal, cv 0.3", "exponential, cv 0.5", "2 % x 5"]
FEW, MORE = "1f1b, 4 in flight", "1f1b, 6 in flight"
PAIR_S = 9.4
"""Processor time of one more seed of two arms: 28 plays took 131 s."""
LINES = {"gpipe": "-", FEW: ":", MORE: "--"}


def write(home: Path, output: Path) -> None:
    """Write a row for each run: its mean step, alone and relative to constant durations, and the seed of its draws."""
    frame, steps = experiments.runs_frame(home), testbed.steps(home)
    steps = steps[steps.measured].groupby(experiments.RUN).step_s.mean().rename("mean_step_s")
    frame = frame.rename(columns={"pipeline.schedule": "schedule", "compute": "durations"}).join(steps, experiments.RUN)
    frame.loc[frame.schedule == "1f1b", "schedule"] += ", " + frame["pipeline.in_flight"].astype(str) + " in flight"
    said = frame.durations.str.extract(r"(lognormal.*|exponential.*)\)$|(2 %)")
    frame["durations"] = said[0].fillna(said[1] + " x 5").fillna(WAYS[0])
    frame["draws"] = [results.Run(home / folder).lab.link_seed for folder in frame.folder]
    constant = frame[frame.durations == WAYS[0]].set_index(ARM).mean_step_s.rename("constant_s")
    frame = (
        frame.join(constant, ARM).eval("longer = mean_step_s / constant_s").sort_values([*ARM, "durations", "draws"])
    )
    columns = [*ARM, "durations", "draws", "mean_step_s", "longer", "efficiency"]
    frame[columns].to_csv(output / "cells.csv", index=False, float_format="%.6g")


def by_seed(folder: Path, value: str) -> Any:
    """Return a column of cells.csv: a row for each seed, a column for each arm and way in which durations vary."""
    return pd.read_csv(folder / "cells.csv").pivot(index="draws", columns=[*ARM, "durations"], values=value).ffill()


def kept(folder: Path, ours: str, base: str, least: float = 1, value: str = "longer") -> Iterator[Facts]:
    """Yield, for each link, the smallest share that a codec or schedule keeps of its speed-up with constant durations
    over another one, paired by the seed; of `mean_step_s` instead, the smallest speed-up. Its interval is that of the
    smallest of all arms, which share the 5 % (Bonferroni).
    """
    longer = by_seed(folder, value)
    for profile in longer.columns.unique("profile"):
        arms = [arm for arm in longer if arm[0] == profile and ours in arm and arm[3] != WAYS[0]]
        others = [longer[tuple(base if part == ours else part for part in arm)] for arm in arms]
        ratios = [list(other / longer[arm]) for other, arm in zip(others, arms, strict=True)]
        shares = [of_ratios(each, "seed", len(arms)) for each in ratios]
        share, arm = min(zip(shares, arms, strict=True), key=lambda pair: pair[0].value)
        ends = [each.interval for each in shares if each.interval is not None]
        if ends:
            share = share._replace(interval=Interval(*map(min, zip(*ends, strict=True))))
        low, high = share.interval or (None, None)
        where = " and ".join(part for part in arm[1:] if part != ours)
        sure = f"{experiments.sure_words(share)}, {len(arms)} arms"
        why = experiments.open_words(f"least with {where}", judge_ratio(share, least), PAIR_S)
        yield {"profile": profile, "why": why, "value": share.value, "low": low, "high": high, "interval": sure}


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    longer = 100 * (by_seed(folder, "longer").mean() - 1)
    said = (
        "Over {}, drawn durations make steps up to {:.0f} % longer. int8 keeps {:.0f} % or more of its speed-up over "
        "fp32, GPipe {:.0f} % of that over 1F1B with 4 in flight; at worst it is {:.2f} times as fast as 1F1B with 6."
    )
    facts = kept(folder, "int8", "fp32"), kept(folder, "gpipe", FEW), kept(folder, "gpipe", MORE, 1, "mean_step_s")
    words = [
        said.format(a["profile"], longer[a["profile"]].max(), 100 * a["value"], 100 * b["value"], c["value"])
        for a, b, c in zip(*facts, strict=True)
    ]
    table = longer.unstack("durations")[WAYS[1:]].map("{:+.1f} %".format)
    return {"answer": experiments.prose(" ".join(words)), "steps": table.reset_index()}


def draw(folder: Path) -> Any:
    """Draw the speed-up of each arm over 1F1B with fp32 under the same draws."""
    steps, looks = by_seed(folder, "mean_step_s"), style.looks(["fp32", "bf16", "int8"])
    figure, (row,) = plots.panels(1, len(profiles := steps.columns.unique("profile")), (9.2, 4.4))
    for axes, profile in zip(row, profiles, strict=True):
        for schedule, codec in steps[profile].columns.droplevel("durations").unique():
            pairs = [(steps[profile, FEW, "fp32", way], steps[profile, schedule, codec, way]) for way in WAYS]
            points, look = enumerate(of_ratios(list(base / arm), "seed") for base, arm in pairs), looks[codec]
            words = {"label": f"{codec}, {schedule}", "line": LINES[schedule]}
            plots.estimates(axes, points, look.colour, look.marker, ms=4, **words)
        axes.set(title=profile, ylabel=f"speed-up over fp32, {FEW}")
        axes.set_xticks(range(len(WAYS)), [way.replace(", ", "\n") for way in WAYS])
    pairs = ("GPipe", "gpipe", FEW), ("int8", "int8", "fp32")
    lost = {name: 100 - 100 * min(each["value"] for each in kept(folder, *pair)) for name, *pair in pairs}
    takes = " and ".join(f"{share:.0f} % of the speed-up of {name}" for name, share in lost.items())
    finding = f"Durations that vary take up to {takes}"
    plots.finish(figure, finding, legend=row[0], columns=3)
    return figure


FIGURES = {"speed-up": draw}

if __name__ == "__main__":
    publishing.run(globals())

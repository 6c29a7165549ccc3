"""Generates the figure, summary.csv, steps.csv, claims.csv and README blocks of varying_links.

python -m testbed sweep varying_links
python experiments/varying_links/figures.py [--results results/varying_links] [--output FOLDER]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

import testbed
from testbed import results
from testbed.metrics.statistics import IntervalEstimate, of_ratios
from testbed.metrics.verdicts import judge_ratio
from testbed.report import experiments, plots, publishing, style
from testbed.report.claim_rows import Facts

SUMMARY, STEPS = "summary.csv", "steps.csv"
CHOICES = ("mild", "middle", "strong")
BASELINE = "bf16"
ADAPTIVE = "adaptive"
PAIR_S = 145.0
"""Seconds for one more seed of the links: 140 s for a live run in the guest, 5 s for a played one; measured on
2026-11-23."""


def runs(home: Path) -> Any:
    """Return a row for each run: the mean of its steps in seconds, its loss, and the shares of its messages sent with
    each of the codecs among which it chooses.
    """
    frame = experiments.runs_frame(home)
    trained = experiments.curves(home)
    ends = (
        trained[trained.phase == "train"]
        .groupby(experiments.RUN)
        .agg(trained_s=("end_s", "max"), trained_steps=("step", "size"))
    )
    frame = frame.merge(ends.reset_index(), on=experiments.RUN)
    rows = []
    for row in frame.itertuples():
        sent = [message for step in results.Run(home / row.folder).steps(0) for message in step.sent]
        chosen, bits = Counter(message.choice for message in sent), [0, 0]
        for message in sent:
            bits[0] += message.payload_bytes
            bits[1] += message.raw_bytes
        rows.append(
            {
                "network": row.network,
                "codec": row.codec,
                "timing": row.timing,
                "run": row.run,
                "steps": row.trained_steps,
                "mean_step_s": row.trained_s / row.trained_steps,
                "validation_loss": row.validation_loss,
                "bits_per_value": 32 * bits[0] / bits[1] if bits[1] else None,
                **{name: chosen[name] / len(sent) if chosen[name] else 0.0 for name in CHOICES},
            }
        )
    return pd.DataFrame(rows).sort_values(["network", "codec", "run"])


def first_steps(home: Path) -> Any:
    """Return the steps of each cell's first run: when they ended and how long they took, in seconds."""
    frame = experiments.runs_frame(home)
    steps = testbed.steps(home).sort_values([*experiments.RUN, "begin_s"])
    steps = steps[steps.phase == "train"]
    steps = steps.assign(end_s=steps.groupby(experiments.RUN).step_s.cumsum())
    first = frame[frame.run == frame.groupby("cell_id").run.transform("min")]
    columns = ["network", "codec", "step", "end_s", "step_s"]
    return first[[*experiments.RUN, "network", "codec"]].merge(steps, on=experiments.RUN)[columns]


def ratio(frame: Any, network: str, ours: str, base: str) -> IntervalEstimate:
    """Return the ratio of the training times of `base` and `ours` over a network, paired by the links' seed."""
    part = frame[frame.network == network].pivot_table(index="run", columns="codec", values="mean_step_s")
    pairs = part[[ours, base]].dropna()
    return of_ratios(list(pairs[base] / pairs[ours]), "link seed")


def arms(frame: Any, network: str) -> tuple[str, str]:
    """Return the fastest adaptive codec, and the fastest other one."""
    means = frame[frame.network == network].groupby("codec").mean_step_s.mean()
    chooses = means.index.str.startswith(ADAPTIVE)
    return str(means[chooses].idxmin()), str(means[~chooses].idxmin())


def table(folder: Path) -> Any:
    """Return a row for each network and codec."""
    frame, rows = pd.read_csv(folder / SUMMARY), []
    for (network, codec), part in frame.groupby(["network", "codec"]):
        speed = None if codec == BASELINE else ratio(frame, network, codec, BASELINE)
        rows.append(
            {
                "links": network,
                "codec": codec,
                "mean step": f"{part.mean_step_s.mean():.3f} s",
                f"speed-up over {BASELINE}": speed and experiments.with_ends(speed, "{:.2f}", unit="x"),
                "bits per value": f"{part.bits_per_value.mean():.1f}",
                "bf16, int8, int4": ", ".join(f"{100 * part[name].mean():.0f} %" for name in CHOICES)
                if codec.startswith(ADAPTIVE)
                else None,
                "loss": f"{part.validation_loss.mean():.3f}" if part.validation_loss.notna().all() else None,
            }
        )
    return pd.DataFrame(rows)


def faster(folder: Path, least: float, over: str = "") -> Iterator[Facts]:
    """Yield, for each network, the speed-up of training with the adaptive codec over another; if none is named, over
    the fastest non-adaptive one.
    """
    frame = pd.read_csv(folder / SUMMARY)
    for network in frame.network.unique():
        follows, stays = arms(frame, network)
        found = ratio(frame, network, follows, over or stays)
        low, high = found.interval or (found.value, found.value)
        bits = frame[frame.network == network].groupby("codec").bits_per_value.mean()
        sent = f"it sends {bits[follows]:.1f} bits per value, {stays} {bits[stays]:.1f}"
        judged = judge_ratio(found, least)
        yield {
            "judgement": judged,
            "network": network,
            "follows": follows,
            "stays": stays,
            "seeds": f"{low:.2f} to {high:.2f}, 95 %, {found.n} seeds of the links",
            "shown": experiments.open_words(sent, judged, PAIR_S),
        }


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README."""
    frame, said = pd.read_csv(folder / SUMMARY), []
    for network in frame.network.unique():
        follows, stays = arms(frame, network)
        said.append(
            f"Over {network}, {follows} is {ratio(frame, network, follows, BASELINE).value:.2f} times as fast as "
            f"{BASELINE} and {ratio(frame, network, follows, stays).value:.2f} times as fast as {stays}, the fastest "
            "non-adaptive codec."
        )
    return {
        "answer": experiments.prose(" ".join(said)),
        "runs": table(folder),
    }


def draw(folder: Path) -> Any:
    """Draw the time of each step over time, on each network: of the baseline, and of the fastest codec that adapts and
    that does not.
    """
    frame = pd.read_csv(folder / STEPS)
    networks = list(frame.network.unique())
    looks, runs_of, said = style.looks(frame.codec.unique()), pd.read_csv(folder / SUMMARY), []
    figure, rows = plots.panels(len(networks), 1, (8.2, 2.5 * len(networks)))
    for axes, network in zip(rows[:, 0], networks, strict=True):
        follows, stays = arms(runs_of, network)
        least = ratio(runs_of, network, follows, stays)
        said.append(f"{experiments.with_ends(least, '{:.2f}')} times as fast over {network}")
        for codec in dict.fromkeys((BASELINE, follows, stays)):
            look, part = looks[codec], frame[(frame.network == network) & (frame.codec == codec)]
            axes.step(part.end_s, part.step_s, where="pre", color=look.colour, ls=look.dash, lw=1.5, label=codec)
        axes.set_title(network)
        axes.set(ylabel="step, s", ylim=(0, None), xlim=(0, None))
    rows[-1, 0].set_xlabel("seconds of training")
    title = f"Adapting, against the best fixed codec: {said[0]}" + "".join(f",\n{words}" for words in said[1:])
    plots.finish(figure, title, rows[0, 0], "lower center", columns=3)
    return figure


FIGURES = {"steps": draw}


def write(results: Path, output: Path) -> None:
    """Write the CSVs of a sweep's results."""
    runs(results).to_csv(output / SUMMARY, index=False, float_format="%.6g")
    first_steps(results).to_csv(output / STEPS, index=False, float_format="%.6g")


if __name__ == "__main__":
    publishing.run(globals())

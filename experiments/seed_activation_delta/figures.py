"""Make the tables, the summary and the figures of seed_activation_delta: `python
experiments/seed_activation_delta/figures.py`.

This reads the results of the sweep, redundancy.csv from the output folder if it is there (redundancy.py writes it), and
published.csv: what the authors of activation delta (Bedoya and Zhang) report of 20 steps of one run each, without a
network, with bytes by formula.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

import testbed
from testbed.report import experiments, style
from testbed.report.canvas import HOLLOW_DASH, Handle, canvas
from testbed.report.collect import codec_order
from testbed.report.lines import window
from testbed.report.remarks import labelled
from testbed.workloads import models

HERE = Path(__file__).resolve().parent
RUN = experiments.RUN
ARM = ["model", "batches", "profile", "codec"]
PAIR = ["model", "batches", "profile", "seed"]
BASELINE, UNSHAPED = "fp32", "datacenter"
FRESH, REPEATED = "fresh", "repeated"
MB = 1e6


# ------------------------------------------------------------------ results
def measured(folder: Path) -> tuple[Any, Any]:
    """Return (a row per run, the curves of all runs), both with model and batches; see `runs_frame` and `curves`."""
    runs = experiments.runs_frame(folder)
    repeated = (runs["workload.training_sequences"] == runs["workload.batch_size"]).fillna(False).astype(bool)
    runs = runs.assign(model=runs["workload.model"], batches=np.where(repeated, REPEATED, FRESH))
    curves = experiments.curves(folder).merge(runs[[*RUN, "model", "batches"]], on=RUN)
    train = curves[curves.phase == "train"].sort_values("step").groupby(RUN)
    whole = {
        "mean_train_loss": train.loss.mean(),
        "last_train_loss": train.loss.last(),
        "mean_step_s": train.end_s.max() / train.step.count(),
        "total_s": train.end_s.max(),
    }
    runs = runs.merge(pandas.DataFrame(whole).join(moved(folder)), left_on=RUN, right_index=True)
    runs = runs.merge(late_losses(curves), left_on=RUN, right_index=True)
    less = {"difference": less_fp32(runs, "validation_loss"), "train_difference": less_fp32(runs, "late_loss")}
    return runs.assign(**less), curves


def less_fp32(runs: Any, value: str) -> Any:
    """Return the difference of each run's value from fp32 with the same model, batches, network and seed."""
    base = runs[runs.codec == BASELINE].drop_duplicates(PAIR).set_index(PAIR)[value]
    return runs[value] - base.reindex(pandas.MultiIndex.from_frame(runs[PAIR])).to_numpy()


def late_losses(curves: Any) -> Any:
    """Return the mean training loss of each run's last quarter of steps, because one step's loss is one batch's."""
    train = curves[curves.phase == "train"]
    late = train[train.step >= 0.75 * (train.groupby(RUN).step.transform("max") + 1)]
    return late.groupby(RUN).loss.mean().rename("late_loss")


def moved(folder: Path) -> Any:
    """Return the megabytes of all training steps of each run: payloads forward, payloads both ways, and IP packets.

    Of two stages the first sends activations only, the second their gradients only. Packets are counted from one record
    to the next, so the first step has no number; it is taken for a mean one.
    """
    steps = testbed.steps(folder, by_stage=True)
    stages = steps[steps.phase == "train"].groupby([*RUN, "stage"])
    of_stage = stages.agg(
        payload=("sent_payload_bytes", "sum"), wire=("sent_wire_bytes", "mean"), steps=("step", "count")
    )
    of_stage = of_stage.assign(wire=of_stage.wire * of_stage.steps) / MB
    both = of_stage.groupby(level=RUN).sum()
    return pandas.DataFrame(
        {"forward_mb": of_stage.payload.xs(0, level="stage"), "both_mb": both.payload, "wire_mb": both.wire}
    )


def summarised(runs: Any) -> Any:
    """Return one row per arm, small models first: means over its runs, and the spread of what differs between seeds."""
    rows = runs.groupby(ARM, sort=False)
    losses = [
        "mean_train_loss",
        "last_train_loss",
        "validation_loss",
        "uncompressed_loss",
        "difference",
        "train_difference",
    ]
    means = rows[[*losses, "mean_step_s", "step_s", "total_s", "forward_mb", "both_mb", "wire_mb"]].mean()
    means["validation_low"], means["validation_high"] = rows.validation_loss.min(), rows.validation_loss.max()
    means["difference_low"], means["difference_high"] = rows.difference.min(), rows.difference.max()
    means["seeds"], means["steps"], means["certified"] = rows.seed.nunique(), rows.steps.first(), rows.certified.all()
    means = means.reset_index()
    sizes = list(models.SIZES)
    place = [
        (sizes.index(row.model), row.batches, row.profile != UNSHAPED, codec_order(row.codec))
        for row in means.itertuples()
    ]
    return means.iloc[sorted(range(len(place)), key=place.__getitem__)].reset_index(drop=True)


def speed_up(rows: Any, value: str) -> Any:
    """Return fp32's time over each row's, on the same model, batches and network."""
    keys = ["model", "batches", "profile"]
    base = rows[rows.codec == BASELINE].set_index(keys)[value]
    return base.reindex(pandas.MultiIndex.from_frame(rows[keys])).to_numpy() / rows[value]


# ------------------------------------------------------------------ tables
def published_table(arms: Any) -> Any:
    """Return the published rows, then ours of the largest model, which in the full form is theirs."""
    ours = arms[arms.model == arms.model.iloc[-1]]
    ours = ours.assign(speed_up=speed_up(ours, "mean_step_s"), certificate=np.where(ours.certified, "pass", "FAIL"))
    theirs = pandas.read_csv(HERE / "published.csv").assign(profile="published: none")
    theirs["speed_up"] = theirs.mean_step_s.iloc[0] / theirs.mean_step_s
    rows = pandas.concat([theirs, ours], ignore_index=True)
    return pandas.DataFrame(
        {
            "network": rows.profile,
            "batches": rows.batches,
            "codec": rows.codec.map(labelled),
            "mean train loss": rows.mean_train_loss.round(3),
            "last train loss": rows.last_train_loss.round(3),
            "validation loss": rows.validation_loss.astype(float).round(3),
            "mean step, s": rows.mean_step_s.round(3),
            "total, s": rows.total_s.round(1),
            "speed-up": rows.speed_up.round(2),
            "forward MB": rows.forward_mb.round(2),
            "both ways MB": rows.both_mb.round(2),
            "wire MB": rows.wire_mb.round(2),
            "certificates": rows.certificate,
        }
    )


def long_table(arms: Any) -> Any:
    """Return our rows of the smallest model: losses after the same tokens, compared with fp32 pair by pair."""
    rows = arms[arms.model == arms.model.iloc[0]]
    four = "{:.4f}".format
    spread = [f"{low:+.4f} to {high:+.4f}" for low, high in zip(rows.difference_low, rows.difference_high, strict=True)]
    return pandas.DataFrame(
        {
            "network": rows.profile,
            "batches": rows.batches,
            "codec": rows.codec.map(labelled),
            "seeds": rows.seeds,
            "last train loss": rows.last_train_loss.map(four),
            "last quarter's train loss vs fp32": rows.train_difference.map("{:+.4f}".format),
            "validation loss": rows.validation_loss.map(four),
            "without the codec": rows.uncompressed_loss.astype(float).map(four),
            "vs fp32": rows.difference.map("{:+.4f}".format),
            "of each seed": spread,
            "median step, ms": (1e3 * rows.step_s).round(1),
            "speed-up": speed_up(rows, "step_s").round(2),
            "wire MB": rows.wire_mb.round(1),
            "certificates": np.where(rows.certified, "pass", "FAIL"),
        }
    )


def redundancy_table(ratios: Any) -> Any:
    """Return what is left of a tensor minus an earlier one, and what int8 makes of both at the smallest gap."""
    key = ["tensor", "step", "batches"]
    mean = ratios.groupby([*key, "gap"], sort=False).mean().reset_index()
    wide = mean.pivot(index=key, columns="gap", values="norm_ratio").round(3)
    wide.columns = [f"gap {gap}" for gap in wide.columns]
    least = mean[mean.gap == mean.gap.min()].set_index(key)
    wide["int8 error"], wide["error of the difference"] = least.int8_error, least.delta_error
    wide["int8 bits, packed"], wide["bits of the difference"] = least.int8_bits.round(2), least.delta_bits.round(2)
    wide = wide.reset_index()
    return wide.assign(step=wide.step + 1).sort_values(["tensor", "step"], ascending=[False, True], kind="stable")


# ------------------------------------------------------------------ figures
def legend_of(codecs: list[str], runs: Any, *, bars: bool = False) -> list[Handle]:
    """Return one entry per codec, and what hollow means where something is."""
    looks = style.looks(codecs)
    handles: list[Handle] = [
        Patch(facecolor=look.colour, label=labelled(codec))
        if bars
        else Line2D([], [], color=look.colour, ls=look.dash, marker=look.marker, label=labelled(codec))
        for codec, look in ((codec, looks[codec]) for codec in codecs)
    ]
    if not runs.certified.all():
        handles.append(Patch(facecolor="none", edgecolor=style.INK, ls=HOLLOW_DASH, label="hollow: not certified"))
    return handles


LOSS_WORDS = """\
Lines: training loss, the mean of the steps around each where there are many. Markers: validation loss, the codec in \
place; its differences are between validation batches, and an error adds up anew. Bands and upright lines: from the \
lowest to the highest seed. Right: the difference from fp32 of the same seed; above 0 is worse. A loss does not \
depend on the network.
"""


def loss_figure(runs: Any, curves: Any) -> Figure:
    """Draw, for each model and kind of batch, losses against steps and their difference from fp32's."""
    codecs = sorted(set(runs.codec), key=codec_order)
    looks = style.looks(codecs)
    settings = list(runs[["model", "batches"]].drop_duplicates().itertuples(index=False, name=None))
    words = LOSS_WORDS + experiments.caption(runs)
    figure, panels = canvas("Loss against steps", 1.9, legend_of(codecs, runs), words, 2 * len(settings), columns=2)
    for row, (model, batches) in enumerate(
        sorted(settings, key=lambda setting: (list(models.SIZES).index(setting[0]), setting[1]))
    ):
        left, right = panels[2 * row : 2 * row + 2]
        of_setting = curves[(curves.model == model) & (curves.batches == batches)]
        train, tested = by_seed(of_setting, "train"), by_seed(of_setting, "evaluation")
        for codec in [codec for codec in codecs if codec in train]:
            look = looks[codec]
            sound = runs[(runs.model == model) & (runs.batches == batches) & (runs.codec == codec)].certified.all()
            for axes, base in ((left, None), (right, BASELINE)):
                lines, points = (frames[codec] - (frames[base] if base else 0) for frames in (train, tested))
                smooth = lines.rolling(window(lines.index), center=True, min_periods=1).mean()
                experiments.band(axes, smooth.index, smooth.T.to_numpy(), look.colour, codec, dash=look.dash, lw=1.3)
                axes.vlines(points.index, points.min(axis=1), points.max(axis=1), color=look.colour, lw=1)
                face = look.colour if sound else style.PAPER
                axes.plot(
                    points.index,
                    points.mean(axis=1),
                    ls="none",
                    marker=look.marker,
                    ms=4.5,
                    color=look.colour,
                    mfc=face,
                )
        left.set_title(f"{model}, {'a new batch each step' if batches == FRESH else 'one batch again and again'}")
        left.set_ylabel("loss, nats per token")
        right.set_title("difference from fp32")
    for axes in panels[-2:]:
        axes.set_xlabel("optimiser steps")
    return figure


def by_seed(curves: Any, phase: str) -> dict[str, Any]:
    """Return a frame per codec: a row per step, a column per seed. A seed's losses are the same over every network."""
    of_phase = curves[curves.phase == phase]
    return {
        codec: rows.pivot_table(index="step", columns="seed", values="loss")
        for codec, rows in of_phase.groupby("codec")
    }


TIME_WORDS = """\
Hatched: as published, forward payload by formula, no network. Left: the mean of all steps, the first one too, as \
published; in brackets all steps together. Right: of all steps, payload forward (full colour), backward (paler), what \
IP packets add (palest).
"""


def time_figure(runs: Any, arms: Any) -> Figure:
    """Draw what a step took and what it moved, beside what was published."""
    ours = arms[(arms.model == arms.model.iloc[-1]) & (arms.batches == FRESH)]
    codecs, looks = sorted(set(ours.codec), key=codec_order), style.looks(arms.codec)
    chosen = runs[(runs.model == ours.model.iloc[0]) & (runs.batches == FRESH)]
    legend, words = legend_of(codecs, chosen, bars=True), TIME_WORDS + experiments.caption(chosen)
    title, height = (
        f"Time and bytes: {ours.model.iloc[0]}, {ours.steps.iloc[0]} steps on new batches",
        0.23 * (len(ours) + 2),
    )
    figure, (left, right) = canvas(title, height, legend, words, 2, columns=2, left=1.45)
    names: list[str] = []
    hatched: dict[str, Any] = {"color": style.RULE, "hatch": "///", "edgecolor": style.MUTED}
    for row in pandas.read_csv(HERE / "published.csv").itertuples():
        left.barh(len(names), row.mean_step_s, **hatched)
        right.barh(len(names), row.forward_mb, **hatched)
        number(left, len(names), row.mean_step_s, f"{row.mean_step_s:.2f} s ({row.total_s:.0f} s)")
        number(right, len(names), row.forward_mb, f"{row.forward_mb:.1f} MB")
        names.append(f"published, {'fp32' if row.codec == BASELINE else 'delta'}")
    for row in ours.itertuples():
        place, colour = len(names), looks[row.codec].colour
        part(left, place, 0, row.mean_step_s, colour, 1.0, certified=row.certified)
        ends = (0, row.forward_mb, row.both_mb, row.wire_mb)
        for low, high, opacity in zip(ends, ends[1:], (1.0, 0.55, 0.25), strict=False):
            part(right, place, low, high, colour, opacity, certified=row.certified)
        number(left, place, row.mean_step_s, f"{row.mean_step_s:.2f} s ({row.total_s:.0f} s)")
        number(right, place, row.wire_mb, f"{row.wire_mb:.1f} MB")
        names.append("" if names[-1] in (row.profile, "") and row.codec != codecs[0] else row.profile)
    for axes, label in ((left, "mean step, s"), (right, "all steps, MB")):
        axes.set_yticks(range(len(names)), names if axes is left else [])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1.35 * axes.dataLim.x1)
        axes.set_xlabel(label)
    return figure


def part(axes: Axes, place: int, low: float, high: float, colour: str, opacity: float, *, certified: bool) -> None:
    """Draw a part of a bar; hollow where a run has no certificate."""
    look: dict[str, Any] = (
        {"facecolor": colour, "alpha": opacity} if certified else {"facecolor": "none", "edgecolor": colour}
    )
    axes.barh(place, high - low, left=low, ls=HOLLOW_DASH, **look)


def number(axes: Axes, place: int, end: float, text: str) -> None:
    """Write words after a bar's end."""
    axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", size=7.8)


REDUNDANCY_WORDS = """\
GPT-2 mini at its one boundary, fp32, trained in one process without a network, settings of sweep.toml, mean of 5 \
consecutive steps; seeds {seeds}. Above the line at 1 the difference is larger than the tensor. Activation delta \
sends the difference at gap 1. The batch that is not learned is of the validation split.
"""


def redundancy_figure(ratios: Any) -> Figure:
    """Draw |X_t - X_(t-gap)| / |X_t| against the gap, a panel for each moment."""
    names, moments, gaps = (
        list(ratios.batches.drop_duplicates()),
        sorted(ratios.step.unique()),
        sorted(ratios.gap.unique()),
    )
    looks = style.looks(names)
    legend: list[Handle] = [
        Line2D([], [], color=looks[name].colour, ls=looks[name].dash, marker=looks[name].marker, label=name)
        for name in names
    ]
    legend.append(Line2D([], [], color=style.INK, ls=":", label="dotted: gradients, G"))
    words = REDUNDANCY_WORDS.format(seeds=", ".join(map(str, sorted(ratios.seed.unique()))))
    title = "How much a tensor differs from an earlier one at its boundary"
    figure, panels = canvas(title, 2.6, legend, words, len(moments), columns=len(moments))
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    for axes, moment in zip(panels, moments, strict=True):
        for (batches, tensor), rows in ratios[ratios.step == moment].groupby(["batches", "tensor"]):
            look, by_gap = looks[batches], rows.pivot_table(index="gap", columns="seed", values="norm_ratio")
            drawn = {"dash": look.dash, "marker": look.marker} if tensor == "X" else {"dash": ":", "marker": "none"}
            experiments.band(axes, by_gap.index, by_gap.T.to_numpy(), look.colour, batches, ms=4.5, **drawn)
        axes.axhline(1, color=style.INK, lw=0.9)
        axes.set_title(f"after {moment + 1} steps")
        axes.set(xscale="log", yscale="log", xlabel="gap, steps", xlim=(0.9 * gaps[0], 1.1 * gaps[-1]))
        axes.set_ylim(0.8 * ratios.norm_ratio.min(), 1.25 * ratios.norm_ratio.max())
        axes.xaxis.set_major_locator(FixedLocator(gaps))
        axes.yaxis.set_major_locator(FixedLocator([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10]))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(plain)
            axis.set_minor_locator(NullLocator())
    for axes in panels[1:]:  # the panels share the axis
        axes.tick_params(labelleft=False)
    panels[0].set_ylabel("|difference| / |tensor|")
    return figure


def main() -> int:
    """Write summary.csv and the figures, print the tables."""
    results, output = experiments.folders(HERE.name, __doc__ or "")
    runs, curves = measured(results)
    arms = summarised(runs)
    arms.to_csv(output / "summary.csv", index=False, float_format="%.6g", lineterminator="\n")
    tables = [published_table(arms), long_table(arms)]
    with style.applied():
        drawn = {"loss": loss_figure(runs, curves), "time-bytes": time_figure(runs, arms)}
        if (path := output / "redundancy.csv").exists():
            ratios = pandas.read_csv(path)
            drawn["redundancy"] = redundancy_figure(ratios)
            tables.append(redundancy_table(ratios))
    for name, figure in drawn.items():
        experiments.save_figure(figure, output, name)
    print("\n\n".join(experiments.markdown_of(table) for table in tables))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())

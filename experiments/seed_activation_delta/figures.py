"""Make the CSVs, the figures, the claims and the README's generated blocks of seed_activation_delta: `python
experiments/seed_activation_delta/figures.py`.

This reads the results of the sweep, redundancy.csv from the output folder if it is there (redundancy.py writes it), and
published.csv: what the authors of activation delta (Bedoya and Zhang) report of 20 steps of one run each, without a
network, with bytes by formula.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
from testbed.report import experiment_tables, experiments, style
from testbed.report.canvas import HOLLOW_DASH, Handle, canvas
from testbed.report.claims import EXACT, Claim, Verdict, claims_table
from testbed.report.collect import codec_order
from testbed.report.lines import window
from testbed.report.numbers import percent
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
        experiments.floor_line(left, runs[runs.model == model])
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
    figure, (left, right) = canvas(title, height, legend, words, 2, columns=2)
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


# ------------------------------------------------------------------ from the CSVs alone
DELTA, AS_PUBLISHED, INT8, OPEN = "delta-int8", "fwd=delta-int8, bwd=fp32", "int8", "delta-open(int8)"
CLOSED_4, OPEN_4 = "delta(int4)", "delta-open(int4)"
SHAPED, SHAPED_BPS = "consumer-80mbps", 80e6
SOURCE = "Bedoya and Zhang, activation delta, as in published.csv (second-hand)"
COMMAND = f"python -m testbed reproduce {HERE.name}"
SAME_LOSS = 0.01
"""Of fp32's loss: what "the same loss" may mean at most."""


def claims(folder: Path) -> list[Claim]:
    """Return what the CSVs of a folder say of the claims; those whose arms they lack are left out."""
    arms = pandas.read_csv(folder / "summary.csv")
    theirs = pandas.read_csv(HERE / "published.csv")
    large, small = (arms[arms.model == model] for model in (arms.model.iloc[-1], arms.model.iloc[0]))
    made = [*_bytes(_arms(large, FRESH), theirs), *_times(large, theirs), *_losses(large, theirs)]
    made += _longer(folder, _arms(small, FRESH), small.model.iloc[0])
    if (path := folder / "redundancy.csv").is_file():
        made += _premise(pandas.read_csv(path))
    return made


def _arms(arms: Any, batches: str, profile: str = UNSHAPED) -> Any:
    return arms[(arms.batches == batches) & (arms.profile == profile)].set_index("codec")


def _bytes(arms: Any, theirs: Any) -> Iterator[Claim]:
    if not {BASELINE, INT8, AS_PUBLISHED} <= set(arms.index):
        return
    base, delta, plain = arms.loc[BASELINE], arms.loc[AS_PUBLISHED], arms.loc[INT8]
    saved = 1 - delta.forward_mb / base.forward_mb
    yield Claim(
        claim="activation delta as int8 sends 75 % fewer bytes of activations than fp32",
        source=SOURCE,
        published=f"{theirs.forward_mb.iloc[0]} MB to {theirs.forward_mb.iloc[1]} MB in 20 steps",
        ours=f"{base.forward_mb:.2f} MB to {delta.forward_mb:.2f} MB: {percent(saved)} fewer",
        interval=EXACT,
        verdict="holds" if abs(saved - 0.75) < _ABOUT else "fails",
        why="counted; both directions together, with the gradients in fp32 as published: "
        f"{percent(1 - delta.both_mb / base.both_mb)}",
        command=COMMAND,
    )
    less = 1 - delta.forward_mb / plain.forward_mb
    yield Claim(
        claim="sending differences is what saves bytes: plain int8 sends more",
        source=SOURCE,
        published='"instead of sending the full activations, we only send the difference"',
        ours=f"{percent(less)} fewer bytes than plain int8",
        interval=EXACT,
        verdict="holds" if less > _ABOUT else "fails",
        why="a difference has as many values as the tensor",
        command=COMMAND,
    )


def _times(large: Any, theirs: Any) -> Iterator[Claim]:
    fresh, shaped = _arms(large, FRESH), _arms(large, FRESH, SHAPED)
    gains = [
        arms.loc[BASELINE].mean_step_s / arms.loc[codec].mean_step_s
        for arms in (fresh, shaped)
        for codec in (DELTA, AS_PUBLISHED)
        if {BASELINE, codec} <= set(arms.index)
    ]
    if len(gains) < 4:
        return
    base = shaped.loc[BASELINE]
    bytes_s = base.wire_mb / base.steps * MB * 8 / SHAPED_BPS
    most = 1 + bytes_s / fresh.loc[BASELINE].mean_step_s
    wanted = theirs.mean_step_s.iloc[0] / theirs.mean_step_s.iloc[1]
    yield Claim(
        claim=f"activation delta makes a step of GPT-2 small {wanted:.2f} times as fast",
        source=SOURCE,
        published=f"{wanted:.2f}x, without a network",
        ours=f"{np.mean(gains):.2f}x",
        interval=f"{min(gains):.2f} to {max(gains):.2f}, unshaped and 80 Mbit/s, one seed",
        verdict="fails" if most < wanted else "not resolved",
        why=f"all of fp32's packets take {bytes_s:.2f} s of the link at 80 Mbit/s, beside "
        f"{fresh.loc[BASELINE].mean_step_s:.2f} s of compute: sending nothing at all would make a step at most "
        f"{most:.2f} times as fast",
        command=COMMAND,
    )


def _losses(large: Any, theirs: Any) -> Iterator[Claim]:
    fresh, repeated = _arms(large, FRESH), _arms(large, REPEATED)
    if {BASELINE, AS_PUBLISHED} <= set(fresh.index):
        ours, base = fresh.loc[AS_PUBLISHED], fresh.loc[BASELINE]
        yield Claim(
            claim="activation delta trains to a lower loss than fp32 in 20 steps",
            source=SOURCE,
            published=f"mean {theirs.mean_train_loss.iloc[1]:.3f} against {theirs.mean_train_loss.iloc[0]:.3f}, last "
            f"{theirs.last_train_loss.iloc[1]:.3f} against {theirs.last_train_loss.iloc[0]:.3f}",
            ours=f"mean {ours.mean_train_loss:.3f} against {base.mean_train_loss:.3f}, last {ours.last_train_loss:.3f} "
            f"against {base.last_train_loss:.3f}",
            verdict="not comparable",
            why="not tested: weights are random here and the loss is above the unigram entropy, while 3.37 implies "
            "pretrained ones; the published losses are of one batch and one run each",
            command=COMMAND,
        )
    if {BASELINE, DELTA, INT8} <= set(repeated.index):
        last = repeated.last_train_loss
        yield Claim(
            claim="on one batch again and again, where differences are small, activation delta trains as fp32 does",
            source="ours",
            ours=f"last loss {last[DELTA]:.3f}; int8 {last[INT8]:.3f}, fp32 {last[BASELINE]:.3f}",
            verdict="not resolved",
            why="one seed; delta and plain int8 are alike, and both above fp32",
            command=COMMAND,
        )


def _longer(folder: Path, arms: Any, model: str) -> Iterator[Claim]:
    if BASELINE not in arms.index:
        return
    loss = arms.loc[BASELINE].validation_loss
    place = {"model": model, "batches": FRESH, "profile": UNSHAPED}
    for codec, base, claim in (
        (DELTA, BASELINE, "activation delta costs at most 1 % of the loss on new batches"),
        (INT8, BASELINE, "int8 costs at most 1 % of the loss on new batches"),
        (OPEN, BASELINE, "negative control: differences without a closed loop cost more than 1 % of the loss"),
        (OPEN_4, CLOSED_4, "negative control at 4 bits: an open loop costs 1 % of the loss more than a closed one"),
    ):
        found = experiments.judge_loss(
            folder, SAME_LOSS * loss, {**place, "codec": codec}, {**place, "codec": base}, "difference"
        )
        if found is None:
            continue
        control = codec in (OPEN, OPEN_4)
        against: dict[Any, Verdict] = {"holds": "fails", "fails": "holds"}
        yield Claim(
            claim=claim,
            source="ours",
            ours=f"{found.value:+.3f} nats",
            interval=experiments.interval_words(found),
            verdict=(against.get(found.verdict, "not resolved") if control else found.verdict) or "not resolved",
            why="int8's errors are too small to add up in 200 steps, so this control cannot fail: delta-open(int4) is "
            "needed"
            if codec == OPEN
            else experiments.shown_words(found, loss),
            command=COMMAND,
        )


def _premise(ratios: Any) -> Iterator[Claim]:
    """Yield whether there is anything to save between two steps."""
    steps = ratios[(ratios.tensor == "X") & (ratios.gap == ratios.gap.min())]
    names = {"a new batch each step": "new batches", "one batch, learned at each step": "one batch that repeats"}
    for batches, words in names.items():
        late = steps[(steps.batches == batches) & (steps.step > steps.step.min())]
        if late.empty:
            continue
        low, high = late.norm_ratio.min(), late.norm_ratio.max()
        yield Claim(
            claim=f"activations of consecutive steps are much alike, on {words}: their difference is less than half of "
            "them",
            source=SOURCE if batches.startswith("a new") else "ours",
            published="the method's premise, without a number" if batches.startswith("a new") else "",
            ours=f"{late.norm_ratio.iloc[-1]:.3f} of the tensor's norm after {late.step.iloc[-1] + 1} steps",
            interval=f"{low:.3f} to {high:.3f}, steps {late.step.min() + 1} to {late.step.max() + 1}, seed "
            f"{', '.join(map(str, sorted(late.seed.unique())))}",
            verdict="holds" if high < _HALF else "fails" if low > _HALF else "not resolved",
            why="sqrt(2) would be two unrelated tensors",
            command=COMMAND,
        )


_ABOUT, _HALF = 0.01, 0.5


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README, from the CSVs of a folder."""
    arms = pandas.read_csv(folder / "summary.csv")
    theirs = pandas.read_csv(HERE / "published.csv")
    made = claims(folder)
    made_blocks = {
        "answer": _answer(made),
        "claims": claims_table(made),
        "published": experiments.markdown_of(theirs.rename(columns=lambda name: name.replace("_", " "))),
        "as-published": experiments.markdown_of(published_table(arms)),
        "longer": experiments.markdown_of(long_table(arms)),
    }
    if (path := folder / "redundancy.csv").is_file():
        made_blocks["redundancy"] = experiments.markdown_of(redundancy_table(pandas.read_csv(path)))
    return made_blocks


def _answer(made: list[Claim]) -> str:
    words = [f"{claim.claim}: {claim.verdict} ({claim.ours})" for claim in made if claim.source == SOURCE]
    return experiments.prose(f"**Answer.** {'; '.join(words)}.")


def main() -> int:
    """Write the CSVs, the figures and the claims; put the generated blocks into the README, and print them."""
    results, output = experiments.folders(HERE.name, __doc__ or "")
    runs, curves = measured(results)
    arms = summarised(runs)
    arms.to_csv(output / "summary.csv", index=False, float_format="%.6g", lineterminator="\n")
    experiment_tables.write_tables(results, output, runs, "model", "batches")
    with style.applied():
        drawn = {"loss": loss_figure(runs, curves), "time-bytes": time_figure(runs, arms)}
        if (path := output / "redundancy.csv").exists():
            drawn["redundancy"] = redundancy_figure(pandas.read_csv(path))
    for name, figure in drawn.items():
        experiments.save_figure(figure, output, name)
    experiments.publish(output, blocks(output), claims(output))
    return 0


if __name__ == "__main__":
    sys.exit(main())

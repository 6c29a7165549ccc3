"""Generates the CSVs, figures, claims and README blocks of seed_activation_delta: `python
experiments/seed_activation_delta/figures.py`.

Reads the results of the sweep, redundancy.csv from the output folder if present (written by redundancy.py), and
published.csv: the numbers reported by the authors of activation delta (Bedoya and Zhang) for 20 steps of one run each,
without a network, with bytes by formula. summary.csv next to the README keeps its rows of models and batches that these
results lack: GPT-2 small takes half an hour.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

import testbed
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import claim_rows, experiment_tables, experiments, floors, plots, publishing, style
from testbed.report.canvas import HOLLOW_DASH, Handle, canvas, name_rows, note
from testbed.report.claim_rows import Facts
from testbed.report.claims import Claim
from testbed.report.collect import codec_order
from testbed.report.numbers import percent
from testbed.report.remarks import labelled
from testbed.units import format_duration
from testbed.workloads import models

HERE = Path(__file__).resolve().parent
RUN = experiments.RUN
ARM = ["model", "batches", "profile", "codec"]
PAIR = ["model", "batches", "profile", "seed"]
BASELINE, UNSHAPED = "fp32", "datacenter"
INT4 = "fwd=int4, bwd=int8"
"""delta(int4) without differences: its gradients are sent as int8."""
FRESH, REPEATED = "fresh", "repeated"
LONGER_SEED_S, LEARNED_SEED_S = 2 * 65.6, 2 * 8.4
"""Seconds of one core for one more seed of two arms of GPT-2 mini, with random and with learned weights. Measured on
2026-11-23, without a network."""
MB = 1e6


# ------------------------------------------------------------------ results
def measured(folder: Path) -> Any:
    """Return a row per run with model and batches; see `experiments.runs_frame`."""
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
    return runs.assign(**less)


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

    The first of two stages sends activations only, the second gradients only. Packets are counted from record to
    record, so the first step has no count; it is assumed to be an average one.
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
    """Return one row per arm, small models first: means over its runs, and the spread over seeds."""
    rows = runs.groupby(ARM, sort=False)
    losses = ["mean_train_loss", "last_train_loss", "validation_loss", "uncompressed_loss"]
    differences = ["difference", "train_difference"]
    means = rows[[*losses, *differences, "mean_step_s", "step_s", "total_s", "forward_mb", "both_mb", "wire_mb"]].mean()
    for name, column in (("validation", rows.validation_loss), ("difference", rows.difference)):
        means[f"{name}_low"], means[f"{name}_high"] = column.min(), column.max()
    means["seeds"], means["steps"], means["certified"] = rows.seed.nunique(), rows.steps.first(), rows.certified.all()
    means = means.reset_index()
    sizes = [*models.SIZES, *models.MADE]
    place = [
        (sizes.index(row.model), row.batches, row.profile != UNSHAPED, codec_order(row.codec))
        for row in means.itertuples()
    ]
    return means.iloc[sorted(range(len(place)), key=place.__getitem__)].reset_index(drop=True)


def with_committed(arms: Any, output: Path) -> Any:
    """Return the arms, and those of the README's summary.csv whose model and batches these lack."""
    if output.resolve() != HERE:
        return arms
    before, setting = pandas.read_csv(HERE / "summary.csv"), ["model", "batches"]
    made = arms[setting].drop_duplicates().assign(made=True)
    kept = before[before.merge(made, on=setting, how="left").made.isna().to_numpy()]
    return pandas.concat([kept, arms], ignore_index=True)


def split(arms: Any) -> tuple[Any, Any, Any]:
    """Return the arms of the largest and the smallest model with random initial weights, and of learned weights."""
    learned = arms.model.isin(models.MADE)
    random = arms[~learned]
    sizes = sorted(set(random.model), key=list(models.SIZES).index)
    if not sizes:
        return random, random, arms[learned]
    return random[random.model == sizes[-1]], random[random.model == sizes[0]], arms[learned]


def speed_up(rows: Any, value: str) -> Any:
    """Return fp32's time over each row's, on the same model, batches and network."""
    keys = ["model", "batches", "profile"]
    base = rows[rows.codec == BASELINE].set_index(keys)[value]
    return base.reindex(pandas.MultiIndex.from_frame(rows[keys])).to_numpy() / rows[value]


# ------------------------------------------------------------------ tables
def published_table(arms: Any) -> Any:
    """Return the published rows, then ours of the largest model, in the full form the published one."""
    ours, _, _ = split(arms)
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
    _, rows, _ = split(arms)
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


@experiments.table
def finetuned_table(folder: Path) -> Any:
    """Return a row for each kind of batches and codec of the learned weights: losses, and differences from fp32's."""
    runs = learned_runs(folder)
    for (batches, codec), part in runs.groupby(["batches", "codec"], sort=False):
        row = {"batches": batches, "codec": labelled(codec), "seeds": part.seed.nunique()}
        for column, name in LOSSES.items():
            found = compared(runs, column, 0.0, batches, codec, BASELINE)
            own = codec == BASELINE or found is None
            row[name] = f"{part[column].mean():.4f}" if own else experiments.with_ends(found, "{:+.4f}")
        yield row


def learned_runs(folder: Path) -> Any:
    """Return the rows of seeds.csv of learned weights; without any, those of the smallest model."""
    if not (path := folder / experiments.SEEDS).is_file():
        return pandas.DataFrame()
    runs = pandas.read_csv(path)
    runs = runs[runs.profile == UNSHAPED]
    _, small, learned = split(runs)
    runs = learned if len(learned) else small
    places = [(row.batches, codec_order(row.codec), row.seed) for row in runs.itertuples()]
    return runs.iloc[sorted(range(len(places)), key=places.__getitem__)]


def compared(runs: Any, column: str, bound: float, batches: str, ours: str, base: str) -> Judgement | None:
    """Judge whether a codec's loss is at most `bound` nats above another's on the same batches; None without runs."""
    a, b = (experiments.by_seed(runs, column, batches=batches, codec=codec) for codec in (ours, base))
    return judge("loss", a, b, bound) if a.keys() & b.keys() else None


LOSSES = {
    "validation_loss": "validation",
    "uncompressed_loss": "validation, codec removed",
    "mean_train_loss": "training, all steps",
    "late_loss": "training, last quarter",
}
"""Columns of seeds.csv, and their names."""


def redundancy_table(ratios: Any) -> Any:
    """Return the norm of a tensor minus an earlier one, and int8's error on both at the smallest gap."""
    key = ["model", "tensor", "step", "batches"]
    mean = ratios.groupby([*key, "gap"], sort=False).mean().reset_index()
    wide = mean.pivot(index=key, columns="gap", values="norm_ratio").round(3)
    wide.columns = [f"gap {gap}" for gap in wide.columns]
    least = mean[mean.gap == mean.gap.min()].set_index(key)
    wide["int8 error"], wide["error of the difference"] = least.int8_error, least.delta_error
    wide["int8 bits, packed"], wide["bits of the difference"] = least.int8_bits.round(2), least.delta_bits.round(2)
    wide = wide.reset_index()
    wide = wide.assign(step=wide.step + 1)
    return wide.sort_values(["model", "tensor", "step"], ascending=[True, False, True], kind="stable")


# ------------------------------------------------------------------ figures
def legend_of(codecs: list[str], runs: Any) -> list[Handle]:
    """Return a patch for each codec, and an entry for hollow marks if there are any."""
    looks = style.looks(codecs)
    handles: list[Handle] = [Patch(facecolor=looks[codec].colour, label=labelled(codec)) for codec in codecs]
    if not runs.certified.all():
        handles.append(Patch(facecolor="none", edgecolor=style.INK, ls=HOLLOW_DASH, label="hollow: not certified"))
    return handles


LOSS_WORDS = """\
Marks: means of {seeds} seeds, {model}, each less fp32's of the same seed; lines: 95 % intervals. Evaluations have the \
codec in place. {fp32}; {floors}.
"""


def loss_figure(folder: Path) -> Figure:
    """Draw the losses of each codec vs fp32: on new batches, and on one repeated batch."""
    runs = learned_runs(folder)
    codecs = [codec for codec in dict.fromkeys(runs.codec) if codec != BASELINE]
    looks = style.looks(codecs)
    panels_of = [
        (batches, column, title)
        for batches, column, title in (
            (FRESH, "validation_loss", "new batches: validation loss"),
            (REPEATED, "late_loss", "one repeated batch: training loss"),
        )
        if batches in set(runs.batches)
    ]
    base = runs[runs.codec == BASELINE].groupby("batches")
    words = LOSS_WORDS.format(
        seeds=runs.seed.nunique(),
        model=runs.model.iloc[0],
        floors=", ".join(f"{name} {floor:.2f}" for name, floor in floors.floors_of(HERE).items()),
        fp32="fp32's: "
        + ", ".join(f"{base[column].mean()[batches]:.3f} nats ({title})" for batches, column, title in panels_of),
    )
    figure, panels = canvas(_finding(runs), 0.27 * len(codecs) + 0.2, [], words, len(panels_of), columns=2)
    for axes, (batches, column, title) in zip(panels, panels_of, strict=True):
        for place, codec in enumerate(codecs):
            found = [(place, compared(runs, column, 0.0, batches, codec, BASELINE))]
            plots.estimates(axes, found, looks[codec].colour, looks[codec].marker, across=True, width=1.6)
        axes.axvline(0, color=style.looks([BASELINE])[BASELINE].colour, lw=1.2)
        name_rows(axes, [labelled(codec) if axes is panels[0] else "" for codec in codecs])
        axes.set(title=title, xlabel="vs fp32, nats per token; right is worse")
    return figure


def _finding(runs: Any) -> str:
    words = []
    for batches, column, name in ((FRESH, "validation_loss", "new batches"), (REPEATED, "late_loss", "one batch")):
        found = compared(runs, column, 0.0, batches, CLOSED_4, INT4)
        if found is not None:
            words.append(f"{found.value:+.3f} nats on {name}")
    if not words:
        return "Losses of each codec against fp32's"
    return f"At 4 bits, differences change the loss by {', '.join(words)}"


TIME_WORDS = """\
Hatched: as published, without a network; bytes by formula, forward only. Left: the mean of all steps, the first one \
too, as published; in brackets all {steps} together. Right: payload of all steps forward (full colour) and backward \
(paler), and what IP packets add (palest).
"""


LOOK: Any = {"va": "center", "size": 7.8}
"""Of the number behind a bar."""


def time_figure(folder: Path) -> Figure:
    """Draw the time and traffic of a step, next to the published ones."""
    arms = pandas.read_csv(folder / "summary.csv")
    large, _, _ = split(arms)
    ours = large[large.batches == FRESH]
    codecs, looks = sorted(set(ours.codec), key=codec_order), style.looks(arms.codec)
    title, height = _quarter(folder, ours), 0.23 * (len(ours) + 2)
    words = TIME_WORDS.format(steps=ours.steps.iloc[0])
    figure, (left, right) = canvas(title, height, legend_of(codecs, ours), words, 2, columns=2)
    names: list[str] = []
    hatched: dict[str, Any] = {"color": style.RULE, "hatch": "///", "edgecolor": style.MUTED}
    for row in pandas.read_csv(HERE / "published.csv").itertuples():
        left.barh(len(names), row.mean_step_s, **hatched)
        right.barh(len(names), row.forward_mb, **hatched)
        note(left, f"{row.mean_step_s:.2f} s ({row.total_s:.0f} s)", (row.mean_step_s, len(names)), (4, 0), **LOOK)
        note(right, f"{row.forward_mb:.1f} MB, forward only", (row.forward_mb, len(names)), (4, 0), **LOOK)
        names.append(f"published: {'fp32' if row.codec == BASELINE else 'delta as int8'}")
    for row in ours.itertuples():
        place, colour = len(names), looks[row.codec].colour
        part(left, place, 0, row.mean_step_s, colour, 1.0, certified=row.certified)
        ends = (0, row.forward_mb, row.both_mb, row.wire_mb)
        for low, high, opacity in zip(ends, ends[1:], (1.0, 0.55, 0.25), strict=False):
            part(right, place, low, high, colour, opacity, certified=row.certified)
        note(left, f"{row.mean_step_s:.2f} s ({row.total_s:.0f} s)", (row.mean_step_s, place), (4, 0), **LOOK)
        note(right, f"{row.wire_mb:.1f} MB ({row.forward_mb:.1f} forward)", (row.wire_mb, place), (4, 0), **LOOK)
        names.append(f"{'unshaped' if row.profile == UNSHAPED else row.profile}: {row.codec}")
    for axes, label in ((left, "mean step, s"), (right, "all steps, MB")):
        name_rows(axes, names if axes is left else [""] * len(names))
        axes.set(xlim=(0, 1.6 * axes.dataLim.x1), xlabel=label)
    return figure


def _quarter(folder: Path, ours: Any) -> str:
    unshaped, gain = ours[ours.profile == UNSHAPED].set_index("codec"), times(folder, "consumer-80mbps", 80e6)
    if gain is None:
        return "Time and bytes on new batches"
    fewer = percent(1 - unshaped.forward_mb[DELTA] / unshaped.forward_mb[BASELINE], "{:.0f}")
    speed = f"{gain['value']:.2f} times as fast ({gain['low']:.2f} to {gain['fastest']:.2f})"
    return f"{fewer} fewer bytes forward, as many as plain int8 saves; a step is {speed}"


def part(axes: Axes, place: int, low: float, high: float, colour: str, opacity: float, *, certified: bool) -> None:
    """Draw a part of a bar; hollow if a run has no certificate."""
    look: dict[str, Any] = (
        {"facecolor": colour, "alpha": opacity} if certified else {"facecolor": "none", "edgecolor": colour}
    )
    axes.barh(place, high - low, left=low, ls=HOLLOW_DASH, **look)


REDUNDANCY_WORDS = """\
GPT-2 mini at its one boundary, fp32, trained in one process without a network, settings of sweep.toml, mean of 5 \
consecutive steps; seeds {seeds}. Activation delta sends the difference at gap 1. The batch that is not learned is of \
the validation split and has no gradients. After 110 steps a gap of 100 reaches back to step 10, before anything was \
learned: hence the jump there.
"""


def redundancy_figure(ratios: Any) -> Figure:
    """Draw |X_t - X_(t-gap)| / |X_t| against the gap, a panel for each moment."""
    names, gaps = list(ratios.batches.drop_duplicates()), sorted(ratios.gap.unique())
    # only where the batch that repeats was followed as long
    both = ratios[ratios.batches.str.startswith("one batch, learned")]
    moments = list(both[["model", "step"]].drop_duplicates().itertuples(index=False, name=None))
    moments.sort(key=lambda moment: (moment[0] in models.MADE, moment[1]))
    looks = style.looks(names)
    legend: list[Handle] = [
        Line2D([], [], color=looks[name].colour, ls=looks[name].dash, marker=looks[name].marker, label=name)
        for name in names
    ]
    legend.append(Line2D([], [], color=style.INK, ls=":", label="dotted: gradients, G"))
    words = REDUNDANCY_WORDS.format(seeds=", ".join(map(str, sorted(ratios.seed.unique()))))
    title = "New batches differ by as much as they are, whatever the weights; only a batch that repeats is alike"
    figure, panels = canvas(title, 2.6, legend, words, len(moments), columns=len(moments))
    for axes, (model, moment) in zip(panels, moments, strict=True):
        of_moment = ratios[(ratios.model == model) & (ratios.step == moment)]
        for (batches, tensor), rows in of_moment.groupby(["batches", "tensor"]):
            look = looks[batches]
            drawn = {"dash": look.dash, "marker": look.marker} if tensor == "X" else {"dash": ":", "marker": "none"}
            plots.curve(axes, rows, "gap", "norm_ratio", look.colour, batches, ms=4.5, **drawn)
        axes.axhline(1, color=style.INK, lw=0.9)
        axes.set_title(f"{'learned' if model in models.MADE else 'random'}, {moment + 1} steps")
        axes.set(xscale="log", yscale="log", xlabel="gap, steps", xlim=(0.9 * gaps[0], 1.1 * gaps[-1]))
        axes.set_ylim(0.8 * ratios.norm_ratio.min(), 1.25 * ratios.norm_ratio.max())
        plots.ticks(axes.xaxis, gaps)
        plots.ticks(axes.yaxis, [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10])
    for axes in panels[1:]:  # the panels share the axis
        axes.tick_params(labelleft=False)
    panels[0].set_ylabel("|difference| / |tensor|")
    return figure


# ------------------------------------------------------------------ from the CSVs alone
DELTA = "delta-int8"
CLOSED_4 = "delta(int4)"


def _theirs() -> list[Any]:
    return list(pandas.read_csv(HERE / "published.csv").itertuples())


def _arms(folder: Path, batches: str = FRESH, profile: str = UNSHAPED, size: int = 0) -> Any:
    """Return the arms of the largest model that began with random weights, or of the smallest (1)."""
    arms = split(pandas.read_csv(folder / "summary.csv"))[size]
    return arms[(arms.batches == batches) & (arms.profile == profile)].set_index("codec")


def arms_of(folder: Path, batches: str = FRESH, **codecs: str) -> Facts | None:
    """Return arms of the largest model by name, and by what share `ours` sends fewer bytes than `base`."""
    arms = _arms(folder, batches)
    if not {*codecs.values()} <= set(arms.index):
        return None
    rows = {name: arms.loc[codec] for name, codec in codecs.items()}
    ours, base, taken = rows["ours"], rows["base"], format_duration(arms.total_s[[*codecs.values()]].sum())
    fewer = {"value": 1 - ours.forward_mb / base.forward_mb, "both": 1 - ours.both_mb / base.both_mb}
    return {"theirs": _theirs(), "taken": taken, **rows, **fewer}


def times(folder: Path, profile: str, rate_bps: float) -> Facts | None:
    """Return the speed-up of the delta's step; `high`: that of a step that sends nothing."""
    fresh, shaped, codecs = _arms(folder), _arms(folder, profile=profile), [DELTA, "fwd=delta-int8, bwd=fp32"]
    if not all({BASELINE, *codecs} <= set(arms.index) for arms in (fresh, shaped)):
        return None
    gains = [arms.mean_step_s[BASELINE] / arms.mean_step_s[codec] for arms in (fresh, shaped) for codec in codecs]
    base, compute_s, (dense, delta) = shaped.loc[BASELINE], fresh.mean_step_s[BASELINE], _theirs()
    bytes_s = base.wire_mb / base.steps * MB * 8 / rate_bps
    ends = {"low": min(gains), "fastest": max(gains), "high": 1 + bytes_s / compute_s}
    seconds = {"bytes_s": bytes_s, "compute_s": compute_s}
    return {"value": np.mean(gains), "wanted": dense.mean_step_s / delta.mean_step_s, **ends, **seconds}


def finetuned(folder: Path, column: str, batches: str, ours: str, base: str, share: float) -> Facts | None:
    """Judge a loss of learned weights; the bound is a share of fp32's loss."""
    runs = learned_runs(folder)
    if runs.empty or runs.model.iloc[0] not in models.MADE:
        return None
    loss = float(runs[(runs.batches == batches) & (runs.codec == BASELINE)][column].mean())
    found = compared(runs, column, share * loss, batches, ours, base)
    if found is None:
        return None
    dense, delta = theirs = _theirs()
    less = delta.mean_train_loss / dense.mean_train_loss - 1
    words = {"published_less": less, "theirs": theirs, "shown": _bound_words(found, loss), "loss": loss}
    return {"judgement": found, "bound": found.effect, "part": found.value / loss, **words}


def _bound_words(found: Judgement, loss: float) -> str:
    bound = found.effect or 0.0
    side = f"{abs(bound):.3f} nats {'above' if bound > 0 else 'below'}"
    if found.verdict in ("holds", "fails"):
        return f"the whole interval is on {'the claimed' if found.verdict == 'holds' else 'the other'} side of {side}"
    more = experiments.more_seeds(found, LEARNED_SEED_S)
    if found.detectable is None:
        return more
    least = percent(found.detectable / loss, "{:.2g}")
    return f"can detect {found.detectable:.2g} nats ({least}) from {side}; {more}"


def longer(folder: Path, codec: str, share: float) -> Facts | None:
    """Judge a codec's loss after the longest training of random weights; the bound is a share of fp32's loss."""
    fresh = _arms(folder, size=1)
    if BASELINE not in fresh.index:
        return None
    loss, place = fresh.validation_loss[BASELINE], {"model": fresh.model.iloc[0], "batches": FRESH, "profile": UNSHAPED}
    ours, base = place | {"codec": codec}, place | {"codec": BASELINE}
    found = experiments.judge_loss(folder, share * loss, ours, base, "difference")
    return experiments.loss_facts(found, loss, LONGER_SEED_S, text="random weights")


def premise(folder: Path, learned: bool, batches: str, half: float) -> Facts | None:
    """Return the difference of activations of consecutive steps, late in training, as a share of their norm."""
    if not (path := folder / "redundancy.csv").is_file():
        return None
    rows = pandas.read_csv(path)
    rows = rows[(rows.tensor == "X") & (rows.gap == rows.gap.min()) & (rows.batches == batches)]
    rows = rows[rows.model.isin(models.MADE) == learned]
    if not learned:
        rows = rows[rows.step > rows.step.min()]
    if rows.empty:
        return None
    ratio, steps, seeds = rows.norm_ratio, rows.step + 1, ", ".join(map(str, sorted(rows.seed.unique())))
    low, high = ratio.min(), ratio.max()
    unknown = f"; it depends on the step, so {experiments.NO_SEEDS}" if low <= half <= high else ""
    words = {"first": steps.min(), "last": steps.max(), "seeds": seeds, "open": unknown}
    return {"value": ratio.iloc[-1], "low": low, "high": high, **words}


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README, from the CSVs of a folder."""
    arms = pandas.read_csv(folder / "summary.csv")
    theirs = pandas.read_csv(HERE / "published.csv")
    made_blocks = {
        "answer": _answer(claim_rows.claims(globals(), folder)),
        "published": theirs.rename(columns=lambda name: name.replace("_", " ")),
        "as-published": published_table(arms),
        "longer": long_table(arms),
        "finetuned": finetuned_table(folder) if (folder / experiments.SEEDS).is_file() else "",
    }
    if (path := folder / "redundancy.csv").is_file():
        made_blocks["redundancy"] = redundancy_table(pandas.read_csv(path))
    return made_blocks


_SAID = {
    "activation delta as int8 sends": "it takes activations from {}",
    "sending differences": "that is {}",
    "activation delta makes a step": "a step is {} as fast as with fp32",
    "learned weights, new batches: the activation": "from learned weights its training loss is {} from fp32's",
    "learned weights, new batches: activations": "consecutive activations differ by {}",
}
"""The answer's text for a claim, by the claim's beginning."""


def _answer(made: list[Claim]) -> str:
    told = [
        f"{words.format(claim.ours)} ({claim.verdict})"
        for begins, words in _SAID.items()
        for claim in made
        if claim.claim.startswith(begins) and "Bedoya" in claim.source
    ]
    return experiments.prose(f"**Answer**, with the verdicts on the claims: {'; '.join(told)}.")


FIGURES = {"loss": loss_figure, "time-bytes": time_figure}


def write(results: Path, output: Path) -> None:
    """Write the CSVs of a sweep's results, and draw what needs one that may be missing."""
    runs = measured(results)
    arms = with_committed(summarised(runs), output)
    arms.to_csv(output / "summary.csv", index=False, float_format="%.6g", lineterminator="\n")
    columns = ("model", "batches", "mean_train_loss", "last_train_loss", "late_loss")
    experiment_tables.write_tables(results, output, runs, *columns)
    if (path := output / "redundancy.csv").exists():
        publishing.save_figure(redundancy_figure(pandas.read_csv(path)), output, "redundancy")


if __name__ == "__main__":
    publishing.run(globals())

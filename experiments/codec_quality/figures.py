"""Make the table, the summary and the figures of codec_quality: `python experiments/codec_quality/figures.py`.

This reads the results of the sweep. An arm is a codec, or a codec on a small part of the text that is seen repeatedly;
its loss is compared with that of fp32 with the same seed and text. Losses do not depend on the network, so a seed
counts once whatever network it ran over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import readme
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

import testbed
from testbed import results
from testbed.codecs.catalogue import placement
from testbed.report import experiment_tables, experiment_verdicts, experiments, style
from testbed.report.canvas import Handle, canvas
from testbed.report.labels import Mark, label_marks
from testbed.report.lines import draw_floor

HERE = Path(__file__).resolve().parent
RUN = experiments.RUN
BASELINE = "fp32"
LOSSES = {"loss": "validation_loss", "plain": "uncompressed_loss"}
"""With the codec in place and without: name in summary.csv -> column of `testbed.load`."""
STRAIGHT = 0.1
"""The difference in nats up to which the axis is linear; beyond it is logarithmic."""
TICKS = (-1, -0.1, -0.05, 0, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
BAR: dict[str, Any] = {"marker": "|", "ms": 9, "mew": 1.6, "ls": "none"}
"""How the loss without the codec is marked."""
BITS = (0.25, 0.5, 1, 2, 4, 8, 16, 32)


# ------------------------------------------------------------------ results
def measured(folder: Path) -> Any:
    """Return one row per run that ended well, with its arm and the bits per value that it sent; see `runs_frame`."""
    runs = experiments.runs_frame(folder)
    share = runs["workload.training_sequences"]
    names = [
        codec if pandas.isna(some) else f"{codec}, {some} sequences"
        for codec, some in zip(runs.codec, share, strict=True)
    ]
    return runs.assign(arm=names, share=share.fillna(0)).merge(sent(folder), left_on=RUN, right_index=True)


def sent(folder: Path) -> Any:
    """Return the bits per value over all training steps of each run: payloads both ways, forward, backward, and IP
    packets.

    The first stage sends activations only, the last their gradients only. Packets are counted from one record to the
    next, so the first step has no number, and is taken to need as many bytes of packets for each byte of payload as the
    others.
    """
    steps = testbed.steps(folder, by_stage=True)
    steps = steps[steps.phase == "train"]
    stages = steps.groupby([*RUN, "stage"])[["sent_payload_bytes", "sent_raw_bytes"]].sum().astype(float)
    both, ends = stages.groupby(level=RUN).sum(), stages.groupby(level=RUN)
    counted = (
        steps[steps.sent_wire_bytes.notna()].groupby(RUN)[["sent_wire_bytes", "sent_payload_bytes"]].sum().astype(float)
    )
    bits = 32 * both.sent_payload_bytes / both.sent_raw_bytes
    return pandas.DataFrame(
        {
            "bits": bits,
            "bits_forward": 32 * ends.sent_payload_bytes.first() / ends.sent_raw_bytes.first(),
            "bits_backward": 32 * ends.sent_payload_bytes.last() / ends.sent_raw_bytes.last(),
            "bits_wire": bits * counted.sent_wire_bytes / counted.sent_payload_bytes,
        }
    )


def with_differences(runs: Any) -> Any:
    """Return a row for each arm and seed, with the differences of its losses from fp32 on the same text and seed."""
    first_runs = runs.drop_duplicates(["arm", "seed"])
    base = first_runs[first_runs.codec == BASELINE].set_index(["share", "seed"])
    of_pair = base.reindex(pandas.MultiIndex.from_frame(first_runs[["share", "seed"]]))
    less = {
        f"{name}_less_fp32": first_runs[column].to_numpy() - of_pair[column].to_numpy()
        for name, column in LOSSES.items()
    }
    return first_runs.assign(**less, **{name: first_runs[column] for name, column in LOSSES.items()})


def summarised(runs: Any) -> Any:
    """Return one row per arm, by bits per value: settings, traffic, and the mean, lowest and highest loss."""
    seeds, rows = with_differences(runs), []
    for arm, of_arm in seeds.groupby("arm"):
        every, first = runs[runs.arm == arm], of_arm.iloc[0]
        shaped, rate = every[every.up_rate_bps.notna()], float(first["optimiser.learning_rate"])
        rows_of_parts = [part.row for spec in placement.parse_placement(first.codec).specs() for part in spec.parts()]
        row = {
            "arm": arm,
            "codec": first.codec,
            "training_sequences": first["workload.training_sequences"],
            "negative_control": placement.parse_placement(first.codec).control,
            "changes_model": any(part.hook for part in rows_of_parts),
            "learning_rate": rate,
            "mark": first["mark"],
            "seeds": len(of_arm),
            "runs": len(every),
            "certified": int(every.certified.sum()),
            "steps": int(of_arm.steps.min()),
            **{name: float(of_arm[name].mean()) for name in ("bits", "bits_forward", "bits_backward")},
            "bits_wire": float(shaped.bits_wire.mean()),
            "step_s": float(shaped.step_s.mean()),
        }
        for name in (*LOSSES, *(f"{name}_less_fp32" for name in LOSSES)):
            row |= {name: of_arm[name].mean(), f"{name}_low": of_arm[name].min(), f"{name}_high": of_arm[name].max()}
        rows.append(row)
    return pandas.DataFrame(rows).sort_values(["bits", "arm"]).reset_index(drop=True)


def remarks(folder: Path, runs: Any, arms: Any, tuning: results.TuningRecord | None) -> Iterator[str]:
    """Yield what the table does not say: seeds over two networks, arms with fewer seeds or none, runs that failed."""
    fixed = runs[[not placement.parse_placement(codec).measures for codec in runs.codec]]
    groups = [group for _, group in fixed.groupby(["arm", "seed"]) if group.profile.nunique() > 1]
    if groups:
        apart = max(group[column].max() - group[column].min() for group in groups for column in LOSSES.values())
        yield f"Arms that ran with one seed over two networks: {len(groups)}; their losses differ by {apart:g}."
    for arm in arms[arms.seeds < arms.seeds.max()].itertuples():
        yield f"{arm.arm}: {arm.seeds} of {arms.seeds.max()} seeds ended well."
    for lost in [] if tuning is None else [arm for arm in tuning.arms if not arm.left]:
        yield f"{', '.join(map(str, lost.arm.values()))}: not run, because no learning rate gave a finite loss."
    every = testbed.load(folder)
    for run in every[(every.status != "ok") & ~every.cell_id.isin(runs.cell_id)].itertuples():
        yield f"{run.codec} over {run.network} {run.status}: {run.error}"


# ------------------------------------------------------------------ table
def table(arms: Any) -> Any:
    """Return the table of the README, by bits per value."""
    controls = ["negative control" if control else "" for control in arms.negative_control]
    marks = ["in the model" if inside else "" for inside in arms.changes_model]
    return pandas.DataFrame(
        {
            "#": arms.index + 1,
            "codec": arms.arm,
            "": [", ".join(filter(None, pair)) for pair in zip(controls, marks, strict=True)],
            "bits per value": arms.bits.round(2),
            "forward": arms.bits_forward.round(2),
            "backward": arms.bits_backward.round(2),
            "IP": arms.bits_wire.round(2),
            "learning rate": [
                f"{rate:g}{' *' * bool(mark)}" for rate, mark in zip(arms.learning_rate, arms["mark"], strict=True)
            ],
            "validation loss": arms.loss.map("{:.3f}".format),
            "vs fp32": arms.loss_less_fp32.map("{:+.3f}".format),
            "of each seed": spread(arms, "loss_less_fp32"),
            "without the codec": arms.plain_less_fp32.map("{:+.3f}".format),
            "each": spread(arms, "plain_less_fp32"),
            "certified": [f"{good} of {all_}" for good, all_ in zip(arms.certified, arms.runs, strict=True)],
        }
    )


def spread(arms: Any, name: str) -> list[str]:
    """Write the range from the lowest to the highest seed."""
    return [f"{low:+.3f} to {high:+.3f}" for low, high in zip(arms[f"{name}_low"], arms[f"{name}_high"], strict=True)]


# ------------------------------------------------------------------ figures
WORDS = """\
Each mark is an arm: the mean over seeds of its difference in validation loss vs fp32, with the same seed, text and \
number of tokens; the line spans the lowest to the highest seed. Above 0 is worse; beyond {straight:g} nats the axis \
is logarithmic. Bits are payload per value, activations and gradients together. Numbers are those of the table and of \
the other figure. In an evaluation a codec with memory starts anew; aqsgd then sends in full, as it does all text \
that is new to it.
"""
TITLES = {"loss": "evaluated with the codec", "plain": "evaluated without it"}


def hollow_words(arms: Any) -> str:
    """Say why marks of this figure are hollow."""
    uncertified, fewer = arms[arms.certified < arms.runs], arms[arms.seeds < arms.seeds.max()]
    words = ["negative controls"] * bool(arms.negative_control.any())
    words += [f"not all runs certified ({', '.join(uncertified.arm)})"] * (len(uncertified) > 0)
    words += [f"not all seeds ended well ({', '.join(fewer.arm)})"] * (len(fewer) > 0)
    return "; ".join(words) or "none"


def settings(arms: Any, runs: Any) -> str:
    """Return the foot of a figure."""
    first = runs.iloc[0]
    sizes = first["training.steps"], first["workload.batch_size"], first["workload.sequence_length"]
    what = "{}, {} steps of {} x {} tokens; ".format(first["workload.model"], *sizes)
    return WORDS.format(straight=STRAIGHT) + what + experiments.caption(runs)


def handles(arms: Any, *looks: dict[str, Any]) -> list[Handle]:
    """Return what a legend says of these marks, and of hollow ones."""
    hollow = {"label": f"hollow: {hollow_words(arms)}", "ls": "none", "marker": "o", "mfc": style.PAPER}
    return [Line2D([], [], color=style.MUTED, **look) for look in (*looks, hollow)]


def face(arm: Any, arms: Any, colour: str) -> str:
    """Return the fill colour of a mark."""
    return style.PAPER if arm.negative_control or arm.certified < arm.runs or arm.seeds < arms.seeds.max() else colour


def scale(axes: Axes, which: str, arms: Any) -> None:
    """Scale an axis of loss differences: linear near 0, logarithmic beyond, with a line at 0."""
    lows, highs = (arms[[f"{name}_less_fp32_{end}" for name in LOSSES]].to_numpy() for end in ("low", "high"))
    low, high = min(1.3 * lows.min(), -0.02), max(1.3 * highs.max(), 0.05)
    if which == "x":
        axes.set_xscale("symlog", linthresh=STRAIGHT)
        axes.set_xlim(low, high)
        axes.axvline(0, color=style.INK, lw=0.9)
    else:
        axes.set_yscale("symlog", linthresh=STRAIGHT)
        axes.set_ylim(low, high)
        axes.axhline(0, color=style.INK, lw=0.9)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(TICKS))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def floors(runs: Any) -> list[float]:
    """Return the unigram floor as a difference from fp32's mean loss, where both are known."""
    base = runs[(runs.codec == BASELINE) & (runs.share == 0)].drop_duplicates("seed").validation_loss.mean()
    return [float(floor) - base for floor in runs.unigram_floor.dropna().unique() if not pandas.isna(base)]


def against_bits(arms: Any, runs: Any) -> Figure:
    """Draw the loss that a codec costs against the bits that it sends, evaluated with and without it."""
    looks = style.looks(arms.codec)
    legend = handles(
        arms, {"label": "mean of paired seeds", "ls": "none", "marker": "o"}, {"label": "lowest to highest seed"}
    )
    figure, panels = canvas("Loss against bits per value", 5.2, legend, settings(arms, runs), 2, columns=2)
    for axes, (name, title) in zip(panels, TITLES.items(), strict=True):
        scale(axes, "y", arms)
        for floor in floors(runs):
            draw_floor(axes, floor)
        axes.set_xscale("log", base=2)
        axes.set_xlim(arms.bits.min() / 1.3, 1.3 * arms.bits.max())
        axes.xaxis.set_major_locator(FixedLocator(BITS))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("payload, bits per value, both directions")
        axes.set_title(title)
        middles = arms[f"{name}_less_fp32"]
        for arm, middle in zip(arms.itertuples(), middles, strict=True):
            look = looks[arm.codec]
            ends = getattr(arm, f"{name}_less_fp32_low"), getattr(arm, f"{name}_less_fp32_high")
            axes.plot([arm.bits] * 2, ends, color=look.colour, lw=1)
            fill = face(arm, arms, look.colour)
            axes.plot(arm.bits, middle, marker=look.marker, color=look.colour, mfc=fill, ms=5, ls="none")
        places = enumerate(zip(arms.bits, middles, strict=True), 1)
        label_marks(axes, [Mark(float(x), float(y), str(number), style.INK) for number, (x, y) in places])
    panels[0].set_ylabel("validation loss vs fp32, nats per token")
    return figure


def by_arm(arms: Any, runs: Any) -> Figure:
    """Draw one row per arm, by bits per value: its difference from fp32, with the codec and without."""
    looks = style.looks(arms.codec)
    legend = handles(arms, {"label": "with the codec", "marker": "o"}, {"label": "without it", **BAR})
    words, height = settings(arms, runs), 0.17 * len(arms) + 0.1
    figure, (axes,) = canvas("Codecs by bits per value", height, legend, words, 1, columns=1)
    for arm in arms.itertuples():
        look, place = looks[arm.codec], arm.Index
        axes.plot([arm.loss_less_fp32_low, arm.loss_less_fp32_high], [place] * 2, color=look.colour, lw=1.4)
        fill = face(arm, arms, look.colour)
        axes.plot(arm.loss_less_fp32, place, marker="o", color=look.colour, mfc=fill, ms=5, ls="none")
        axes.plot(arm.plain_less_fp32, place, color=look.colour, **BAR)
    names = [f"{arm.arm}   {arm.bits:.2f} bits   {arm.Index + 1}" for arm in arms.itertuples()]
    axes.set_yticks(range(len(arms)), names, size=7.5)
    axes.set_ylim(len(arms) - 0.4, -0.6)
    scale(axes, "x", arms)
    for floor in floors(runs):
        axes.axvline(floor, color=style.MUTED, lw=0.9, ls=(0, (6, 3)), zorder=1)
        axes.annotate(
            "unigram floor", (floor, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", va="bottom", size=7.2, color=style.MUTED,
        )  # fmt: skip
    axes.set_xlabel("validation loss vs fp32, nats per token")
    return figure


# ------------------------------------------------------------------ from the CSVs alone
claims = readme.claims


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README, from the CSVs of a folder."""
    arms = pandas.read_csv(folder / "summary.csv").fillna({"mark": ""})
    return readme.blocks(folder, experiments.markdown_of(table(arms)))


def main() -> int:
    """Write the CSVs, the figures and the claims; put the generated blocks into the README, and print them."""
    folder, output = experiments.folders(HERE.name, "Draw the figures of codec_quality and print its table.")
    runs = measured(folder)
    tuning = results.last_tuning(folder)
    arms = summarised(runs)
    tables = experiment_tables.write_tables(folder, output, runs, "arm")
    arms.to_csv(output / "summary.csv", index=False, float_format="%.6g", lineterminator="\n")
    with style.applied():
        drawn = {"quality": against_bits(arms, runs), "arms": by_arm(arms, runs)}
    for name, figure in drawn.items():
        experiments.save_figure(figure, output, name)
    experiments.publish(output, blocks(output), claims(output))
    lines = [*remarks(folder, runs, arms, tuning)]
    lines += [experiment_verdicts.floor_sentence(tables.seeds), experiment_verdicts.tuning_sentence(tables.tuning)]
    if not tables.comparisons.empty:
        lines += ["", experiments.markdown_of(experiment_verdicts.verdict_table(tables.comparisons))]
    print("\n".join(lines))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())

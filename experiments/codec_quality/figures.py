"""Generates the table, summary and figures of codec_quality: `python experiments/codec_quality/figures.py`.

Reads the results of the sweep. An arm is a codec, or a codec on a small part of the text that is seen repeatedly; its
loss is compared with fp32's on the same seed and text. Losses do not depend on the network, so each seed counts once.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import readme
from matplotlib.figure import Figure

import testbed
from testbed.codecs.catalogue import placement
from testbed.report import experiment_tables, experiment_verdicts, experiments, floors, plots, publishing, style
from testbed.report.labels import Mark, label_marks

HERE = Path(__file__).resolve().parent
RUN = experiments.RUN
BASELINE = "fp32"
LOSSES = {"loss": "validation_loss", "plain": "uncompressed_loss"}
"""With the codec in place and without: name in summary.csv -> column of `testbed.load`."""
FEW = 4
SHOWN = {
    "int1": "1 bit", "powersgd(8)": "PowerSGD", "mask(0.1)": "mask of 10 %", "subspace": "subspace, 1/8",
    "topk-shared(0.1, sample)": "top-k of 10 %", "int2(group=64)": "2 bits", "mapl": "MAPL", "int3(group=64)": "3 bits",
    "int4(group=64)": "4 bits", "tah(sample)": "TAH", "int6": "6 bits", "int8": "int8", "delta-int8": "delta-int8",
    "bf16": "bf16",
}  # fmt: skip
"""Arms of the figure, and their labels; the table has all."""


# ------------------------------------------------------------------ results
def measured(folder: Path) -> Any:
    """Return one row per successful run, with its arm and its bits per value; see `runs_frame`."""
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

    The first stage sends activations only, the last one gradients only. Packets are counted from record to record, so
    the first step has no count; it is assumed to have the other steps' ratio of packet bytes to payload bytes.
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
        shaped = every[every.up_rate_bps.notna()]
        rows_of_parts = [part.row for spec in placement.parse_placement(first.codec).specs() for part in spec.parts()]
        row = {
            "arm": arm,
            "codec": first.codec,
            "training_sequences": first["workload.training_sequences"],
            "negative_control": placement.parse_placement(first.codec).control,
            "changes_model": any(part.hook for part in rows_of_parts),
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


def remarks(folder: Path, runs: Any, arms: Any) -> Iterator[str]:
    """Yield facts missing from the table: seeds over two networks, arms with fewer or no seeds, failed runs."""
    fixed = runs[[not placement.parse_placement(codec).measures for codec in runs.codec]]
    groups = [group for _, group in fixed.groupby(["arm", "seed"]) if group.profile.nunique() > 1]
    if groups:
        apart = max(group[column].max() - group[column].min() for group in groups for column in LOSSES.values())
        yield f"Arms that ran with one seed over two networks: {len(groups)}; their losses differ by {apart:g}."
    for arm in arms[arms.seeds < arms.seeds.max()].itertuples():
        yield f"{arm.arm}: {arm.seeds} of {arms.seeds.max()} seeds succeeded."
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


# ------------------------------------------------------------------ figure
def draw(folder: Path) -> Figure:
    """Draw the loss of a few codecs above fp32's against their bits per value: each seed's range, and its mean."""
    arms = pandas.read_csv(folder / "summary.csv").set_index("arm").reindex(SHOWN).dropna(subset="loss")
    looks, low, marks = style.looks(arms.codec), arms.bits < FEW, []
    figure, ((axes,),) = plots.panels(1, 1, (8.6, 4.4))
    for name, arm in arms.iterrows():
        found = plots.ErrorBar(arm.loss_less_fp32, (arm.loss_less_fp32_low, arm.loss_less_fp32_high))
        plots.estimates(axes, [(arm.bits, found)], looks[arm.codec].colour, looks[arm.codec].marker)
        marks.append(Mark(arm.bits, arm.loss_less_fp32, SHOWN[str(name)], looks[arm.codec].colour))
    axes.axhline(0, color=style.INK, lw=0.9)
    axes.set(xscale="log", xlabel="payload, bits per value, both directions")
    axes.set(xlim=(0.9, 24), ylabel="validation loss vs fp32, nats per token")
    plots.ticks(axes.xaxis, (1, 2, 4, 8, 16))
    floors.draw_floors(axes, HERE, (arms.loss - arms.loss_less_fp32).mean())
    worse = arms.loss_less_fp32_low > 0
    words = f"{worse[low].sum()} of {low.sum()} codecs below {FEW} bits, {worse[~low].sum()} of {(~low).sum()} others"
    style.state(figure, f"Above fp32 with every seed: {words}")
    label_marks(axes, marks)
    return figure


# ------------------------------------------------------------------ from the CSVs alone
above, rows_of, lossless = readme.above, readme.rows_of, readme.lossless


def blocks(folder: Path) -> dict[str, Any]:
    """Return the generated blocks of the README, from the CSVs of a folder."""
    arms = pandas.read_csv(folder / "summary.csv")
    return {"answer": readme.answer(arms), "arms": table(arms)}


# ------------------------------------------------------------------ from a sweep's results
def write(results: Path, output: Path) -> None:
    """Write the CSVs and the figures, and print the facts missing from the table."""
    runs = measured(results)
    arms = summarised(runs)
    tables = experiment_tables.write_tables(results, output, runs, "arm")
    arms.to_csv(output / "summary.csv", index=False, float_format="%.6g", lineterminator="\n")
    lines = [*remarks(results, runs, arms), experiment_verdicts.floor_sentence(tables.seeds)]
    if not tables.comparisons.empty:
        lines += ["", experiments.markdown_of(experiment_verdicts.verdict_table(tables.comparisons))]
    print("\n".join(lines))  # noqa: T201


FIGURES = {"quality": draw}

if __name__ == "__main__":
    publishing.run(globals())

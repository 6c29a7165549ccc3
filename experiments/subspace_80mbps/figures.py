"""Generates the figure, CSVs, claims and README blocks of subspace_80mbps from its sweep's results.

python experiments/subspace_80mbps/figures.py [--results results/subspace_80mbps] [--output experiments/subspace_80mbps]
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

import testbed
from testbed.codecs.catalogue import placement
from testbed.codecs.contract import Context, ModelCodec
from testbed.codecs.make import make
from testbed.codecs.wrap import capability
from testbed.metrics.curves import LossPoint
from testbed.metrics.time_to_loss import TargetCrossing, crossing
from testbed.report import canvas, experiment_tables, experiment_verdicts, experiments, floors, plots, publishing, style
from testbed.report.claim_rows import Facts
from testbed.report.numbers import percent
from testbed.results import Run
from testbed.spec import Cell
from testbed.workloads.build_stage import build_stage
from testbed.workloads.models import model_size

HERE = Path(__file__).resolve().parent
BASELINE, REFERENCE, SCALED, PLAIN = "fp32", "datacenter", "scaled-80mbps", "consumer-80mbps"
HALVED = "bf16"
"""What people send: the baseline of the last column of speed-ups."""
NETWORKS = (REFERENCE, SCALED, PLAIN)
"""The networks in the order of the table."""
TARGETS = ("half", "last")
_ARM = ["codec", "profile"]


class Matched(NamedTuple):
    """Relation of the scaled link to the model, from fp32's runs over it, whose stages wait and seldom share a
    processor.
    """

    message_bytes: float
    """One micro-batch's activations as fp32."""
    rate_bps: float
    forward_s: float
    """Forward pass of one micro-batch through one stage: median of its steps, mean of the stages."""
    slowest_s: float
    """The same for the slowest stage, which has the output layer."""

    @property
    def wire_s(self) -> float:
        return self.message_bytes * 8 / self.rate_bps

    @property
    def words(self) -> str:
        return (
            f"one micro-batch's activations as fp32 are {self.message_bytes / 1e3:.0f} kB: {self.wire_s * 1e3:.1f} ms "
            f"on a link of {self.rate_bps / 1e6:g} Mbit/s, {self.wire_s / self.forward_s:.1f} times the forward pass "
            f"of a stage (mean {self.forward_s * 1e3:.1f} ms) and {self.wire_s / self.slowest_s:.1f} times that of the "
            f"slowest ({self.slowest_s * 1e3:.1f} ms); the aim was 10 to 20 times"
        )


def matched(results: Path, runs: Any) -> Matched | None:
    """Return the relation of the scaled link to the model; None if fp32 did not run over it."""
    baseline = runs[(runs.codec == BASELINE) & (runs.profile == SCALED)]
    if baseline.empty:
        return None
    first = baseline.iloc[0]
    steps = testbed.steps(results / first.folder, by_stage=True)
    parts = first["pipeline.microbatches"]
    forward_s = steps[steps.measured].groupby("stage").forward_s.median() / parts
    messages = 2 * (first["pipeline.stages"] - 1) * parts
    numbers = (first.raw_bytes_per_step / messages, first.up_rate_bps, forward_s.mean(), forward_s.max())
    return Matched(*map(float, numbers))


def learned_parameters(cell: Cell) -> int:
    """Count the parameters that the optimisers of all stages update together, each once."""
    learned: dict[torch.nn.Parameter, None] = {}
    last = cell.pipeline.stages - 1
    for stage in range(cell.pipeline.stages):
        model = build_stage(
            cell.workload,
            stage=stage,
            stages=cell.pipeline.stages,
            seed=cell.training.seed,
            vocabulary=model_size(cell.workload.model).vocabulary,
            layers=cell.pipeline.layers,
        )
        hooks = []
        for side, boundary in (("upstream", stage - 1), ("downstream", stage)):
            codec = make(cell.codec, Context(seed=cell.training.seed, boundary=max(boundary, 0), direction="forward"))
            model_codec = capability(codec, ModelCodec)
            if 0 <= boundary < last and model_codec is not None:
                hooks.append(model_codec.hook(model, side))  # type: ignore[arg-type]
        learned |= dict.fromkeys(p for p in model.parameters() if p.requires_grad)
        learned |= dict.fromkeys(p for hook in hooks if hook is not None for p in hook.parameters())
    return sum(parameter.numel() for parameter in learned)


def points(curves: Any, phase: str = "evaluation") -> list[LossPoint]:
    """Return the curve of one run."""
    chosen = curves[curves.phase == phase]
    return [LossPoint(int(p.step), float(p.end_s), float(p.loss)) for p in chosen.itertuples()]


def targets(curves: Any) -> dict[str, float]:
    """Return the target losses: fp32's at half of its steps and at the end, the worst seed's, so that fp32 reaches
    them.
    """
    base = curves[(curves.codec == BASELINE) & (curves.phase == "evaluation")]
    last = base.step.max()
    steps = (base.step[base.step <= last / 2].max(), last)
    return {name: float(base[base.step == step].loss.max()) for name, step in zip(TARGETS, steps, strict=True)}


def _reached(per_seed: Sequence[list[LossPoint]], target: float, asked: int) -> TargetCrossing | None:
    """Return the mean over the seeds; None unless all requested seeds reach the target."""
    there = [reached for seed in per_seed if (reached := crossing(seed, target)) is not None]
    if len(there) < asked:
        return None
    return TargetCrossing(mean(seed.seconds for seed in there), mean(seed.steps for seed in there))


def summary(results: Path, runs: Any, curves: Any) -> Any:
    """Return a row for each codec over each network: the seeds' means, and the lowest and highest."""
    goals, rows = targets(curves), []
    last = curves[curves.phase == "evaluation"].groupby(["codec", "seed"]).loss.last()
    planned = testbed.load(results).groupby(["codec", "network"])["training.seed"].nunique()
    for (codec, profile), arm in runs.groupby(_ARM):
        ran = arm.groupby("seed").mean(numeric_only=True)
        plain = ran.uncompressed_loss
        paired = [last[codec, seed] - last[BASELINE, seed] for seed in ran.index if (BASELINE, seed) in last.index]
        row = {
            "codec": codec,
            "profile": profile,
            "negative_control": placement.parse_placement(codec).control,
            "learning_rate": arm["optimiser.learning_rate"].iloc[0],
            "parameters": learned_parameters(Run(results / arm.folder.iloc[0]).cell),
            "seeds": len(ran),
            "seeds_asked": int(planned[codec, profile]),
            "certified": bool(arm.certified.all()),
            "bits_per_value": 32 * float(ran.payload_bytes_per_step.mean() / ran.raw_bytes_per_step.mean()),
            "payload_bytes_per_step": ran.payload_bytes_per_step.mean(),
            "wire_bytes_per_step": ran.wire_bytes_per_step.mean(),
            "frame_bytes_per_step": _frames(results, arm),
            "header_bytes_per_step": ran.header_bytes_per_step.mean(),
            **_spread("step_s", ran.step_s),
            **_spread("loss", ran.validation_loss),
            **_spread("loss_without_codec", plain.dropna()),
            **_spread("loss_less_fp32", pd.Series(paired)),
        }
        per_seed = [points(curves[(curves.cell_id == cell)]) for cell in arm.groupby("seed").cell_id.first()]
        for name, goal in goals.items():
            there = _reached(per_seed, goal, row["seeds_asked"])
            row |= {
                f"target_{name}": goal,
                f"steps_to_{name}": there and there.steps,
                f"s_to_{name}": there and there.seconds,
            }
        rows.append(row)
    frame = pd.DataFrame(rows)
    base = frame[frame.codec == BASELINE].set_index("profile")
    frame["speed_up"] = [base.step_s.get(p, math.nan) / s for p, s in zip(frame.profile, frame.step_s, strict=True)]
    halved = frame[frame.codec == HALVED].set_index("profile").step_s
    frame["speed_up_over_bf16"] = frame.profile.map(halved) / frame.step_s
    frame["step_of_unshaped"] = frame.step_s / base.step_s.get(REFERENCE, math.nan)
    for name in goals:
        frame[f"steps_factor_{name}"] = frame[f"steps_to_{name}"] / frame.profile.map(base[f"steps_to_{name}"])
        frame[f"net_speed_up_{name}"] = frame.profile.map(base[f"s_to_{name}"]) / frame[f"s_to_{name}"]
    frame["order"] = frame.profile.map({network: place for place, network in enumerate(NETWORKS)})
    return frame.sort_values(["order", "negative_control", "loss"]).drop(columns="order").reset_index(drop=True)


def _frames(results: Path, arm: Any) -> float:
    """Return the mean bytes of payloads and our frame headers per training step."""
    steps = testbed.steps(results / arm.folder.iloc[0])
    return float(steps[steps.phase == "train"].sent_frame_bytes.mean())


def _spread(name: str, values: Any) -> dict[str, float]:
    return {name: values.mean(), f"{name}_low": values.min(), f"{name}_high": values.max()}


def speed_table(frame: Any) -> Any:
    """Return the README's table of a step's traffic and time, and of the loss after equal tokens."""
    rows = [
        {
            **_arm(row),
            "learning rate": f"{row.learning_rate:g}",
            "learned": f"{row.parameters / 1e6:.3f} M",
            "bits per value": f"{row.bits_per_value:.2f}",
            "wire per step": f"{row.wire_bytes_per_step / 1e6:.3f} MB",
            "step": f"{row.step_s * 1e3:.0f} ms",
            "speed-up": _number(row.speed_up, ".2f", "x"),
            "over bf16": _number(row.speed_up_over_bf16, ".2f", "x"),
            "of unshaped fp32's": _number(row.step_of_unshaped, ".2f", "x"),
            "validation loss": f"{row.loss:.3f} ({row.loss_low:.3f} to {row.loss_high:.3f})",
            "vs fp32": f"{row.loss_less_fp32:+.3f} ({row.loss_less_fp32_low:+.3f} to {row.loss_less_fp32_high:+.3f})",
            "seeds": f"{row.seeds} of {row.seeds_asked}",
            "without codec": _number(row.loss_without_codec, ".3f"),
        }
        for _, row in frame.iterrows()
    ]
    return pd.DataFrame(rows)


@experiments.table
def target_table(frame: Any) -> Any:
    """Return the README's table of the times to fp32's losses at half of its steps and at the end."""
    for _, row in frame.iterrows():
        shown = _arm(row)
        for name in TARGETS:
            goal = f"to {row[f'target_{name}']:.3f}"
            shown[f"steps {goal}"] = _number(row[f"steps_to_{name}"], ".0f", missing="not reached")
            shown[f"of fp32's {goal}"] = _number(row[f"steps_factor_{name}"], ".2f", "x")
            shown[f"time {goal}"] = _number(row[f"s_to_{name}"], ".1f", " s")
            shown[f"net speed-up {goal}"] = _number(row[f"net_speed_up_{name}"], ".2f", "x")
        yield shown


def _arm(row: Any) -> dict[str, str]:
    return {"network": row.profile, "codec": f"`{row.codec}`" + (" (negative control)" if row.negative_control else "")}


def _number(value: float | None, form: str, unit: str = "", missing: str = "–") -> str:  # noqa: RUF001
    return missing if value is None or math.isnan(value) else f"{value:{form}}{unit}"


def draw(runs: Any, curves: Any, match: Matched | None) -> Any:
    """Draw the loss against wall-clock time and steps over the scaled link, with fp32 over the unshaped one for
    comparison.
    """
    looks = style.looks(runs.codec)
    main = SCALED if SCALED in set(runs.profile) else runs.profile.iloc[0]
    shown = runs[(runs.profile == main) | ((runs.profile == REFERENCE) & (runs.codec == BASELINE))]
    legend = [
        Line2D(
            [], [], color=looks[codec].colour, marker=looks[codec].marker, ls=_dash(looks[codec], profile),
            mfc=looks[codec].colour if sure else style.PAPER,
            label=codec + ", unshaped" * (profile == REFERENCE)
            + " (negative control)" * placement.parse_placement(codec).control,
        )
        for codec, profile, sure in shown.groupby(_ARM).certified.all().reset_index().itertuples(index=False)
    ]  # fmt: skip
    foot = experiments.caption(shown)
    if match is not None:
        foot += f"\nscaled: {match.words}"
    foot += (
        "\nbands: lowest to highest of the seeds, line: their mean; validation loss, the codec in place; "
        f"{_model(runs)}; learning rate tuned for each codec with the same budget"
    )
    figure, (time, steps) = canvas.canvas(
        f"Training through 8 times fewer bytes over a slow link ({main})", 3.6, legend, foot, 2, columns=2
    )
    for (codec, profile), arm in shown.groupby(_ARM):
        own, certified = curves[curves.cell_id.isin(arm.cell_id)], bool(arm.certified.all())
        for axes in (time, steps):
            _line(axes, own, looks[codec], profile, certified, by_time=axes is time)
    for axes, what in ((time, "training time, s (evaluations left out)"), (steps, "optimiser steps (equal tokens)")):
        axes.set(xlabel=what, ylabel="validation loss, nats per token")
    time.set_xscale("log")
    time.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    time.xaxis.set_major_formatter(ScalarFormatter())
    time.xaxis.set_minor_formatter(NullFormatter())
    _leave_out(time, steps, runs=shown, curves=curves, looks=looks)
    for axes in (time, steps):
        floors.draw_floors(axes, HERE)
    time.set_title("Loss against wall-clock time")
    steps.set_title("Loss against steps")
    return figure


def _dash(look: style.Look, profile: str) -> Any:
    """Return the codec's own dash, and dots for the network drawn for comparison."""
    return (0, (1.2, 1.2)) if profile == REFERENCE else look.dash


def _line(axes: Axes, curves: Any, look: style.Look, profile: str, certified: bool, *, by_time: bool) -> None:
    wide = curves[curves.phase == "evaluation"]
    losses = wide.pivot_table(index="step", columns="seed", values="loss").dropna()
    ends = wide.pivot_table(index="step", columns="seed", values="end_s").loc[losses.index].mean(axis=1)
    x = ends.tolist() if by_time else [float(step) for step in losses.index]
    how = {"dash": _dash(look, profile), "marker": look.marker, "mfc": look.colour if certified else style.PAPER}
    plots.band(axes, x, losses.T.values.tolist(), look.colour, "", markersize=4, **how)


def _leave_out(*panels: Axes, runs: Any, curves: Any, looks: Mapping[str, style.Look]) -> None:
    """End the axes slightly above the common start, and note codecs whose loss went beyond, with their final loss."""
    wide = curves[(curves.phase == "evaluation") & curves.cell_id.isin(runs.cell_id)]
    means = wide.groupby(["codec", "step"]).loss.mean()
    begun, ended = means.groupby("codec").first(), means.groupby("codec").last()
    margin = 0.05 * (begun.max() - wide.loss.min())
    top = begun.max() + 2 * margin
    for axes in panels:
        axes.set_ylim(wide.loss.min() - margin, top)
        for line, (codec, loss) in enumerate(ended[ended > top].items()):
            at = {"transform": axes.transAxes, "ha": "right", "va": "top", "color": looks[codec].colour}
            axes.text(0.98, 0.98 - 0.1 * line, f"{codec}\nleaves: {loss:.1f} at the end", None, **at)


def _model(runs: Any) -> str:
    first = runs.iloc[0]
    tokens = first["workload.batch_size"] * first["workload.sequence_length"]
    return f"{first['workload.model']}, {tokens} tokens per step, {first['training.steps']} steps, AdamW"


# ------------------------------------------------------------------ from the CSVs alone
SSN, CONTROL, RATE = "subspace(inner=fp32)", "subspace-free(inner=fp32)", "optimiser.learning_rate"
TRAINING_S = 127
"""Seconds of one core for one training: the median of 149."""


def _scaled(folder: Path) -> Any:
    table = pd.read_csv(folder / "summary.csv")
    return table[table.profile == SCALED].set_index("codec")


def against(folder: Path, codec: str, share: float, baseline: str = BASELINE) -> Facts | None:
    """Judge a codec's loss over the scaled link; the bound is a share of the baseline's."""
    scaled = _scaled(folder)
    if baseline not in scaled.index:
        return None
    loss = scaled.loss[baseline]
    ours, base = ({"codec": name, "profile": SCALED} for name in (codec, baseline))
    found = experiments.judge_loss(folder, share * loss, ours, base, "loss_less_fp32")
    if found is None:
        return None
    ends = " to ".join(percent(end / loss, "{:+.1f}") for end in found.interval or ())
    parts = f"{ends}, 95 %, {found.n} seeds" if ends else found.interval_words
    return experiments.loss_facts(found, loss, 2 * TRAINING_S, parts=parts)


def over_the_link(folder: Path, codec: str, known: str) -> Facts | None:
    """Return a codec's row of summary.csv over the scaled link, where that column is known."""
    scaled = _scaled(folder)
    if codec not in scaled.index or math.isnan(scaled[known][codec]):
        return None
    return {"ours": scaled.loc[codec]}


def constraint(folder: Path, rates: Sequence[float], share: float) -> Iterator[Facts]:
    """Yield the loss of a free projection above the subspace's, at each rate; the bound is a share of fp32's loss."""
    losses = _scaled(folder).loss
    for rate in rates if {BASELINE, SSN, CONTROL} <= set(losses.index) else ():
        free, ssn = ({"codec": codec, "profile": SCALED, RATE: rate} for codec in (CONTROL, SSN))
        loss = losses[BASELINE]
        found = experiments.judge_loss(folder, share * loss, free, ssn, "loss_less_fp32")
        if found is not None:
            yield {**experiments.loss_facts(found, loss, 2 * TRAINING_S), "rate": rate}


def blocks(folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README, from the CSVs of a folder."""
    table, link = pd.read_csv(folder / "summary.csv"), pd.read_csv(folder / "link.csv")
    match = Matched(**link.iloc[0]) if len(link) else None
    return {
        "answer": _answer(folder),
        "speed": speed_table(table),
        "targets": target_table(table),
        "crossed": _crossed(experiment_tables.read_tables(folder).comparisons),
        "link": "" if match is None else match.words[0].upper() + match.words[1:] + ".",
    }


def _crossed(comparisons: Any) -> Any:
    """Return the table of the comparisons that sweep.toml names; empty without them."""
    if comparisons.empty:
        return ""
    return experiment_verdicts.verdict_table(comparisons[comparisons.claim.notna() & (comparisons.claim != "")])


def _answer(folder: Path) -> str:
    scaled = _scaled(folder)
    if SSN not in scaled.index or BASELINE not in scaled.index:
        return ""
    row, said = scaled.loc[SSN], list[str]()
    for baseline in (HALVED, BASELINE):
        if (found := against(folder, SSN, 0.01, baseline)) is not None:
            of = found["judgement"]
            words = {"holds": "at most 1 % above", "fails": "more than 1 % above"}.get(
                of.verdict, "1 % is not resolved"
            )
            said.append(f"{of.value:+.3f} nats from {baseline}'s ({experiments.interval_words(of)}; {words})")
    loss = f"**Answer.** With an eighth of fp32's bytes, a subspace's loss is {' and '.join(said)}. " * bool(said)
    unshaped = "" if math.isnan(row.step_of_unshaped) else (
        f", and takes {row.step_of_unshaped:.2f} times as long as with fp32 over an unshaped link"
    )  # fmt: skip
    halved = (
        "" if math.isnan(row.speed_up_over_bf16) else f" and {row.speed_up_over_bf16:.2f} times as fast as with bf16"
    )
    return experiments.prose(f"{loss}A step is {row.speed_up:.2f} times as fast as with fp32{halved}{unshaped}.")


def write(results: Path, output: Path) -> None:
    """Write the CSVs of a sweep's results, and draw its curves."""
    runs, curves = experiments.runs_frame(results), experiments.curves(results)
    match = matched(results, runs)
    experiment_tables.write_tables(results, output, runs)
    # Runs that state their rate are the 2 x 2 of constraint and rate, for comparisons.csv; here each codec has its own.
    runs = runs[~runs.stated]
    curves = curves[curves.cell_id.isin(runs.cell_id)]
    summary(results, runs, curves).to_csv(output / "summary.csv", index=False, float_format="%.6g")
    link = pd.DataFrame([] if match is None else [match._asdict()], columns=list(Matched._fields))
    link.to_csv(output / "link.csv", index=False, float_format="%.6g")
    publishing.save_figure(draw(runs, curves, match), output, "loss")


if __name__ == "__main__":
    publishing.run(globals())

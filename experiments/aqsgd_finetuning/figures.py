"""Generates the figures, CSVs, claims and README blocks of aqsgd_finetuning.

python -m testbed sweep aqsgd_finetuning
python -m testbed predict aqsgd_finetuning
python experiments/aqsgd_finetuning/figures.py [--results results/aqsgd_finetuning] [--output FOLDER]

passes.csv has the mean training loss of each pass of each run; the other CSVs are those of all experiments.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from testbed.codecs.catalogue.placement import canonical_text
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import experiment_tables, experiments, floors, plots, predicted, publishing, style
from testbed.report.claim_rows import Facts

HERE = Path(__file__).resolve().parent
PASSES = "passes.csv"
BASELINES = {"fp32": 32, "bf16": 16}
"""Forward bits of each arm."""
AQSGD, CONTROL, DIRECT = "AQ-SGD", "DirectQ after a full first pass", "DirectQ"
WIDTHS = {2: 6, 3: 6, 4: 8}
"""Bits backward, by bits forward."""
TEXTS = {
    AQSGD: "aqsgd(acsgd(bits={0}), backward=acsgd(bits={1}))",
    CONTROL: "aqsgd(acsgd(bits={0}), direct, backward=acsgd(bits={1}))",
    DIRECT: "fwd=acsgd(bits={0}), bwd=acsgd(bits={1})",
}
ARMS = {
    canonical_text(text.format(bits, back)): (method, bits)
    for method, text in TEXTS.items()
    for bits, back in WIDTHS.items()
}
"""Method and bits forward of each codec."""
COLOURS = {AQSGD: "#009e73", CONTROL: "#e69f00", DIRECT: "#d55e00"}
MARKERS = {AQSGD: "o", CONTROL: "s", DIRECT: "D"}
MEASURES = {
    "validation_loss": "validation",
    "uncompressed_loss": "validation, codec taken out",
    "last_pass": "training, last pass",
}
BOUND = 0.02
"""Nats above fp32 that count as a worse loss; [compare] states it before any run."""
LOOKS = 2
"""At three seeds, and at five where a bound was near."""
BEST = "each at its best rate"
TRAINING_S = 15.9
"""Seconds of one core for one training of 48 steps: measured on 2026-11-23."""
SLOW, MIDDLE, FAST = "100Mbit", "500Mbit", "10Gbit"
PASSES_PUBLISHED, SLOWDOWN, SPEED_UP = 10, 1.31, 4.3
"""As in published.csv, which states the source."""
BITS = {"acsgd": "4 and 8 bits", "fwd=acsgd(bits=3), bwd=acsgd(bits=6)": "3 and 6 bits"}
NEAR = 0.05
"""Relative difference within which a number equals a published one."""


# ------------------------------------------------------------------ losses
def runs_and_passes(results: Path) -> tuple[Any, Any]:
    """Return a row for each run, with its last pass's mean training loss, and a row for each pass of each run."""
    runs = experiments.runs_frame(results)
    each = (runs["workload.training_sequences"] // runs["workload.batch_size"]).astype(int)
    curves = experiments.curves(results).merge(runs[experiments.RUN].assign(each=each), on=experiments.RUN)
    train = curves[curves.phase == "train"]
    passes = train.assign(number=train.step // train.each + 1).groupby([*experiments.RUN, "number"]).loss.mean()
    last = passes.groupby(level=experiments.RUN).last().rename("last_pass")
    runs = runs.merge(last, left_on=experiments.RUN, right_index=True)
    known = runs[[*experiments.RUN, "codec", "seed"]].assign(rate=runs["optimiser.learning_rate"])
    rows = passes.reset_index().merge(known, on=experiments.RUN)
    return runs, rows[["codec", "rate", "seed", "number", "loss"]].rename(columns={"number": "pass"})


def arms(folder: Path) -> Any:
    """Return the runs of seeds.csv with method and bits forward; a baseline's method is its own name."""
    frame = pd.read_csv(folder / experiments.SEEDS)
    known = [ARMS.get(codec, (codec, BASELINES.get(codec, 16))) for codec in frame.codec.map(canonical_text)]
    method, bits = zip(*known, strict=True)
    return frame.assign(method=method, bits=bits, rate=frame["optimiser.learning_rate"])


def losses(frame: Any, method: str, bits: int, column: str) -> dict[int, float]:
    """Return an arm's losses by seed, at the rate with its lowest mean validation loss; empty if it was not run."""
    rows = frame[(frame.method == method) & (frame.bits == bits)]
    if rows.empty:
        return {}
    return dict(rows[rows.rate == rows.groupby("rate").validation_loss.mean().idxmin()].groupby("seed")[column].first())


def against(
    frame: Any,
    method: str,
    bits: int,
    base: tuple[str, int] = ("fp32", 32),
    column: str = "validation_loss",
    bound: float = BOUND,
) -> Judgement | None:
    """Judge whether an arm's loss is at most `bound` nats above another's; None if either was not run."""
    a, b = losses(frame, method, bits, column), losses(frame, *base, column)
    return judge("loss", a, b, bound, looks=LOOKS) if a.keys() & b.keys() else None


def at_one_rate(frame: Any) -> Any:
    """Return the runs at fp32's best rate, because training losses at different rates are not comparable."""
    base = frame[frame.method == "fp32"]
    return frame[frame.rate == base.groupby("rate").validation_loss.mean().idxmin()]


@experiments.table
def loss_table(folder: Path) -> Any:
    """Return a row for each arm: its rate, and its losses vs fp32 with intervals."""
    frame = arms(folder)
    order = [*BASELINES, *TEXTS]
    groups = frame.groupby(["method", "bits", "rate"])
    for (method, bits, rate), part in sorted(
        groups, key=lambda one: (-min(one[0][1], 16), order.index(one[0][0]), one[0][2])
    ):
        row: dict[str, Any] = {
            "method": method,
            "bits forward, backward": f"{bits}, {WIDTHS.get(bits, bits)}",
            "rate": f"{rate:g}" + ("" if part.stated.any() else ", tuned"),
            "seeds": len(part),
            "payload per step, kB": f"{part.payload_bytes_per_step.mean() / 1e3:.0f}",
        }
        alone = pd.concat([frame[(frame.method != method) | (frame.bits != bits)], part])
        for column, name in MEASURES.items():
            found = against(at_one_rate(alone) if column == "last_pass" else alone, method, bits, column=column)
            row[name] = found and experiments.with_ends(found, "{:+.4f}")
            if method == "fp32":
                row[name] = f"{part[column].mean():.4f}"
        yield row


# ------------------------------------------------------------------ time
def times(folder: Path) -> Any:
    """Return the times that follow from bytes, rates and schedule, for each way to send, bits and compute time.

    `speed_up` is fp32's time at 100 Mbit/s over AQ-SGD's, `slowdown` AQ-SGD's at 500 Mbit/s over fp32's at 10 Gbit/s:
    for a step in the steady state, and for ten passes, the first one in full.
    """
    frame = predicted.cells(folder)
    frame = frame[frame.grid == "fit"].assign(rate=lambda rows: rows.links.str.extract(r"\((\w+),")[0])
    rows = []
    for (sends, compute), part in frame.groupby(["sends", "compute"], sort=False):
        step = part.pivot_table(index="codec", columns="rate", values="ideal_s")
        full = step.loc["fp32"]
        for codec, bits in BITS.items():
            ours = step.loc[codec]
            for passes, words in ((None, "steady state"), (PASSES_PUBLISHED, f"{PASSES_PUBLISHED} passes")):
                share = 0.0 if passes is None else 1 / passes
                slow, middle = (share * full[rate] + (1 - share) * ours[rate] for rate in (SLOW, MIDDLE))
                stage_s = part.forward_s.iloc[0] + part.backward_s.iloc[0]
                rows.append((sends, bits, words, compute, stage_s, full[SLOW] / slow, middle / full[FAST]))
    return pd.DataFrame(rows, columns=["sends", "bits", "of", "compute", "stage_s", "speed_up", "slowdown"])


def solved(folder: Path) -> Any:
    """Return, for each explanation, the compute time that yields 31 %, and the resulting speed-up.

    A slowdown that no compute time yields is missing.
    """
    rows = []
    for key, part in times(folder).groupby(["sends", "bits", "of"], sort=False):
        part = part.sort_values("compute")
        slow = part.sort_values("slowdown")
        stage = float(np.interp(SLOWDOWN, slow.slowdown, slow.stage_s, left=np.nan, right=np.nan))
        speed = float(np.interp(stage, part.stage_s, part.speed_up))
        rows.append((*key, stage, speed, part.speed_up.max()))
    return pd.DataFrame(rows, columns=["sends", "bits", "of", "stage_s", "speed_up", "most"])


def time_table(folder: Path) -> Any:
    """Return the explanations of the two published times; empty if they were not computed."""
    if not (folder / predicted.FILE).is_file():
        return ""
    rows = solved(folder)
    never = rows.stage_s.isna()
    return pd.DataFrame(
        {
            "sends": rows.sends,
            "bits forward and backward": rows.bits,
            "counted": rows.of,
            "31 % slower at 500 Mbit/s if a stage takes, s": rows.stage_s.map("{:.3f}".format).mask(never, "never"),
            "then at 100 Mbit/s": rows.speed_up.map("{:.2f}x".format).mask(never),
            "at most at 100 Mbit/s": rows.most.map("{:.2f}x".format),
        }
    )


# ------------------------------------------------------------------ claims
def less(
    folder: Path, method: str, bits: Sequence[int], bound: float, ways: Sequence[str], than: str = "fp32"
) -> Iterator[Facts]:
    """Yield an arm's validation loss minus that of another arm with equal bits, or of fp32, for each of `bits` and
    `ways`.
    """
    frame = arms(folder) if (folder / experiments.SEEDS).is_file() else None
    for width, way in itertools.product(bits if frame is not None else (), ways):
        rows = frame if way == BEST else at_one_rate(frame)
        found = against(rows, method, width, (than, BASELINES.get(than, width)), bound=bound)
        if found is not None:
            facts = {"bits": width, "way": way, "shown": _shown(found, bound), "loss": _fp32(rows)}
            yield {"judgement": found, **facts, "beside": _beside(rows, method, width)}


def _beside(rows: Any, method: str, bits: int) -> str:
    plain = against(rows, method, bits, column="uncompressed_loss")
    last = against(at_one_rate(rows), method, bits, column="last_pass")
    said = {"codec taken out": plain, "training loss of the last pass, at fp32's rate": last}
    return "".join(f"; {name} {experiments.with_ends(found, '{:+.4f}')}" for name, found in said.items() if found)


def _shown(found: Judgement, bound: float) -> str:
    if found.verdict in ("holds", "fails"):
        return f"the whole interval is on one side of {bound:+.2f} nats"
    shown = "" if found.detectable is None else f"can detect {found.detectable:.2g} nats from {bound:+.2f}; "
    return shown + experiments.more_seeds(found, 2 * TRAINING_S)


def published_times(folder: Path) -> Facts | None:
    """Return the largest speed-up of ten passes, and the settings that agree with both published times."""
    if not (folder / predicted.FILE).is_file():
        return None
    rows = solved(folder)
    able = rows[rows.speed_up.notna()]
    near = able[able.speed_up >= SPEED_UP * (1 - NEAR)]
    which = [f"{row.sends} sends, {row.bits}, {row.of}: {row.speed_up:.2f}x" for row in near.itertuples()]
    most = rows[rows.of != "steady state"].groupby("bits").most.max()
    return {
        "value": most.max(),
        "published": SPEED_UP,
        **dict(zip(("four", "three"), most[list(BITS.values())], strict=True)),
        "least": able.speed_up.min(),
        "largest": able.speed_up.max(),
        "agree": bool(which),
        "which": "; ".join(which) or "none agrees",
    }


def played(folder: Path) -> Facts | None:
    """Return the deviation of played cells from arithmetic; None if none was played."""
    facts = predicted.explained(folder) if (folder / predicted.FILE).is_file() else {"played": 0}
    return facts if facts["played"] else None


# ------------------------------------------------------------------ figures
def loss_figure(folder: Path) -> Any:
    """Draw the training loss above fp32's by pass at 2 bits, and the validation loss by bits."""
    frame = arms(folder)
    same, grey = at_one_rate(frame), style.looks(["fp32"])["fp32"].colour
    rate = same.rate.iloc[0]
    figure, ((left, right),) = plots.panels(1, 2, (9.2, 3.6))
    passes = _behind(folder, rate)
    for method, colour in COLOURS.items():
        rows = passes[passes.method == method]
        if len(rows):
            plots.curve(left, rows, "pass", "behind", colour, method, marker=MARKERS[method], ms=4.5)
    left.axhline(0, color=grey, lw=1.2)
    left.set_xticks(sorted(passes["pass"].unique()))
    title = f"Training loss at 2 bits, all at a rate of {rate:g}"
    left.set(xlabel="pass over the same sequences", ylabel="nats above fp32", title=title)
    for shift, method in zip((-0.07, 0.0, 0.07), TEXTS, strict=True):
        for rows, hollow in ((same, True), (frame, False)):
            points = [(bits + shift, against(rows, method, bits)) for bits in WIDTHS]
            look = COLOURS[method], MARKERS[method]
            plots.estimates(right, points, *look, hollow=hollow, width=0.8 if hollow else 1.6)
    right.axhline(0, color=grey, lw=1.2)
    plots.level(right, BOUND, f"{BOUND}: counts as worse")
    floors.draw_floors(right, HERE, _fp32(frame), corner=(1, 1))
    right.set_xticks(list(WIDTHS), [f"{bits} and {back}" for bits, back in WIDTHS.items()])
    right.set(xlabel=f"bits forward and backward (hollow: at a rate of {rate:g})", ylabel="nats above fp32")
    right.set(xlim=(1.6, 4.4), title="Validation loss, best learning rates")
    plots.finish(figure, _finding(frame), left)
    return figure


def _behind(folder: Path, rate: float) -> Any:
    """Return the passes at 2 bits and one rate, with each loss vs fp32 of the same seed."""
    passes = pd.read_csv(folder / PASSES)
    passes = passes[passes.rate == rate].assign(codec=lambda rows: rows.codec.map(canonical_text))
    base = passes[passes.codec == "fp32"].set_index(["seed", "pass"]).loss
    rows = passes[[ARMS.get(codec, ("", 0))[1] == min(WIDTHS) for codec in passes.codec]]
    behind = rows.loss - base.reindex(pd.MultiIndex.from_frame(rows[["seed", "pass"]])).to_numpy()
    return rows.assign(method=[ARMS[codec][0] for codec in rows.codec], behind=behind)


def _fp32(frame: Any) -> float:
    return experiments.mean_of(losses(frame, "fp32", 32, "validation_loss"))


def _two_bits(frame: Any) -> dict[str, Judgement]:
    """Return each method's validation loss above fp32's at 2 bits, if it was run."""
    every = {method: against(frame, method, min(WIDTHS)) for method in TEXTS}
    return {method: found for method, found in every.items() if found is not None}


def _finding(frame: Any) -> str:
    same, best = _two_bits(at_one_rate(frame)), _two_bits(frame)
    if not {AQSGD, DIRECT} <= same.keys() & best.keys():
        return "Losses of AQ-SGD and DirectQ against fp32"
    at_best = experiments.ends_words(best[DIRECT], "{:.3f}")
    return (
        f"2 bits, validation above fp32: AQ-SGD {best[AQSGD].value:.3f}; DirectQ {same[DIRECT].value:.3f}, at its own "
        f"rate {at_best}"
    )


def time_figure(folder: Path) -> Any:
    """Draw both published times against a stage's compute time, which is not published."""
    rows = times(folder)
    rows = rows[rows.of != "steady state"]
    figure, ((left, right),) = plots.panels(1, 2, (9.2, 3.4))
    for (sends, bits), part in rows.groupby(["sends", "bits"], sort=False):
        part = part.sort_values("stage_s")
        look = {"color": "#0072b2" if bits == BITS["acsgd"] else "#cc79a7", "ls": "-" if sends == "overlapped" else ":"}
        left.plot(part.stage_s, part.speed_up, label=f"{bits}, {sends} sends", **look)
        right.plot(part.stage_s, part.slowdown, **look)
    for axes, value, words in ((left, SPEED_UP, f"published: {SPEED_UP}x"), (right, SLOWDOWN, "published: 1.31x")):
        plots.level(axes, value, words, color=style.INK)
        axes.set(xscale="log", xlim=(0.03, None), xlabel="compute time of a stage per sequence, s (not published)")
        plots.ticks(axes.xaxis, [0.03, 0.1, 0.3])
    left.set(ylim=(0, None), title="100 Mbit/s: speed-up over fp32", ylabel="times as fast")
    right.set(ylim=(1, 3), title="500 Mbit/s: time over fp32's at 10 Gbit/s", ylabel="times as long")
    plots.finish(figure, _times_finding(folder), left, columns=2)
    return figure


def _times_finding(folder: Path) -> str:
    able = solved(folder)
    able = able[(able.of != "steady state") & able.speed_up.notna()]
    if able.empty:
        return "No compute time yields the published 31 %"
    best = able.loc[(able.speed_up - SPEED_UP).abs().idxmin()]
    if abs(best.speed_up / SPEED_UP - 1) > NEAR:
        return f"With the published 31 %, 100 Mbit/s gives {best.speed_up:.1f} times, not {SPEED_UP}"
    return f"Both published times follow from {best.bits} and a stage time of {best.stage_s:.3f} s"


# ------------------------------------------------------------------ README
def _answer(folder: Path) -> str:
    same = at_one_rate(arms(folder))
    words = [f"{method} {experiments.with_ends(found, '{:+.4f}')}" for method, found in _two_bits(same).items()]
    told = f" {_times_finding(folder)}." if (folder / predicted.FILE).is_file() else ""
    found = against(same, AQSGD, 2, (CONTROL, 2), bound=-BOUND)
    why = ": the differences keep the loss" if found is not None and found.verdict == "holds" else ""
    return experiments.prose(
        "**Answer.** Loss vs fp32 after four passes of 2 bits forward, in nats, at fp32's rate: "
        f"{'; '.join(words)}{why}.{told}"
    )


BLOCKS = {"answer": _answer, "losses": loss_table, "times": time_table}
FIGURES = {"loss": loss_figure, "time": time_figure}


def write(results: Path, output: Path) -> None:
    """Write the CSVs of a sweep's results."""
    runs, passes = runs_and_passes(results)
    passes.to_csv(output / PASSES, index=False, float_format="%.6f", lineterminator="\n")
    experiment_tables.write_tables(results, output, runs, "last_pass", "optimiser.learning_rate")


if __name__ == "__main__":
    publishing.run(globals())

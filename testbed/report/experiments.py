"""Shared by the figure programs of experiments/: frames of runs and curves, bands over seeds, captions, judgements of
arms, and Markdown tables. `publishing` runs such a program.
"""

from __future__ import annotations

import functools
import math
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas

import testbed
from testbed.errors import ResultsError, SpecError
from testbed.metrics.curves import LossPoint
from testbed.metrics.statistics import Interval, IntervalEstimate, of_differences
from testbed.metrics.time_to_loss import TargetCrossing, crossing
from testbed.metrics.verdicts import Judgement, judge, judge_ratio
from testbed.report import settings
from testbed.report.canvas import link_words
from testbed.report.numbers import markdown_table, percent
from testbed.report.plots import Estimate
from testbed.results import Run, last_sweep
from testbed.units import format_duration, parse_time

RUN = ["cell_id", "run"]
"""Columns that identify a run."""
SEEDS = "seeds.csv"
"""File with a row per run, from which every interval can be recomputed (`experiment_tables`)."""


def runs_frame(folder: str | Path) -> Any:
    """Return a pandas.DataFrame with a row for each successful run of the last sweep, by codec, profile, seed and run.

    Columns: those of `testbed.load`, and profile and seed (short for network and training.seed), certified, stated
    (whether its cell states the field that [tune] chose for others), mark (the caveat of that choice), and as text
    links, transport, pipeline, compute and machine. ResultsError if no run succeeded.
    """
    folder = Path(folder)
    frame, sweep = testbed.load(folder), last_sweep(folder)
    frame = frame[frame.status == "ok"]
    if frame.empty:
        lost = "succeeded, so there is nothing to draw; run the sweep again"
        raise ResultsError(f"no run of the last sweep in {folder} {lost}")
    frame = frame.assign(
        profile=frame.network,
        seed=frame["training.seed"].astype(int),
        certified=frame.certificate == "PASS",
        stated=frame.cell_id.isin(sweep.stated),
        mark=[sweep.marks.get(cell_id, "") for cell_id in frame.cell_id],
    )
    words = [_words(Run(folder / run)) for run in frame.folder]
    frame = frame.assign(**{name: [said[name] for said in words] for name in words[0]})
    return frame.sort_values(["codec", "profile", "seed", "run"]).reset_index(drop=True)


def _words(run: Run) -> dict[str, str]:
    cell = run.cell
    return {
        "links": link_words(cell.all_profiles),
        "transport": settings.transport_words(cell.all_profiles),
        "pipeline": settings.pipeline_words(cell),
        "compute": settings.compute_words(cell),
        "machine": settings.machine_words(run.environment),
    }


def judge_loss(
    folder: Path, bound: float, ours: Mapping[str, object], base: Mapping[str, object], column: str
) -> Judgement | None:
    """Judge whether an arm's validation loss is at most `bound` nats above another's, from the CSVs of a folder.

    `ours` and `base` are columns and values that select runs from seeds.csv; runs that state the value which [tune]
    chose for others are excluded, unless that column is among them. If only summary.csv has them, with the mean,
    lowest and highest difference of up to three seeds in `column`, these are judged. None if neither has the runs.
    """
    if (folder / SEEDS).is_file():
        runs = pandas.read_csv(folder / SEEDS)
        if not {*runs.tuned_field} & {*ours, *base}:
            runs = runs[~runs.stated]
        a, b = (matching(runs, arm).groupby("seed").validation_loss.first().to_dict() for arm in (ours, base))
        if a.keys() & b.keys():
            return judge("loss", a, b, bound)
    if not (folder / "summary.csv").is_file():
        return None
    summary = pandas.read_csv(folder / "summary.csv")
    if not ours.keys() <= {*summary.columns} or (rows := matching(summary, ours)).empty:
        return None
    row = rows.iloc[0]
    values = seed_values(row[column], row[f"{column}_low"], row[f"{column}_high"], int(row.seeds))
    return judge("loss", dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0), bound)


def matching(frame: Any, values: Mapping[str, object]) -> Any:
    """Return the rows of a frame whose columns have these values."""
    for name, value in values.items():
        frame = frame[frame[name] == value]
    return frame


def by_seed(frame: Any, column: str, **values: object) -> dict[int, float]:
    """Return a column by seed, of the rows that have these values; omits missing numbers."""
    rows = matching(frame, values).set_index("seed")[column].dropna()
    return {int(seed): float(value) for seed, value in rows.items()}


def seed_values(mean: float, low: float, high: float, seeds: int) -> list[float]:
    """Return the values of one to three seeds, given their mean, lowest and highest; their order is lost. ValueError
    for more seeds, which these numbers do not determine.
    """
    if not 1 <= seeds <= 3:
        raise ValueError(f"mean, lowest and highest do not determine the values of {seeds} seeds")
    return {1: [mean], 2: [low, high], 3: [low, 3 * mean - low - high, high]}[seeds]


def mean_of(by_seed: Mapping[int, float]) -> float:
    """Return the mean over seeds."""
    return float(np.mean(list(by_seed.values())))


def mean_words(by_seed: Mapping[int, float], form: str) -> str:
    """Return the mean over seeds with its interval, if any; `form` formats a number."""
    estimate = of_differences(list(by_seed.values()), "seed")
    ends = estimate.interval
    mean = form.format(estimate.value)
    return mean if ends is None or math.isnan(ends.low) else f"{mean} ({' to '.join(map(form.format, ends))})"


def table(rows: Callable[..., Iterator[Mapping[str, Any]]]) -> Callable[..., Any]:
    """Return a function that returns as a pandas.DataFrame the rows that the decorated one yields."""
    return functools.wraps(rows)(lambda *places, **names: pandas.DataFrame(rows(*places, **names)))


def prose(text: str) -> str:
    """Wrap a paragraph of a README."""
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def interval_words(judgement: Judgement) -> str:
    """Return the interval of a judgement as in claims."""
    if judgement.interval is None or judgement.exact:
        return judgement.interval_words
    form = "{:+.3f} to {:+.3f}".format(*judgement.interval) if judgement.measure == "loss" else judgement.interval_words
    return f"{form}, {judgement.confidence_words}, {judgement.n} seeds"


def ends_words(estimate: Estimate, form: str = "{:.2f}", otherwise: str = "one seed") -> str:
    """Return the ends of an interval, '1.20 to 1.31'; `otherwise` if there is none."""
    return otherwise if estimate.interval is None else " to ".join(map(form.format, estimate.interval))


def sure_words(estimate: Judgement | IntervalEstimate, form: str = "{:.2f}", of: str = "seeds") -> str:
    """Return an interval with its basis `of`, '1.20 to 1.31, 95 %, 5 seeds'; 'one seed' if there is none."""
    return ends_words(estimate, form) + ("" if estimate.interval is None else f", 95 %, {estimate.n} {of}")


def with_ends(estimate: Estimate, form: str = "{:+.3f}", otherwise: str = "", unit: str = "") -> str:
    """Return a number with its interval, '1.21x (1.18 to 1.24)'; `otherwise` replaces a missing interval."""
    ends, number = ends_words(estimate, form, otherwise), f"{form.format(estimate.value)}{unit}"
    return f"{number} ({ends})" if ends else number


def times_smaller(judgement: Judgement, form: str = "{:.3g}") -> tuple[str, str]:
    """Return by what factor ours is smaller than the base, or larger if the ratio is below 1, and the interval of that
    factor: ('1.21 times larger', '1.181 to 1.238').
    """
    if judgement.value >= 1:
        return f"{form.format(judgement.value)} times smaller", judgement.interval_words
    larger = judgement._replace(value=1 / judgement.value)
    if judgement.interval is not None:
        larger = larger._replace(interval=Interval(1 / judgement.interval.high, 1 / judgement.interval.low))
    return f"{form.format(larger.value)} times larger", larger.interval_words


def shown_words(judgement: Judgement, loss: float, seed_s: float, size: float | None = None) -> str:
    """Describe what decided a judgement of a loss; if undecided, the detectable effect in nats and as a share of
    `loss`, and the seeds and time needed (`more_seeds`).
    """
    bound = f"{judgement.effect:.3g} nats above" if judgement.effect else "the other's loss"
    if judgement.verdict in ("holds", "fails"):
        return f"the whole interval is {'at most' if judgement.verdict == 'holds' else 'more than'} {bound}"
    more = more_seeds(judgement, seed_s, size)
    if judgement.detectable is None:
        return more
    share = percent(judgement.detectable / loss, "{:.2g}")
    return f"can detect {judgement.detectable:.2g} nats from {bound} ({share} of the loss); {more}"


def loss_facts(
    judgement: Judgement | None, loss: float, seed_s: float, size: float | None = None, **more: Any
) -> dict[str, Any] | None:
    """Return the facts of a claim about a loss for claims.toml; None without a judgement. `loss`: the baseline's, of
    which `part` is the share; the others are as for `shown_words`.
    """
    if judgement is None:
        return None
    facts = {"judgement": judgement, "bound": judgement.effect, "part": judgement.value / loss, "loss": loss}
    return {**facts, "shown": shown_words(judgement, loss, seed_s, size), **more}


def ratio_facts(found: IntervalEstimate, least: float = 1.0, why: str = "", seed_s: float = 0.0) -> dict[str, Any]:
    """Return the facts of a claim that a factor over seeds of the links, or an exact one, is at least `least`, for
    claims.toml; `shown` is what `open_words` returns.
    """
    if found.interval is None:
        return {"value": found.value, "low": found.value, "high": found.value, "shown": why}
    judgement = judge_ratio(found, least)
    facts = {"value": found.value, "low": found.interval.low, "high": found.interval.high}
    words = sure_words(found, of="seeds of the links")
    return {**facts, "interval": words, "shown": open_words(why, judgement, seed_s, unit="")}


NO_SEEDS = "more seeds would not settle it"
"""Part of the reason of an unresolved claim that is uncertain for other reasons than chance."""
SEEDS_NEEDED = " seeds per arm"
"""Part of the reason of all other unresolved claims."""


def open_words(why: str, judgement: Judgement, seed_s: float, size: float | None = None, unit: str = "nats") -> str:
    """Return the reason of a claim; if its judgement is not resolved, with the detectable effect and what would resolve
    it (`more_seeds`).
    """
    if judgement.verdict != "not resolved":
        return why
    detectable = judgement.detectable
    shown = "" if detectable is None else f"; can detect {_effect(judgement, detectable, unit)}"
    return f"{why}{shown}; {more_seeds(judgement, seed_s, size, unit)}"


def more_seeds(judgement: Judgement, seed_s: float, size: float | None = None, unit: str = "nats") -> str:
    """Describe how many seeds per arm, and how much time of one core, would resolve an unresolved judgement.

    They detect an effect of `size` with 80 % power, given the observed spread: a published difference in `unit`, or
    factor; by default the claim's own. If the claim has none, or that many seeds were already used, they are the number
    that resolves the observed effect. `seed_s`: time on one core of one more seed of both arms.
    """
    if judgement.error is None:
        return f"one seed shows no spread, two{SEEDS_NEEDED} do: {format_duration(seed_s)} of one core"
    wanted = judgement.effect if size is None else size
    finds, seeds = " would resolve the observed effect", judgement.seeds
    if wanted is not None and wanted != (0.0 if judgement.measure == "loss" else 1.0):
        finds = f" would detect {_effect(judgement, wanted, unit)} with 80 % power"
        seeds = judgement.seeds_for(wanted)
        if seeds is not None and seeds <= judgement.n:
            out = ", which the interval excludes" if size is not None and _left_out(judgement, size) else ""
            finds = f" would resolve the observed effect, which is close to the bound ({judgement.n}{finds}{out})"
            seeds = judgement.seeds
    if seeds is None:
        return f"more than 10,000{SEEDS_NEEDED}{finds}"
    time = format_duration((seeds - judgement.n) * seed_s)
    return f"{seeds:,}{SEEDS_NEEDED} instead of {judgement.n}{finds}: {time} of one core"


def _effect(judgement: Judgement, size: float, unit: str) -> str:
    return f"{abs(size):.3g} {unit}" if judgement.measure == "loss" else f"a factor of {size:.3g}"


def _left_out(judgement: Judgement, size: float) -> bool:
    """Return whether an effect of this size lies outside the interval, in either direction."""
    assert judgement.interval is not None
    bound = judgement.effect or 0.0
    ends = (bound - size, bound + size) if judgement.measure == "loss" else (bound / size, bound * size)
    return not any(judgement.interval.holds(end) for end in ends)


def takes_s(folder: Path, program: str, parts: int) -> float:
    """Return how long one of `parts` equal parts of an experiment's program takes on one core, from its
    reproduce.toml, which states the total. SpecError if it does not.
    """
    path = folder / "reproduce.toml"
    for step in tomllib.loads(path.read_text(encoding="utf8")).get("step", []):
        if step["run"].split()[0] == program and "takes" in step:
            return parse_time(step["takes"]) / 1e9 / parts
    raise SpecError(f"{path} does not state the time of {program}; add `takes` to its step")


@functools.cache
def training_s(folder: Path, table: str, *columns: str, program: str = "train.py") -> float:
    """Return the time of one training of a table (`takes_s`): one per row, or per distinct value of these columns."""
    rows = pandas.read_csv(folder / table)
    return takes_s(folder, program, len(rows[list(columns)].drop_duplicates()) if columns else len(rows))


@functools.cache
def tuned_pair_s(folder: Path, tuning_seeds: int = 2) -> float:
    """Return the time of one more seed of two methods of `studies.tuned_text` (`takes_s`), whose rates were tried with
    `tuning_seeds` seeds.
    """
    tuning, curves = (pandas.read_csv(folder / name) for name in ("tuning.csv", "curves.csv"))
    of_best, methods = len(curves[["method", "seed"]].drop_duplicates()), curves.method.nunique()
    trained = of_best + tuning_seeds * (len(tuning) - methods)  # a method's best rate is among the tried ones
    return 2 * takes_s(folder, "train.py", trained)


def curves(folder: str | Path, value: str = "loss") -> Any:
    """Return a pandas.DataFrame with a row for each step and evaluation of each successful run.

    Columns: cell_id, run, codec, profile, seed, phase (train, evaluation, uncompressed), step (optimiser steps done
    before it), end_s (seconds of training steps until then, without evaluations) and `value`, a column of
    `testbed.steps`.
    """
    steps = testbed.steps(folder).sort_values([*RUN, "begin_s"])
    trained = steps.step_s.where(steps.phase == "train", 0.0)
    steps = steps.assign(end_s=trained.groupby([steps.cell_id, steps.run]).cumsum())
    known = runs_frame(folder)[[*RUN, "codec", "profile", "seed"]]
    return known.merge(steps[[*RUN, "phase", "step", "end_s", value]].dropna(subset=[value]), on=RUN)


def tuned_curves(folder: Path) -> dict[str, dict[int, list[LossPoint]]]:
    """Return the curves of `studies.tuned_text`, by method and seed; a step is one batch of every worker."""
    rows = pandas.read_csv(folder / "curves.csv")
    by_method: dict[str, dict[int, list[LossPoint]]] = {}
    for (method, seed), part in rows.groupby(["method", "seed"], sort=False):
        points = [LossPoint(row.batches, 0.0, row.loss) for row in part.itertuples()]
        by_method.setdefault(str(method), {})[int(seed)] = points
    return by_method


def crossings(by_seed: Mapping[int, Sequence[LossPoint]], target: float) -> dict[int, TargetCrossing]:
    """Return when each seed's curve reaches a loss; empty if one of them never does."""
    met = {seed: crossing(points, target) for seed, points in by_seed.items()}
    return {} if None in met.values() else {seed: each for seed, each in met.items() if each is not None}


MODELS = {
    "gpt2-nano": "GPT-2 nano, random",
    "gpt2-mini": "GPT-2 mini, random",
    "gpt2-mini-trained": "GPT-2 mini, trained",
    "smollm2-135m": "SmolLM2-135M",
}
"""Names in tables and figures of the models at whose boundaries codecs are measured (`studies.at_boundaries`)."""


def models_of(codecs: Any) -> list[str]:
    """Return the models of `MODELS` that occur in a codecs.csv, random ones first."""
    return [name for name in MODELS if name in set(codecs.model)]


def caption(frame: Any) -> str:
    """Describe the conditions of runs, for the foot of a figure; `frame`: the result of `runs_frame`, or part of it."""
    networks = frame[["profile", "links", "transport"]].drop_duplicates().itertuples(index=False, name=None)
    compute = f"compute {_all(frame.compute)}; timing {_all(frame.timing)}"
    lines = [
        f"engine {_all(frame.engine)}; {_all(frame.pipeline)}; {compute}",
        "; ".join(f"{name}: {links}, TCP {how}" for name, links, how in networks),
        f"{_all(frame.machine)}; seeds {_all(frame.seed)}",
    ]
    if not frame.certified.all():
        lines.append(f"hollow: not certified ({int((~frame.certified).sum())} of {len(frame)} runs)")
    return "\n".join(lines)


def _all(values: Iterable[object]) -> str:
    return " | ".join(dict.fromkeys(map(str, values)))


def markdown_of(frame: Any) -> str:
    """Write a frame as a Markdown table: columns of numbers are right-aligned, missing values are dashes."""
    headings = [str(name) for name in frame.columns]
    right = {heading for heading, kind in zip(headings, frame.dtypes, strict=True) if kind.kind in "iuf"}
    rows = [list(map(_text, row)) for row in frame.itertuples(index=False, name=None)]
    return markdown_table(headings, rows, right).rstrip("\n")


def _text(cell: Any) -> str:
    return "\N{EN DASH}" if pandas.isna(cell) else f"{cell:.4g}" if isinstance(cell, float) else str(cell)

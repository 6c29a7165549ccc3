"""What the figure programs of experiments/ share: frames of runs and curves, bands over seeds, captions, Markdown
tables, and how their README and claims.csv are kept equal to the numbers.

Such a program, experiments/NAME/figures.py, reads a sweep's results, writes CSVs and figures into a folder, and then
calls `publish`. It has two functions of that folder alone, which read nothing but its CSVs: `claims(folder) ->
list[Claim]`, and `blocks(folder) -> dict[str, str]`, the generated blocks of the README.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import testbed
from testbed.errors import ResultsError, SpecError
from testbed.metrics.statistics import Interval, of_differences
from testbed.metrics.verdicts import Judgement, judge
from testbed.report import blocks as markdown_blocks
from testbed.report import claims as claim_files
from testbed.report import settings, style
from testbed.report.canvas import link_words, render_figure
from testbed.report.lines import draw_floor
from testbed.report.numbers import markdown_table, percent
from testbed.results import Run, last_sweep
from testbed.units import format_duration, parse_time

_LARGEST_SVG = 300_000
"""The largest SVG, in bytes, that is worth its place in a repository."""
RUN = ["cell_id", "run"]
"""The columns that name a run."""
SEEDS = "seeds.csv"
"""A row for each run, from which every interval can be computed again (`experiment_tables`)."""


def folders(name: str, what: str) -> tuple[Path, Path]:
    """Return (results, output) from the command line of experiments/NAME/figures.py; `what` is its help."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument(
        "--results", type=Path, default=Path("results") / name, help="of the sweep (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("experiments") / name, help="for what is written (%(default)s)"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    return arguments.results, arguments.output


def publish(folder: Path, blocks: Mapping[str, str], claims: Iterable[claim_files.Claim] = ()) -> None:
    """Write claims.csv, put the blocks into the folder's README.md where there is one, and print them.

    SpecError where the README lacks a block or has another.
    """
    if rows := list(claims):
        claim_files.write_claims(folder / claim_files.FILE, rows)
    readme = folder / "README.md"
    if readme.is_file():
        markdown_blocks.write_blocks(readme, blocks)
    sys.stdout.write("\n\n".join(blocks.values()) + "\n")


def draw_and_publish(
    folder: Path,
    output: Path,
    figures: Mapping[str, Callable[[Path], Figure]],
    blocks: Callable[[Path], Mapping[str, str]],
    claims: Callable[[Path], Iterable[claim_files.Claim]],
) -> None:
    """Draw the figures, by name, of the CSVs in `output`, and `publish` what these show.

    published.csv of the experiment's `folder` goes with them, where there is one.
    """
    published = folder / "published.csv"
    if published.is_file() and output.resolve() != folder.resolve():
        (output / published.name).write_bytes(published.read_bytes())
    with style.applied():
        for name, draw in figures.items():
            save_figure(draw(output), output, name)
    publish(output, blocks(output), claims(output))


@contextmanager
def figures_program(folder: Path) -> Iterator[ModuleType]:
    """Import experiments/NAME/figures.py for a while, with the modules beside it. FileNotFoundError without one."""
    path, before = folder / "figures.py", set(sys.modules)
    specification = importlib.util.spec_from_file_location(f"figures of {folder.name}", path)
    assert specification is not None
    assert specification.loader is not None
    sys.path.insert(0, str(folder))
    try:
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:  # another experiment's module may have the same name
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]


def runs_frame(folder: str | Path) -> Any:
    """Return a pandas.DataFrame with a row for each run of the last sweep that ended well, by codec, profile, seed and
    run.

    The columns of `testbed.load`, and besides: profile and seed (short for network and training.seed), certified,
    stated (whether its cell states the field that [tune] chose for others), mark (what must be known of that choice),
    and in words links, transport, pipeline, compute and machine. ResultsError when no run ended well.
    """
    folder = Path(folder)
    frame, sweep = testbed.load(folder), last_sweep(folder)
    frame = frame[frame.status == "ok"]
    if frame.empty:
        lost = "ended well, so there is nothing to draw; run the sweep again"
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
        "links": link_words(cell.profiles),
        "transport": settings.transport_words(cell.profiles),
        "pipeline": settings.pipeline_words(cell),
        "compute": settings.compute_words(cell),
        "machine": settings.machine_words(run.environment),
    }


def judge_loss(
    folder: Path, bound: float, ours: Mapping[str, object], base: Mapping[str, object], column: str
) -> Judgement | None:
    """Judge that the validation loss of an arm is at most `bound` nats above another's, from the CSVs of a folder.

    `ours` and `base` are columns and values that choose the runs in seeds.csv; those that state a value which [tune]
    chose for the others are left out, unless the column is among them. Where only summary.csv has them, with the
    mean, lowest and highest difference of up to three seeds in `column`, these are what is judged. None where the
    runs are not there.
    """
    if (folder / SEEDS).is_file():
        runs = pandas.read_csv(folder / SEEDS)
        if not {*runs.tuned_field} & {*ours, *base}:
            runs = runs[~runs.stated]
        a, b = (_matching(runs, arm).groupby("seed").validation_loss.first().to_dict() for arm in (ours, base))
        if a.keys() & b.keys():
            return judge("loss", a, b, bound)
    if not (folder / "summary.csv").is_file():
        return None
    rows = _matching(pandas.read_csv(folder / "summary.csv"), ours)
    if rows.empty:
        return None
    row = rows.iloc[0]
    values = seed_values(row[column], row[f"{column}_low"], row[f"{column}_high"], int(row.seeds))
    return judge("loss", dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0), bound)


def _matching(frame: Any, arm: Mapping[str, object]) -> Any:
    for name, value in arm.items():
        frame = frame[frame[name] == value]
    return frame


def seed_values(mean: float, low: float, high: float, seeds: int) -> list[float]:
    """Return the values of one to three seeds, of which a table has the mean, the lowest and the highest; their order
    is lost. ValueError for more seeds, of which these three numbers do not tell.
    """
    if not 1 <= seeds <= 3:
        raise ValueError(f"mean, lowest and highest do not tell the values of {seeds} seeds")
    return {1: [mean], 2: [low, high], 3: [low, 3 * mean - low - high, high]}[seeds]


def mean_of(by_seed: Mapping[int, float]) -> float:
    """Return the mean over seeds."""
    return float(np.mean(list(by_seed.values())))


def mean_words(by_seed: Mapping[int, float], form: str) -> str:
    """Return the mean over seeds and, where there is one, its interval; `form` is that of a number."""
    estimate = of_differences(list(by_seed.values()), "seed")
    ends = estimate.interval
    mean = form.format(estimate.value)
    return mean if ends is None or math.isnan(ends.low) else f"{mean} ({' to '.join(map(form.format, ends))})"


def prose(text: str) -> str:
    """Break a paragraph of a README into lines."""
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def interval_words(found: Judgement) -> str:
    """Return the interval of a judgement in the words of a claim."""
    if found.interval is None or found.exact:
        return found.interval_words
    form = "{:+.3f} to {:+.3f}".format(*found.interval) if found.measure == "loss" else found.interval_words
    return f"{form}, 95 %, {found.n} seeds"


def times_smaller(found: Judgement, form: str = "{:.3g}") -> tuple[str, str]:
    """Return how many times smaller ours is than the base, or larger where the ratio is below 1, and the interval of
    the number that is said: ('1.21 times larger', '1.181 to 1.238').
    """
    if found.value >= 1:
        return f"{form.format(found.value)} times smaller", found.interval_words
    larger = found._replace(value=1 / found.value)
    if found.interval is not None:
        larger = larger._replace(interval=Interval(1 / found.interval.high, 1 / found.interval.low))
    return f"{form.format(larger.value)} times larger", larger.interval_words


def shown_words(found: Judgement, loss: float, seed_s: float, size: float | None = None) -> str:
    """Say what decided a judgement of a loss, or what would have: in nats, as a part of `loss`, and in seeds and hours
    (`more_seeds`).
    """
    bound = f"{found.effect:.3g} nats above" if found.effect else "the other's loss"
    if found.verdict in ("holds", "fails"):
        return f"the whole interval is {'at most' if found.verdict == 'holds' else 'more than'} {bound}"
    more = more_seeds(found, seed_s, size)
    if found.detectable is None:
        return more
    share = percent(found.detectable / loss, "{:.2g}")
    return f"would have shown {found.detectable:.2g} nats from {bound} ({share} of the loss); {more}"


NO_SEEDS = "more seeds would not settle it"
"""In the reason of a claim that is not resolved, and that something else than chance keeps open."""
SEEDS_NEEDED = " seeds per arm"
"""In the reason of every other one."""


def open_words(why: str, found: Judgement, seed_s: float, size: float | None = None, unit: str = "nats") -> str:
    """Return the reason of a claim, and where its judgement is not resolved, what would have shown and what would
    resolve it (`more_seeds`).
    """
    if found.verdict != "not resolved":
        return why
    shown = "" if found.detectable is None else f"; would have shown {_effect(found, found.detectable, unit)}"
    return f"{why}{shown}; {more_seeds(found, seed_s, size, unit)}"


def more_seeds(found: Judgement, seed_s: float, size: float | None = None, unit: str = "nats") -> str:
    """Say how many seeds per arm, and how much time of one core, would resolve a judgement that is not.

    They are as many as find an effect of `size` 4 times in 5 with the spread that was seen: a published difference, in
    `unit`, or factor; if there is none, the one that the claim itself states. Where it states none, or so many seeds
    are there, they are as many as it takes where the truth is what was seen. `seed_s`: one more seed of both arms, on
    one core.
    """
    if found.error is None:
        return f"one seed tells no spread, two{SEEDS_NEEDED} do: {format_duration(seed_s)} of one core"
    wanted = found.effect if size is None else size
    finds, seeds = " would resolve what was seen", found.seeds
    if wanted is not None and wanted != (0.0 if found.measure == "loss" else 1.0):
        finds = f" would find {_effect(found, wanted, unit)} 4 times in 5"
        seeds = found.seeds_for(wanted)
        if seeds is not None and seeds <= found.n:
            out = ", which the interval leaves out" if size is not None and _left_out(found, size) else ""
            finds, seeds = f" would resolve what was seen, so near the bound ({found.n}{finds}{out})", found.seeds
    if seeds is None:
        return f"more than 10,000{SEEDS_NEEDED}{finds}"
    time = format_duration((seeds - found.n) * seed_s)
    return f"{seeds:,}{SEEDS_NEEDED} instead of {found.n}{finds}: {time} of one core"


def _effect(found: Judgement, size: float, unit: str) -> str:
    return f"{abs(size):.3g} {unit}" if found.measure == "loss" else f"a factor of {size:.3g}"


def _left_out(found: Judgement, size: float) -> bool:
    """Say whether an effect of this size lies outside the interval, in either direction."""
    assert found.interval is not None
    bound = found.effect or 0.0
    ends = (bound - size, bound + size) if found.measure == "loss" else (bound / size, bound * size)
    return not any(found.interval.holds(end) for end in ends)


def takes_s(folder: Path, program: str, parts: int) -> float:
    """Return how long one of so many parts of an experiment's program takes on one core: its reproduce.toml says how
    long all of them do. SpecError where it does not.
    """
    path = folder / "reproduce.toml"
    for step in tomllib.loads(path.read_text(encoding="utf8")).get("step", []):
        if step["run"].split()[0] == program and "takes" in step:
            return parse_time(step["takes"]) / 1e9 / parts
    raise SpecError(f"{path} does not say how long {program} takes; add `takes` to its step")


@functools.cache
def training_s(folder: Path, table: str, *columns: str, program: str = "train.py") -> float:
    """Return how long one training of a table takes, `takes_s`: a row each, or rows that are alike in these columns."""
    rows = pandas.read_csv(folder / table)
    return takes_s(folder, program, len(rows[list(columns)].drop_duplicates()) if columns else len(rows))


@functools.cache
def tuned_training_s(folder: Path, tuning_seeds: int) -> float:
    """Return how long one training of `replicas.tuned_text` takes, `takes_s`; rates were tried with so many seeds."""
    tuning, curves = (pandas.read_csv(folder / name) for name in ("tuning.csv", "curves.csv"))
    of_best, methods = len(curves[["method", "seed"]].drop_duplicates()), curves.method.nunique()
    trained = of_best + tuning_seeds * (len(tuning) - methods)  # a method's best rate is among those that were tried
    return takes_s(folder, "train.py", trained)


def curves(folder: str | Path, value: str = "loss") -> Any:
    """Return a pandas.DataFrame with a row for each step and evaluation of each run that ended well.

    Columns: cell_id, run, codec, profile, seed, phase (train, evaluation, uncompressed), step (optimiser steps done
    before it), end_s (seconds spent in training steps until then; evaluations are left out) and `value`, a column of
    `testbed.steps`.
    """
    steps = testbed.steps(folder).sort_values([*RUN, "begin_s"])
    trained = steps.step_s.where(steps.phase == "train", 0.0)
    steps = steps.assign(end_s=trained.groupby([steps.cell_id, steps.run]).cumsum())
    known = runs_frame(folder)[[*RUN, "codec", "profile", "seed"]]
    return known.merge(steps[[*RUN, "phase", "step", "end_s", value]].dropna(subset=[value]), on=RUN)


def band(
    axes: Axes,
    x: Sequence[float],
    per_seed: Sequence[Sequence[float]],
    colour: str,
    label: str,
    *,
    dash: Any = "-",
    **line: Any,
) -> None:
    """Draw the mean of the seeds as a line, and a band from the lowest to the highest.

    `per_seed`: (seeds, points), `x`: (points).
    """
    rows = np.asarray(per_seed, dtype=np.float64)
    if rows.ndim != 2 or rows.shape[1] != len(x):
        raise ValueError(f"{label}: {rows.shape} losses for {len(x)} points; each seed needs one at each point")
    axes.plot(x, rows.mean(axis=0), color=colour, ls=dash, label=label, **line)
    axes.fill_between(x, rows.min(axis=0), rows.max(axis=0), color=colour, alpha=0.18, lw=0)


def floor_line(axes: Axes, frame: Any) -> None:
    """Draw the unigram floors of these runs' texts, where they lie within an axis of losses."""
    for floor in sorted(frame.unigram_floor.dropna().round(4).unique()):
        draw_floor(axes, float(floor))


def caption(frame: Any) -> str:
    """Say what runs were made with, for the foot of a figure; `frame` is what `runs_frame` returns, or a part."""
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
    """Write a frame as a Markdown table: columns of numbers are aligned to the right, what is missing is a dash."""
    headings = [str(name) for name in frame.columns]
    right = {heading for heading, kind in zip(headings, frame.dtypes, strict=True) if kind.kind in "iuf"}
    rows = [list(map(_text, row)) for row in frame.itertuples(index=False, name=None)]
    return markdown_table(headings, rows, right).rstrip("\n")


def _text(cell: Any) -> str:
    return "\N{EN DASH}" if pandas.isna(cell) else f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png, and NAME.svg where that is small, into an existing folder.

    The same figure gives the same bytes.
    """
    png, svg = (folder / f"{name}.{kind}" for kind in ("png", "svg"))
    with style.applied():
        png.write_bytes(render_figure(figure, "png", style.PAPER))
        drawn = render_figure(figure, "svg", style.PAPER)
    if len(drawn) > _LARGEST_SVG:
        svg.unlink(missing_ok=True)
        return [png]
    svg.write_bytes(drawn)
    return [png, svg]

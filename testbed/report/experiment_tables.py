"""The CSVs that every experiment commits next to its README, so that a reader can recompute each of its numbers.

seeds.csv         a row per run: losses, step time, bytes, time to the target
tuning.csv        a row per value and seed that [tune] tried; absent without tuning
certificates.csv  a row per measured quantity of each link
comparisons.csv   a row per comparison of [compare], computed from seeds.csv alone

figures.py calls `write_tables`; `experiment_verdicts` computes comparisons and their text in a README.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pandas

from testbed import paths, results
from testbed.codecs.catalogue.placement import canonical_text
from testbed.frozen import flatten
from testbed.metrics import LossPoint
from testbed.metrics.time_to_loss import crossing
from testbed.report import experiments
from testbed.report.experiment_verdicts import compared, settings
from testbed.results import RankCheck, Run, TunedArm, TuningRecord

_RUN = experiments.RUN
_NUMBERS = (
    *("steps", "train_loss", "validation_loss", "uncompressed_loss", "unigram_floor", "step_s"),
    *("payload_bytes_per_step", "wire_bytes_per_step", "certificate", "bound"),
)


class Tables(NamedTuple):
    """The written tables, each a pandas.DataFrame."""

    seeds: Any
    tuning: Any
    certificates: Any
    comparisons: Any


def write_tables(folder: Path, output: Path, runs: Any = None, *more: str) -> Tables:
    """Write the CSVs of a sweep's results into an existing folder; removes a CSV that would be empty.

    `runs`: the result of `experiments.runs_frame`, optionally with further columns, of which seeds.csv gets those named
    in `more`.
    """
    sweep, tuning = results.last_sweep(folder), results.last_tuning(folder)
    seeds = seeds_frame(folder, experiments.runs_frame(folder) if runs is None else runs, *more)
    tables = Tables(
        seeds,
        tuning_frame(tuning) if sweep.tuned and tuning is not None else pandas.DataFrame(),
        certificates_frame(folder, seeds),
        pandas.DataFrame() if sweep.compare is None else compared(seeds, sweep.compare),
    )
    for name, frame in zip(Tables._fields, tables, strict=True):
        path = output / f"{name}.csv"
        if frame.empty:
            path.unlink(missing_ok=True)
            continue
        frame.to_csv(path, index=False, lineterminator="\n")
        paths.give_to_user(path)
    return tables


def read_tables(folder: Path) -> Tables:
    """Read back the tables of `write_tables`; a missing file is an empty frame."""
    return Tables(
        *(
            pandas.read_csv(path) if (path := folder / f"{name}.csv").is_file() else pandas.DataFrame()
            for name in Tables._fields
        )
    )


# ---------------------------------------------------------------------- per-seed rows
def seeds_frame(folder: Path, runs: Any, *more: str) -> Any:
    """Return a row for each successful run of the last sweep; `more`: further columns of `runs`.

    Columns: cell_id, run, codec, profile, seed, every field of a cell (dotted) in which the runs differ or that
    [compare] names, tuned_field, stated, mark, exact, the numbers of `_NUMBERS`, and target_s, the seconds to the
    target loss of [compare], missing if the run did not reach it.
    """
    sweep, tuning = results.last_sweep(folder), results.last_tuning(folder)
    cells = [Run(folder / run).cell for run in runs.folder]
    asked = sweep.compare
    claims = () if asked is None else asked.claims
    named = {name for claim in claims for side in (claim.ours, claim.baseline) for name, _ in flatten(side)}
    field = tuning.field if sweep.tuned and tuning is not None else ""
    fields = [
        name for name in settings(runs.columns) if name in {*named, field} or runs[name].astype(str).nunique() > 1
    ]
    frame = runs[[*_RUN, "codec", "profile", "seed", *more, *fields]].assign(
        tuned_field=field,
        stated=runs.stated,
        mark=runs["mark"],
        exact=[cell.clock == "virtual" and cell.timing == "played" and not cell.by_chance for cell in cells],
        **{name: runs[name] for name in _NUMBERS},
    )
    return frame.assign(target_s=_target_seconds(folder, runs, None if asked is None else asked.target_loss))


def _target_seconds(folder: Path, runs: Any, target: float | None) -> list[float | None]:
    if target is None:
        return [None] * len(runs)
    curves = experiments.curves(folder)
    tested = curves[curves.phase == "evaluation"].sort_values("step")
    reached = {}
    for key, points in tested.groupby(_RUN):
        at = crossing([LossPoint(int(p.step), float(p.end_s), float(p.loss)) for p in points.itertuples()], target)
        reached[key] = None if at is None else at.seconds
    resumed = {(run.cell_id, run.run) for run in runs.itertuples() if pandas.notna(getattr(run, "resumed_at", None))}
    return [None if key in resumed else reached.get(key) for key in zip(runs.cell_id, runs.run, strict=True)]


# ---------------------------------------------------------------------- tuning and certificates
def tuning_frame(record: TuningRecord) -> Any:
    """Return a row for each value and seed that was tried, and for each full-length run that checked the short ones."""
    arms: list[tuple[TunedArm | RankCheck, str, int | None, str]]
    arms = [(arm, "tuning", record.steps, arm.mark) for arm in record.arms]
    if (check := record.check) is not None:
        arms.append((check, "check", check.steps, ""))
    rows = []
    for arm, kind, steps, mark in arms:
        named = {name: canonical_text(value) if name == "codec" else value for name, value in arm.arm.items()}
        for tried in arm.tried:
            about = {"mean_loss": tried.mean_loss, "added": tried.added, "chosen": tried.value == arm.chosen}
            for seed, loss in zip(record.seeds, tried.losses, strict=True):
                one = {"field": record.field, "value": tried.value, "seed": seed, "steps": steps or "all", "loss": loss}
                rows.append({**named, **one, **about, "mark": mark, "kind": kind})
    return pandas.DataFrame(rows)


def certificates_frame(folder: Path, seeds: Any) -> Any:
    """Return a row for each measured quantity of each link. On the virtual clock, a certificate serves many runs, and
    is listed once per network, with the number of runs and their worst bound.
    """
    rows = []
    for run in seeds.itertuples():
        path = folder / run.cell_id / f"run-{run.run}"
        if not (path / "certificate.json").exists():
            continue
        both = Run(path).certificates
        for certificate in filter(None, (both.before, both.after)):
            for measurement in certificate.measurements:
                row = measurement.model_dump(exclude={"bound", "fault", "chance"})
                about = {"profile": run.profile, "clock": certificate.clock, "taken_at": certificate.taken_at}
                rows.append({**about, **row, "runs": f"{run.cell_id} {run.run}", "bound": measurement.bound})
    if not rows:
        return pandas.DataFrame()
    frame = pandas.DataFrame(rows)
    same = [name for name in frame.columns if name not in ("runs", "bound")]
    return (
        frame.groupby(same, dropna=False, sort=False)
        .agg(runs=("runs", "nunique"), bound=("bound", "max"))
        .reset_index()
    )

"""Prints what a sweep will do: its cells, their predicted time, its tuning; and the progress of its runs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from testbed import devices
from testbed.commands.console import out, print_table, say, warn_of_buffers
from testbed.devices.device import Precision
from testbed.results import TuningRecord
from testbed.spec import Cell, Paced, recipe_of
from testbed.sweep import conduct
from testbed.sweep.environment import Means
from testbed.sweep.estimate import Estimator, RunEstimate, on_this_machine
from testbed.sweep.progress import SweepProgress
from testbed.sweep.trainings import untrained
from testbed.units import format_duration


def progress_into(folder: Path) -> Callable[[Sequence[Cell]], SweepProgress]:
    """Return a factory of progress displays for runs into `folder`, with an estimate of each run's duration."""
    estimator = Estimator(folder, None)  # a better estimate is not worth the time to measure this machine

    def make(cells: Sequence[Cell]) -> SweepProgress:
        estimates = {cell.id: estimator.estimate(cell) for cell in cells}
        return SweepProgress(
            out, cells, {cell_id: estimate.seconds for cell_id, estimate in estimates.items() if estimate is not None}
        )

    return make


def print_means(agenda: conduct.Agenda, means: Means) -> None:
    """Print which clock and engine the runs use, and why; warn about links with too small a buffer."""
    if any(cell.timing == "played" or cell.clock == "virtual" for cell in agenda.cells):
        say(f"clock {means.clock}: {means.clock_reason}")
    if any(cell.clock == "real" for cell in agenda.cells):
        say(f"engine {means.engine}: {means.engine_reason}")
    warn_of_buffers((cell.topology, cell.profiles) for cell in agenda.cells)


def print_plan(agenda: conduct.Agenda, folder: Path, *, again: bool) -> None:
    """Print the table of `testbed plan`, and the tuning, pace and time of the sweep that it announces."""
    estimator = Estimator(folder, cache(devices.host))
    rows = []
    cells, repeats = agenda.cells, agenda.experiment.repeats
    tuning = conduct.untried(agenda.to_tune, folder, again=again)
    runs = conduct.missing_runs(cells, agenda.experiment, folder, again=again)
    # A played trial is only trained, which is counted below.
    left = Counter(cell.id for cell in (*(trial for trial in tuning if trial.timing == "live"), *runs))
    untried = {cell.id for cell in tuning}
    seconds = 0.0
    for kind, group in (("tuning ", agenda.to_tune), ("", cells)):
        for cell in group:
            estimate, p, name = estimator.estimate(cell), cell.pipeline, cell.id
            assert estimate is not None
            asked = conduct.wanted_runs(cell, repeats) if not kind else 1
            seconds += left[name] * estimate.seconds
            made = int(name not in untried) if kind else max(0, asked - left[name])
            if kind and cell.timing == "played":
                estimate = RunEstimate(estimator.training_s(recipe_of(cell)), "training alone")
            works, order = cell.parallelism.in_short
            name = name if kind or not agenda.to_tune else f"{name.rpartition('-')[0]} (as chosen after tuning)"
            parts = f"{p.accumulation} x {p.microbatches}" if p.accumulation > 1 else str(p.microbatches)
            takes = (format_duration(estimate.seconds), estimate.source)
            rows.append((kind + name, works, order, parts, str(cell.training.steps), f"{made} of {asked} done", *takes))
    headings = ("cell", "stages", "schedule", "micro-batches", "steps", "runs", "a run takes", "known from")
    print_table(headings, rows)
    _print_trials(agenda)
    _print_paced(cells)
    made = sum(left[cell.id] == 0 for cell in cells)
    order = f", {agenda.experiment.order}" if repeats > 1 else ""
    wanted = sum(conduct.wanted_runs(cell, repeats) for cell in cells)
    say(
        f"{len(cells)} cells, {wanted} runs{order}: {made} cells finished, {left.total()} runs to make, "
        f"about {format_duration(seconds)}"
    )
    recipes, training_s = _trainings(estimator, (*tuning, *runs), folder)
    if recipes:
        say(
            f"before that: {recipes} recipes to train, about {format_duration(training_s)}, and durations to measure "
            "where none are stored"
        )


def _trainings(estimator: Estimator, cells: Sequence[Cell], folder: Path) -> tuple[int, float]:
    """Return the number of trainings missing for these cells, and the seconds they take together."""
    played = {recipe.id: recipe for cell in cells if cell.timing == "played" for recipe in [recipe_of(cell)]}
    recipes = untrained(played.values(), folder)
    return len(recipes), sum(map(estimator.training_s, recipes)) / len(os.sched_getaffinity(0))


def predicted(
    agenda: conduct.Agenda, folder: Path, host: Callable[[Precision], devices.ComputeDevice]
) -> tuple[int, float]:
    """Return the number of missing runs of an agenda, tuning included, and their seconds, training included."""
    estimator = Estimator(folder, host)
    trials = conduct.untried(agenda.to_tune, folder)
    missing = [*trials, *conduct.missing_runs(agenda.cells, agenda.experiment, folder)]
    _, training_s = _trainings(estimator, missing, folder)
    only_trained = {cell.id for cell in trials if cell.timing == "played"}
    to_run = [cell for cell in missing if cell.id not in only_trained]
    estimates = [estimate for cell in to_run if (estimate := estimator.estimate(cell)) is not None]
    return len(missing), training_s + sum(estimate.seconds for estimate in estimates)


def _print_trials(agenda: conduct.Agenda) -> None:
    asked = agenda.experiment.tune
    if asked is None or agenda.tuning is not None:
        return None if agenda.tuning is None else print_tuning(agenda.tuning)
    arms = len({repr(trial.arm) for trial in agenda.trials})
    total = arms * len(asked.values) * len(asked.seeds)
    length = "of full length" if asked.steps is None else f"of {asked.steps} steps, {total * asked.steps} in all"
    wider = "" if asked.quick else f"; up to {asked.widen} more values for an arm whose best value is at an end"
    return say(
        f"tuning: {asked.field} for each {', '.join(asked.arm)}: {arms} arms x {len(asked.values)} values x "
        f"{len(asked.seeds)} seeds = {total} runs {length}{wider}; the cells use the best value of their arm"
    )


def print_tuning(record: TuningRecord) -> None:
    """Print the value chosen for each arm with its candidates, and the arms that are not run."""
    for arm in record.arms:
        name = ", ".join(str(value) for value in arm.arm.values() if value is not None)
        losses = ", ".join(
            f"{'added ' * tried.added}{tried.value}: {'out' if tried.mean_loss is None else f'{tried.mean_loss:.3f}'}"
            for tried in arm.tried
        )
        more = f"; marked: {arm.mark}" if arm.mark else ""
        value = (
            f"{record.field} = {arm.chosen}" if arm.left else f"every value of {record.field} failed, so it is not run"
        )
        say(f"tuned: {name}: {value} (mean loss {losses}){more}")
    if (check := record.check) is not None:
        name = ", ".join(str(value) for value in check.arm.values() if value is not None)
        tau = "" if check.tau is None else f", rank correlation {check.tau:.2f}"
        regret = "" if check.regret is None else f"; the choice of the short runs is {check.regret:.4f} worse there"
        verdict = "rank values the same" if check.alike else "choose a different value than full runs"
        say(
            f"tuned with {record.steps} of {check.steps} steps, which {verdict}: for {name}, {check.chosen} is best at "
            f"full length{tau}{regret}"
        )


def _print_paced(cells: Sequence[Cell]) -> None:
    """Print how this machine keeps the pace of the cells whose compute is paced."""
    live = [cell for cell in cells if (cell.timing, cell.clock) == ("live", "real")]
    paced = [cell for cell in live if isinstance(cell.compute, Paced)]
    lines = Counter(on_this_machine(cell, devices.host(cell.workload.precision)) for cell in paced)
    for text, count in lines.items():
        say(f"paced, {count} cells: {text}")
    for dilation in sorted({cell.compute.dilation for cell in cells} - {1}):
        say(devices.caveat(dilation))

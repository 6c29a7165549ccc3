"""Conducts a whole experiment: tunes, orders the runs, and makes the missing ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from testbed import manifest, results
from testbed.codecs.catalogue.placement import parse_placement
from testbed.errors import TestbedError, UnknownNameError
from testbed.proofs import proofs_in
from testbed.results import Order, SweepRecord, TuningRecord
from testbed.spec import Cell, Clock, Engine, Measured, recipe_of
from testbed.sweep import controller, live_virtual, plan, playing, trainings, tune
from testbed.sweep.environment import Means
from testbed.sweep.live_session import network_of
from testbed.sweep.plan import Choice, Combination, Experiment
from testbed.sweep.progress import SweepProgress

LINK_SEEDS = 3
"""Minimum number of runs of a played cell with random links, each with its own link seed."""
Anew = Callable[[Iterable[Cell]], None]
"""Sets the runs of cells aside, so that they are made anew."""
MakeProgress = Callable[[Sequence[Cell]], SweepProgress]
"""Makes the progress display for a list of runs."""


@dataclass(frozen=True)
class Agenda:
    """What an experiment asks for: its cells, trials and, once made, the choice among the trials."""

    experiment: Experiment
    """The experiment, with the changes of the command line."""
    engine: Engine
    """Engine of runs on the real clock."""
    clock: Clock
    """Clock of played cells."""
    combinations: list[Combination]
    trials: list[tune.TuningTrial]
    """Empty without [tune]."""
    tuning: TuningRecord | None
    """The choice among the trials; None until it is made."""
    chosen: tuple[str, ...] = ()
    """Ids of the requested cells; empty: all."""

    @cached_property  # a sweep of two thousand cells takes seconds to resolve
    def resolved(self) -> list[tuple[Combination, Cell]]:
        """Each combination with its cell. Before tuning, cells have the first value of the tuned field."""
        points, asked = self.combinations, self.experiment.tune
        if asked is not None:
            points = tune.with_choice(points, asked, self.tuning) if self.tuning else plan.untuned(points, asked)
        cells = plan.resolve_cells(points, self.engine, str(self.experiment.path), self.clock)
        return list(zip(points, cells, strict=True))

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The requested cells of the sweep, each once."""
        cells = plan.unique(cell for _, cell in self.resolved)
        if not self.chosen or (self.experiment.tune is not None and self.tuning is None):  # ids depend on the tuning
            return cells
        known = {cell.id: cell for cell in cells}
        if unknown := [name for name in self.chosen if name not in known]:
            raise UnknownNameError("cell of this sweep", unknown[0], known)
        return tuple(known[name] for name in self.chosen)

    @property
    def to_tune(self) -> tuple[Cell, ...]:
        """The cells of the trials; empty once the choice is made."""
        return plan.unique(cell for trial in self.trials for cell in trial.cells) if self.tuning is None else ()


def make_agenda(
    experiment: Experiment, engine: Engine, choice: Choice, folder: Path, *, clock: Clock = "real", again: bool = False
) -> Agenda:
    """Determine and check all work to do; starts and writes nothing. `again`: ignore an earlier tuning."""
    asked = plan.apply_choice(experiment, choice)
    points = plan.combinations(asked, choice)
    tried = tune.trials(asked, points, engine, clock)
    before = results.last_tuning(folder) if tried and not again else None
    known = before if before is not None and asked.tune and tune.answers(before, asked.tune, tried) else None
    agenda = Agenda(asked, engine, clock, points, tried, known, tuple(choice.cells))
    _ = agenda.cells  # checks them
    return agenda


def missing_runs(
    cells: tuple[Cell, ...], experiment: Experiment, folder: Path, *, again: bool = False
) -> tuple[Cell, ...]:
    """Return the runs missing from the repeats of these cells, in order."""
    repeats = partial(wanted_runs, repeats=experiment.repeats)
    runs = arrange_runs(cells, repeats=repeats, order=experiment.order, seed=experiment.order_seed)
    done = {} if again else {name: len(results.finished_runs(folder, name)) for name in (cell.id for cell in cells)}
    proofs_in(folder).keep()
    return tuple(runs_left(runs, done))


def wanted_runs(cell: Cell, repeats: int) -> int:
    """Return the number of runs of a cell.

    On the virtual clock over deterministic links, all runs are identical, played or live, so one is enough. Over random
    links, each run has its own link seed, and there are at least LINK_SEEDS.
    """
    if cell.timing == "live" and cell.clock == "real":
        return repeats
    if cell.by_chance:
        return max(repeats, LINK_SEEDS)
    return 1 if cell.clock == "virtual" else repeats


def arrange_runs(cells: Sequence[Cell], *, repeats: Callable[[Cell], int], order: Order, seed: int) -> list[Cell]:
    """Order the runs, `repeats(cell)` of each cell. The same arguments give the same order.

    `grouped`: in the order of the file, with the runs over one network together, and a cell's repeats in a row.

    `interleaved`: in rounds in which every cell runs once. Networks, and the cells within a network, are shuffled, so
    that a machine that warms up or slows down affects all codecs alike. Cells of one network stay together in a round
    because they share a lab.
    """
    networks: dict[object, list[Cell]] = {}
    for cell in cells:
        networks.setdefault(network_of(cell), []).append(cell)
    groups = list(networks.values())
    if order == "grouped":
        return [cell for group in groups for cell in group for _ in range(repeats(cell))]
    runs: list[Cell] = []
    for number in range(max(map(repeats, cells), default=0)):
        shuffle = random.Random(f"{seed} {number}")  # a round does not depend on the number of rounds
        for group in shuffle.sample(groups, len(groups)):
            runs += [cell for cell in shuffle.sample(group, len(group)) if number < repeats(cell)]
    return runs


def runs_left(runs: Iterable[Cell], done: Mapping[str, int]) -> list[Cell]:
    """Return the runs still to be made, in the same order. `done` counts the finished runs of each cell."""
    spare = dict(done)
    left = []
    for cell in runs:
        if spare.get(name := cell.id, 0) > 0:
            spare[name] -= 1
        else:
            left.append(cell)
    return left


def untried(cells: Iterable[Cell], folder: Path, *, again: bool = False) -> tuple[Cell, ...]:
    """Return the cells of trials whose loss is not known yet. `again` repeats live ones; a training without a network
    would give the same loss.
    """

    def known(cell: Cell) -> bool:
        if cell.timing == "played":
            return trainings.is_trained(trainings.trained_folder(folder, recipe_of(cell)))
        return not again and results.finished(folder, cell.id) is not None

    return tuple(cell for cell in cells if not known(cell))


@contextmanager
def replacing(folder: Path) -> Iterator[Anew]:
    """Yield a function that sets the runs of cells aside, once for each cell: durations measured since do not mix with
    earlier ones. At the end, runs that nothing replaced are put back.
    """
    moved = dict[str, list[tuple[Path, Path]]]()

    def set_aside(cells: Iterable[Cell]) -> None:
        for name in {cell.id for cell in cells} - moved.keys():
            moved[name] = [(manifest.set_aside(run.folder), run.folder) for run in list(results.runs(folder, name))]

    try:
        yield set_aside
    finally:
        for name, runs in moved.items():
            if not any(results.runs(folder, name)):
                for aside, was in runs:
                    aside.rename(was)


def make_runs(runs: Sequence[Cell], folder: Path, means: Means, progress: MakeProgress) -> list[TestbedError]:
    """Make runs, played ones first; return the errors of those that failed. See `playing`, `live_virtual` and
    `controller.run_cells`. Altered and unfinished runs of the same cells are set aside. The caller holds the folder's
    lock.
    """
    played = [cell for cell in runs if cell.timing == "played"]
    in_guests = [cell for cell in runs if cell.timing == "live" and cell.clock == "virtual"]
    live = [cell for cell in runs if cell.timing == "live" and cell.clock == "real"]
    failures: list[TestbedError] = []
    for cells, make in ((played, playing.play_cells), (in_guests, live_virtual.run_cells), (live, _run_live)):
        if cells:
            with progress(cells) as following:
                results.set_aside(folder, dict.fromkeys(cell.id for cell in cells), following.note)
                failures += make(cells, folder, means, following)
    return failures


def _run_live(cells: Sequence[Cell], folder: Path, means: Means, progress: SweepProgress) -> list[TestbedError]:
    own_pace = [cell for cell in cells if isinstance(cell.compute, Measured)]
    # A codec that adapts to its link cannot be calibrated without one.
    own_pace = [cell for cell in own_pace if not parse_placement(cell.codec).measures]
    # Stored costs only: a calibration would take longer than most runs.
    costs = playing.measured_costs(own_pace, folder, means._replace(calibration=None), progress, 0).recipes
    return controller.run_cells(cells, folder, means.engine_reason, progress, costs)


def tune_first(
    agenda: Agenda, folder: Path, means: Means, progress: MakeProgress, anew: Anew = lambda cells: None
) -> Agenda:
    """Run the trials, and the further ones that their losses require; choose, and store the choice in tuning.json.
    StageError if no arm has a value left. `anew` is told all trials.

    Played trials are only trained: a loss needs no network. Finished trainings are not repeated, so that an interrupted
    tuning resumes.
    """
    asked = agenda.experiment.tune
    assert asked is not None
    loss_of, more = partial(final_loss, folder), list(agenda.trials)
    tried = list(more)
    while more:
        # A run that fails disqualifies its value.
        cells = plan.unique(cell for trial in more for cell in trial.cells)
        anew(cells)
        cells = untried(cells, folder)
        if played := [cell for cell in cells if cell.timing == "played"]:
            with progress(played) as following:
                playing.train_cells(played, folder, means, following)
        make_runs([cell for cell in cells if cell.timing == "live"], folder, means, progress)
        more = tune.further(asked, agenda.combinations, tried, loss_of, agenda.engine, agenda.clock)
        tried += more
    record = tune.settle(asked, tried, loss_of)
    results.write_json(folder / "tuning.json", record)
    return replace(agenda, tuning=record)


def final_loss(folder: Path, cell: Cell) -> float | None:
    """Return the final validation loss of a trial's cell; None if none of its runs succeeded."""
    if cell.timing == "played":
        return trainings.final_loss(trainings.trained_folder(folder, recipe_of(cell)))
    run = results.finished(folder, cell.id)
    return None if run is None or run.summary is None else run.summary.validation_loss


def sweep_record(agenda: Agenda, command: str) -> SweepRecord:
    """Return the agenda's record for sweep.json; `command` is the command line as typed."""
    asked = agenda.experiment
    stated = {name: getattr(asked, name) for name in ("question", "repeats", "order", "order_seed", "compare")}
    field = None if asked.tune is None else asked.tune.field
    own = dict.fromkeys(cell.id for point, cell in agenda.resolved if field in point.stated)
    tuned = {cell.id for point, cell in agenda.resolved if field not in point.stated}
    return SweepRecord(
        **stated,
        command=command,
        cells=tuple(cell.id for cell in agenda.cells),
        tuned=agenda.tuning is not None,
        marks={cell.id: point.mark for point, cell in agenda.resolved if point.mark},
        stated=tuple(name for name in own if name not in tuned),
    )

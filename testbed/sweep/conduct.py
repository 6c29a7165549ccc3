"""Conduct a whole experiment: choose what is to be tuned, put the runs in order, make those that are missing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from testbed import results
from testbed.codecs.catalogue.placement import parse_placement
from testbed.errors import TestbedError, UnknownNameError
from testbed.results import Order, SweepRecord, TuningRecord
from testbed.spec import Cell, Clock, Engine, Measured, recipe_of
from testbed.sweep import controller, live_virtual, plan, playing, trainings, tune
from testbed.sweep.means import Means
from testbed.sweep.plan import Choice, Combination, Experiment
from testbed.sweep.progress import SweepProgress
from testbed.sweep.session import network_of

LINK_SEEDS = 3
"""Runs of a played cell whose links draw at random: as many seeds of theirs."""
MakeProgress = Callable[[Sequence[Cell]], SweepProgress]
"""Given runs in their order, makes what follows them."""


@dataclass(frozen=True)
class Agenda:
    """What an experiment asks for, and what of it is known."""

    experiment: Experiment
    """With what the command line changes in it."""
    engine: Engine
    """Of runs on the real clock."""
    clock: Clock
    """Of played cells."""
    combinations: list[Combination]
    trials: list[tune.TuningTrial]
    """Empty without [tune]."""
    tuning: TuningRecord | None
    """The choice among them; None before it was made."""
    chosen: tuple[str, ...] = ()
    """Ids of the cells that are asked for; empty: all."""

    @cached_property  # a sweep of two thousand cells takes seconds to resolve
    def resolved(self) -> list[tuple[Combination, Cell]]:
        """Each combination and its cell. Before tuning they have the first value that will be tried."""
        points, asked = self.combinations, self.experiment.tune
        if asked is not None:
            points = tune.with_choice(points, asked, self.tuning) if self.tuning else plan.untuned(points, asked)
        found = plan.resolve_cells(points, self.engine, str(self.experiment.path), self.clock)
        return list(zip(points, found, strict=True))

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The cells of the sweep that are asked for, each once."""
        cells = plan.unique(cell for _, cell in self.resolved)
        if not self.chosen or (self.experiment.tune is not None and self.tuning is None):  # tuning decides the ids
            return cells
        known = {cell.id: cell for cell in cells}
        if unknown := [name for name in self.chosen if name not in known]:
            raise UnknownNameError("cell of this sweep", unknown[0], known)
        return tuple(known[name] for name in self.chosen)

    @property
    def to_tune(self) -> tuple[Cell, ...]:
        """The runs of the trials, while the choice has not been made."""
        return plan.unique(cell for trial in self.trials for cell in trial.cells) if self.tuning is None else ()


def make_agenda(
    experiment: Experiment,
    engine: Engine,
    choice: Choice,
    folder: Path,
    *,
    clock: Clock = "real",
    again: bool = False,
) -> Agenda:
    """Work out what is to be done and check it all; starts and writes nothing. `again`: what was tuned before does not
    count.
    """
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
    """Return the runs that these cells still lack of their repeats, in order."""
    runs = arrange_runs(
        cells,
        repeats=lambda cell: wanted_runs(cell, experiment.repeats),
        order=experiment.order,
        seed=experiment.order_seed,
    )
    done = {} if again else {cell.id: len(results.finished_runs(folder, cell.id)) for cell in cells}
    return tuple(runs_left(runs, done))


def wanted_runs(cell: Cell, repeats: int) -> int:
    """Return how many runs a cell is to have.

    On the virtual clock, played or live, over links without chance, every run is the same, so one is enough. Over links
    that draw at random each run has another seed for its links, and there are LINK_SEEDS at least.
    """
    if cell.timing == "live" and cell.clock == "real":
        return repeats
    if cell.by_chance:
        return max(repeats, LINK_SEEDS)
    return 1 if cell.clock == "virtual" else repeats


def arrange_runs(cells: Sequence[Cell], *, repeats: Callable[[Cell], int], order: Order, seed: int) -> list[Cell]:
    """Put the runs in order: every cell as often as `repeats` says. The same arguments give the same order.

    `grouped`: as the file has them, runs over one network together, and a cell's repeats one after another.

    `interleaved`: in rounds, in each of which every cell runs once. Networks are shuffled, and the cells within a
    network, so that a machine that warms up or slows down does it to all codecs alike. Cells of one network stay
    together in a round, because they share a lab.
    """
    networks: dict[object, list[Cell]] = {}
    for cell in cells:
        networks.setdefault(network_of(cell), []).append(cell)
    groups = list(networks.values())
    if order == "grouped":
        return [cell for group in groups for cell in group for _ in range(repeats(cell))]
    runs: list[Cell] = []
    for number in range(max(map(repeats, cells), default=0)):
        shuffle = random.Random(f"{seed} {number}")  # a round is the same however many follow
        for group in shuffle.sample(groups, len(groups)):
            runs += [cell for cell in shuffle.sample(group, len(group)) if number < repeats(cell)]
    return runs


def runs_left(runs: Iterable[Cell], done: Mapping[str, int]) -> list[Cell]:
    """Return the runs that are still to be made, in the same order. `done` counts those of each cell that were made."""
    spare = dict(done)
    left = []
    for cell in runs:
        if spare.get(cell.id, 0) > 0:
            spare[cell.id] -= 1
        else:
            left.append(cell)
    return left


def untried(cells: Iterable[Cell], folder: Path, *, again: bool = False) -> tuple[Cell, ...]:
    """Return the trials' cells whose loss is not known yet. `again` makes live ones once more; what is trained without
    a network would be the same.
    """

    def known(cell: Cell) -> bool:
        if cell.timing == "played":
            return trainings.is_trained(trainings.trained_folder(folder, recipe_of(cell)))
        return not again and results.finished(folder, cell.id) is not None

    return tuple(cell for cell in cells if not known(cell))


def make_runs(runs: Sequence[Cell], folder: Path, means: Means, progress: MakeProgress) -> list[TestbedError]:
    """Make runs, first those that are played; returns why some failed. See `playing`, `live_virtual` and
    `controller.run_cells`.
    """
    played = [cell for cell in runs if cell.timing == "played"]
    in_guests = [cell for cell in runs if cell.timing == "live" and cell.clock == "virtual"]
    live = [cell for cell in runs if cell.timing == "live" and cell.clock == "real"]
    failures: list[TestbedError] = []
    for cells, make in ((played, playing.play_cells), (in_guests, live_virtual.run_cells), (live, _run_live)):
        if cells:
            with progress(cells) as following:
                failures += make(cells, folder, means, following)
    return failures


def _run_live(cells: Sequence[Cell], folder: Path, means: Means, progress: SweepProgress) -> list[TestbedError]:
    own_pace = [cell for cell in cells if isinstance(cell.compute, Measured)]
    # A codec that goes by what its link carries cannot be calibrated without one.
    own_pace = [cell for cell in own_pace if not parse_placement(cell.codec).measures]
    # What is known: measuring it first would take longer than many a run.
    costs = playing.measured_costs(own_pace, folder, means, progress, 0).recipes
    return controller.run_cells(cells, folder, means.engine_reason, progress, costs)


def tune_first(agenda: Agenda, folder: Path, means: Means, progress: MakeProgress, *, again: bool = False) -> Agenda:
    """Make the runs of the trials, and those that their losses call for; choose, and keep the choice in tuning.json.
    StageError when nothing is left for any arm.

    Played trials are trained and no more: no network is needed for a loss. What was trained before is not trained
    again, so that an interrupted tuning goes on where it was.
    """
    asked = agenda.experiment.tune
    assert asked is not None
    loss_of, more = partial(final_loss, folder), list(agenda.trials)
    tried = list(more)
    while more:
        # A run that fails disqualifies its value.
        cells = untried(plan.unique(cell for trial in more for cell in trial.cells), folder, again=again)
        if played := [cell for cell in cells if cell.timing == "played"]:
            with progress(played) as following:
                playing.train_cells(played, folder, following)
        make_runs([cell for cell in cells if cell.timing == "live"], folder, means, progress)
        more = tune.further(asked, agenda.combinations, tried, loss_of, agenda.engine, agenda.clock)
        tried += more
    record = tune.settle(asked, tried, loss_of)
    results.write_json(folder / "tuning.json", record)
    return replace(agenda, tuning=record, chosen=())


def final_loss(folder: Path, cell: Cell) -> float | None:
    """Return the final validation loss of a trial's cell; None where no run of it ended well."""
    if cell.timing == "played":
        return trainings.final_loss(trainings.trained_folder(folder, recipe_of(cell)))
    run = results.finished(folder, cell.id)
    return None if run is None or run.summary is None else run.summary.validation_loss


def sweep_record(agenda: Agenda, command: str) -> SweepRecord:
    """Return what sweep.json keeps of the agenda; `command` is what was typed."""
    asked = agenda.experiment
    stated = {name: getattr(asked, name) for name in ("question", "repeats", "order", "order_seed", "compare")}
    return SweepRecord(
        **stated,
        command=command,
        cells=tuple(cell.id for cell in agenda.cells),
        tuned=agenda.tuning is not None,
        marks={cell.id: point.mark for point, cell in agenda.resolved if point.mark},
        stated=tuple(
            dict.fromkeys(cell.id for point, cell in agenda.resolved if asked.tune and asked.tune.field in point.stated)
        ),
    )

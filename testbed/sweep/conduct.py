"""Conduct a whole experiment: choose what is to be tuned, put the runs in order, make those that are missing."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from testbed import results
from testbed.codecs.catalogue.placement import parse_placement
from testbed.errors import TestbedError
from testbed.results import Order, SweepRecord, TuningRecord
from testbed.spec import Cell, Clock, Engine, Measured
from testbed.sweep import controller, live_virtual, plan, playing, tune
from testbed.sweep.means import Means
from testbed.sweep.plan import Choice, Combination, Experiment
from testbed.sweep.progress import SweepProgress
from testbed.sweep.session import network_of

LINK_SEEDS = 3
"""Runs of a played cell whose links draw at random: as many seeds of theirs."""
MakeProgress = Callable[[Sequence[Cell]], SweepProgress]
"""Given runs in their order, makes what follows them."""
Network = Callable[[Cell], Hashable]
"""What cells must agree in to share a lab (`session.network_of`)."""


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
    trials: list[tune.Trial]
    """Empty without [tune]."""
    tuning: TuningRecord | None
    """The choice among them; None before it was made."""

    @cached_property  # a sweep of two thousand cells takes seconds to resolve
    def cells(self) -> tuple[Cell, ...]:
        """The cells of the sweep, each once. Before tuning they have the first value that will be tried."""
        points, asked = self.combinations, self.experiment.tune
        if asked is not None:
            points = tune.with_choice(points, asked, self.tuning) if self.tuning else plan.untuned(points, asked)
        return plan.unique(plan.resolve_cells(points, self.engine, str(self.experiment.path), self.clock))

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
    known = before if before is not None and tune.answers(before, tried) else None
    agenda = Agenda(asked, engine, clock, points, tried, known)
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
        network=network_of,
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


def arrange_runs(
    cells: Sequence[Cell], *, repeats: Callable[[Cell], int], order: Order, seed: int, network: Network
) -> list[Cell]:
    """Put the runs in order: every cell as often as `repeats` says. The same arguments give the same order.

    `grouped`: as the file has them, runs over one network together, and a cell's repeats one after another.

    `interleaved`: in rounds, in each of which every cell runs once. Networks are shuffled, and the cells within a
    network, so that a machine that warms up or slows down does it to all codecs alike. Cells of one network stay
    together in a round, because they share a lab.
    """
    networks: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        networks.setdefault(network(cell), []).append(cell)
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


def untried(agenda: Agenda, folder: Path, *, again: bool = False) -> tuple[Cell, ...]:
    """Return the runs of the trials that are still to be made."""
    return tuple(cell for cell in agenda.to_tune if again or results.finished(folder, cell.id) is None)


def make_runs(runs: Sequence[Cell], folder: Path, means: Means, progress: MakeProgress) -> list[TestbedError]:
    """Make runs, first those that are played; returns why some failed. See `playing`, `live_virtual` and
    `controller.run_cells`.
    """
    played = [cell for cell in runs if cell.timing == "played"]
    in_guests = [cell for cell in runs if cell.timing == "live" and cell.clock == "virtual"]
    live = [cell for cell in runs if cell.timing == "live" and cell.clock == "real"]
    failures: list[TestbedError] = []
    if played:
        with progress(played) as following:
            failures += playing.play_cells(played, folder, means, following)
    if in_guests:
        with progress(in_guests) as following:
            failures += live_virtual.run_cells(in_guests, folder, means, following)
    if live:
        with progress(live) as following:
            own_pace = [cell for cell in live if isinstance(cell.compute, Measured) and not _measures(cell)]
            # What is known: measuring it first would take longer than many a run.
            costs = playing.measured_costs(own_pace, folder, means, following, 0)
            failures += controller.run_cells(live, folder, means.engine_reason, following, costs)
    return failures


def _measures(cell: Cell) -> bool:
    """Say whether a cell's codec goes by what its link carries, so that it cannot be calibrated without one."""
    return parse_placement(cell.codec).measures


def tune_first(agenda: Agenda, folder: Path, means: Means, progress: MakeProgress, *, again: bool = False) -> Agenda:
    """Make the runs of the trials, choose, and keep the choice in tuning.json. StageError when nothing is left for any
    arm.
    """
    assert agenda.experiment.tune is not None
    # A run that fails disqualifies its value.
    make_runs(untried(agenda, folder, again=again), folder, means, progress)

    def loss_of(cell_id: str) -> float | None:
        run = results.finished(folder, cell_id)
        return None if run is None or run.summary is None else run.summary.validation_loss

    record = tune.settle(agenda.experiment.tune, agenda.trials, loss_of)
    results.write_json(folder / "tuning.json", record)
    return replace(agenda, tuning=record)


def sweep_record(agenda: Agenda, command: str) -> SweepRecord:
    """Return what sweep.json keeps of the agenda; `command` is what was typed."""
    asked = agenda.experiment
    return SweepRecord(
        question=asked.question,
        command=command,
        cells=tuple(cell.id for cell in agenda.cells),
        repeats=asked.repeats,
        order=asked.order,
        order_seed=asked.order_seed,
        tuned=agenda.tuning is not None,
    )

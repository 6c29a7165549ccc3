"""A whole experiment: choose what is to be tuned, put the runs in order, make those that are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from testbed import results
from testbed.errors import TestbedError
from testbed.results import SweepRecord, TuningRecord
from testbed.spec import Cell, Engine
from testbed.sweep import controller, order, plan, tune
from testbed.sweep.plan import Choice, Combination, Experiment
from testbed.sweep.progress import Watch
from testbed.sweep.recordings import with_recordings
from testbed.sweep.session import network_of

MakeWatch = Callable[[Sequence[Cell]], Watch]
"""Given runs in their order, what follows them."""


class Agenda(NamedTuple):
    """What an experiment asks for, and what of it is known."""

    experiment: Experiment
    """With what the command line changes in it."""
    engine: Engine
    combinations: list[Combination]
    trials: list[tune.Trial]
    """Empty without [tune]."""
    tuning: TuningRecord | None
    """The choice among them; None before it was made."""

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Of the sweep, each once. Before tuning, with the first value that will be tried."""
        found, asked = self.combinations, self.experiment.tune
        if asked is not None:
            found = tune.with_choice(found, asked, self.tuning) if self.tuning else plan.untuned(found, asked)
        return plan.unique(plan.resolve(found, self.engine, str(self.experiment.path)))

    @property
    def to_tune(self) -> tuple[Cell, ...]:
        """The runs of the trials, while the choice has not been made."""
        return plan.unique(cell for trial in self.trials for cell in trial.cells) if self.tuning is None else ()


def agenda(experiment: Experiment, engine: Engine, choice: Choice, folder: Path, *, again: bool = False) -> Agenda:
    """What is to be done, everything checked; starts and writes nothing. `again`: what was tuned before does not count."""
    asked = plan.chosen(experiment, choice)
    found = plan.combinations(asked, choice)
    tried = tune.trials(asked, found, engine)
    before = results.last_tuning(folder) if tried and not again else None
    made = Agenda(asked, engine, found, tried, before if before is not None and tune.answers(before, tried) else None)
    _ = made.cells  # checks them
    return made


def missing(cells: tuple[Cell, ...], experiment: Experiment, folder: Path, *, again: bool = False) -> tuple[Cell, ...]:
    """The runs that are still to be made for these cells to have all their repeats, in order; recordings come before replays."""
    runs = order.arrange(
        cells, repeats=experiment.repeats, order=experiment.order, seed=experiment.order_seed, network=network_of
    )
    done = {} if again else {cell.id: len(results.finished_runs(folder, cell.id)) for cell in cells}
    left = order.missing(runs, done)
    return with_recordings(left, _Finished(folder) if not again else ())


def untried(made: Agenda, folder: Path, *, again: bool = False) -> tuple[Cell, ...]:
    """The runs of the trials that are still to be made."""
    return tuple(cell for cell in made.to_tune if again or results.finished(folder, cell.id) is None)


class _Finished:
    """The cells that have a good run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __contains__(self, cell_id: object) -> bool:
        return results.finished(self._folder, str(cell_id)) is not None


def make(runs: Sequence[Cell], folder: Path, engine_reason: str, watch: MakeWatch) -> list[TestbedError]:
    """Make runs; why some failed. See `controller.sweep`."""
    if not runs:
        return []
    with watch(runs) as following:
        return controller.sweep(runs, folder, engine_reason, following)


def tune_first(made: Agenda, folder: Path, engine_reason: str, watch: MakeWatch, *, again: bool = False) -> Agenda:
    """Make the runs of the trials, choose, and keep the choice in tuning.json. StageError when nothing is left for any arm."""
    assert made.experiment.tune is not None
    make(untried(made, folder, again=again), folder, engine_reason, watch)  # a run that fails puts its value out

    def loss_of(cell_id: str) -> float | None:
        run = results.finished(folder, cell_id)
        return None if run is None or run.summary is None else run.summary.validation_loss

    record = tune.settle(made.experiment.tune, made.trials, loss_of)
    results.write_json(folder / "tuning.json", record)
    return made._replace(tuning=record)


def record_of(made: Agenda, command: str) -> SweepRecord:
    """What is kept of it in sweep.json; `command` is what was typed."""
    asked = made.experiment
    return SweepRecord(
        question=asked.question,
        command=command,
        cells=tuple(cell.id for cell in made.cells),
        repeats=asked.repeats,
        order=asked.order,
        order_seed=asked.order_seed,
        tuned=made.tuning is not None,
    )

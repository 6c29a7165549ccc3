"""Predicted trainings whose sites come and go: which steps take place when, and who takes part in them.

A cell that states `churn` is played as it is, and once for each set of replicas that ever takes part in a step
together, or returns to it. At the end of a step everyone waits for everyone, so that a step tells nothing of the one
before, and a training takes as long as its steps and what it waits between them: who is there when the next one begins
follows from when this one ends (`play.churn`). Who takes part is not known before that, so what has not been played yet
takes its `formula_s` for a moment, and whatever then takes place is played, until nothing is missing.

Whether a step tells nothing of the one before is tried too: the steps of some trainings are played one after the other
as one trace, and their times stand beside the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from testbed.play.churn import Churn, ChurnRound, Held, Presence, rounds
from testbed.play.hybrid import HybridShape
from testbed.play.scenarios import load_scenario
from testbed.sweep.predict import ChurnTable, Planned, PredictionCell, PredictionResult, changed

FILE = "rounds.csv"

Play = Callable[[Sequence[Planned]], None]
"""Make the results of cells that have none."""
Find = Callable[[PredictionCell], PredictionResult | None]
"""Return a cell's result; None: it was not played."""


class RoundRow(NamedTuple):
    """A line of rounds.csv: a step of a training."""

    grid: str
    cell: str
    """That in which everyone takes part."""
    seed: int
    step: int
    begin_s: float
    waited_s: float
    """For a replica to be whole, before it."""
    lasts_s: float
    """As its like was played, alone."""
    in_turn_s: float | None
    """As it was played after the step before; None: it was not, or is the first."""
    away: str
    """Replicas, by number."""
    returning: str


class _Training(NamedTuple):
    """A cell with its absences."""

    planned: Planned
    churn: ChurnTable
    replicas: Sequence[Sequence[int]]
    """The sites of each."""
    sites: Mapping[int, Churn | None]
    server: bool

    def held(self, seed: int, find: Find, missing: dict[str, Planned]) -> list[Held]:
        """Return the steps of a training; `missing` gets those that would have to be played, by the cell's id."""
        sites = {site: Presence(churn, seed, site) for site, churn in self.sites.items()}

        def lasts(who: ChurnRound) -> float:
            planned = self.of(who)
            cell, shape = planned.cell, planned.cell.shape
            if (found := find(cell)) is not None and found.step_ns is not None:
                return found.step_ns / 1e9
            missing[cell.id] = planned
            assert isinstance(shape, HybridShape)
            return shape.formula_s(cell.topology, cell.profiles)

        known: dict[ChurnRound, float] = {}
        taken = rounds(
            self.replicas, sites, lambda who: known.get(who) or known.setdefault(who, lasts(who)), server=self.server
        )
        return list(itertools.islice(taken, self.churn.steps))

    def of(self, *who: ChurnRound) -> Planned:
        """Return the cell in which these take part in its steps. Several are followed by the first again: what was
        played counts from the second step on.
        """
        if who == (ChurnRound(),):
            return self.planned
        steps = {"steps": 1 + len(who)} if len(who) > 1 else {}
        return changed(self.planned, {"churn": None, "rounds": [each._asdict() for each in who], **steps})


def play_rounds(planned: Iterable[Planned], play: Play, find: Find) -> list[RoundRow]:
    """Return the steps of all trainings of cells that state churn, having played what is missing."""
    trainings = [_training(each) for each in planned if "churn" in each.fields]
    while True:
        missing: dict[str, Planned] = {}
        held = {
            (number, seed): training.held(seed, find, missing)
            for number, training in enumerate(trainings)
            for seed in range(training.churn.seeds)
        }
        if not missing:
            break
        play(list(missing.values()))
    whole = {
        (number, seed): training.of(*(each.who for each in held[number, seed]))
        for number, training in enumerate(trainings)
        for seed in range(training.churn.in_turn)
    }
    play([each for each in whole.values() if find(each.cell) is None])
    rows = list[RoundRow]()
    for (number, seed), steps in held.items():
        each = trainings[number].planned
        in_turn = find(whole[number, seed].cell) if (number, seed) in whole else None
        times: list[float | None] = [None] * len(steps)
        if in_turn is not None:
            times[1:] = [ns / 1e9 for ns in in_turn.steps_ns[:-1]]
        for step, (at, time_s) in enumerate(zip(steps, times, strict=True)):
            who = (" ".join(map(str, numbers)) for numbers in at.who)
            rows.append(
                RoundRow(each.grid, each.cell.id, seed, step, at.begin_s, at.waited_s, at.lasts_s, time_s, *who)
            )
    return rows


def _training(planned: Planned) -> _Training:
    shape, churn = planned.cell.shape, ChurnTable.model_validate(planned.fields["churn"])
    assert isinstance(shape, HybridShape)
    devices = load_scenario(str(planned.fields["scenario"])).devices()
    sites = {at: device.churn for at, device in zip(shape.sites, devices, strict=False)}
    replicas = [sorted({shape.sites[device] for device in own}) for own in shape.devices()]
    return _Training(planned, churn, replicas, sites, shape.star)

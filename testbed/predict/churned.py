"""Predicted trainings with churn: when their steps take place, and which replicas take part.

A cell with `churn` is played without churn, and once for each set of replicas that participates in a step or returns to
it. All replicas synchronise at the end of a step, so steps are independent, and the duration of a training is the sum
of its steps and of the waits between them: the participants of the next step depend on when this one ends
(`predict.churn`). They are not known in advance, so a step that has not been played yet provisionally takes its
`formula_s`; the steps that then occur are played, until none is missing.

The independence of steps is verified too: the steps of some trainings are played as one continuous trace, and reported
next to the others.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from testbed.predict.cells import ChurnTable, Planned, PredictionCell, PredictionResult, changed
from testbed.predict.churn import Churn, ChurnRound, Held, Presence, rounds
from testbed.predict.hybrid_shapes import HybridShape
from testbed.predict.scenarios import Scenario, load_scenario

FILE = "rounds.csv"

Play = Callable[[Sequence[Planned]], None]
"""Plays the cells that have no result."""
Find = Callable[[PredictionCell], PredictionResult | None]
"""Returns a cell's result; None: it was not played."""


class RoundRow(NamedTuple):
    """A row of rounds.csv: a step of a training."""

    grid: str
    cell: str
    """Id of the cell without churn."""
    seed: int
    step: int
    begin_s: float
    waited_s: float
    """Time spent waiting for a complete replica before the step."""
    lasts_s: float
    """Duration of the step, as played separately with the same participants."""
    in_turn_s: float | None
    """Duration of the step in the continuous trace; None if there is none, or for its first step."""
    away: str
    """Numbers of the absent replicas."""
    returning: str


class _Training(NamedTuple):
    """A training of a cell with churn."""

    planned: Planned
    churn: ChurnTable
    replicas: Sequence[Sequence[int]]
    """Sites of each replica."""
    sites: Mapping[int, Churn | None]
    server: bool

    def held(self, seed: int, find: Find, missing: dict[str, Planned]) -> list[Held]:
        """Return the steps of a training; adds the cells that have to be played to `missing`, by id."""
        sites = {site: Presence(churn, seed, site) for site, churn in self.sites.items()}

        def lasts(who: ChurnRound) -> float:
            planned = self.of(who)
            cell, shape = planned.cell, planned.cell.shape
            if (result := find(cell)) is not None and result.step_ns is not None:
                return result.step_ns / 1e9
            missing[cell.id] = planned
            assert isinstance(shape, HybridShape)
            return shape.formula_s(cell.topology, cell.profiles)

        taken = rounds(self.replicas, sites, functools.cache(lasts), server=self.server)
        return list(itertools.islice(taken, self.churn.steps))

    def of(self, *who: ChurnRound) -> Planned:
        """Return the cell whose steps have these participants. Several are followed by the first again, because played
        steps count from the second one on.
        """
        if who == (ChurnRound(),):
            return self.planned
        steps = {"steps": 1 + len(who)} if len(who) > 1 else {}
        return changed(self.planned, {"churn": None, "rounds": [each._asdict() for each in who], **steps})


def play_rounds(planned: Iterable[Planned], play: Play, find: Find) -> list[RoundRow]:
    """Return the steps of all trainings of cells with churn, after playing the missing ones."""
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
    stated = planned.fields["scenario"]
    devices = load_scenario(stated if isinstance(stated, str) else Scenario.model_validate(stated)).devices()
    sites = {at: device.churn for at, device in zip(shape.sites, devices, strict=False)}
    replicas = [sorted({shape.sites[device] for device in own}) for own in shape.devices()]
    return _Training(planned, churn, replicas, sites, shape.star)

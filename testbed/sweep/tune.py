"""[tune]: choose one field's value for each arm by short runs, before the sweep. Pure: `conduct` makes the runs.

Codecs differ in the learning rate that suits them; one that was chosen with fp32 favours fp32. An arm is what gets a
value of its own (a codec, if nothing else is said). Each value is tried with the same seeds, over one network;
everything else is as in the arm's first combination. The smallest mean of the final validation losses wins; of equals
the first. A value with a run that failed, or whose loss is not finite, is out; an arm without any value left is not
run, and the others are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from testbed.errors import SpecError, StageError, UnknownNameError
from testbed.results import TriedValue, TunedArm, TuningRecord
from testbed.spec import Cell, Clock, Engine
from testbed.sweep.fields import flatten, known_fields, merge, nest
from testbed.sweep.plan import Combination, Experiment, TuneSpec, resolve_cells


class Trial(NamedTuple):
    """One value for one arm."""

    arm: dict[str, Any]
    value: Any
    cells: tuple[Cell, ...]
    """One a seed."""


def trials(experiment: Experiment, points: Sequence[Combination], engine: Engine, clock: Clock = "real") -> list[Trial]:
    """List all that is tried, arm by arm; nothing without [tune]. SpecError where [tune] does not fit the sweep."""
    tune, where = experiment.tune, f"[tune] of {experiment.path}"
    if tune is None:
        return []
    for name in (tune.field, *tune.arm):
        if name not in known_fields():
            raise UnknownNameError(f"field of a cell in {where}:", name, known_fields())
    if tune.field in experiment.axes or any(tune.field in dict(flatten(variant)) for variant in experiment.variants):
        raise SpecError(f"{where}: {tune.field} is an axis already; it cannot be chosen as well")
    firsts: list[Combination] = []
    for combination in points:
        if all(combination.arm(tune.arm) != first.arm(tune.arm) for first in firsts):
            firsts.append(combination)
    return [_trial(tune, first, value, engine, clock, where) for first in firsts for value in tune.values]


def _trial(tune: TuneSpec, first: Combination, value: Any, engine: Engine, clock: Clock, where: str) -> Trial:
    arm = first.arm(tune.arm)
    training = {"steps": tune.steps, "evaluate_every": 0, "target_loss": None, "budget_s": None}
    short = {"profile": tune.over, "training": training}
    fields = merge(merge(first.fields, short, where), nest(tune.field, value), where)
    label = ", ".join(f"{name}={one}" for name, one in arm.items())
    seeded = [
        Combination(f"{label}, {tune.field}={value}, seed {seed}", merge(fields, nest("training.seed", seed), where))
        for seed in tune.seeds
    ]
    return Trial(arm, value, tuple(resolve_cells(seeded, engine, where, clock)))


def settle(tune: TuneSpec, tried: Sequence[Trial], loss_of: Callable[[str], float | None]) -> TuningRecord:
    """Record what was found and choose. `loss_of`: final validation loss by cell id, None where no run ended well.

    StageError when no arm has a value left.
    """
    arms: list[TunedArm] = []
    for arm in list({repr(trial.arm): trial.arm for trial in tried}.values()):
        values = [_result(trial, loss_of) for trial in tried if trial.arm == arm]
        left = [value for value in values if value.mean_loss is not None]
        best = min(left, key=lambda value: value.mean_loss or 0.0, default=None)
        arms.append(TunedArm(arm=arm, tried=tuple(values), chosen=None if best is None else best.value))
    if not any(arm.left for arm in arms):
        raise StageError(
            f"[tune]: no value of {tune.field} led to a finite validation loss with every seed, for any of "
            f"{len(arms)} arms; tried {', '.join(map(str, tune.values))}; state smaller ones, "
            "or look at what the runs say"
        )
    return TuningRecord(field=tune.field, steps=tune.steps, seeds=tune.seeds, over=_network(tune), arms=tuple(arms))


def _result(trial: Trial, loss_of: Callable[[str], float | None]) -> TriedValue:
    losses = tuple(loss_of(cell.id) for cell in trial.cells)
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    mean = sum(finite) / len(finite) if len(finite) == len(losses) else None
    return TriedValue(value=trial.value, cells=tuple(cell.id for cell in trial.cells), losses=losses, mean_loss=mean)


def _network(tune: TuneSpec) -> str:
    return tune.over if isinstance(tune.over, str) else "+".join(tune.over)


def answers(record: TuningRecord, tried: Sequence[Trial]) -> bool:
    """Say whether an earlier choice was made among these very trials; an arm without a choice is tried again."""
    earlier = {value.cells for arm in record.arms for value in arm.tried}
    return all(arm.left for arm in record.arms) and earlier == {
        tuple(cell.id for cell in trial.cells) for trial in tried
    }


def with_choice(points: Sequence[Combination], tune: TuneSpec, record: TuningRecord) -> list[Combination]:
    """Return the combinations with each arm's value in place; not those of an arm that has none."""
    chosen = [(tuned.arm, nest(tune.field, tuned.chosen)) for tuned in record.arms if tuned.left]
    return [
        Combination(combination.label, merge(combination.fields, value, "[tune]"))
        for combination in points
        for arm, value in chosen
        if arm == combination.arm(tune.arm)
    ]

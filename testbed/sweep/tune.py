"""[tune]: chooses one field's value for each arm before the sweep. Pure: `conduct` makes the runs.

Codecs need different learning rates; one that was chosen with fp32 favours fp32. An arm is a set of combinations that
share a tuned value (a codec, by default). Each value is tried with the same seeds; everything else is as in the arm's
first combination. The smallest mean of the final validation losses wins, the first on a tie. A failed run or a loss
that is not finite disqualifies its value; an arm without any value left is not run, but the others are. A combination
that states the field itself, in an axis or a variant, keeps its value and belongs to no arm.

The best value must lie between others. If it is at an end of the list, the list grows by one value in that direction,
by the ratio of its last two, until the best lies inside or `widen` values were added; an arm whose best is then still
at an end is marked. Trials are as long as the training by default. If they are shorter, the first arm's values are also
trained at full length, and unless both lengths choose the same value, every arm is marked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from testbed.errors import SpecError, StageError, UnknownNameError
from testbed.frozen import flatten
from testbed.results import RankCheck, TriedValue, TunedArm, TuningRecord
from testbed.spec import Cell, Clock, Engine
from testbed.sweep.fields import known_fields, merge, nest
from testbed.sweep.plan import Combination, Experiment, TuneSpec, resolve_cells

LossOf = Callable[[Cell], float | None]
"""The final validation loss of a trial's cell; None if no run succeeded."""
AT_AN_END = "at the end of the values tried"
NOT_ALIKE = "chosen by short runs, which rank otherwise than full ones"
SHORT_FORM = "chosen in short form"


class TuningTrial(NamedTuple):
    """One value for one arm."""

    arm: dict[str, Any]
    value: Any
    cells: tuple[Cell, ...]
    """One per seed."""
    added: bool = False
    """Whether the value was added to those of the file."""
    check: bool = False
    """Whether this is a full-length run that checks the short ones."""


def trials(
    experiment: Experiment, points: Sequence[Combination], engine: Engine, clock: Clock = "real"
) -> list[TuningTrial]:
    """List all requested trials, arm by arm; none without [tune]. SpecError if [tune] does not fit the sweep."""
    tune, where = experiment.tune, f"[tune] of {experiment.path}"
    if tune is None:
        return []
    for name in (tune.field, *tune.arm):
        if name not in known_fields():
            raise UnknownNameError(f"field of a cell in {where}:", name, known_fields())
    if tune.field in experiment.axes:
        raise SpecError(f"{where}: {tune.field} is already an axis, so it cannot be tuned; remove it from one of them")
    return [_trial(tune, arm, value, engine, clock) for arm in _arms(tune, points) for value in tune.values]


def further(
    tune: TuneSpec,
    points: Sequence[Combination],
    tried: Sequence[TuningTrial],
    loss_of: LossOf,
    engine: Engine,
    clock: Clock = "real",
) -> list[TuningTrial]:
    """Return the trials to run next, given the losses of `tried`: a value beyond the end of each list whose best value
    is at that end; when no list grows any more, the full-length runs that check the short ones. Empty when done.
    """
    if tune.quick:
        return []
    more: list[TuningTrial] = []
    for arm in _arms(tune, points):
        mine = [trial for trial in tried if trial.arm == arm.arm(tune.arm) and not trial.check]
        value = beyond([_result(trial, loss_of) for trial in mine], tune.widen)
        if value is None:
            continue
        try:
            more.append(_trial(tune, arm, value, engine, clock)._replace(added=True))
        except SpecError:
            continue  # the field does not allow the value, so the arm stays at its end
    if more or any(trial.check for trial in tried):
        return more
    arm = _arms(tune, points)[0]
    mine = [trial for trial in tried if trial.arm == arm.arm(tune.arm)]
    own_steps = dict(flatten(arm.fields)).get("training.steps")
    if all(cell.training.steps == own_steps for trial in mine for cell in trial.cells):
        return []
    full = tune.model_copy(update={"steps": None})
    left = [trial.value for trial in mine if _result(trial, loss_of).mean_loss is not None]
    return [_trial(full, arm, value, engine, clock)._replace(check=True) for value in left]


def beyond(tried: Sequence[TriedValue], widen: int) -> Any:
    """Return the value to try beyond the end of an arm's list; None if `value_beyond` has none, or `widen` values were
    already added.
    """
    if sum(value.added for value in tried) >= widen:
        return None
    return value_beyond({value.value: value.mean_loss for value in tried})


def value_beyond(losses: Mapping[Any, float | None]) -> Any:
    """Return the value to try beyond the end of a list of values with their losses; None if the best lies inside, the
    first one on a tie, or if all are disqualified (None).
    """
    values = sorted(losses)
    left = [(loss, value) for value in values if (loss := losses[value]) is not None]
    if not left or len(values) < 2:
        return None
    _, best = min(left)
    if best == values[0]:
        new = values[0] ** 2 / values[1]
    elif best == values[-1]:
        new = values[-1] ** 2 / values[-2]
    else:
        return None
    rounded = round(new) if all(isinstance(value, int) for value in values) else float(f"{new:.3g}")
    return rounded if rounded > 0 and rounded not in values else None


def _best(tried: Sequence[TriedValue]) -> TriedValue | None:
    """Return the value with the smallest mean loss, the first on a tie; None if all are disqualified."""
    left = [value for value in tried if value.mean_loss is not None]
    return min(left, key=lambda value: value.mean_loss or 0.0, default=None)


def _arms(tune: TuneSpec, points: Sequence[Combination]) -> list[Combination]:
    """Return the first combination of each arm."""
    firsts: list[Combination] = []
    for combination in points:
        new = all(combination.arm(tune.arm) != first.arm(tune.arm) for first in firsts)
        if new and tune.field not in combination.stated:
            firsts.append(combination)
    return firsts


def _trial(tune: TuneSpec, first: Combination, value: Any, engine: Engine, clock: Clock) -> TuningTrial:
    arm, where = first.arm(tune.arm), "[tune]"
    # Otherwise as in the sweep, so that the chosen value is not trained twice at full length.
    training: dict[str, Any] = {"target_loss": None, "budget_s": None}
    if tune.steps is not None:
        training |= {"steps": tune.steps, "evaluate_every": 0}
    fields = merge(first.fields, {"profile": tune.over, "training": training}, where)
    fields = merge(fields, nest(tune.field, value), where)
    label = ", ".join(f"{name}={one}" for name, one in arm.items())
    seeded = [
        Combination(f"{label}, {tune.field}={value}, seed {seed}", merge(fields, nest("training.seed", seed), where))
        for seed in tune.seeds
    ]
    return TuningTrial(arm, value, tuple(resolve_cells(seeded, engine, where, clock)))


def settle(tune: TuneSpec, tried: Sequence[TuningTrial], loss_of: LossOf) -> TuningRecord:
    """Record the losses, choose a value for each arm, and mark unreliable choices.

    StageError if no arm has a value left.
    """
    arms: list[TunedArm] = []
    for arm in list({repr(trial.arm): trial.arm for trial in tried}.values()):
        values = [_result(trial, loss_of) for trial in tried if trial.arm == arm and not trial.check]
        values.sort(key=lambda value: value.value)
        best = _best(values)
        chosen = None if best is None else best.value
        mark = AT_AN_END if best is not None and chosen in (values[0].value, values[-1].value) else ""
        arms.append(TunedArm(arm=arm, tried=tuple(values), chosen=chosen, mark=SHORT_FORM if tune.quick else mark))
    if not any(arm.left for arm in arms):
        raise StageError(
            f"[tune]: no value of {tune.field} led to a finite validation loss with every seed, for any of "
            f"{len(arms)} arms; tried {', '.join(map(str, tune.values))}; add smaller values, "
            "or read the errors of the runs"
        )
    check = _check(arms[0], [trial for trial in tried if trial.check], loss_of)
    if check is not None and not check.alike:
        arms = [arm.model_copy(update={"mark": "; ".join(filter(None, (arm.mark, NOT_ALIKE)))}) for arm in arms]
    over = tune.over if isinstance(tune.over, str) else "+".join(tune.over)
    stated = {name: getattr(tune, name) for name in ("field", "steps", "seeds", "widen", "quick")}
    return TuningRecord(**stated, over=over, arms=tuple(arms), check=check)


def _check(arm: TunedArm, full: Sequence[TuningTrial], loss_of: LossOf) -> RankCheck | None:
    if not full:
        return None
    values = [_result(trial, loss_of) for trial in full]
    best = _best(values)
    short = {value.value: value.mean_loss for value in arm.tried}
    pairs = [(short[value.value], value.mean_loss) for value in values if value.mean_loss is not None]
    at_choice = next((value.mean_loss for value in values if value.value == arm.chosen), None)
    regret = None if best is None or best.mean_loss is None or at_choice is None else at_choice - best.mean_loss
    return RankCheck(
        arm=arm.arm,
        steps=full[0].cells[0].training.steps,
        tried=tuple(values),
        chosen=None if best is None else best.value,
        tau=kendall(pairs),
        regret=regret,
        alike=best is not None and best.value == arm.chosen,
    )


def kendall(pairs: Sequence[tuple[Any, Any]]) -> float | None:
    """Return Kendall's rank correlation (tau-a) of pairs of numbers, from -1 to 1; None below two pairs."""
    # The product of two tiny differences would underflow to 0; their signs do not.
    signs = [((a > c) - (a < c)) * ((b > d) - (b < d)) for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    return sum(signs) / len(signs) if signs else None


def _result(trial: TuningTrial, loss_of: LossOf) -> TriedValue:
    losses = tuple(loss_of(cell) for cell in trial.cells)
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    mean = sum(finite) / len(finite) if len(finite) == len(losses) else None
    cells = tuple(cell.id for cell in trial.cells)
    return TriedValue(value=trial.value, cells=cells, losses=losses, mean_loss=mean, added=trial.added)


def answers(record: TuningRecord, tune: TuneSpec, asked: Sequence[TuningTrial]) -> bool:
    """Return whether an earlier choice was made from exactly these trials; an arm without a choice is tried again."""
    earlier = {value.cells for arm in record.arms for value in arm.tried if not value.added}
    same = (record.widen, record.quick, record.steps) == (tune.widen, tune.quick, tune.steps)
    ids = {tuple(cell.id for cell in trial.cells) for trial in asked}
    return same and earlier == ids and all(arm.left for arm in record.arms)


def with_choice(points: Sequence[Combination], tune: TuneSpec, record: TuningRecord) -> list[Combination]:
    """Return the combinations with their arm's value and mark, without those of arms that have no value."""
    chosen: list[Combination] = []
    for point in points:
        if tune.field in point.stated:
            chosen.append(point)
            continue
        for arm in record.arms:
            if arm.left and arm.arm == point.arm(tune.arm):
                fields = merge(point.fields, nest(tune.field, arm.chosen), "[tune]")
                mark = f"{tune.field} {arm.mark}" if arm.mark else ""
                chosen.append(Combination(point.label, fields, point.stated, mark))
    return chosen

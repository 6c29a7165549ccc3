"""[tune]: what is tried, what is chosen, and what the sweep's cells have then."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from testbed import results
from testbed.errors import StageError, UnknownNameError, UserError
from testbed.results import TriedValue, TuningRecord
from testbed.spec import Cell, recipe_of
from testbed.sweep import conduct, plan, tune
from testbed.sweep.plan import Choice, TuneSpec
from tests.known import known

RATES = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]
_TUNE = {"field": "optimiser.learning_rate", "values": RATES, "steps": 10, "seeds": [5, 6], "over": "datacenter"}
Losses = Callable[[str, float, int], float | None]
"""The loss of a codec at a learning rate after so many steps, whatever the seed."""


def experiment(**changes: Any) -> plan.Experiment:
    axes = {"profile": ["cable", "lte"], "codec": ["fp32", "int8"], "training.seed": [0, 1]}
    default = dict(plan.load_experiment("default"))
    return plan.Experiment(**{**default, "axes": axes, "tune": {**_TUNE, **changes}})


def agenda(folder: Path, **changes: Any) -> conduct.Agenda:
    return conduct.make_agenda(experiment(**changes), "relay", Choice(), folder)


def chosen(made: conduct.Agenda, record: TuningRecord) -> conduct.Agenda:
    return dataclasses.replace(made, tuning=record)


def settled(
    folder: Path, losses: Mapping[tuple[str, float, int], float | None], **changes: Any
) -> tuple[conduct.Agenda, TuningRecord]:
    """The agenda after runs that ended with these losses, by codec, value and seed; nothing is added to the lists."""
    made = agenda(folder, **{"widen": 0, **changes})

    def loss_of(cell: Cell) -> float | None:
        return losses.get((cell.codec, cell.optimiser.learning_rate, cell.training.seed), 9.0)

    record = tune.settle(known(made.experiment.tune), made.trials, loss_of)
    return chosen(made, record), record


def tuned(made: conduct.Agenda, losses: Losses) -> tuple[TuningRecord, list[tune.TuningTrial]]:
    """Go through all that the losses call for, as a sweep does."""

    def loss_of(cell: Cell) -> float | None:
        return losses(cell.codec, cell.optimiser.learning_rate, cell.training.steps)

    asked, tried = known(made.experiment.tune), list(made.trials)
    while more := tune.further(asked, made.combinations, tried, loss_of, "relay"):
        tried += more
    return tune.settle(asked, tried, loss_of), tried


def valley(best: float) -> Losses:
    """A loss with its smallest value at one learning rate, whatever the codec and the number of steps."""
    return lambda codec, rate, steps: 4.0 + abs(math.log(rate / best))


def test_every_arm_tries_every_value_with_the_same_seeds_over_one_network(tmp_path: Path) -> None:
    made = agenda(tmp_path)
    tried = {(c.codec, c.optimiser.learning_rate, c.training.seed) for c in made.to_tune}
    assert tried == {(codec, value, seed) for codec in ("fp32", "int8") for value in RATES for seed in (5, 6)}
    assert len(made.to_tune) == len(tried)
    means = {(c.network, c.training.steps, c.training.evaluate_every, c.timing) for c in made.to_tune}
    assert means == {("datacenter", 10, 0, "played")}


def test_one_cell_is_chosen_by_its_id_once_tuning_has_decided_it(tmp_path: Path) -> None:
    whole, _ = settled(tmp_path, {})
    wanted = whole.cells[3]
    assert dataclasses.replace(whole, chosen=(wanted.id,)).cells == (wanted,)
    before = conduct.make_agenda(experiment(), "relay", Choice(cells=(wanted.id,)), tmp_path)
    assert len(before.cells) == len(whole.cells)  # their ids are not known yet
    with pytest.raises(UnknownNameError, match="no cell of this sweep 'x'"):
        _ = dataclasses.replace(whole, chosen=("x",)).cells


def test_the_smallest_mean_wins_for_each_arm_alone(tmp_path: Path) -> None:
    fp32 = {("fp32", 1e-3, 5): 4.0, ("fp32", 1e-3, 6): 6.0, ("fp32", 3e-3, 5): 3.9, ("fp32", 3e-3, 6): 8.0}
    made, record = settled(tmp_path, {**fp32, ("int8", 3e-4, 5): 1.0})
    assert [(arm.arm, arm.chosen) for arm in record.arms] == [({"codec": "fp32"}, 1e-3), ({"codec": "int8"}, 3e-4)]
    assert len(made.cells) == 8
    assert {(c.codec, c.optimiser.learning_rate) for c in made.cells} == {("fp32", 1e-3), ("int8", 3e-4)}
    assert {c.training.steps for c in made.cells} == {made.experiment.cell["training"]["steps"]}
    assert made.to_tune == ()


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_a_value_with_a_run_that_has_no_finite_loss_is_out(tmp_path: Path, bad: float | None) -> None:
    _, record = settled(tmp_path, {("fp32", 3e-3, 5): 0.1, ("fp32", 3e-3, 6): bad})
    fp32 = record.arms[0]
    assert fp32.chosen == RATES[0]  # of equals the first
    assert [tried.value for tried in fp32.tried if tried.mean_loss is None] == [3e-3]


def test_an_arm_for_which_nothing_is_left_is_not_run_and_is_tried_again(tmp_path: Path) -> None:
    made, record = settled(tmp_path, {("int8", value, 5): None for value in RATES})
    assert [(arm.left, arm.chosen) for arm in record.arms] == [(True, RATES[0]), (False, None)]
    assert {cell.codec for cell in made.cells} == {"fp32"}
    results.write_json(tmp_path / "tuning.json", record)
    assert agenda(tmp_path, widen=0).tuning is None


def test_nothing_left_for_any_arm_is_an_error(tmp_path: Path) -> None:
    losses = {(codec, value, 5): None for codec in ("fp32", "int8") for value in RATES}
    with pytest.raises(StageError, match=r"no value of optimiser\.learning_rate.*2 arms.*0\.0001, .*0\.01;"):
        settled(tmp_path, losses)


def test_a_choice_that_was_kept_is_taken_again_unless_something_changed(tmp_path: Path) -> None:
    made, record = settled(tmp_path, {})
    results.write_json(tmp_path / "tuning.json", record)
    assert agenda(tmp_path, widen=0).tuning == record
    assert agenda(tmp_path, widen=0).cells == made.cells
    for changes in ({"steps": 11}, {"values": [*RATES, 0.1]}, {"widen": 1}, {"quick": True}):
        assert agenda(tmp_path, **{"widen": 0, **changes}).tuning is None
    assert conduct.make_agenda(made.experiment, "relay", Choice(), tmp_path, again=True).tuning is None


def test_arms_may_be_other_fields(tmp_path: Path) -> None:
    made = agenda(tmp_path, arm=["codec", "training.seed"])
    assert len({repr(trial.arm) for trial in made.trials}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"field": "optimiser.learning_rat"}, "did you mean 'optimiser.learning_rate'?"),
        ({"arm": ["codex"]}, "did you mean 'codec'?"),
        ({"field": "training.seed"}, "training.seed is already an axis"),
        ({"over": "datacentre"}, "did you mean 'datacenter'?"),
        ({"steps": 3}, "warmup_steps is 4, which leaves no step of 3 to measure"),
        ({"values": [*RATES, 1e-3]}, "values must be positive and ascend"),
        ({"values": [0.0, *RATES]}, "values must be positive and ascend"),
        ({"values": [*RATES, math.inf]}, "values must be positive and ascend"),
    ],
)
def test_a_tune_table_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((UserError, ValidationError)) as caught:
        agenda(tmp_path, **changes)
    assert message in str(caught.value)


def test_plan_cells_before_tuning_have_the_first_value(tmp_path: Path) -> None:
    assert {c.optimiser.learning_rate for c in plan.cells(experiment(), "relay")} == {RATES[0]}
    assert agenda(tmp_path).cells == plan.cells(experiment(), "relay")


# ---------------------------------------------------------------------- what is enough
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=8, unique=True),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)
def test_a_table_is_taken_where_it_is_enough_or_says_that_it_is_quick(values: list[float], seeds: list[int]) -> None:
    table = {**_TUNE, "values": sorted(values), "seeds": seeds}
    assert TuneSpec(**table, quick=True).values == tuple(sorted(values))
    if len(values) >= 5 and len(set(seeds)) >= 2:
        assert TuneSpec(**table).widen > 0
    else:
        with pytest.raises(ValidationError, match=r"state at least [25], or quick = true"):
            TuneSpec(**table)


def test_a_quick_form_is_marked_and_neither_grows_nor_is_checked(tmp_path: Path) -> None:
    made = agenda(tmp_path, values=[1e-3, 3e-3], seeds=[5], quick=True)
    record, tried = tuned(made, valley(1.0))
    assert tried == made.trials
    assert {arm.mark for arm in record.arms} == {tune.SHORT_FORM}
    brief = experiment().model_copy(update={"quick": {"tune": {"values": [1e-3], "seeds": [0]}}})
    assert known(plan.apply_choice(brief, Choice(quick=True)).tune).quick


# ---------------------------------------------------------------------- an optimum that lies inside
@pytest.mark.parametrize(("best", "added"), [(1e-3, []), (0.1, [0.0333, 0.111, 0.37]), (3e-5, [3.33e-5, 1.11e-5])])
def test_a_list_grows_by_its_own_ratio_until_the_best_lies_inside(
    tmp_path: Path, best: float, added: list[float]
) -> None:
    made = agenda(tmp_path, steps=None)
    record, tried = tuned(made, valley(best))
    for arm in record.arms:
        assert sorted(one.value for one in arm.tried if one.added) == pytest.approx(sorted(added))
        values = [one.value for one in arm.tried]
        assert values == sorted(values)
        assert arm.chosen == min(values[1:-1], key=lambda value: abs(math.log(value / best)))
        assert arm.mark == ""
    assert len({cell.id for trial in tried for cell in trial.cells}) == sum(len(trial.cells) for trial in tried)
    assert tune.answers(record, known(made.experiment.tune), made.trials)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(0, 10)), min_size=5, max_size=9), st.integers(0, 6), st.integers(0, 8))
def test_growing_ends_within_the_budget_inside_or_at_an_end_that_is_marked(
    losses: list[float | None], widen: int, deepest: int
) -> None:
    """Whatever the losses: a list that has not grown as far as it may has its best inside, or nothing left."""
    known = dict(enumerate(losses))
    tried = [_tried(3.0**place, known.get(place)) for place in range(5)]
    for _ in range(100):
        new = tune.beyond(tried, widen)
        if new is None:
            break
        assert new > max(one.value for one in tried) or new < min(one.value for one in tried)
        tried.append(_tried(new, known.get(round(math.log(new, 3)), float(deepest)), added=True))
    else:
        pytest.fail("it grows for ever")
    tried.sort(key=lambda one: one.value)
    assert sum(one.added for one in tried) <= widen
    left = [one for one in tried if one.mean_loss is not None]
    if left and sum(one.added for one in tried) < widen:
        best = min(left, key=lambda one: one.mean_loss or 0.0)
        assert best not in (tried[0], tried[-1])


def _tried(value: float, loss: float | None, *, added: bool = False) -> TriedValue:
    return TriedValue(value=value, cells=("x",), losses=(loss,), mean_loss=loss, added=added)


def test_an_arm_that_stays_at_an_end_is_marked_wherever_its_numbers_go(tmp_path: Path) -> None:
    made = agenda(tmp_path, steps=None, widen=2)
    losses = {"int8": lambda codec, rate, steps: 1 / rate, "fp32": valley(1e-3)}
    record, _ = tuned(made, lambda codec, rate, steps: losses[codec](codec, rate, steps))
    assert [(arm.mark, sum(one.added for one in arm.tried)) for arm in record.arms] == [("", 0), (tune.AT_AN_END, 2)]
    done = chosen(made, record)
    marked = {cell.id for cell in done.cells if cell.codec == "int8"}
    mark = f"optimiser.learning_rate {tune.AT_AN_END}"
    assert conduct.sweep_record(done, "testbed sweep x").marks == dict.fromkeys(marked, mark)


def test_a_value_that_a_cell_cannot_have_ends_the_growth(tmp_path: Path) -> None:
    made = agenda(tmp_path, field="optimiser.beta1", values=[0.5, 0.6, 0.7, 0.8, 0.99], steps=None)
    record, _ = tuned(made, lambda codec, rate, steps: 5.0)  # all equal: the first counts, which is an end
    assert record.arms[0].tried[0].added
    asked = known(made.experiment.tune)
    higher = tune.settle(asked, made.trials, lambda cell: -cell.optimiser.beta1)
    assert {arm.mark for arm in higher.arms} == {tune.AT_AN_END}
    assert tune.beyond(higher.arms[0].tried, 1) > 1
    assert not tune.further(asked, made.combinations, made.trials, lambda cell: -cell.optimiser.beta1, "relay")


# ---------------------------------------------------------------------- full length, or a fraction that ranks alike
def test_at_full_length_a_trial_is_the_training_that_the_sweep_makes(tmp_path: Path) -> None:
    made = agenda(tmp_path, steps=None, seeds=[0, 1])
    record, _ = tuned(made, valley(1e-3))
    recipes = {recipe_of(cell) for cell in chosen(made, record).cells}
    assert recipes <= {recipe_of(cell) for trial in made.trials for cell in trial.cells}
    assert record.check is None


@pytest.mark.parametrize(("best", "mark"), [(3e-3, ""), (3e-4, tune.NOT_ALIKE)])
def test_short_runs_are_checked_with_full_ones_and_mark_every_arm_where_these_choose_otherwise(
    tmp_path: Path, best: float, mark: str
) -> None:
    made = agenda(tmp_path)
    record, tried = tuned(made, lambda codec, rate, steps: valley(3e-3 if steps == 10 else best)(codec, rate, steps))
    full = [trial for trial in tried if trial.check]
    own = made.experiment.cell["training"]["steps"]
    assert [trial.value for trial in full] == RATES
    assert {(cell.codec, cell.training.steps) for trial in full for cell in trial.cells} == {("fp32", own)}
    check = known(record.check)
    assert (record.arms[0].chosen, check.chosen, check.alike) == (3e-3, best, best == 3e-3)
    assert check.regret == pytest.approx(math.log(3e-3 / best))
    assert (check.tau == 1) == check.alike
    assert {arm.mark for arm in record.arms} == {mark}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=2, max_size=8))
def test_rank_correlation_knows_order_only(pairs: list[tuple[float, float]]) -> None:
    tau = known(tune.kendall(pairs))
    assert -1 <= tau <= 1
    assert tune.kendall([(a, -b) for a, b in pairs]) == pytest.approx(-tau)
    distinct = sorted({a for a, _ in pairs})
    if len(distinct) > 1:
        assert tune.kendall([*zip(distinct, itertools.count())]) == 1


# ---------------------------------------------------------------------- what states the field is no arm
def test_what_states_the_field_keeps_its_value_and_is_not_tuned(tmp_path: Path) -> None:
    made = experiment(steps=None)
    variants = [{"codec": "fp32"}, {"codec": "int8"}, {"codec": "int8", "optimiser": {"learning_rate": 0.5}}]
    axes = {name: values for name, values in made.axes.items() if name != "codec"}
    made = made.model_copy(update={"axes": axes, "variants": variants})
    planned = conduct.make_agenda(made, "relay", Choice(), tmp_path)
    assert {repr(trial.arm) for trial in planned.trials} == {"{'codec': 'fp32'}", "{'codec': 'int8'}"}
    record, _ = tuned(planned, valley(1e-3))
    done = chosen(planned, record)
    rates = {(cell.codec, cell.optimiser.learning_rate) for cell in done.cells}
    assert rates == {("fp32", 1e-3), ("int8", 1e-3), ("int8", 0.5)}
    swept = conduct.sweep_record(done, "testbed sweep x")
    assert {cell.optimiser.learning_rate for cell in done.cells if cell.id in swept.stated} == {0.5}
    alike = made.model_copy(
        update={"variants": [{"codec": "int8"}, variants[2] | {"optimiser": {"learning_rate": 1e-3}}]}
    )
    planned = conduct.make_agenda(alike, "relay", Choice(), tmp_path)
    done = chosen(planned, tuned(planned, valley(1e-3))[0])
    assert conduct.sweep_record(done, "testbed sweep x").stated == (), "tuning chose what a variant states"

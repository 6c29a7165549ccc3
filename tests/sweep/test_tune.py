"""[tune]: what is tried, what is chosen, and what the sweep's cells have then."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from testbed import results
from testbed.errors import StageError, UserError
from testbed.results import TuningRecord
from testbed.sweep import conduct, plan, tune
from testbed.sweep.plan import Choice

_TUNE = {
    "field": "optimiser.learning_rate",
    "values": [3e-4, 1e-3, 3e-3],
    "steps": 10,
    "seeds": [5, 6],
    "over": "datacenter",
}


def experiment(**changes: Any) -> plan.Experiment:
    default = plan.load_experiment("default")
    axes = {"profile": ["cable", "lte"], "codec": ["fp32", "int8"], "training.seed": [0, 1]}
    content = {name: getattr(default, name) for name in plan.Experiment.model_fields}
    return plan.Experiment(**{**content, "axes": axes, "tune": {**_TUNE, **changes}})


def agenda(folder: Path, **changes: Any) -> conduct.Agenda:
    return conduct.make_agenda(experiment(**changes), "relay", Choice(), folder)


def settled(folder: Path, losses: dict[tuple[str, float, int], float | None], **changes: Any) -> conduct.Agenda:
    """The agenda after runs that ended with these losses, by codec, value and seed."""
    made = agenda(folder, **changes)
    of_cell = {
        cell.id: losses.get((cell.codec, cell.optimiser.learning_rate, cell.training.seed), 9.0)
        for trial in made.trials
        for cell in trial.cells
    }
    assert made.experiment.tune is not None
    return dataclasses.replace(made, tuning=tune.settle(made.experiment.tune, made.trials, of_cell.__getitem__))


def test_every_arm_tries_every_value_with_the_same_seeds_over_one_network(tmp_path: Path) -> None:
    made = agenda(tmp_path)
    tried = {(c.codec, c.optimiser.learning_rate, c.training.seed) for c in made.to_tune}
    assert tried == {(codec, value, seed) for codec in ("fp32", "int8") for value in _TUNE["values"] for seed in (5, 6)}  # type: ignore[attr-defined]
    assert len(made.to_tune) == len(tried)
    assert {(c.network, c.training.steps, c.training.evaluate_every, c.timing) for c in made.to_tune} == {
        ("datacenter", 10, 0, "played")
    }


def test_the_smallest_mean_wins_for_each_arm_alone(tmp_path: Path) -> None:
    fp32 = {("fp32", 1e-3, 5): 4.0, ("fp32", 1e-3, 6): 6.0, ("fp32", 3e-3, 5): 3.9, ("fp32", 3e-3, 6): 8.0}
    made = settled(tmp_path, {**fp32, ("int8", 3e-4, 5): 1.0})
    assert made.tuning is not None
    assert [(arm.arm, arm.chosen) for arm in made.tuning.arms] == [({"codec": "fp32"}, 1e-3), ({"codec": "int8"}, 3e-4)]
    assert len(made.cells) == 8
    assert {(c.codec, c.optimiser.learning_rate) for c in made.cells} == {("fp32", 1e-3), ("int8", 3e-4)}
    assert {c.training.steps for c in made.cells} == {made.experiment.cell["training"]["steps"]}
    assert made.to_tune == ()


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_a_value_with_a_run_that_has_no_finite_loss_is_out(tmp_path: Path, bad: float | None) -> None:
    losses = {("fp32", 3e-3, 5): 0.1, ("fp32", 3e-3, 6): bad}
    made = settled(tmp_path, losses)
    assert made.tuning is not None
    fp32 = made.tuning.arms[0]
    assert fp32.chosen == 3e-4  # of equals the first
    assert fp32.tried[2].mean_loss is None


def test_an_arm_for_which_nothing_is_left_is_not_run_and_is_tried_again(tmp_path: Path) -> None:
    losses = {("int8", value, 5): None for value in (3e-4, 1e-3, 3e-3)}
    made = settled(tmp_path, losses)  # type: ignore[arg-type]
    assert made.tuning is not None
    assert [(arm.left, arm.chosen) for arm in made.tuning.arms] == [(True, 3e-4), (False, None)]
    assert {cell.codec for cell in made.cells} == {"fp32"}
    results.write_json(tmp_path / "tuning.json", made.tuning)
    assert agenda(tmp_path).tuning is None


def test_nothing_left_for_any_arm_is_an_error(tmp_path: Path) -> None:
    losses = {(codec, value, 5): None for codec in ("fp32", "int8") for value in (3e-4, 1e-3, 3e-3)}
    with pytest.raises(StageError, match=r"no value of optimiser\.learning_rate.*2 arms.*0\.0003, 0\.001, 0\.003"):
        settled(tmp_path, losses)  # type: ignore[arg-type]


def test_a_choice_that_was_kept_is_taken_again_unless_something_changed(tmp_path: Path) -> None:
    made = settled(tmp_path, {})
    assert made.tuning is not None
    results.write_json(tmp_path / "tuning.json", made.tuning)
    assert results.read_json(tmp_path / "tuning.json", TuningRecord) == made.tuning
    assert agenda(tmp_path).tuning == made.tuning
    assert agenda(tmp_path).cells == made.cells
    assert agenda(tmp_path, steps=11).tuning is None
    assert agenda(tmp_path, values=[1e-3]).tuning is None
    assert conduct.make_agenda(made.experiment, "relay", Choice(), tmp_path, again=True).tuning is None


def test_arms_may_be_other_fields(tmp_path: Path) -> None:
    made = agenda(tmp_path, arm=["codec", "training.seed"])
    assert len({repr(trial.arm) for trial in made.trials}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"field": "optimiser.learning_rat"}, "did you mean 'optimiser.learning_rate'?"),
        ({"arm": ["codex"]}, "did you mean 'codec'?"),
        ({"field": "training.seed"}, "training.seed is an axis already"),
        ({"over": "datacentre"}, "did you mean 'datacenter'?"),
        ({"steps": 3}, "warmup_steps is 4, which leaves none of 3 steps"),
        ({"values": [-1.0]}, "optimiser.learning_rate: Input should be greater than 0"),
    ],
)
def test_a_tune_table_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        agenda(tmp_path, **changes)
    assert message in str(caught.value)


def test_plan_cells_before_tuning_have_the_first_value(tmp_path: Path) -> None:
    assert {c.optimiser.learning_rate for c in plan.cells(experiment(), "relay")} == {3e-4}
    assert agenda(tmp_path).cells == plan.cells(experiment(), "relay")

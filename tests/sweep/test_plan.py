from __future__ import annotations

from pathlib import Path

import pytest

from testbed.errors import SpecError, UnknownNameError, UserError
from testbed.sweep import plan


@pytest.fixture
def default() -> plan.Experiment:
    return plan.load_experiment("default")


def test_every_shipped_experiment_resolves() -> None:
    for name in plan.experiment_files():
        experiment = plan.load_experiment(name)
        assert plan.cells(experiment, "relay")
        if experiment.quick:
            assert plan.cells(experiment, "relay", quick=True)


def test_cells_are_the_product_of_the_axes_first_axis_slowest(default: plan.Experiment) -> None:
    cells = plan.cells(default, "relay")
    assert len(cells) == len(default.axes["profile"]) * len(default.axes["codec"])
    assert [cell.profile.name for cell in cells[: len(default.axes["codec"])]] == [default.axes["profile"][0]] * len(
        default.axes["codec"]
    )
    assert len({cell.id for cell in cells}) == len(cells)


def test_an_id_depends_on_content_and_on_nothing_else(default: plan.Experiment) -> None:
    ids = [cell.id for cell in plan.cells(default, "relay")]
    assert ids == [cell.id for cell in plan.cells(default, "relay")]
    assert not set(ids) & {cell.id for cell in plan.cells(default, "netem")}
    assert not set(ids) & {cell.id for cell in plan.cells(default, "relay", overrides=["training.seed=7"])}


def test_an_override_changes_a_field_or_replaces_an_axis(default: plan.Experiment) -> None:
    cells = plan.cells(default, "relay", overrides=["training.steps=9", 'codec=["int8"]', "profile=lte"])
    assert [(cell.codec, cell.profile.name, cell.training.steps) for cell in cells] == [("int8", "lte", 9)]


def test_equal_cells_run_once(default: plan.Experiment) -> None:
    assert len(plan.cells(default, "relay", overrides=['codec=["int8", "int8"]', "profile=lte"])) == 1


def test_a_cell_that_was_written_reads_back_with_the_same_id(default: plan.Experiment) -> None:
    for cell in plan.cells(default, "relay"):
        assert type(cell).model_validate_json(cell.model_dump_json()).id == cell.id


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.step=3", "there is no key 'training.step' (did you mean 'training.steps'?)"),
        ("trainin.steps=3", "there is no key 'trainin' (did you mean 'training'?)"),
        ("training.steps=many", "training.steps: Input should be a valid integer, found 'many'"),
        ("training.steps=1.5", "training.steps: Input should be a valid integer"),
        ("training.steps=true", "training.steps: Input should be a valid integer"),
        ("training.steps=2", "warmup_steps is 4, which leaves none of 2 steps"),
        ("codec=int9", "did you mean 'int8'?"),
        ("codec=nowhere.codecs:Mine", "nowhere"),
        ("profile=kable", "did you mean 'cable'?"),
        ("pipeline.stages=70", "less than or equal to 64"),
        ("pipeline.stages=30", "30 stages"),
        ("pipeline.microbatches=5", "batch_size 16 cannot be cut into 5 equal micro-batches"),
        ("pipeline.schedule=2f2b", "'gpipe' or '1f1b'"),
        ("pipeline.in_flight=1", "need at least 3 micro-batches in flight"),
        ("training.steps", "is not of the form field=value"),
        ("workload.model=gpt2-minni", "gpt2-minni"),
    ],
)
def test_a_mistake_is_one_message(default: plan.Experiment, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan.cells(default, "relay", overrides=[override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_experiment_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'default'"):
        plan.load_experiment("defualt")


def test_an_unknown_table_in_an_experiment_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    text = (plan.experiment_files()["default"]).read_text(encoding="utf8")
    (folder / "sweep.toml").write_text(text.replace("[axes]", "[axis]"), encoding="utf8")
    with pytest.raises(SpecError, match=r"there is no key 'axis' \(did you mean 'axes'\?\)"):
        plan.load_experiment(str(folder / "sweep.toml"))

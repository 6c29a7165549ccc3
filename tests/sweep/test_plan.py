from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from testbed.errors import SpecError, UserError
from testbed.spec import Engine
from testbed.sweep import plan
from testbed.sweep.fields import known_fields
from testbed.workloads import models


@pytest.fixture
def default() -> plan.Experiment:
    return plan.load_experiment("default")


@pytest.mark.slow
def test_every_shipped_experiment_resolves() -> None:
    absent = [model for model in models.MADE if not models.made_folder(model).is_dir()]
    for name in plan.experiment_files():
        experiment = plan.load_experiment(name)
        clock = "real" if experiment.clock == "auto" else experiment.clock
        engine: Engine = "relay" if clock == "real" else "netem"
        if any(model in experiment.path.read_text(encoding="utf8") for model in absent):
            with pytest.raises(SpecError, match="make it once with"):
                plan.cells(experiment, engine, clock=clock)
        else:
            assert plan.cells(experiment, engine, clock=clock)
        if experiment.quick:
            assert plan.cells(experiment, engine, quick=True, clock=clock)


def test_what_variants_state_cannot_be_set_and_the_short_form_has_variants_of_its_own() -> None:
    experiment, overrides = plan.load_experiment("seed_activation_delta"), ["codec_cost=zero"]
    with pytest.raises(SpecError, match="codec_cost is set by the"):
        plan.apply_choice(experiment, plan.Choice(overrides=overrides))
    assert plan.apply_choice(experiment, plan.Choice(quick=True, overrides=overrides)).cell["codec_cost"] == "zero"
    with pytest.raises(SpecError, match=r"tunes optimiser\.learning_rate"):
        plan.apply_choice(plan.load_experiment("topk_knee"), plan.Choice(overrides=["optimiser.learning_rate=0.01"]))


def test_cells_are_the_product_of_the_axes_first_axis_slowest(default: plan.Experiment) -> None:
    cells = plan.cells(default, "relay")
    assert [(cell.network, cell.codec) for cell in cells] == [*itertools.product(*default.axes.values())]


def test_an_override_changes_a_field_or_replaces_an_axis(default: plan.Experiment) -> None:
    cells = plan.cells(default, "relay", overrides=["training.steps=9", 'codec=["int8"]', "profile=lte"])
    assert [(cell.codec, cell.network, cell.training.steps) for cell in cells] == [("int8", "lte", 9)]


def test_links_may_have_a_profile_each(default: plan.Experiment) -> None:
    overrides = ['profile=[["cable", "lte", "cable"], "lte"]', 'codec=["fp32"]']
    mixed, same = plan.cells(default, "relay", overrides=overrides)
    assert [profile.name for profile in mixed.links] == ["cable", "lte", "cable"]
    assert [profile.name for profile in same.links] == ["lte"] * 3
    assert (mixed.network, same.network) == ("cable+lte+cable", "lte")
    (line,) = plan.cells(default, "relay", overrides=["topology=line", 'profile=[["cable", "lte"]]', 'codec=["fp32"]'])
    assert [profile.name for profile in line.links] == ["cable", "lte"]


def test_the_model_says_its_family_and_the_pipeline_how_it_is_cut(default: plan.Experiment) -> None:
    overrides = ["workload.model=llama-nano", "pipeline.layers=[1, 4, 1]"]
    cell = plan.cells(default, "relay", overrides=overrides)[0]
    assert (cell.workload.family, cell.pipeline.layers) == ("llama", (1, 4, 1))
    assert cell.id != plan.cells(default, "relay", overrides=overrides[:1])[0].id


def test_equal_cells_run_once(default: plan.Experiment) -> None:
    assert len(plan.cells(default, "relay", overrides=['codec=["int8", "int8"]', "profile=lte"])) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.step=3", "there is no key 'training.step' (did you mean 'training.steps'?)"),
        ("compute.mod=paced", "there is no key of compute 'mod'; did you mean 'mode'?"),
        ("pipeline.accumulation=3", "batch_size 16 cannot be cut into 12 equal micro-batches"),
        ("workload.text=nowhere.parquet", "nowhere.parquet"),
        ("training.steps=many", "training.steps: Input should be a valid integer, found 'many'"),
        ("training.steps=1.5", "training.steps: Input should be a valid integer"),
        ("training.steps=true", "training.steps: Input should be a valid integer"),
        ("training.steps=2", "warmup_steps is 4, which leaves no step of 2 to measure"),
        ("codec=2: int8; rest: bf16", "has a rule for boundary 2, but the pipeline has boundaries 0 to 1"),
        ("codec=0: int8", "has no rule for boundary 1; add one, or 'rest: CODEC'"),
        ("codec=fwd=int8", "character 1: bwd=CODEC is missing"),
        ("codec=fwd=int9, bwd=int8", "character 5: there is no codec 'int9'; did you mean 'int8'?"),
        ("codec=bf16(7)", "bf16 takes no arguments"),
        ("codec=nowhere.codecs:Mine", "nowhere"),
        ("profile=kable", "did you mean 'cable'?"),
        ("pipeline.stages=70", "less than or equal to 64"),
        ("pipeline.stages=30", "cannot split a model of 4 layers into 30 stages: each needs"),
        ("pipeline.in_flight=1", "set it to at least 3 micro-batches"),
        ("training.steps", "is not of the form field=value"),
        ("workload.model=gpt2-minni", "gpt2-minni"),
        ('profile=[["cable", "lte"]]', "2 profiles for a star of 3 stages, which has 3 links"),
        ("profile=[[]]", "profile must be a name, or a list of names, one per link; found []"),
        ("profiles=cable", "did you mean 'profile'?"),
        ("workload.family=llama", "workload.family is 'llama', but the model 'gpt2-mini' is a gpt2"),
        ("pipeline.layers=[2, 1]", "3 positive numbers, one per stage, with the sum 4"),
        ("topology=line & pipeline.stages=1", "a line has 2 to 254 nodes, asked for 1"),
        ("topology=ring", "Input should be 'star' or 'line', found 'ring'"),
    ],
)
def test_a_mistake_is_one_message(default: plan.Experiment, override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan.cells(default, "relay", overrides=override.split(" & "))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_links_that_cannot_be_in_one_lab_are_refused(
    default: plan.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "netem_profiles").mkdir()
    slot = '{ wait = "5ms", wait_max = "5ms", packets = 4, bytes = "none" }'
    for name, lines in (
        ("small", "mtu = 1400"),
        ("slotted", f"[up]\nslot = {slot}"),
        ("jittery", '[up]\njitter = "2ms"\nreorder = "by-jitter"'),
    ):
        (folder / f"{name}.toml").write_text(f'extends = "cable"\n{lines}\n', encoding="utf8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"must agree in mtu.*cable has 1500, small has 1400"):
        plan.cells(default, "relay", overrides=['profile=[["cable", "small", "cable"]]'])
    for engine, profile in (("relay", "slotted"), ("netem", "jittery")):
        with pytest.raises(SpecError, match=rf"network {profile}: .*(slot|jitter|reorder)"):
            plan.cells(default, engine, overrides=[f"profile={profile}"])  # type: ignore[arg-type]
    assert plan.cells(default, "netem", overrides=["profile=slotted"])
    assert plan.cells(default, "relay", overrides=["profile=jittery"])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[axes]", "[axis]", "there is no key 'axis' (did you mean 'axes'?)"),
        ("[cell.training]", "[cell.trainin]", "there is no key 'trainin' (did you mean 'training'?)"),
        ("seed = 0", "sed = 0", "there is no key 'training.sed' (did you mean 'training.seed'?)"),
        ("[axes]", '[axes]\n"pipeline.stage" = [2]', "no key 'pipeline.stage' (did you mean 'pipeline.stages'?)"),
        ("[axes]", "[axes]\nseed = 3", "axes.seed: Input should be a valid list"),
        ("[axes]", "[axes]\ntopology = []", "axis topology must be a list with at least one value"),
        ("[axes]", "[[variants]]\ntraining.step = 1\n[axes]", "there is no key 'training.step'"),
        ("[axes]", "[tune]\nfeld = 1\n[axes]", "there is no key 'tune.feld' (did you mean 'tune.field'?)"),
        ("[quick.axes]", "[quick.axis]", "there is no key of [quick]"),
        ("[cell]", 'order = "shuffled"\n[cell]', "order: Input should be 'grouped' or 'interleaved', found 'shuffled'"),
        ("[cell]", "repeats = 0\n[cell]", "repeats: Input should be greater than or equal to 1, found 0"),
        ('compute.mode = "calibrated"', "", "compute is missing"),
        ('compute.mode = "calibrated"', 'compute = "fast"', "compute: "),
        ('compute.mode = "calibrated"', 'compute.mode = "paced"\ncompute.device = "t5"', "did you mean 't4'?"),
    ],
)
def test_a_slip_in_an_experiment_file_is_one_message(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "sweep.toml"
    text = (plan.experiment_files()["default"]).read_text(encoding="utf8")
    assert before in text
    path.write_text(text.replace(before, after, 1), encoding="utf8")
    with pytest.raises(UserError) as caught:
        plan.cells(plan.load_experiment(str(path)), "relay", quick=True)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


NOT_FINITE = ("inf", "-inf", "nan", "1e999")


@pytest.mark.parametrize("field", known_fields())
def test_no_field_may_be_infinite_or_nan(default: plan.Experiment, field: str) -> None:
    """In one way, whatever kind of number it is: by --set, and in a list of an axis."""
    for word in NOT_FINITE:
        for typed in (word, f"[1, {word}]"):
            with pytest.raises(SpecError, match=rf"--set {re.escape(field)}: value is .*; state a finite number"):
                plan.cells(default, "relay", overrides=[f"{field}={typed}"])


@pytest.mark.parametrize("word", NOT_FINITE)
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("cell.optimiser.clip_norm = {}", "clip_norm"),
        ('axes."optimiser.weight_decay" = [0.1, {}]', "optimiser.weight_decay"),
        ("[tune]\nvalues = [{}]", "values"),
        ("[compare]\nspeed_up = {}", "speed_up"),
        ("[[compare.claims]]\nloss = {}", "loss"),
        ("[[variants]]\nx = 1\n[[variants]]\nx = {{ y = {} }}", "y"),
    ],
)
def test_no_number_of_a_file_may_be_infinite_or_nan(tmp_path: Path, text: str, key: str, word: str) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(text.format(word), encoding="utf8")
    with pytest.raises(SpecError, match=rf"sweep\.toml: {re.escape(key)} is {float(word)}; state a finite number"):
        plan.load_experiment(str(path))


def test_any_field_may_be_an_axis(default: plan.Experiment) -> None:
    axes = {"compute.dilation": [1, 2], "pipeline.accumulation": [1, 2], "profile": ["cable"], "codec": ["int8"]}
    paced = {**default.cell, "compute": {"mode": "paced", "forward": "20ms", "backward": ["40ms", "40ms", "50ms"]}}
    cells = plan.cells(default.model_copy(update={"axes": axes, "cell": paced}), "relay")
    assert [(c.compute.dilation, c.pipeline.accumulation) for c in cells] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert {c.network for c in cells} == {"cable"}
    assert cells[0].links[0].up.rate_bps == 2 * cells[2].links[0].up.rate_bps  # type: ignore[union-attr]


def test_quick_may_ask_for_other_repeats_and_other_variants(default: plan.Experiment) -> None:
    long, brief = [{"training": {"steps": 40}}, {"training": {"steps": 50}}], [{"training": {"steps": 5}}]
    short = default.model_copy(
        update={"variants": long, "quick": {**default.quick, "repeats": 2, "variants": brief, "cell": {}}}
    )
    for choice, repeats, steps in (
        (plan.Choice(quick=True), 2, {5}),
        (plan.Choice(quick=True, repeats=5), 5, {5}),
        (plan.Choice(), 1, {40, 50}),
    ):
        assert plan.apply_choice(short, choice).repeats == repeats
        assert {cell.training.steps for cell in plan.cells(short, "relay", **choice._asdict())} == steps
    with pytest.raises(UserError, match="repeats"):
        plan.apply_choice(short, plan.Choice(repeats=0))

"""Which combinations of the axes are run: only, exclude, variants."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import UserError
from testbed.sweep import plan

_CODECS, _PROFILES, _SEEDS = ["fp32", "bf16", "int8"], ["datacenter", "cable"], [0, 1, 2]


def experiment(**changes: Any) -> plan.Experiment:
    axes = {"profile": _PROFILES, "codec": _CODECS, "training.seed": _SEEDS}
    return plan.Experiment(**{**dict(plan.load_experiment("default")), "axes": axes, **changes})


def matches(asked: plan.Experiment, **choice: Any) -> set[tuple[str, str, int]]:
    return {(c.network, c.codec, c.training.seed) for c in plan.cells(asked, "relay", **choice)}


EVERYTHING = {(profile, codec, seed) for profile in _PROFILES for codec in _CODECS for seed in _SEEDS}
CONDITIONS = st.fixed_dictionaries(
    {},
    optional={
        "profile": st.lists(st.sampled_from(_PROFILES), min_size=1),
        "codec": st.lists(st.sampled_from(_CODECS), min_size=1),
        "training.seed": st.lists(st.sampled_from(_SEEDS), min_size=1),
    },
).filter(bool)


def meets(one: tuple[str, str, int], condition: dict[str, list[Any]]) -> bool:
    fields = dict(zip(("profile", "codec", "training.seed"), one, strict=True))
    return all(fields[name] in values for name, values in condition.items())


@given(st.lists(CONDITIONS, max_size=3), st.lists(CONDITIONS, max_size=3))
def test_what_is_left_is_what_one_only_table_wants_and_no_exclude_table_does(
    only: list[dict[str, list[Any]]], exclude: list[dict[str, list[Any]]]
) -> None:
    asked = experiment(only=only, exclude=exclude)
    expected = {
        one
        for one in EVERYTHING
        if (not only or any(meets(one, table) for table in only)) and not any(meets(one, table) for table in exclude)
    }
    kept = {
        (c.fields["profile"], c.fields["codec"], c.fields["training"]["seed"])
        for c in (plan.combinations(asked, plan.Choice()) if expected else [])
    }
    assert kept == expected
    if not expected:
        with pytest.raises(UserError, match="none of the 18 cells is left"):
            plan.combinations(asked, plan.Choice())


def test_flags_for_several_fields_must_all_hold_and_for_one_field_one_of_them() -> None:
    assert matches(experiment(), only=["codec=int8", "codec=fp32", "training.seed=1"]) == {
        (profile, codec, 1) for profile in _PROFILES for codec in ("fp32", "int8")
    }
    assert matches(experiment(), exclude=["codec=int8", "training.seed=[0, 1]"]) == {
        (profile, codec, 2) for profile in _PROFILES for codec in ("fp32", "bf16")
    }


def test_a_field_that_is_not_an_axis_and_one_that_is_not_stated_can_be_filtered_by() -> None:
    assert matches(experiment(), only=["pipeline.stages=3", "compute.mode=calibrated"]) == EVERYTHING
    measured = experiment(cell={**experiment().cell, "compute": "measured", "timing": "live"})
    assert matches(measured, only=["timing=live", "compute.mode=measured", "compute.dilation=1"]) == EVERYTHING


def test_networks_of_several_profiles_can_be_filtered_by() -> None:
    mixed = experiment(axes={"profile": ["cable", ["cable", "lte", "cable"]], "codec": ["fp32"]})
    (left,) = plan.cells(mixed, "relay", exclude=["profile=cable"])
    assert left.network == "cable+lte+cable"
    (left,) = plan.cells(mixed, "relay", exclude=['profile=[["cable", "lte", "cable"]]'])
    assert left.network == "cable"


def test_an_invalid_combination_may_be_left_out() -> None:
    axes = {"pipeline.stages": [2, 30], "codec": ["fp32"], "profile": ["cable"]}
    with pytest.raises(UserError, match="30 stages"):
        plan.cells(experiment(axes=axes), "relay")
    assert len(plan.cells(experiment(axes=axes, exclude=[{"pipeline": {"stages": 30}}]), "relay")) == 1


@pytest.mark.parametrize(
    ("changes", "choice", "message"),
    [
        ({}, {"only": ["codec=int9"]}, "--only codec=int9: there is no cell with codec = 'int9'; did you mean 'int8'?"),
        ({}, {"exclude": ["training.seed=7"]}, "--exclude training.seed=7: there is no cell with training.seed = '7'"),
        ({}, {"only": ["codex=int8"]}, "did you mean 'codec'?"),
        ({}, {"exclude": ["training.sed=1"]}, "did you mean 'training.seed'?"),
        ({}, {"only": ["codec"]}, "--only 'codec' is not of the form field=value"),
        ({}, {"only": ["codec=int8"], "exclude": ["codec=int8"]}, "none of the 18 cells is left"),
        ({"exclude": [{"codex": "int8"}]}, {}, "[[exclude]]"),
        ({"only": [{"training": {"sed": 0}}]}, {}, "did you mean 'training.seed'"),
        ({"only": [{}]}, {}, "names no field"),
        ({"exclude": [{"codec": []}]}, {}, "codec has no value"),
        ({"variants": [{"codec": "int8"}]}, {}, "codec is both an axis and a field of [[variants]]"),
    ],
)
def test_a_filter_that_fits_nothing_or_makes_no_sense_is_a_slip(
    changes: dict[str, Any], choice: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        plan.cells(experiment(**changes), "relay", **choice)
    assert message in str(caught.value)


def test_variants_change_several_fields_together() -> None:
    other = {"codec": "int8", "optimiser": {"learning_rate": 5e-4}, "pipeline": {"in_flight": 3}}
    variants = [{"codec": "fp32"}, other]
    asked = experiment(axes={"profile": _PROFILES}, variants=variants)
    cells = plan.cells(asked, "relay")
    rate, depth = asked.cell["optimiser"]["learning_rate"], asked.cell["pipeline"]["in_flight"]
    assert [(c.network, c.codec, c.optimiser.learning_rate, c.pipeline.in_flight) for c in cells] == [
        (profile, *fields) for profile in _PROFILES for fields in (("fp32", rate, depth), ("int8", 5e-4, 3))
    ]
    with pytest.raises(UserError, match=r"codec is set by the \[\[variants\]\]"):
        plan.cells(asked, "relay", overrides=["codec=bf16"])
    assert [c.codec for c in plan.cells(asked, "relay", only=["codec=int8"])] == ["int8", "int8"]

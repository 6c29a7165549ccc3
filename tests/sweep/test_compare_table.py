"""[compare]: what a file may say, and what is refused where it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.errors import UserError
from testbed.sweep import conduct, plan
from testbed.sweep.plan import Choice
from tests.commands import Command
from tests.known import known

DEFAULT = (Command.shipped / "default" / "sweep.toml").read_text(encoding="utf8")
CODECS = ("fp32", "bf16", "int8", "delta-int8")
CLAIM = '[[compare.claims]]\nname = "x"\nours = {{ {ours} }}\nbaseline = {{ codec = "fp32" }}\nloss = 0.1\n'


def load(folder: Path, table: str) -> plan.Experiment:
    path = folder / "sweep.toml"
    path.write_text(f"{DEFAULT}\n{table}\n", encoding="utf8")
    return plan.load_experiment(str(path))


def test_without_a_word_the_baselines_are_bf16_and_fp32(tmp_path: Path) -> None:
    asked = known(load(tmp_path, "[compare]").compare)
    assert (asked.baselines, asked.loss, asked.claims) == (("bf16", "fp32"), None, ())
    made = conduct.make_agenda(load(tmp_path, "[compare]\nloss = 0.1"), "relay", Choice(), tmp_path)
    assert known(conduct.sweep_record(made, "").compare).loss == 0.1


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('[compare]\nbaselines = ["int4"]', "codec=int4"),
        ('[compare]\nbaselines = ["int88"]', "did you mean 'int8'?"),
        ("[compare]\nbaselines = []", "compare.baselines"),
        ("[compare]\nspeedup = 2.0", "did you mean 'compare.speed_up'?"),
        ("[compare]\nspeed_up = 0.0", "greater than 0"),
        ("[compare]\ntime_to_loss = 1.5", "without target_loss"),
        (CLAIM.format(ours='codex = "int8"'), "did you mean 'codec'?"),
        (CLAIM.format(ours='codec = "int8", training.seed = 7'), "training.seed=7"),
        (CLAIM.format(ours=""), "names no field"),
        (CLAIM.format(ours='codec = "int8"').replace("loss = 0.1", ""), "states no effect"),
    ],
)
def test_a_slip_is_one_message_that_names_the_table(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, table)
    assert message in str(caught.value)
    assert "compare" in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    baselines=st.lists(st.one_of(st.sampled_from(CODECS), st.text("abf123(", max_size=5)), max_size=3),
    effects=st.dictionaries(
        st.sampled_from(["loss", "speed_up", "time_to_loss", "target_loss"]),
        st.one_of(st.floats(allow_nan=False, allow_infinity=False, width=32), st.booleans(), st.just("much")),
    ),
    ours=st.dictionaries(
        st.sampled_from(["codec", "profile", "training.seed", "x"]), st.sampled_from([*CODECS, 0, 1]), max_size=2
    ),
)
def test_whatever_the_table_says_it_is_kept_as_it_is_or_refused(
    tmp_path: Path, baselines: list[str], effects: dict[str, Any], ours: dict[str, Any]
) -> None:
    stated = {"baselines": baselines, **effects}
    lines = ["[compare]", *(f"{name} = {json.dumps(value)}" for name, value in stated.items())]
    condition = ", ".join(f'"{name}" = {json.dumps(value)}' for name, value in ours.items())
    try:
        asked = known(load(tmp_path, "\n".join([*lines, CLAIM.format(ours=condition)])).compare)
    except UserError:
        return
    assert set(asked.baselines) == set(baselines) <= set(CODECS)
    assert {name: getattr(asked, name) for name in effects} == effects
    assert [claim.ours for claim in asked.claims] == [ours]

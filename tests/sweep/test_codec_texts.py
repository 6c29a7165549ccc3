"""Codecs as an experiment says them: one meaning is one cell, mistakes are found before anything is started."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from testbed.codecs.catalogue import table
from testbed.errors import SpecError
from testbed.spec import recipe_of
from testbed.sweep import plan


@pytest.fixture(scope="module")
def default() -> plan.Experiment:
    return plan.load_experiment("default")


def cells(default: plan.Experiment, *texts: str, **choice: list[str]) -> list[tuple[str, str]]:
    listed = ", ".join(f"'{text}'" for text in texts)
    resolved = plan.cells(default, "relay", overrides=[f"codec=[{listed}]", "profile=cable"], **choice)
    return [(one.codec, one.id) for one in resolved]


def test_two_texts_for_the_same_codecs_are_one_cell(default: plan.Experiment) -> None:
    alike = cells(default, "int8", "int8( )", "rest: int8", "fwd=int8, bwd=int8", "0: int8; 1: int8", "0-1: int8")
    assert alike == [("int8", alike[0][1])]
    texts = ("0: bf16; 1: int8", "1: int8; rest: bf16", "0: bf16; rest: int8")
    assert len({cell for text in texts for cell in cells(default, text)}) == 1


def test_a_cell_is_named_by_its_codec_within_what_a_folder_s_name_may_be(default: plan.Experiment) -> None:
    ((text, name),) = cells(default, "bwd = bf16,fwd=  int8")
    assert text == "fwd=int8, bwd=bf16"
    assert name.startswith("fwd_int8_bwd_bf16-cable-")
    ((_, long),) = cells(default, "json:JSONDecoder(" + ", ".join(f"word{i}" for i in range(60)) + ")")
    assert re.fullmatch(r"[\w+-]+", long)
    assert len(long) < 180


def test_an_edited_module_or_text_is_another_cell(
    default: plan.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module, text = tmp_path / "edited_codec.py", tmp_path / "text.txt"
    seen = set()
    for words, code in (("one", "a = 1"), ("one", "a = 2"), ("two", "a = 2"), ("one", "a = 1")):
        module.write_text(code)
        text.write_text(words)
        own = plan.cells(default, "relay", overrides=["codec='ef(edited_codec:Codec)'", "profile=cable"])
        read = plan.cells(default, "relay", overrides=["codec=int8", "profile=cable", f"workload.text='{text}'"])
        seen.add((own[0].id, recipe_of(own[0]).id, read[0].id, recipe_of(read[0]).id))
    assert [len(set(column)) for column in zip(*seen, strict=True)] == [2] * 4, "as many as versions of its file"
    assert plan.cells(default, "relay", overrides=["codec=int8", "profile=cable"])[0].outside is None


def test_codecs_that_a_job_states_are_checked_and_their_modules_are_in_the_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    context, ids = plan.load_experiment("context_parallel"), set()
    for code in ("a = 1", "a = 2"):
        (tmp_path / "edited_weights.py").write_text(code)
        ids.add(plan.cells(context, "relay", quick=True, overrides=["job.weights='edited_weights:Codec'"])[0].id)
    assert len(ids) == 2
    with pytest.raises(SpecError, match="subspace needs activations"):
        plan.cells(context, "relay", quick=True, overrides=["job.weights='subspace(8)'"])
    with pytest.raises(SpecError, match="subspace needs activations"):
        plan.cells(plan.load_experiment("decode"), "relay", quick=True, overrides=["codec='subspace(8)'"])


def test_conditions_on_codecs_go_by_what_they_mean(default: plan.Experiment) -> None:
    texts = ("int8", "fwd=int8, bwd=bf16")
    for choice in ({"only": ["codec='fwd=int8,bwd=bf16'"]}, {"exclude": ["codec=rest:int8"]}):
        ((text, _),) = cells(default, *texts, **choice)
        assert text == texts[1]


def test_what_measures_its_link_cannot_be_played(default: plan.Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    curious = dataclasses.replace(table.CODECS["bf16"], name="curious", measures=True)
    monkeypatch.setitem(table.CODECS, "curious", curious)
    choice = ["codec='fwd=curious, bwd=int8'", "profile=cable", "timing=live"]
    assert len(plan.cells(default, "relay", overrides=choice)) == 1
    with pytest.raises(SpecError, match="cannot be played"):
        plan.cells(default, "relay", overrides=[*choice[:2], "timing=played"])

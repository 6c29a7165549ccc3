"""Stages chained with plain tensors are transformers' own model, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

from testbed.errors import SpecError, UnknownNameError
from testbed.spec import TextSpec
from testbed.workloads import models
from testbed.workloads.build import build_stage
from testbed.workloads.gpt2 import Gpt2Stage
from tests.workloads.chained import (
    Trained,
    batches,
    cut,
    reference,
    save_checkpoint,
    train_stages,
    train_whole,
    workload,
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _a_deep_narrow_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No named GPT-2 is both quick and of enough layers for many cuts."""
    monkeypatch.setitem(models.SIZES, "gpt2-deep", dataclasses.replace(models.SIZES["gpt2-nano"], layers=8))


REGIMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.2},
    "bf16": {"precision": "bf16"},
    "bf16, dropout": {"precision": "bf16", "dropout": 0.1},
}


@functools.cache
def whole(spec: TextSpec) -> Trained:
    return train_whole(spec)


def assert_same(found: Trained, expected: Trained) -> None:
    """Bit for bit; the parameters' names and their order are transformers' too."""
    (losses, parameters), (whole_losses, names) = found, expected
    assert [loss.item() for loss in losses] == [loss.item() for loss in whole_losses]
    assert list(parameters) == list(names)
    assert all(torch.equal(parameters[name], value) for name, value in names.items())


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("size", ["gpt2-deep", "llama-nano"])
@pytest.mark.parametrize("shares", [1, 2, 3, 6, "uneven"], ids=str)
def test_training_in_stages_is_training_the_whole(size: str, shares: int | str, regime: str) -> None:
    spec = workload(size, **REGIMES[regime])
    uneven = [1, models.SIZES[size].layers - 3, 2]
    stages = cut(spec, 3, uneven) if shares == "uneven" else cut(spec, int(shares))
    before = torch.get_rng_state()
    trained = train_stages(stages)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(trained, whole(spec))
    losses, _ = trained
    assert losses[-1] < losses[0] + 1  # something was computed


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("size", ["gpt2-deep", "llama-nano"])
def test_activations_computed_again_are_the_same(size: str, regime: str) -> None:
    spec = workload(size, **REGIMES[regime])
    assert_same(train_stages(cut(spec, 3), recompute=True), whole(spec))


@given(
    cuts=st.sets(st.integers(1, 7)),
    size=st.sampled_from(["gpt2-deep", "llama-nano"]),
    regime=st.sampled_from(sorted(REGIMES)),
    recompute=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_any_cut_is_the_whole(cuts: set[int], size: str, regime: str, recompute: bool) -> None:
    layers = models.SIZES[size].layers
    ends = [0, *sorted(end for end in cuts if end < layers), layers]
    shares = [end - start for start, end in itertools.pairwise(ends)]
    spec = workload(size, **REGIMES[regime])
    assert_same(train_stages(cut(spec, len(shares), shares), recompute=recompute), whole(spec))


def test_regimes_are_not_the_same() -> None:
    """Else the tests above would compare nothing: dropout and bf16 do change the numbers, and so does what keys
    dropout.
    """
    curves = [tuple(loss.item() for loss in whole(workload("llama-nano", **regime))[0]) for regime in REGIMES.values()]
    assert len(set(curves)) == len(REGIMES)
    ids = batches()[0, 0, :, :-1]
    for size in ("gpt2-nano", "llama-nano"):
        outputs = []
        for seed, step, microbatch in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)):
            (stage,) = cut(workload(size, dropout=0.1), 1)
            stage._seed = seed
            stage.draw(step, microbatch)
            outputs.append(stage.train()(ids))
        assert torch.equal(outputs[0], outputs[-1])
        assert not any(torch.equal(outputs[0], other) for other in outputs[1:-1])
        (plain,) = cut(workload(size), 1)
        assert torch.equal(stage.eval()(ids), plain.eval()(ids))  # an evaluation draws nothing


@pytest.mark.parametrize(("size", "kind"), [("gpt2-nano", GPT2LMHeadModel), ("llama-nano", LlamaForCausalLM)])
def test_what_stages_learned_is_a_checkpoint(size: str, kind: Any, tmp_path: Path) -> None:
    stages = cut(workload(size), 3)
    train_stages(stages)
    save_checkpoint(workload(size), [stage.state_dict() for stage in stages], tmp_path / "llama or gpt2")
    hidden = ids = batches()[0, 0, :, :-1]
    with torch.no_grad():
        for stage in stages:
            hidden = stage(hidden)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "llama or gpt2", attn_implementation="sdpa")
        assert isinstance(loaded, kind)
        assert torch.equal(hidden, loaded(ids).logits)
        # and a workload can name it, its tokenizer included
        spec = workload(size).model_copy(update={"model": str(tmp_path / "llama or gpt2")})
        again = ids
        for stage in cut(spec, 2):
            again = stage(again)
        assert torch.equal(again, hidden)
    with pytest.raises(RuntimeError, match="Missing key"):
        save_checkpoint(workload(size), [stage.state_dict() for stage in stages[1:]], tmp_path / "a part")


def test_a_stage_holds_its_own_parameters_and_no_others() -> None:
    owned = [set(dict(stage.named_parameters())) for stage in cut(workload(), 3)]
    assert sum(map(len, owned)) == len(set.union(*owned))
    assert set.union(*owned) == set(dict(reference(workload()).named_parameters()))
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= owned[0]
    assert {"transformer.ln_f.weight", "lm_head.weight"} <= owned[2]
    assert {name.split(".")[2] for name in owned[1]} == {"3", "4", "5"}


def test_parameters_follow_the_seed_and_leave_global_generators_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build_stage(workload("gpt2-nano"), stage=0, stages=1, seed=0, vocabulary=4096)
    torch.manual_seed(2)
    same = build_stage(workload("gpt2-nano"), stage=0, stages=1, seed=0, vocabulary=4096)
    other = build_stage(workload("gpt2-nano"), stage=0, stages=1, seed=1, vocabulary=4096)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)
    weight = "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(one.state_dict()[weight], same.state_dict()[weight])
    assert not torch.equal(one.state_dict()[weight], other.state_dict()[weight])


def test_a_middle_stage_sees_no_future() -> None:
    stage = build_stage(workload("gpt2-nano"), stage=1, stages=3, seed=0, vocabulary=4096)
    x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 10:] += 1
    with torch.no_grad():
        before, after = stage(x), stage(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_the_width_of_a_boundary() -> None:
    for name, size in models.SIZES.items():
        assert models.hidden_width(workload(name)) == size.width
    stage = build_stage(workload("gpt2-nano"), stage=0, stages=3, seed=0, vocabulary=4096)
    assert stage(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 7, stage.width) == (2, 7, 64)


# ------------------------------------------------------------------ checkpoints
def save(folder: Path, *, tied: bool) -> Any:
    config = Gpt2Stage.config(models.SIZES["gpt2-nano"])
    config.tie_word_embeddings = tied
    config.resid_pdrop = 0.1
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_in_stages_is_the_checkpoint(tied: bool, tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", tied=tied)
    spec = workload(str(tmp_path / "saved"))
    models.check_workload(spec, 3)
    stages = cut(spec, 3)
    hidden = ids = batches()[0, 0, :, :-1]
    with torch.no_grad():
        for stage in stages:
            hidden = stage.train()(hidden)  # training mode: dropout is off
        assert torch.equal(hidden, saved.eval()(ids).logits)
    assert (
        torch.equal(stages[0].state_dict()["transformer.wte.weight"], stages[2].state_dict()["lm_head.weight"]) == tied
    )
    whole = cut(spec, 1)[0]
    assert len(dict(whole.named_parameters())) == len(dict(reference(workload("gpt2-nano")).named_parameters()))


def rewritten(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """The same checkpoint with its weights in another form."""
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


def test_weights_may_lie_in_shards_in_older_files_and_under_older_names(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    saved = save(folder, tied=True)
    weights = load_file(folder / "model.safetensors")
    expected = cut(workload(str(folder)), 3)

    def assert_unchanged() -> None:
        for stage, before in zip(cut(workload(str(folder)), 3), expected, strict=True):
            assert all(torch.equal(value, before.state_dict()[name]) for name, value in stage.state_dict().items())

    saved.save_pretrained(folder, max_shard_size="500KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    (folder / "model.safetensors").unlink()
    assert_unchanged()
    for part in folder.glob("model*"):
        part.unlink()
    # GPT-2 as it was published: of the model without its output layer, and with masks among the weights
    plain = {name.removeprefix("transformer."): value for name, value in weights.items()} | {
        "h.0.attn.bias": torch.ones(1, 1)
    }
    save_file(plain, folder / "model.safetensors")
    assert_unchanged()
    rewritten(folder, plain)
    assert_unchanged()
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_unchanged()
    torch.save({name: value.to(torch.int8) for name, value in weights.items()}, folder / "pytorch_model.bin")
    with pytest.raises(SpecError, match="quantised"):
        cut(workload(str(folder)), 1)


def test_a_cached_checkpoint_is_found_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    save(repository / "snapshots" / "abc", tied=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert models.model_size("someone/tiny") == models.SIZES["gpt2-nano"]
    assert build_stage(workload("someone/tiny"), stage=2, stages=3, seed=0, vocabulary=4096).width == 64
    with pytest.raises(SpecError, match="hf download someone/other"):
        models.check_workload(workload("someone/other"), 1)


def test_a_pretrained_model_that_is_not_here_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for model, module in models.MADE.items():
        with pytest.raises(SpecError, match=f"make it once with: python -m {module}"):
            models.check_workload(workload(model).model_copy(update={"family": "llama"}), 2)
        save(tmp_path / "testbed" / "models" / model, tied=True)
        models.check_workload(workload(model).model_copy(update={"family": "gpt2"}), 2)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(SpecError, match="mamba"):
        models.check_workload(workload(str(tmp_path)), 1)
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(SpecError, match="not the config"):
        models.check_workload(workload(str(tmp_path)), 1)
    save(tmp_path / "torn", tied=True)
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SpecError, match="cannot load"):
        build_stage(workload(str(tmp_path / "torn")), stage=0, stages=1, seed=0, vocabulary=4096)
    save(tmp_path / "shallow", tied=True)
    config = json.loads((tmp_path / "shallow" / "config.json").read_text())
    (tmp_path / "shallow" / "config.json").write_text(json.dumps(config | {"n_layer": 4}))
    with pytest.raises(SpecError, match="lacks 12 weights"):
        build_stage(workload(str(tmp_path / "shallow")), stage=0, stages=1, seed=0, vocabulary=4096)


def test_what_cannot_be_built() -> None:
    with pytest.raises(SpecError, match=r"family is 'gpt2', and the model 'llama-nano' is a llama"):
        build_stage(
            workload("llama-nano").model_copy(update={"family": "gpt2"}), stage=0, stages=1, seed=0, vocabulary=4096
        )
    for shares in ([2, 6], [8, 0, 0], [1, 1, 1]):
        with pytest.raises(SpecError, match=r"3 numbers from 1 on that add up to 8"):
            cut(workload(), 3, shares)
    with pytest.raises(UnknownNameError, match="did you mean 'gpt2-mini'"):
        models.check_workload(workload("gpt2-mimi"), 1)
    with pytest.raises(SpecError, match="8 layers cannot be cut into 9"):
        models.check_workload(workload(), 9)
    with pytest.raises(SpecError, match="at most 512"):
        models.check_workload(workload(sequence_length=513), 1)
    with pytest.raises(SpecError, match="no such folder"):
        models.check_workload(workload("./nowhere"), 1)
    with pytest.raises(SpecError, match="do not belong together"):
        build_stage(workload(), stage=0, stages=1, seed=0, vocabulary=50257)

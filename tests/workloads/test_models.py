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
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM

from testbed.errors import SpecError, UnknownNameError
from testbed.spec import TextSpec
from testbed.workloads import models
from testbed.workloads.build_stage import build_stage
from testbed.workloads.gpt2 import Gpt2Stage
from testbed.workloads.stage_model import EMBEDDING, dropout_key
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


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("size", ["gpt2-deep", "llama-nano"])
@pytest.mark.parametrize(
    ("shares", "recompute"), [(1, False), (2, False), (3, True), (6, False), ("uneven", False), ("uneven", True)]
)
def test_training_in_stages_is_training_the_whole(size: str, shares: int | str, recompute: bool, regime: str) -> None:
    spec = workload(size, **REGIMES[regime])
    uneven = [1, models.SIZES[size].layers - 3, 2]
    before = torch.get_rng_state()
    stages = cut(spec, 3, uneven) if shares == "uneven" else cut(spec, int(shares))
    trained = train_stages(stages, recompute=recompute)
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(trained, whole(spec))
    assert sum(len(list(stage.parameters())) for stage in stages) == len(trained[1])
    losses, _ = trained
    assert losses[-1] < losses[0] + 1  # something was computed


def test_regimes_are_not_the_same() -> None:
    """Else the tests above would compare nothing: dropout and bf16 do change the numbers, and so does what keys
    dropout.
    """
    curves = [tuple(loss.item() for loss in whole(workload("llama-nano", **regime))[0]) for regime in REGIMES.values()]
    assert len(set(curves)) == len(REGIMES)
    keys = list(itertools.product((0, 1), (0, 1), (0, 1), (EMBEDDING, 0, 1)))  # seed, step, micro-batch, layer
    assert len({dropout_key(*key) for key in keys}) == len(keys)
    ids = batches()[0, 0, :, :-1]
    for size in ("gpt2-nano", "llama-nano"):
        (stage,), (plain,) = cut(workload(size, dropout=0.1), 1), cut(workload(size), 1)
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
    with pytest.raises(SpecError, match="as a checkpoint's config"):
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
    with pytest.raises(SpecError, match=r"family is 'gpt2', but the model 'llama-nano' is a llama"):
        build_stage(
            workload("llama-nano").model_copy(update={"family": "gpt2"}), stage=0, stages=1, seed=0, vocabulary=4096
        )
    for shares in ([2, 6], [8, 0, 0], [1, 1, 1]):
        with pytest.raises(SpecError, match=r"3 positive numbers, one per stage, with the sum 8"):
            cut(workload(), 3, shares)
    with pytest.raises(UnknownNameError, match="did you mean 'gpt2-mini'"):
        models.check_workload(workload("gpt2-mimi"), 1)
    with pytest.raises(SpecError, match="8 layers into 9"):
        models.check_workload(workload(), 9)
    with pytest.raises(SpecError, match="has a context of 512 tokens"):
        models.check_workload(workload(sequence_length=513), 1)
    with pytest.raises(SpecError, match="a vocabulary of 64 characters, and texts are converted into the 4,096 tokens"):
        models.check_workload(workload("gpt2-characters"), 1)
    with pytest.raises(SpecError, match="no such folder"):
        models.check_workload(workload("./nowhere"), 1)
    with pytest.raises(SpecError, match="use the model's own tokenizer"):
        build_stage(workload(), stage=0, stages=1, seed=0, vocabulary=50257)

"""Stages chained with plain tensors are transformers' own model, bit for bit."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from testbed.errors import SpecError, UnknownNameError
from testbed.spec import WorkloadSpec
from testbed.workloads import gpt2, llama, table
from testbed.workloads.build import build
from testbed.workloads.gpt2 import configuration
from testbed.workloads.model import StageModel

SEED, MICROBATCHES, STEPS = 11, 2, 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def workload(model: str = "gpt2-midi", sequence_length: int = 24) -> WorkloadSpec:
    return WorkloadSpec(
        family="llama" if "llama" in model else "gpt2",
        model=model,
        text="bundled",
        sequence_length=sequence_length,
        batch_size=4,
        validation_batches=1,
    )


def batches(vocabulary: int = 4096) -> Tensor:
    """(steps, micro-batches, sequences, tokens + 1)."""
    return torch.randint(vocabulary, (STEPS, MICROBATCHES, 2, 25), generator=torch.Generator().manual_seed(3))


def optimiser(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)


def train_whole(model: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and parameters of transformers' model, its own forward and its own loss."""
    adamw, losses = optimiser(model), []
    model.train()
    for step in batches():
        for tokens in step:
            out = model(tokens[:, :-1], labels=tokens[:, :-1], shift_labels=tokens[:, 1:].contiguous())
            (out.loss / MICROBATCHES).backward()
            losses.append(out.loss.detach())
        adamw.step()
        adamw.zero_grad()
    return losses, dict(model.named_parameters())


def train_stages(stages: list[StageModel]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same through the stages: what crosses a boundary is a detached tensor, and its gradient on the way back."""
    optimisers, losses = [optimiser(stage) for stage in stages], []
    for step in batches():
        for tokens in step:
            hidden, crossings = tokens[:, :-1], []
            for stage in stages:
                if stage is not stages[0]:
                    hidden = hidden.detach().clone().requires_grad_()
                inputs, hidden = hidden, stage(hidden)
                crossings.append((inputs, hidden))
            loss = stages[-1].loss(hidden, tokens[:, 1:])
            losses.append(loss.detach())
            gradient = None
            for i, (inputs, outputs) in reversed(list(enumerate(crossings))):
                (loss / MICROBATCHES if gradient is None else outputs).backward(gradient)
                gradient = inputs.grad.clone() if i else None
        for adamw in optimisers:
            adamw.step()
            adamw.zero_grad()
    return losses, {name: value for stage in stages for name, value in stage.named_parameters()}


def reference(size: str = "gpt2-midi") -> Any:
    family = llama if size.startswith("llama") else gpt2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return family.WHOLE(family.configuration(table.SIZES[size]))


def cut(spec: WorkloadSpec, stages: int, layers: list[int] | None = None) -> list[StageModel]:
    return [build(spec, stage=s, stages=stages, seed=SEED, vocabulary=4096, layers=layers) for s in range(stages)]


@functools.cache
def whole(size: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    return train_whole(reference(size))


@pytest.mark.parametrize("size", ["gpt2-midi", "llama-nano"])
@pytest.mark.parametrize("shares", [1, 2, 3, 4, 5, 6, "uneven"], ids=str)
def test_training_in_stages_is_training_the_whole(size: str, shares: int | str) -> None:
    uneven = [1, table.SIZES[size].layers - 3, 2]
    stages = cut(workload(size), 3, uneven) if shares == "uneven" else cut(workload(size), int(shares))
    losses, parameters = train_stages(stages)
    expected, names = whole(size)
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected]
    assert list(parameters) == list(names)  # the names, and the order of transformers
    assert all(torch.equal(parameters[name], value) for name, value in names.items())
    assert expected[-1] < expected[0] + 1  # something was computed


def test_what_stages_learned_is_a_checkpoint(tmp_path: Path) -> None:
    """Parameter names map back: transformers loads what the stages hold."""
    for size, kind in (("gpt2-nano", GPT2LMHeadModel), ("llama-nano", LlamaForCausalLM)):
        stages = cut(workload(size), 3)
        train_stages(stages)
        model = reference(size)
        model.load_state_dict({name: value for stage in stages for name, value in stage.named_parameters()})
        model.save_pretrained(tmp_path / size)
        ids = batches()[0, 0, :, :-1]
        hidden = ids
        with torch.no_grad():
            for stage in stages:
                hidden = stage(hidden)
            assert torch.equal(hidden, kind.from_pretrained(tmp_path / size, attn_implementation="sdpa")(ids).logits)


def test_a_stage_holds_its_own_parameters_and_no_others() -> None:
    owned = [set(dict(stage.named_parameters())) for stage in cut(workload(), 3)]
    assert sum(map(len, owned)) == len(set.union(*owned))
    assert set.union(*owned) == set(dict(reference().named_parameters()))
    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= owned[0]
    assert {"transformer.ln_f.weight", "lm_head.weight"} <= owned[2]
    assert {name.split(".")[2] for name in owned[1]} == {"3", "4", "5"}


def test_parameters_follow_the_seed_and_leave_global_generators_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build(workload("gpt2-nano"), stage=0, stages=1, seed=0, vocabulary=4096)
    torch.manual_seed(2)
    same = build(workload("gpt2-nano"), stage=0, stages=1, seed=0, vocabulary=4096)
    other = build(workload("gpt2-nano"), stage=0, stages=1, seed=1, vocabulary=4096)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)
    weight = "transformer.h.0.attn.c_attn.weight"
    assert torch.equal(one.state_dict()[weight], same.state_dict()[weight])
    assert not torch.equal(one.state_dict()[weight], other.state_dict()[weight])


def test_a_middle_stage_sees_no_future() -> None:
    stage = build(workload("gpt2-nano"), stage=1, stages=3, seed=0, vocabulary=4096)
    x = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 10:] += 1
    with torch.no_grad():
        before, after = stage(x), stage(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_the_width_of_a_boundary() -> None:
    for name, size in table.SIZES.items():
        assert table.width(workload(name)) == size.width
    stage = build(workload("gpt2-nano"), stage=0, stages=3, seed=0, vocabulary=4096)
    assert stage(torch.zeros(2, 7, dtype=torch.int64)).shape == (2, 7, stage.width) == (2, 7, 64)


# ------------------------------------------------------------------ checkpoints
def save(folder: Path, *, tied: bool) -> Any:
    config = configuration(table.SIZES["gpt2-nano"])
    config.tie_word_embeddings = tied
    config.resid_pdrop = 0.1
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_in_stages_is_the_checkpoint(tied: bool, tmp_path: Path) -> None:
    saved = save(tmp_path / "saved", tied=tied)
    spec = workload(str(tmp_path / "saved"))
    table.check(spec, 3)
    stages = cut(spec, 3)
    hidden = ids = batches()[0, 0, :, :-1]
    with torch.no_grad():
        for stage in stages:
            hidden = stage.train()(hidden)  # training mode: dropout is off
        assert torch.equal(hidden, saved.eval()(ids).logits)
    assert torch.equal(stages[0].state_dict()["transformer.wte.weight"], stages[2].state_dict()["lm_head.weight"]) == tied
    whole = cut(spec, 1)[0]
    assert len(dict(whole.named_parameters())) == len(dict(reference("gpt2-nano").named_parameters()))


def test_a_cached_checkpoint_is_found_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--tiny"
    save(repository / "snapshots" / "abc", tied=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert table.size_of("someone/tiny") == table.SIZES["gpt2-nano"]
    assert build(workload("someone/tiny"), stage=2, stages=3, seed=0, vocabulary=4096).width == 64
    with pytest.raises(SpecError, match="hf download someone/other"):
        table.check(workload("someone/other"), 1)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(SpecError, match="mamba"):
        table.check(workload(str(tmp_path)), 1)
    (tmp_path / "config.json").write_text("not json")
    with pytest.raises(SpecError, match="not the config"):
        table.check(workload(str(tmp_path)), 1)
    save(tmp_path / "torn", tied=True)
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(SpecError, match="cannot load"):
        build(workload(str(tmp_path / "torn")), stage=0, stages=1, seed=0, vocabulary=4096)
    save(tmp_path / "shallow", tied=True)
    config = json.loads((tmp_path / "shallow" / "config.json").read_text())
    (tmp_path / "shallow" / "config.json").write_text(json.dumps(config | {"n_layer": 4}))
    with pytest.raises(SpecError, match="lacks 12 weights"):
        build(workload(str(tmp_path / "shallow")), stage=0, stages=1, seed=0, vocabulary=4096)


def test_what_cannot_be_built() -> None:
    with pytest.raises(SpecError, match=r"family is 'gpt2', and the model 'llama-nano' is a llama"):
        build(workload("llama-nano").model_copy(update={"family": "gpt2"}), stage=0, stages=1, seed=0, vocabulary=4096)
    for shares in ([2, 6], [8, 0, 0], [1, 1, 1]):
        with pytest.raises(SpecError, match=r"3 numbers from 1 on that add up to 8"):
            cut(workload(), 3, shares)
    with pytest.raises(UnknownNameError, match="did you mean 'gpt2-mini'"):
        table.check(workload("gpt2-mimi"), 1)
    with pytest.raises(SpecError, match="8 layers cannot be cut into 9"):
        table.check(workload(), 9)
    with pytest.raises(SpecError, match="at most 512"):
        table.check(workload(sequence_length=513), 1)
    with pytest.raises(SpecError, match="no such folder"):
        table.check(workload("./nowhere"), 1)
    with pytest.raises(SpecError, match="do not belong together"):
        build(workload(), stage=0, stages=1, seed=0, vocabulary=50257)

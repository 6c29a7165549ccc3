"""DistributedDataParallel with our hook, in processes over gloo, trains as a played cell does, bit for bit."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import testbed.torch
from testbed.errors import SpecError
from testbed.nodes.optimise import Optimiser, learning_rate
from testbed.runtime.gather import global_norm
from testbed.spec import Recipe
from tests.small_replicas import Learner, a_recipe, same, trained
from tests.torch_codecs.ranks import in_processes

STEPS = 10
CODECS = ["fp32", "int8", "ef(topk(0.05))", "zstd(int4(64))", "delta(int8)"]


def train(
    recipe: Recipe,
    *,
    bucket_mb: float = 25.0,
    first: int = 0,
    saved: Any = None,
    until: int = STEPS,
    exchange: Any = "auto",
) -> dict[str, Any]:
    """Train the small network as a script of DDP's does; with the update of a played cell."""
    assert recipe.data is not None
    learner = Learner(recipe.data.parts, dist.get_rank())
    ddp = DistributedDataParallel(learner.net.layers, bucket_cap_mb=bucket_mb)
    optimiser = Optimiser(learner.parameters, recipe.optimiser)
    hook = testbed.torch.ddp_hook(recipe.codec, exchange=exchange, seed=recipe.training.seed)
    ddp.register_comm_hook(learner.net, hook)
    if saved is not None:
        learner.net.load_state_dict(saved[dist.get_rank()]["model"])
        hook.load_state_dict(saved[dist.get_rank()]["hook"])
    losses = []
    for step in range(first, until):
        batch = learner.data.train(step, dist.get_rank(), dist.get_world_size())
        loss = learner.net.loss(ddp(batch.inputs), batch.targets)
        loss.backward()
        losses.append(loss.item())
        rate = learning_rate(recipe.optimiser, step, recipe.training.steps)
        optimiser.update(global_norm(optimiser.squares()), rate)
    weights = [parameter.detach() for parameter in learner.parameters]
    return {"losses": losses, "weights": weights, "model": learner.net.state_dict(), "hook": hook.state_dict()}


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "ranks"), [*((codec, 2) for codec in CODECS), ("ef(topk(0.05))", 3)])
def test_losses_and_weights_are_a_played_cells(codec: str, ranks: int, tmp_path: Path, one_thread: None) -> None:
    recipe = a_recipe("all-gather", codec, workers=ranks, steps=STEPS)
    played = trained(recipe)
    ours = in_processes(train, tmp_path / "ddp", recipe, ranks=ranks)
    losses = zip(*(each["losses"] for each in ours), strict=True)
    means = [math.fsum(loss * (1 / ranks) for loss in every) for every in losses]
    assert means == [record.loss for record in played.records[-1] if record.phase == "train"]
    for rank, each in enumerate(ours):
        assert same(each["weights"], played.weights(rank))


def in_two_runs(recipe: Recipe) -> dict[str, Any]:
    """Train with DDP's smallest buckets, then go on in a new model, DDP and hook from what torch.save wrote."""
    before = train(recipe, bucket_mb=1e-6, until=4)
    name = f"checkpoint-{dist.get_rank()}.pt"
    torch.save(before, name)
    saved = {dist.get_rank(): torch.load(name, weights_only=True)}
    after = train(recipe, first=4, saved=saved)
    return {**after, "losses": before["losses"] + after["losses"]}


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["ef(topk(0.05))", "delta(int8)"])
def test_it_goes_on_from_a_checkpoint_bit_for_bit_however_buckets_are_cut(
    codec: str, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = a_recipe("all-gather", codec, workers=2, steps=STEPS, sgd=True)
    straight = in_processes(train, tmp_path / "straight", recipe)
    resumed = in_processes(in_two_runs, tmp_path / "resumed", recipe)
    for one, other in zip(straight, resumed, strict=True):
        assert one["losses"] == other["losses"]
        assert same(one["weights"], other["weights"])
    played = trained(recipe)
    assert same(played.weights(), resumed[0]["weights"])


def by_each_exchange(recipe: Recipe) -> dict[str, Any]:
    return {exchange: train(recipe, exchange=exchange) for exchange in ("auto", "parts", "all-gather")}


@pytest.mark.slow
def test_three_ranks_sum_int8_by_parts_and_agree(tmp_path: Path, one_thread: None) -> None:
    recipe = a_recipe("all-gather", "int8", workers=3, steps=STEPS)
    ranks = in_processes(by_each_exchange, tmp_path / "ddp", recipe, ranks=3)
    assert all(same(ranks[0]["parts"]["weights"], rank["auto"]["weights"]) for rank in ranks)
    auto, gathered = ranks[0]["auto"], ranks[0]["all-gather"]
    assert same(gathered["weights"], trained(recipe).weights())
    assert not same(auto["weights"], gathered["weights"])
    assert auto["losses"][-1] == pytest.approx(gathered["losses"][-1], rel=0.02)


def wrongly() -> list[str]:
    """Return what DDP raises for each mistake."""
    said = []
    for model, codec, dtype, value in (
        (None, "int8", torch.float32, 1.0),
        ("model", "int8", torch.float64, 1.0),
        ("model", "int8", torch.float32, torch.nan),
    ):
        layer = torch.nn.Linear(64, 64, dtype=dtype)
        ddp = DistributedDataParallel(layer)
        ddp.register_comm_hook(layer if model else None, testbed.torch.ddp_hook(codec))
        try:
            (ddp(torch.ones(1, 64, dtype=dtype)).sum() * value).backward()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_mistakes_are_named(tmp_path: Path) -> None:
    state, dtype, nan = in_processes(wrongly, tmp_path / "wrong", ranks=1)[0]
    assert re.search(r"needs the model as its state.*got None; write ddp.register_comm_hook\(model", state)
    assert re.search("cannot code gradients of torch.float64, only of torch.float32", dtype)
    assert re.search("CodecError.*train step 0", nan)


def test_a_state_of_another_hook_is_refused(tmp_path: Path, one_thread: None) -> None:
    assert in_processes(other_state, tmp_path / "other", ranks=1) == [
        "cannot load a hook's state: its codec is 'int8', the hook's 'fp32'"
    ]


def other_state() -> str:
    hook = testbed.torch.ddp_hook("fp32")
    try:
        hook.load_state_dict({"codec": "int8", "step": 1, "ranks": 1, "codecs": []})
    except SpecError as error:
        return str(error)
    return ""

"""Train transformers' whole model and the stages that it is cut into, on the same batches, each in the plainest way."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from testbed.spec import TextSpec
from testbed.workloads import models, prepare
from testbed.workloads.build_stage import build_stage, empty_model, stage_class
from testbed.workloads.precision import autocast
from testbed.workloads.stage_model import EMBEDDING, StageModel, dropout_key
from tests.specs import text_spec

SEED, MICROBATCHES, STEPS = 11, 2, 3
Trained = tuple[list[Tensor], dict[str, Tensor]]
"""Losses, and parameters by name."""


def workload(model: str = "gpt2-midi", sequence_length: int = 24, **changes: Any) -> TextSpec:
    return text_spec(model, sequence_length=sequence_length, **changes)


def batches(vocabulary: int = 4096) -> Tensor:
    """(steps, micro-batches, sequences, tokens + 1)."""
    return torch.randint(vocabulary, (STEPS, MICROBATCHES, 2, 25), generator=torch.Generator().manual_seed(3))


def optimiser(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)


def reference(spec: TextSpec) -> Any:
    """The whole model of a named size as transformers makes it from the seed."""
    kind = stage_class(spec.family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return kind.whole_class(kind.config(models.SIZES[spec.model], spec.dropout))


def save_checkpoint(spec: TextSpec, states: Iterable[Mapping[str, Tensor]], folder: Path) -> None:
    """Write what the stages learned as a folder that transformers loads and that a workload's `model` can name.

    The two embeddings have learned apart, so both are saved, and the configuration says that they are not tied.
    """
    whole = empty_model(spec)
    whole.load_state_dict({name: value for state in states for name, value in state.items()}, assign=True)
    whole.save_pretrained(folder)
    shutil.copyfile(prepare.tokenizer_file(spec.model), folder / "tokenizer.json")


def cut(spec: TextSpec, stages: int, layers: list[int] | None = None) -> list[StageModel]:
    return [build_stage(spec, stage=s, stages=stages, seed=SEED, vocabulary=4096, layers=layers) for s in range(stages)]


def _key_dropout(model: Any, key: list[int]) -> None:
    """Seed torch's generator before the embedding and before each layer of transformers' model; `key` is step,
    micro-batch.
    """

    def seed(layer: int | str, *_: Any) -> None:
        step, microbatch = key
        torch.manual_seed(dropout_key(SEED, step, microbatch, layer))

    body = model.base_model
    blocks = body.h if hasattr(body, "h") else body.layers
    body.get_input_embeddings().register_forward_pre_hook(functools.partial(seed, EMBEDDING))
    for layer, block in enumerate(blocks):
        block.register_forward_pre_hook(functools.partial(seed, layer))


def train_whole(spec: TextSpec) -> Trained:
    """transformers' model, its own forward and its own loss."""
    model, key = reference(spec), [0, 0]
    if spec.dropout:
        _key_dropout(model, key)
    adamw, losses = optimiser(model), []
    model.train()
    for step, parts in enumerate(batches()):
        for microbatch, tokens in enumerate(parts):
            key[:] = step, microbatch
            with autocast("cpu", bf16=spec.precision == "bf16"):
                out = model(tokens[:, :-1], labels=tokens[:, :-1], shift_labels=tokens[:, 1:].contiguous())
            (out.loss / MICROBATCHES).backward()
            losses.append(out.loss.detach())
        adamw.step()
        adamw.zero_grad()
    return losses, dict(model.named_parameters())


def train_stages(stages: list[StageModel], *, recompute: bool = False) -> Trained:
    """The same through the stages: what crosses a boundary is a detached tensor, and its gradient on the way back.

    All micro-batches of a step go forward before the first goes back, and the other way round than they came where they
    are computed again: a stage may not rely on having just seen a micro-batch.
    """
    optimisers, losses = [optimiser(stage) for stage in stages], []
    for stage in stages:
        stage.train()
    for step, parts in enumerate(batches()):
        kept = []
        for microbatch, tokens in enumerate(parts):
            hidden, crossings = tokens[:, :-1], []
            for stage in stages:
                if stage is not stages[0]:
                    hidden = hidden.detach().clone().requires_grad_()
                stage.draw(step, microbatch)
                with torch.set_grad_enabled(not recompute):
                    inputs, hidden = hidden, stage(hidden)
                crossings.append((inputs, hidden))
                assert stage.last or hidden.dtype == torch.float32
            loss = stages[-1].loss(hidden, tokens[:, 1:])
            losses.append(loss.detach())
            kept.append((crossings, loss))
        for microbatch, (crossings, loss) in enumerate(kept):
            gradient = None
            for stage, (inputs, outputs) in zip(reversed(stages), reversed(crossings), strict=True):
                if recompute:
                    stage.draw(step, microbatch)
                    outputs = stage(inputs)
                    loss = stages[-1].loss(outputs, parts[microbatch][:, 1:]) if stage.last else loss
                torch.autograd.backward(loss / MICROBATCHES if gradient is None else outputs, gradient)
                gradient = None if stage.first else inputs.grad.clone()
        for adamw in optimisers:
            adamw.step()
            adamw.zero_grad()
    return losses, {name: value for stage in stages for name, value in stage.named_parameters()}

"""Llama for stages: transformers' `LlamaForCausalLM` (Touvron et al., LLaMA, 2023).

SmolLM2 and many others are Llamas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from testbed.spec import TextSpec
from testbed.workloads.models import ModelSize
from testbed.workloads.stage_model import StageModel, Submodule


class LlamaStage(StageModel):
    """One stage's share of a `LlamaForCausalLM`. Every stage computes the rotary positions for itself."""

    whole_class = LlamaForCausalLM
    table_names = ("embed_tokens",)
    layers_name, norm_name = "layers", "norm"
    dropout_names = ("attention_dropout",)
    """Llama has dropout in its attention alone."""

    def __init__(self, whole: Any, size: ModelSize, layers: range, spec: TextSpec, seed: int) -> None:
        super().__init__(whole, size, layers, spec, seed)
        self.rotary: nn.Module = LlamaRotaryEmbedding(whole.config)  # not part of checkpoints

    def embed(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.parts["embed_tokens"](ids)
        return hidden

    def blocks(self, hidden: Tensor) -> Iterable[Callable[[Tensor], Tensor]]:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotations = self.rotary(hidden, position_ids=positions)
        # without a mask, sdpa is causal
        return (
            partial(layer, position_embeddings=rotations, position_ids=positions, use_cache=False)
            for layer in self.parts["layers"].values()
        )

    def writers(self) -> tuple[Submodule, ...]:
        layers = self.parts["layers"].values()
        pairs = ((Submodule(layer.self_attn, "o_proj"), Submodule(layer.mlp, "down_proj")) for layer in layers)
        return tuple(itertools.chain.from_iterable(pairs))

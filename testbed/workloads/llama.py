"""Llama for stages: transformers' `LlamaForCausalLM` (Touvron et al., LLaMA, 2023), which SmolLM2 and many others are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from testbed.spec import WorkloadSpec
from testbed.workloads.model import Part, StageModel
from testbed.workloads.table import Size

WHOLE = LlamaForCausalLM
EMBEDDING = "model.embed_tokens.weight"
"""Which the output layer may share in published checkpoints."""


def settings(dropout: float) -> dict[str, Any]:
    """What a workload decides of a configuration, a checkpoint's too. Llama has dropout in its attention alone."""
    return {
        "attention_dropout": dropout,
        "use_cache": False,
        "attn_implementation": "sdpa",
        "tie_word_embeddings": False,
    }


class LlamaStage(StageModel):
    """One stage's share of a `LlamaForCausalLM`. Every stage computes the rotary positions for itself."""

    def __init__(self, whole: Any, layers: range, spec: WorkloadSpec, seed: int) -> None:
        config = whole.config
        first, last = layers.start == 0, layers.stop == config.num_hidden_layers
        super().__init__(
            first=first,
            last=last,
            layers=layers,
            width=config.hidden_size,
            context=config.max_position_embeddings,
            vocabulary=config.vocab_size,
            learned_positions=False,
            spec=spec,
            seed=seed,
        )
        source = whole.model
        parts: dict[str, nn.Module] = {"layers": nn.ModuleDict({str(i): source.layers[i] for i in layers})}
        if first:
            parts = {"embed_tokens": source.embed_tokens, **parts}
        if last:
            parts["norm"] = source.norm
        self.model = nn.ModuleDict(parts)
        self.rotary: nn.Module = LlamaRotaryEmbedding(config)  # its numbers are in no checkpoint
        if last:
            self.lm_head: nn.Module = whole.lm_head

    def embed(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.model["embed_tokens"](ids)
        return hidden

    def blocks(self, hidden: Tensor) -> Iterable[Callable[[Tensor], Tensor]]:
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        rotations = self.rotary(hidden, position_ids=positions)
        layers = self.model["layers"]
        assert isinstance(layers, nn.ModuleDict)
        # without a mask, sdpa is causal
        return (
            partial(layer, position_embeddings=rotations, position_ids=positions, use_cache=False)
            for layer in layers.values()
        )

    def tables(self) -> tuple[Part, ...]:
        return (Part(self.model, "embed_tokens"),) if self.first else ()

    def writers(self) -> tuple[Part, ...]:
        layers: Any = self.model["layers"]
        pairs = ((Part(layer.self_attn, "o_proj"), Part(layer.mlp, "down_proj")) for layer in layers.values())
        return tuple(itertools.chain.from_iterable(pairs))

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model["norm"](hidden))
        return logits


def configuration(size: Size, dropout: float = 0.0) -> LlamaConfig:
    """transformers' description of a named size."""
    return LlamaConfig(
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        intermediate_size=size.inner,
        max_position_embeddings=size.context,
        vocab_size=size.vocabulary,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **settings(dropout),
    )

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
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from testbed.spec import TextSpec
from testbed.workloads.models import ModelSize
from testbed.workloads.stage_model import StageModel, Submodule


class LlamaStage(StageModel):
    """One stage's share of a `LlamaForCausalLM`. Every stage computes the rotary positions for itself."""

    whole_class = LlamaForCausalLM
    embedding_name = "model.embed_tokens.weight"

    def __init__(self, whole: Any, size: ModelSize, layers: range, spec: TextSpec, seed: int) -> None:
        """Take `layers` out of the `whole` model, and what belongs to the first and the last stage."""
        super().__init__(size, layers, spec, seed)
        source = whole.model
        parts: dict[str, nn.Module] = {"layers": nn.ModuleDict({str(i): source.layers[i] for i in layers})}
        if self.first:
            parts = {"embed_tokens": source.embed_tokens, **parts}
        if self.last:
            parts["norm"] = source.norm
        self.model = nn.ModuleDict(parts)
        self.rotary: nn.Module = LlamaRotaryEmbedding(whole.config)  # its numbers are in no checkpoint
        if self.last:
            self.lm_head: nn.Module = whole.lm_head

    @staticmethod
    def config_options(dropout: float) -> dict[str, Any]:
        # Llama has dropout in its attention alone.
        return {
            "attention_dropout": dropout,
            "use_cache": False,
            "attn_implementation": "sdpa",
            "tie_word_embeddings": False,
        }

    @classmethod
    def config(cls, size: ModelSize, dropout: float = 0.0) -> LlamaConfig:
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
            **cls.config_options(dropout),
        )

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

    def tables(self) -> tuple[Submodule, ...]:
        return (Submodule(self.model, "embed_tokens"),) if self.first else ()

    def writers(self) -> tuple[Submodule, ...]:
        layers: Any = self.model["layers"]
        pairs = ((Submodule(layer.self_attn, "o_proj"), Submodule(layer.mlp, "down_proj")) for layer in layers.values())
        return tuple(itertools.chain.from_iterable(pairs))

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model["norm"](hidden))
        return logits

"""Llama for stages: transformers' `LlamaForCausalLM` (Touvron et al., LLaMA, 2023), which SmolLM2 and many others are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from testbed.workloads.model import StageModel
from testbed.workloads.table import Size

WHOLE = LlamaForCausalLM
FIXED = {"attention_dropout": 0.0, "use_cache": False, "attn_implementation": "sdpa"}


class LlamaStage(StageModel):
    """One stage's share of a `LlamaForCausalLM`. Every stage computes the rotary positions for itself."""

    def __init__(self, whole: Any, layers: range) -> None:
        config = whole.config
        first, last = layers.start == 0, layers.stop == config.num_hidden_layers
        super().__init__(first=first, last=last, layers=layers, width=config.hidden_size, context=config.max_position_embeddings)
        source = whole.model
        parts: dict[str, nn.Module] = {"layers": nn.ModuleDict({str(i): source.layers[i] for i in layers})}
        if first:
            parts = {"embed_tokens": source.embed_tokens, **parts}
        if last:
            parts["norm"] = source.norm
        self.model = nn.ModuleDict(parts)
        self.rotary: nn.Module = source.rotary_emb  # it has no parameters
        if last:
            self.lm_head: nn.Module = whole.lm_head

    def embed(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.model["embed_tokens"](ids)
        return hidden

    def through(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        rotations = self.rotary(hidden, position_ids=positions)
        layers = self.model["layers"]
        assert isinstance(layers, nn.ModuleDict)
        for layer in layers.values():  # without a mask, sdpa is causal
            hidden = layer(hidden, position_embeddings=rotations, position_ids=positions, use_cache=False)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.model["norm"](hidden))
        return logits


def configuration(size: Size) -> LlamaConfig:
    """transformers' description of a named size."""
    return LlamaConfig(
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        intermediate_size=size.inner,
        max_position_embeddings=size.context,
        vocab_size=size.vocabulary,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **FIXED,
    )

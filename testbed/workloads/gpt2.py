"""GPT-2 for stages: transformers' `GPT2LMHeadModel` (Radford et al., Language models ..., 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from testbed.workloads.model import StageModel
from testbed.workloads.table import Size

WHOLE = GPT2LMHeadModel
# No dropout: its noise would depend on the cut. sdpa on one thread gives the same bits every time, forward and backward.
FIXED = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
    "attn_implementation": "sdpa",
}


class Gpt2Stage(StageModel):
    """One stage's share of a `GPT2LMHeadModel`."""

    def __init__(self, whole: Any, layers: range) -> None:
        config = whole.config
        first, last = layers.start == 0, layers.stop == config.n_layer
        super().__init__(first=first, last=last, layers=layers, width=config.n_embd, context=config.n_positions)
        source = whole.transformer
        parts: dict[str, nn.Module] = {"h": nn.ModuleDict({str(i): source.h[i] for i in layers})}
        if first:
            parts = {"wte": source.wte, "wpe": source.wpe, **parts}
        if last:
            parts["ln_f"] = source.ln_f
        self.transformer = nn.ModuleDict(parts)
        if last:
            self.lm_head: nn.Module = whole.lm_head

    def embed(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        hidden: Tensor = self.transformer["wte"](ids) + self.transformer["wpe"](positions)
        return hidden

    def through(self, hidden: Tensor) -> Tensor:
        blocks = self.transformer["h"]
        assert isinstance(blocks, nn.ModuleDict)
        for block in blocks.values():
            hidden = block(hidden, None, None, use_cache=False)  # without a mask, sdpa is causal
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer["ln_f"](hidden))
        return logits


def configuration(size: Size) -> GPT2Config:
    """transformers' description of a named size."""
    return GPT2Config(
        n_layer=size.layers,
        n_embd=size.width,
        n_head=size.heads,
        n_positions=size.context,
        vocab_size=size.vocabulary,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        **FIXED,
    )

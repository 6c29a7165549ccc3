"""GPT-2 for stages: transformers' `GPT2LMHeadModel` (Radford et al., Language models ..., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from testbed.spec import TextSpec
from testbed.workloads.models import ModelSize
from testbed.workloads.stage_model import StageModel, Submodule


class Gpt2Stage(StageModel):
    """One stage's share of a `GPT2LMHeadModel`."""

    whole_class = GPT2LMHeadModel
    embedding_name = "transformer.wte.weight"

    def __init__(self, whole: Any, size: ModelSize, layers: range, spec: TextSpec, seed: int) -> None:
        """Take `layers` out of the `whole` model, and what belongs to the first and the last stage."""
        super().__init__(size, layers, spec, seed)
        source = whole.transformer
        parts: dict[str, nn.Module] = {"h": nn.ModuleDict({str(i): source.h[i] for i in layers})}
        if self.first:
            parts = {"wte": source.wte, "wpe": source.wpe, "drop": source.drop, **parts}
        if self.last:
            parts["ln_f"] = source.ln_f
        self.transformer = nn.ModuleDict(parts)
        if self.last:
            self.lm_head: nn.Module = whole.lm_head

    @staticmethod
    def config_options(dropout: float) -> dict[str, Any]:
        # sdpa on one thread gives the same bits every time, forward and backward.
        return {
            "resid_pdrop": dropout,
            "embd_pdrop": dropout,
            "attn_pdrop": dropout,
            "use_cache": False,
            "attn_implementation": "sdpa",
            "tie_word_embeddings": False,
        }

    @classmethod
    def config(cls, size: ModelSize, dropout: float = 0.0) -> GPT2Config:
        return GPT2Config(
            n_layer=size.layers,
            n_embd=size.width,
            n_head=size.heads,
            n_inner=size.inner,
            n_positions=size.context,
            vocab_size=size.vocabulary,
            bos_token_id=None,
            eos_token_id=None,
            **cls.config_options(dropout),
        )

    def embed(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        hidden: Tensor = self.transformer["drop"](self.transformer["wte"](ids) + self.transformer["wpe"](positions))
        return hidden

    def blocks(self, hidden: Tensor) -> Iterable[Callable[[Tensor], Tensor]]:
        blocks = self.transformer["h"]
        assert isinstance(blocks, nn.ModuleDict)
        return (partial(block, use_cache=False) for block in blocks.values())  # without a mask, sdpa is causal

    def tables(self) -> tuple[Submodule, ...]:
        return (Submodule(self.transformer, "wte"), Submodule(self.transformer, "wpe")) if self.first else ()

    def writers(self) -> tuple[Submodule, ...]:
        blocks: Any = self.transformer["h"]
        return tuple(Submodule(part, "c_proj") for block in blocks.values() for part in (block.attn, block.mlp))

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer["ln_f"](hidden))
        return logits

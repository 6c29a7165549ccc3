"""GPT-2 for stages: transformers' `GPT2LMHeadModel` (Radford et al., Language models ..., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from testbed.workloads.stage_model import StageModel, Submodule


class Gpt2Stage(StageModel):
    """One stage's share of a `GPT2LMHeadModel`."""

    whole_class = GPT2LMHeadModel
    table_names = ("wte", "wpe")
    first_names = ("drop",)
    layers_name, norm_name = "h", "ln_f"
    dropout_names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")

    def embed(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        hidden: Tensor = self.parts["drop"](self.parts["wte"](ids) + self.parts["wpe"](positions))
        return hidden

    def blocks(self, hidden: Tensor) -> Iterable[Callable[[Tensor], Tensor]]:
        return (partial(block, use_cache=False) for block in self.parts["h"].values())  # without a mask, sdpa is causal

    def writers(self) -> tuple[Submodule, ...]:
        blocks = self.parts["h"].values()
        return tuple(Submodule(part, "c_proj") for block in blocks for part in (block.attn, block.mlp))

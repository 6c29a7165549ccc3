"""GPT-2 cut into stages: each builds transformers' whole model from the seed, or loads it, and keeps its own layers.

Chained with plain tensors, the stages do the same operations in the same order as `GPT2LMHeadModel`, bit for bit, whatever the
number of stages. Input and output embeddings are not tied: tied ones would lie in the first and the last stage, and their
gradients would have to be exchanged at every step.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from testbed.errors import SpecError
from testbed.spec import WorkloadSpec
from testbed.workloads import table

# No dropout: its noise would depend on the cut. sdpa on one thread gives the same bits every time, forward and backward.
_FIXED = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
    "attn_implementation": "sdpa",
}


class StageModel(nn.Module):
    """One stage's share. Its parameters bear the names that they have in `GPT2LMHeadModel`.

    The first stage has the embeddings, the last the final layer norm and the output layer; one stage alone has all.
    """

    def __init__(self, whole: Any, *, stage: int, stages: int) -> None:
        super().__init__()
        source, layers = whole.transformer, table.split(whole.config.n_layer, stages)[stage]
        self.width: int = whole.config.n_embd
        self.context: int = whole.config.n_positions
        self.layers = layers
        parts: dict[str, nn.Module] = {"h": nn.ModuleDict({str(i): source.h[i] for i in layers})}
        if stage == 0:
            parts = {"wte": source.wte, "wpe": source.wpe, **parts}
        self._first, self._last = stage == 0, stage == stages - 1
        if self._last:
            parts["ln_f"] = source.ln_f
        self.transformer = nn.ModuleDict(parts)
        if self._last:
            self.lm_head: nn.Module = whole.lm_head

    def forward(self, inputs: Tensor) -> Tensor:
        """Token ids (b, n) int64 at the first stage, hidden states (b, n, d) fp32 at others, to hidden states.

        The last stage returns logits (b, n, v).
        """
        hidden = self._embed(inputs) if self._first else inputs
        blocks = self.transformer["h"]
        assert isinstance(blocks, nn.ModuleDict)
        for block in blocks.values():
            hidden = block(hidden, None, None, use_cache=False)  # without a mask, sdpa is causal
        if self._last:
            hidden = self.lm_head(self.transformer["ln_f"](hidden))
        return hidden

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the b * n tokens, a scalar: what the whole model computes from shifted labels."""
        return nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))

    def _embed(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        hidden: Tensor = self.transformer["wte"](ids) + self.transformer["wpe"](positions)
        return hidden


def build(spec: WorkloadSpec, *, stage: int, stages: int, seed: int, vocabulary: int) -> StageModel:
    """The share of one stage, fp32. All stages of all cuts hold parts of one and the same model.

    A named size is initialised by transformers from the seed, a checkpoint is loaded; the global generator is left as it was.
    `vocabulary` is the tokenizer's. SpecError when the model cannot be had, has too few layers or does not know all tokens.
    """
    size = table.size_of(spec.model)
    if vocabulary > size.vocabulary:
        raise SpecError(
            f"the tokenizer has {vocabulary} tokens and the model {spec.model!r} {size.vocabulary}: they do not belong together"
        )
    table.split(size.layers, stages)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        whole = _initialise(size) if spec.model in table.SIZES else _load(spec.model)
    return StageModel(whole, stage=stage, stages=stages)


def configuration(size: table.Size) -> Any:
    """transformers' description of a named size: a GPT2Config."""
    return GPT2Config(
        n_layer=size.layers,
        n_embd=size.width,
        n_head=size.heads,
        n_positions=size.context,
        vocab_size=size.vocabulary,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        **_FIXED,
    )


def _initialise(size: table.Size) -> Any:
    return GPT2LMHeadModel(configuration(size))


def _load(model: str) -> Any:
    folder = os.fspath(table.checkpoint_folder(model))
    try:
        whole, loading = GPT2LMHeadModel.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True, **_FIXED
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SpecError(f"model {model!r}: cannot load a checkpoint from {folder}: {type(error).__name__}: {error}") from None
    # transformers would fill these with random numbers
    if missing := sorted(loading["missing_keys"]):
        raise SpecError(f"model {model!r}: the checkpoint in {folder} lacks {len(missing)} weights, the first is {missing[0]}")
    # A published checkpoint ties the two; each gets a copy, and from here they learn apart.
    whole.lm_head.weight = nn.Parameter(whole.lm_head.weight.detach().clone())
    return whole

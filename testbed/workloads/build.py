"""A stage's share of a model: each builds transformers' whole model from the seed, or loads it, and keeps its own layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from testbed.errors import SpecError
from testbed.spec import WorkloadSpec
from testbed.workloads import gpt2, llama, table
from testbed.workloads.model import StageModel

_FAMILIES: dict[str, tuple[ModuleType, type[Any]]] = {"gpt2": (gpt2, gpt2.Gpt2Stage), "llama": (llama, llama.LlamaStage)}


def build(
    spec: WorkloadSpec, *, stage: int, stages: int, seed: int, vocabulary: int, layers: Sequence[int] | None = None
) -> StageModel:
    """The share of one stage, fp32. All stages of all cuts hold parts of one and the same model.

    A named size is initialised by transformers from the seed, a checkpoint is loaded; the global generator is left as it was.
    `vocabulary` is the tokenizer's; `layers` says how many each stage has, None: as even as can be. SpecError when the model
    cannot be had, is not of the family, has too few layers or does not know all tokens.
    """
    size = table.checked_size(spec)
    if vocabulary > size.vocabulary:
        raise SpecError(
            f"the tokenizer has {vocabulary} tokens and the model {spec.model!r} {size.vocabulary}: they do not belong together"
        )
    own = table.split(size.layers, stages, layers)[stage]
    family, kind = _FAMILIES[size.family]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        whole = family.WHOLE(family.configuration(size)) if spec.model in table.SIZES else _load(spec.model, family)
    model: StageModel = kind(whole, own)
    return model


def _load(model: str, family: ModuleType) -> Any:
    folder = os.fspath(table.checkpoint_folder(model))
    try:
        whole, loading = family.WHOLE.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True, **family.FIXED
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SpecError(f"model {model!r}: cannot load a checkpoint from {folder}: {type(error).__name__}: {error}") from None
    # transformers would fill these with random numbers
    if missing := sorted(loading["missing_keys"]):
        raise SpecError(f"model {model!r}: the checkpoint in {folder} lacks {len(missing)} weights, the first is {missing[0]}")
    # A published checkpoint ties the two; each gets a copy, and from here they learn apart.
    whole.lm_head.weight = nn.Parameter(whole.lm_head.weight.detach().clone())
    return whole

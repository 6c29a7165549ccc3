"""A stage's share of a model: its layers of transformers' whole model, initialised from the seed or read from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from testbed.errors import SpecError
from testbed.spec import WorkloadSpec
from testbed.workloads import gpt2, llama, table, weights
from testbed.workloads.model import StageModel

_FAMILIES: dict[str, tuple[ModuleType, type[Any]]] = {
    "gpt2": (gpt2, gpt2.Gpt2Stage),
    "llama": (llama, llama.LlamaStage),
}


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
    family, kind = _FAMILIES[spec.family]
    if spec.model not in table.SIZES:
        model: StageModel = kind(empty(spec), own, spec, seed)
        _fill(model, spec)
        return model
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # whole, because a layer's numbers come after those of all layers before it
        return kind(family.WHOLE(family.configuration(size, spec.dropout)), own, spec, seed)  # type: ignore[no-any-return]


def empty(spec: WorkloadSpec) -> Any:
    """transformers' whole model without its numbers: its parameters take no memory. SpecError as `build`."""
    size = table.checked_size(spec)
    family, _ = _FAMILIES[spec.family]
    named = spec.model in table.SIZES
    config = (
        family.configuration(size, spec.dropout) if named else _configuration(spec, **family.settings(spec.dropout))
    )
    with torch.device("meta"):
        return family.WHOLE(config)


def _configuration(spec: WorkloadSpec, **changes: Any) -> Any:
    """A checkpoint's own, but for `changes`."""
    folder = table.checkpoint_folder(spec.model)
    family, _ = _FAMILIES[spec.family]
    try:
        return family.WHOLE.config_class.from_pretrained(folder, local_files_only=True, **changes)
    except (OSError, ValueError) as error:
        raise SpecError(f"model {spec.model!r}: cannot load a configuration from {folder}: {error}") from None


def _fill(model: StageModel, spec: WorkloadSpec) -> None:
    """Read the stage's weights. A published checkpoint ties its embeddings; each gets a copy, and from here they learn apart."""
    family, _ = _FAMILIES[spec.family]
    base, output = f"{family.WHOLE.base_model_prefix}.", "lm_head.weight"
    # the oldest checkpoints of GPT-2 are of the model without its output layer, whose names lack the prefix
    wanted = {name: [name, name.removeprefix(base)] for name in model.state_dict()}
    if _configuration(spec).tie_word_embeddings:
        for name in {family.EMBEDDING, output} & wanted.keys():
            wanted[name] = [family.EMBEDDING, family.EMBEDDING.removeprefix(base), output]
    try:
        model.load_state_dict(weights.read(table.checkpoint_folder(spec.model), wanted), assign=True)
    except (SpecError, RuntimeError) as error:
        raise SpecError(f"model {spec.model!r}: {error}") from None

"""Build a stage's share of a model: its layers of transformers' whole model, initialised from the seed or read from a
checkpoint.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, cast

import torch

from testbed.errors import SpecError
from testbed.spec import TextSpec
from testbed.workloads import models
from testbed.workloads.checkpoints import check_weights
from testbed.workloads.stage_model import StageModel
from testbed.workloads.weights import read_weights


def stage_class(family: str) -> type[Any]:
    """Import the class of a family's stages. UnknownNameError for a family without a row."""
    module, _, name = models.family(family).stage.partition(":")
    return cast("type[Any]", getattr(importlib.import_module(module), name))


def build_stage(
    spec: TextSpec, *, stage: int, stages: int, seed: int, vocabulary: int, layers: Sequence[int] | None = None
) -> StageModel:
    """Build the share of one stage, fp32. The stages of every cut are parts of the same model.

    A named size is initialised by transformers from the seed, a checkpoint is loaded; the global generator is
    unchanged. `vocabulary` is the tokenizer's; `layers` are those of each stage, None: as even as possible. SpecError
    for a model that is unavailable, of another family, with other weights than the workload's, with too few layers or
    too small a vocabulary.
    """
    size = models.workload_size(spec)
    if vocabulary > size.vocabulary:
        raise SpecError(
            f"the tokenizer has {vocabulary} tokens, more than the vocabulary of model {spec.model!r}, "
            f"{size.vocabulary}: use the model's own tokenizer"
        )
    own = models.split_layers(size.layers, stages, layers)[stage]
    kind = stage_class(spec.family)
    check_weights(spec)
    if spec.model not in models.SIZES:
        model: StageModel = kind(empty_model(spec), size, own, spec, seed)
        _fill(model, spec)
        return model
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        # whole, because a layer's draws follow those of all earlier layers
        return kind(kind.whole_class(kind.config(size, spec.dropout)), size, own, spec, seed)  # type: ignore[no-any-return]


def empty_model(spec: TextSpec) -> Any:
    """Make transformers' whole model without values: its parameters take no memory. Raises SpecError like
    `build_stage`.
    """
    size, kind = models.workload_size(spec), stage_class(spec.family)
    if spec.model in models.SIZES:
        config = kind.config(size, spec.dropout)
    else:
        config = _checkpoint_config(spec, **kind.config_options(spec.dropout))
    with torch.device("meta"):
        return kind.whole_class(config)


def _checkpoint_config(spec: TextSpec, **changes: Any) -> Any:
    """Load a checkpoint's own configuration, with `changes`."""
    folder = models.checkpoint_folder(spec.model)
    try:
        return stage_class(spec.family).whole_class.config_class.from_pretrained(
            folder, local_files_only=True, **changes
        )
    except (OSError, ValueError) as error:
        raise SpecError(f"model {spec.model!r}: cannot load a configuration from {folder}: {error}") from None


def _fill(model: StageModel, spec: TextSpec) -> None:
    """Read the stage's weights. Published checkpoints tie their embeddings; here each gets a copy and trains
    separately.
    """
    base, output = f"{model.whole_class.base_model_prefix}.", "lm_head.weight"
    # the oldest GPT-2 checkpoints are of the model without output layer, whose names lack the prefix
    wanted = {name: [name, name.removeprefix(base)] for name in model.state_dict()}
    if _checkpoint_config(spec).tie_word_embeddings:
        embedding = f"{model.table_names[0]}.weight"
        for name in {base + embedding, output} & wanted.keys():
            wanted[name] = [base + embedding, embedding, output]
    try:
        model.load_state_dict(read_weights(models.checkpoint_folder(spec.model), wanted), assign=True)
    except (SpecError, RuntimeError) as error:
        raise SpecError(f"model {spec.model!r}: {error}") from None

"""Model families, named sizes and checkpoints, and the division of a model's layers. No torch.

A new family is one row of `FAMILIES` and the module that the row names. A new size is one row of `SIZES`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed import paths
from testbed.errors import SpecError, UnknownNameError
from testbed.spec import ImagesSpec, TextSpec, Workload
from testbed.workloads import networks, texts


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What decides the shapes of a causal language model."""

    family: str
    """A row of `FAMILIES`."""
    layers: int
    width: int
    """The hidden size: values of a token at a boundary."""
    heads: int
    key_heads: int
    """Heads of keys and values; fewer than `heads` where queries share them, equal in GPT-2."""
    inner: int
    """Width between the two halves of a layer's feed-forward part."""
    context: int
    """Longest sequence, in tokens."""
    vocabulary: int
    """Rows of the token embedding; at least as many as the tokenizer has tokens."""


def _size(
    family: str,
    *,
    layers: int,
    width: int,
    heads: int,
    context: int,
    vocabulary: int,
    key_heads: int | None = None,
    inner: int | None = None,
) -> ModelSize:
    return ModelSize(
        family=family,
        layers=layers,
        width=width,
        heads=heads,
        key_heads=key_heads or heads,
        inner=inner or 4 * width,
        context=context,
        vocabulary=vocabulary,
    )


def _gpt2_layer(size: ModelSize) -> list[tuple[int, ...]]:
    width, inner, norm = size.width, size.inner, [(size.width,)] * 2
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    return [*norm, *attention, *norm, (width, inner), (inner,), (inner, width), (width,)]


def _llama_layer(size: ModelSize) -> list[tuple[int, ...]]:
    width, inner, keys = size.width, size.inner, size.width * size.key_heads // size.heads
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    return [*attention, (inner, width), (inner, width), (width, inner), (width,), (width,)]


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """Facts about a family of models that need no torch."""

    stage: str
    """Path of the class of its stages, a `stage_model.StageModel`: 'module:class'."""
    config_names: Mapping[str, str]
    """Name of each field of a `ModelSize` in a checkpoint's config.json and in transformers."""
    not_stated: Mapping[str, int | None]
    """Defaults of fields that a config.json may omit; None: derived from other fields."""
    biases: bool
    """Whether norms have a bias: LayerNorm does, RMSNorm does not."""
    learned_positions: bool
    """Whether positions have an embedding with one row per token of the context."""
    layer_shapes: Callable[[ModelSize], list[tuple[int, ...]]]
    """The parameters of one layer, in the model's order."""


FAMILIES: dict[str, ModelFamily] = {
    "gpt2": ModelFamily(
        stage="testbed.workloads.gpt2:Gpt2Stage",
        config_names={
            "layers": "n_layer",
            "width": "n_embd",
            "heads": "n_head",
            "inner": "n_inner",
            "context": "n_positions",
            "vocabulary": "vocab_size",
        },
        not_stated={"inner": None, "context": 1024},
        biases=True,
        learned_positions=True,
        layer_shapes=_gpt2_layer,
    ),
    "llama": ModelFamily(
        stage="testbed.workloads.llama:LlamaStage",
        config_names={
            "layers": "num_hidden_layers",
            "width": "hidden_size",
            "heads": "num_attention_heads",
            "key_heads": "num_key_value_heads",
            "inner": "intermediate_size",
            "context": "max_position_embeddings",
            "vocabulary": "vocab_size",
        },
        not_stated={"key_heads": None, "context": 2048},
        biases=False,
        learned_positions=False,
        layer_shapes=_llama_layer,
    ),
}
"""Families by transformers' name: the `model_type` of their config.json."""


def family(name: str) -> ModelFamily:
    """Look a family up. UnknownNameError for one without a row."""
    if name not in FAMILIES:
        raise UnknownNameError("model family", name, FAMILIES)
    return FAMILIES[name]


def _size_of_config(kind: str, config: Mapping[str, Any]) -> ModelSize:
    """Read the size from the config.json of a checkpoint."""
    row = family(kind)
    stated = {
        field: int(config[name])
        for field, name in row.config_names.items()
        if config.get(name) or field not in row.not_stated
    }
    return _size(kind, **{**row.not_stated, **stated})  # type: ignore[arg-type]


def family_modules() -> list[str]:
    """Return the modules of all families; importing them loads torch and transformers."""
    return [row.stage.partition(":")[0] for row in FAMILIES.values()]


_TOKENS = 4096
"""Of the bundled tokenizer, which all of these sizes use."""

SIZES: dict[str, ModelSize] = {
    # Randomly initialised, for the bundled tokenizer.
    "gpt2-nano": _size("gpt2", layers=3, width=64, heads=2, context=128, vocabulary=_TOKENS),
    "gpt2-micro": _size("gpt2", layers=4, width=128, heads=4, context=128, vocabulary=_TOKENS),
    "gpt2-mini": _size("gpt2", layers=4, width=256, heads=4, context=256, vocabulary=_TOKENS),
    # As many parameters as gpt2-mini in 4 stages whose layers' outputs (except the last) and table rows are 40
    # coordinates.
    "gpt2-mini-wide": _size("gpt2", layers=4, width=256, heads=4, context=256, vocabulary=_TOKENS, inner=2288),
    "gpt2-midi": _size("gpt2", layers=8, width=256, heads=8, context=512, vocabulary=_TOKENS),
    # For programs that write characters as tokens, as experiments/subspace_growth does; large and wide are for a GPU.
    "gpt2-characters": _size("gpt2", layers=3, width=64, heads=2, context=128, vocabulary=64),
    "gpt2-characters-large": _size("gpt2", layers=6, width=512, heads=8, context=128, vocabulary=64),
    "gpt2-characters-shallow": _size("gpt2", layers=2, width=128, heads=4, context=128, vocabulary=64),
    "gpt2-characters-wide": _size("gpt2", layers=2, width=768, heads=12, context=128, vocabulary=64),
    "llama-nano": _size("llama", layers=6, width=64, heads=4, key_heads=2, inner=176, context=256, vocabulary=_TOKENS),
    "llama-mini": _size("llama", layers=4, width=256, heads=4, key_heads=2, inner=688, context=512, vocabulary=_TOKENS),
    # The shapes of the published small model with random weights: the bundled tokenizer leaves most rows of its
    # embedding unused. The published weights are 'openai-community/gpt2', if cached.
    "gpt2": _size("gpt2", layers=12, width=768, heads=12, context=1024, vocabulary=50257),
}


MADE = {
    "smollm2-135m": "testbed.workloads.smollm2",
    "gpt2-mini-trained": "testbed.training.pretrain gpt2-mini-trained",
    "gpt2-nano-trained": "testbed.training.pretrain gpt2-nano-trained",
}
"""Checkpoints that our programs fetch or train once per machine: name to arguments of `python -m`."""


def split_layers(layers: int, stages: int, shares: Sequence[int] | None = None) -> tuple[range, ...]:
    """Divide the layers into consecutive groups, one per stage, of sizes `shares`, or as even as possible, with larger
    groups first.

    The last stage also has the output layer, which in a small model costs as much as a few layers. SpecError for a
    stage without layers, or shares that do not match stages or layers.
    """
    if not 1 <= stages <= layers:
        raise SpecError(f"cannot split a model of {layers} layers into {stages} stages: each needs at least one layer")
    if shares is None:
        even, more = divmod(layers, stages)
        shares = [even + (stage < more) for stage in range(stages)]
    elif len(shares) != stages or min(shares) < 1 or sum(shares) != layers:
        raise SpecError(
            f"pipeline.layers is {list(shares)}; it must be {stages} positive numbers, one per stage, with the sum "
            f"{layers}, the layers of the model"
        )
    return tuple(range(end - share, end) for share, end in zip(shares, itertools.accumulate(shares), strict=True))


def model_size(model: str) -> ModelSize:
    """Return the size of a named model or of a checkpoint. UnknownNameError or SpecError for anything else."""
    if model in SIZES:
        return SIZES[model]
    path = checkpoint_folder(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf8"))
        kind = config["model_type"]
        if kind not in FAMILIES:
            known = " and ".join(FAMILIES)
            raise SpecError(
                f"model {model!r} is a {kind} according to {path}; only {known} checkpoints can be split into stages"
            )
        return _size_of_config(kind, config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"model {model!r}: cannot read {path} as a checkpoint's config.json: {type(error).__name__}: {error}"
        ) from None


def workload_size(spec: TextSpec) -> ModelSize:
    """Return the size of a workload's model. SpecError for a family other than the workload's; other errors as for
    `model_size`.
    """
    size = model_size(spec.model)
    if size.family != spec.family:
        raise SpecError(f"workload.family is {spec.family!r}, but the model {spec.model!r} is a {size.family}")
    return size


def parameter_shapes(spec: Workload) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters of a workload's model, in its order. Raises SpecError like
    `check_workload`.
    """
    if isinstance(spec, ImagesSpec):
        return [shape for layer in networks.workload_layers(spec) for shape in layer.shapes]
    return shapes_of(workload_size(spec))


def shapes_of(size: ModelSize, layers: range | None = None) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters of a language model, or of the stage that has these layers, in the model's
    order: the first stage has the embeddings, the last one the final norm and the output layer.
    """
    row, layers = family(size.family), range(size.layers) if layers is None else layers
    table = (size.vocabulary, size.width)
    embeddings = [table, *([(size.context, size.width)] if row.learned_positions else [])]
    ending = [*([(size.width,)] * (2 if row.biases else 1)), table]
    return [
        *(embeddings if layers.start == 0 else []),
        *row.layer_shapes(size) * len(layers),
        *(ending if layers.stop == size.layers else []),
    ]


def hidden_width(spec: TextSpec) -> int:
    """Return the number of values per token at a boundary."""
    return model_size(spec.model).width


def validation_tokens(spec: Workload) -> int:
    """Return the number of tokens, or images, in an evaluation."""
    if isinstance(spec, ImagesSpec):
        return networks.image_counts(spec.images).test
    return spec.validation_batches * spec.batch_tokens


def check_workload(spec: Workload, stages: int, layers: Sequence[int] | None = None) -> None:
    """Check everything that can be checked before a run starts. SpecError or UnknownNameError."""
    if isinstance(spec, ImagesSpec):
        networks.workload_layers(spec)
        return
    size = workload_size(spec)
    split_layers(size.layers, stages, layers)
    if spec.model in SIZES and size.vocabulary < _TOKENS:
        raise SpecError(
            f"model {spec.model} has a vocabulary of {size.vocabulary} characters, and texts are converted into the "
            f"{_TOKENS:,} tokens of the bundled tokenizer; use a size such as gpt2-micro"
        )
    if spec.sequence_length > size.context:
        raise SpecError(
            f"workload.sequence_length is {spec.sequence_length}; {spec.model} has a context of {size.context} "
            "tokens, so set at most that"
        )
    if spec.training_sequences is not None and spec.training_sequences < spec.batch_size:
        raise SpecError(
            f"workload.training_sequences is {spec.training_sequences}, less than workload.batch_size, "
            f"{spec.batch_size}"
        )
    texts.check_text_name(spec.text)


# ------------------------------------------------------------------ checkpoints
def checkpoint_folder(model: str) -> Path:
    """Return the folder of a checkpoint: `model` itself if it is one, else the newest snapshot of that id in the
    Hugging Face cache.

    Nothing is downloaded. UnknownNameError for a plain word, SpecError for a model that is not on this machine.
    """
    if model in MADE:
        if not (folder := made_folder(model)).is_dir():
            raise SpecError(f"model {model!r} is not on this machine yet; make it once with: python -m {MADE[model]}")
        return folder
    if Path(model).is_dir():
        return Path(model)
    if "/" not in model:
        raise UnknownNameError("model", model, (*SIZES, *MADE))
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise SpecError(
            f"model {model!r}: no such folder; use a checkpoint's folder, a cached id, or one of {', '.join(SIZES)}"
        )
    repository = _hub_cache() / f"models--{model.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf8").strip()
    except OSError:
        raise SpecError(
            f"model {model!r} is not in the Hugging Face cache {_hub_cache()}, and runs do not download models; fetch "
            f"it first with: hf download {model}"
        ) from None
    return repository / "snapshots" / commit


def made_folder(model: str) -> Path:
    """Return the folder of a checkpoint made by our programs, existing or not."""
    return paths.cache_folder() / "models" / model


def _hub_cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or texts.hub_home() / "hub")

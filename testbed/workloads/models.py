"""Which models can be named: families, named sizes and checkpoints, and how a model's layers are divided. No torch.

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
    """Heads of keys and values; fewer than `heads` where queries share them. GPT-2 has as many."""
    inner: int
    """Width between the two halves of a layer's feed-forward part."""
    context: int
    """Longest sequence, in tokens."""
    vocabulary: int
    """Rows of the token embedding; at least as many as the tokenizer has tokens."""


def _gpt2(*, layers: int, width: int, heads: int, context: int, vocabulary: int, inner: int | None = None) -> ModelSize:
    return ModelSize(
        family="gpt2",
        layers=layers,
        width=width,
        heads=heads,
        key_heads=heads,
        inner=inner or 4 * width,
        context=context,
        vocabulary=vocabulary,
    )


def _llama(
    *, layers: int, width: int, heads: int, key_heads: int, inner: int, context: int, vocabulary: int
) -> ModelSize:
    return ModelSize(
        family="llama",
        layers=layers,
        width=width,
        heads=heads,
        key_heads=key_heads,
        inner=inner,
        context=context,
        vocabulary=vocabulary,
    )


def _gpt2_of(config: Mapping[str, Any]) -> ModelSize:
    return _gpt2(
        layers=int(config["n_layer"]),
        width=int(config["n_embd"]),
        heads=int(config["n_head"]),
        context=int(config.get("n_positions", 1024)),
        vocabulary=int(config["vocab_size"]),
        inner=int(config.get("n_inner") or 0) or None,
    )


def _llama_of(config: Mapping[str, Any]) -> ModelSize:
    heads = int(config["num_attention_heads"])
    return _llama(
        layers=int(config["num_hidden_layers"]),
        width=int(config["hidden_size"]),
        heads=heads,
        key_heads=int(config.get("num_key_value_heads") or heads),
        inner=int(config["intermediate_size"]),
        context=int(config.get("max_position_embeddings", 2048)),
        vocabulary=int(config["vocab_size"]),
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
    """What is known about a family of models without loading torch."""

    stage: str
    """Where the class of its stages is, a `stage_model.StageModel`: 'module:class'."""
    size_of_config: Callable[[Mapping[str, Any]], ModelSize]
    """Reads the size from the config.json of a checkpoint."""
    feed_forward_matrices: int
    """Matrices of width x inner values in each layer: 2 with a plain activation function, 3 with a gated one."""
    biases: bool
    """Whether norms have a bias: LayerNorm does, RMSNorm does not."""
    learned_positions: bool
    """Whether positions have an embedding with one row per token of the context."""
    layer_shapes: Callable[[ModelSize], list[tuple[int, ...]]]
    """The parameters of one layer, in the model's order."""


FAMILIES: dict[str, ModelFamily] = {
    "gpt2": ModelFamily(
        stage="testbed.workloads.gpt2:Gpt2Stage",
        size_of_config=_gpt2_of,
        feed_forward_matrices=2,
        biases=True,
        learned_positions=True,
        layer_shapes=_gpt2_layer,
    ),
    "llama": ModelFamily(
        stage="testbed.workloads.llama:LlamaStage",
        size_of_config=_llama_of,
        feed_forward_matrices=3,
        biases=False,
        learned_positions=False,
        layer_shapes=_llama_layer,
    ),
}
"""Families by what transformers calls them: the `model_type` of their config.json."""


def family(name: str) -> ModelFamily:
    """Look a family up. UnknownNameError for one without a row."""
    if name not in FAMILIES:
        raise UnknownNameError("model family", name, FAMILIES)
    return FAMILIES[name]


def family_modules() -> list[str]:
    """Return the modules of all families; importing them loads torch and transformers."""
    return [row.stage.partition(":")[0] for row in FAMILIES.values()]


SIZES: dict[str, ModelSize] = {
    # Randomly initialised, for the bundled tokenizer of 4,096 tokens.
    "gpt2-nano": _gpt2(layers=3, width=64, heads=2, context=128, vocabulary=4096),
    "gpt2-micro": _gpt2(layers=4, width=128, heads=4, context=128, vocabulary=4096),
    "gpt2-mini": _gpt2(layers=4, width=256, heads=4, context=256, vocabulary=4096),
    # As many parameters as gpt2-mini in 4 stages where all layers but the last have their outputs, and the tables
    # their rows, as 40 coordinates.
    "gpt2-mini-wide": _gpt2(layers=4, width=256, heads=4, context=256, vocabulary=4096, inner=2288),
    "gpt2-midi": _gpt2(layers=8, width=256, heads=8, context=512, vocabulary=4096),
    "llama-nano": _llama(layers=6, width=64, heads=4, key_heads=2, inner=176, context=256, vocabulary=4096),
    "llama-mini": _llama(layers=4, width=256, heads=4, key_heads=2, inner=688, context=512, vocabulary=4096),
    # The published small model's shapes, random: the bundled tokenizer leaves most rows of its embedding unused.
    # The published weights are 'openai-community/gpt2', where they are cached.
    "gpt2": _gpt2(layers=12, width=768, heads=12, context=1024, vocabulary=50257),
}


MADE = {
    "smollm2-135m": "testbed.workloads.smollm2",
    "gpt2-mini-trained": "testbed.pipeline.pretrain gpt2-mini-trained",
    "gpt2-nano-trained": "testbed.pipeline.pretrain gpt2-nano-trained",
}
"""Checkpoints that a program of ours fetches or trains, once a machine: name to what `python -m` runs."""


def split_layers(layers: int, stages: int, shares: Sequence[int] | None = None) -> tuple[range, ...]:
    """Divide the layers: consecutive ones for each stage, `shares` of them, or as even as can be, the first stages
    taking one more.

    The last stage has the output layer besides, which for a small model costs as much as a few layers. SpecError when a
    stage would have none, or the shares are not one a stage or do not add up.
    """
    if not 1 <= stages <= layers:
        raise SpecError(f"a model of {layers} layers cannot be cut into {stages} stages: each needs a layer")
    if shares is None:
        even, more = divmod(layers, stages)
        shares = [even + (stage < more) for stage in range(stages)]
    elif len(shares) != stages or min(shares) < 1 or sum(shares) != layers:
        raise SpecError(
            f"pipeline.layers is {list(shares)}; {stages} stages of a model of {layers} layers need {stages} numbers "
            f"from 1 on that add up to {layers}"
        )
    return tuple(range(end - share, end) for share, end in zip(shares, itertools.accumulate(shares), strict=True))


def model_size(model: str) -> ModelSize:
    """Return the size of a named model, or of a checkpoint. UnknownNameError or SpecError for what is neither."""
    if model in SIZES:
        return SIZES[model]
    path = checkpoint_folder(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf8"))
        kind = config["model_type"]
        if kind not in FAMILIES:
            known = " and ".join(FAMILIES)
            raise SpecError(
                f"model {model!r} is a {kind}, found in {path}; only {known} checkpoints can be cut into stages"
            )
        return FAMILIES[kind].size_of_config(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"model {model!r}: {path} is not the config.json of a checkpoint: {type(error).__name__}: {error}"
        ) from None


def workload_size(spec: TextSpec) -> ModelSize:
    """Return the size of a workload's model. SpecError when that is of another family than the workload says, else as
    `model_size`.
    """
    size = model_size(spec.model)
    if size.family != spec.family:
        raise SpecError(f"workload.family is {spec.family!r}, and the model {spec.model!r} is a {size.family}")
    return size


def parameter_shapes(spec: Workload) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters of a workload's model, in its order. SpecError as `check_workload`."""
    if isinstance(spec, ImagesSpec):
        return [shape for layer in networks.workload_layers(spec) for shape in layer.shapes]
    return shapes_of(workload_size(spec))


def shapes_of(size: ModelSize) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters of a language model, in the model's order."""
    row = family(size.family)
    table = (size.vocabulary, size.width)
    embeddings = [table, *([(size.context, size.width)] if row.learned_positions else [])]
    norm: list[tuple[int, ...]] = [(size.width,)] * (2 if row.biases else 1)
    return [*embeddings, *row.layer_shapes(size) * size.layers, *norm, table]


def hidden_width(spec: TextSpec) -> int:
    """Return how many values a token has at a boundary."""
    return model_size(spec.model).width


def validation_tokens(spec: Workload) -> int:
    """Return how many tokens, or images, an evaluation reads."""
    if isinstance(spec, ImagesSpec):
        return networks.image_counts(spec.images).test
    return spec.validation_batches * spec.batch_tokens


def check_workload(spec: Workload, stages: int, layers: Sequence[int] | None = None) -> None:
    """Check everything that can be known before anything starts. SpecError or UnknownNameError."""
    if isinstance(spec, ImagesSpec):
        networks.workload_layers(spec)
        return
    size = workload_size(spec)
    split_layers(size.layers, stages, layers)
    if spec.sequence_length > size.context:
        raise SpecError(
            f"workload.sequence_length is {spec.sequence_length}; {spec.model} reads at most {size.context} tokens "
            "at once"
        )
    if spec.training_sequences is not None and spec.training_sequences < spec.batch_size:
        raise SpecError(
            f"workload.training_sequences is {spec.training_sequences}, less than a batch of {spec.batch_size} "
            "sequences"
        )
    texts.check_text_name(spec.text)


# ------------------------------------------------------------------ checkpoints
def checkpoint_folder(model: str) -> Path:
    """Return the folder of a checkpoint: `model` itself where it is one, else the newest snapshot of that id in the
    Hugging Face cache.

    Nothing is downloaded. UnknownNameError for a plain word, SpecError for a model that is not here.
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
            f"model {model!r}: there is no such folder; give a checkpoint's folder, a cached id, or one of "
            f"{', '.join(SIZES)}"
        )
    repository = _hub_cache() / f"models--{model.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf8").strip()
    except OSError:
        raise SpecError(
            f"model {model!r} is not in the Hugging Face cache {_hub_cache()}, and a run downloads nothing; "
            f"fetch it first with: hf download {model}"
        ) from None
    return repository / "snapshots" / commit


def made_folder(model: str) -> Path:
    """Return where a checkpoint that a program of ours makes lies, or will lie."""
    return paths.cache_folder() / "models" / model


def _hub_cache() -> Path:
    return Path(os.environ.get("HF_HUB_CACHE") or texts.hub_home() / "hub")

"""The models that can be named, how their layers are divided, and where checkpoints lie. Imports no torch."""

from __future__ import annotations

import itertools
import json
import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from testbed import paths
from testbed.errors import SpecError, UnknownNameError
from testbed.spec import WorkloadSpec


@dataclass(frozen=True, kw_only=True)
class Size:
    """What decides the shapes of a GPT-2."""

    layers: int
    width: int
    """The hidden size: values of a token at a boundary."""
    heads: int
    context: int
    """Longest sequence, in tokens."""
    vocabulary: int
    """Rows of the token embedding; at least as many as the tokenizer has tokens."""


SIZES: dict[str, Size] = {
    # Randomly initialised, for the bundled tokenizer of 4,096 tokens.
    "gpt2-nano": Size(layers=3, width=64, heads=2, context=128, vocabulary=4096),
    "gpt2-mini": Size(layers=4, width=256, heads=4, context=256, vocabulary=4096),
    "gpt2-midi": Size(layers=8, width=256, heads=8, context=512, vocabulary=4096),
    # The published small model's shapes, random: the bundled tokenizer leaves most rows of its embedding unused.
    # The published weights are 'openai-community/gpt2', where they are cached.
    "gpt2": Size(layers=12, width=768, heads=12, context=1024, vocabulary=50257),
}


def split(layers: int, stages: int) -> tuple[range, ...]:
    """Consecutive layers for each stage, as even as can be; the first stages take one more where it does not divide.

    The last stage has the output layer besides, which for a small model costs as much as a few layers.
    """
    if not 1 <= stages <= layers:
        raise SpecError(f"a model of {layers} layers cannot be cut into {stages} stages: each needs a layer")
    even, more = divmod(layers, stages)
    starts = [stage * even + min(stage, more) for stage in range(stages + 1)]
    return tuple(range(a, b) for a, b in itertools.pairwise(starts))


def size_of(model: str) -> Size:
    """Of a named size, or of a checkpoint. UnknownNameError or SpecError for what is neither."""
    if model in SIZES:
        return SIZES[model]
    path = checkpoint_folder(model) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf8"))
        if config["model_type"] != "gpt2":
            raise SpecError(
                f"model {model!r} is a {config['model_type']}, found in {path}; only gpt2 checkpoints can be cut into stages"
            )
        return Size(
            layers=int(config["n_layer"]),
            width=int(config["n_embd"]),
            heads=int(config["n_head"]),
            context=int(config.get("n_positions", 1024)),
            vocabulary=int(config["vocab_size"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"model {model!r}: {path} is not the config.json of a GPT-2 checkpoint: {type(error).__name__}: {error}"
        ) from None


def width(spec: WorkloadSpec) -> int:
    """Values of a token at a boundary."""
    return size_of(spec.model).width


def check(spec: WorkloadSpec, stages: int) -> None:
    """Everything that can be known before anything starts. SpecError or UnknownNameError."""
    size = size_of(spec.model)
    split(size.layers, stages)
    if spec.sequence_length > size.context:
        raise SpecError(
            f"workload.sequence_length is {spec.sequence_length}; {spec.model} reads at most {size.context} tokens at once"
        )
    if spec.text != "bundled" and not Path(spec.text).is_file():
        raise SpecError(f"workload.text: there is no file {spec.text!r}; give the path of a text file, or 'bundled'")


# ------------------------------------------------------------------ checkpoints
def checkpoint_folder(model: str) -> Path:
    """The folder of a checkpoint: `model` itself where it is one, else the newest snapshot of that id in the Hugging Face cache.

    Nothing is downloaded. UnknownNameError for a plain word, SpecError for an id or folder that is not here.
    """
    if Path(model).is_dir():
        return Path(model)
    if "/" not in model:
        raise UnknownNameError("model", model, SIZES)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise SpecError(
            f"model {model!r}: there is no such folder; give a checkpoint's folder, a cached id, or one of {', '.join(SIZES)}"
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


def _hub_cache() -> Path:
    """Where huggingface_hub keeps repositories; under sudo that of the person behind it."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder)
    if folder := os.environ.get("HF_HOME"):
        return Path(folder) / "hub"
    user = paths.invoking_user()
    if user is None and os.environ.get("SUDO_UID") == str(os.geteuid()):
        user = os.geteuid(), os.getegid()  # a helper of a run under sudo, which still has root's HOME
    home = Path(pwd.getpwuid(user[0]).pw_dir) if user else Path.home()
    return Path(os.environ.get("XDG_CACHE_HOME", home / ".cache")) / "huggingface" / "hub"

"""Writes floors.csv: the unigram and bigram floors of the text of each experiment that reports losses of a language
model (`testbed.workloads.floor`): `python experiments/floors.py`.

A row names the validation batches that the experiment evaluates; its tokenizer is its model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from testbed import csv_rows, paths
from testbed.spec import TextSpec
from testbed.workloads import characters, floor, prepare, windows

HERE = Path(__file__).resolve().parent
CHARACTERS = ("sites", "local_steps_or_codec", "deco_varying", "newer_methods", "one_shot")
"""Experiments with the model of single characters."""
LONGER = {"diloco_scale": 128, "subspace_growth": 64}
"""Experiments with larger models of the same symbols -> length of their 128 validation sequences."""
TEXTS = {
    "aqsgd_finetuning": ("moby-dick", "gpt2-mini", 128, 4, 8),
    "codec_quality": ("bundled", "gpt2-micro", 64, 16, 16),
    "context_parallel": ("bundled", "gpt2-nano", 128, 8, 8),
    "default": ("bundled", "gpt2-mini", 64, 16, 4),
    "mixed_precision": ("bundled", "gpt2-mini", 128, 4, 8),
    "protocol_nanogpt": ("bundled", "gpt2-mini", 64, 8, 16),
    "seed_activation_delta": ("moby-dick", "gpt2-mini", 128, 4, 8),
    "state_transfer": ("bundled", "gpt2-mini", 128, 4, 8),
    "subspace_80mbps": ("bundled", "gpt2-micro", 64, 16, 4),
    "subspace_ratio": ("bundled", "gpt2-nano", 64, 16, 8),
    "topk_knee": ("bundled", "gpt2-mini", 128, 3, 10),
}
"""Experiment -> text, a model with its tokenizer, sequence length, batch size and number of validation batches."""
RANDOM = "seed_activation_delta, random weights", ("bundled", "gpt2-mini", 64, 8, 8)


class Row(NamedTuple):
    """A line of floors.csv; floors are in nats per token."""

    experiment: str
    text: str
    unigram_floor: float
    bigram_floor: float


def of_text(experiment: str, text: str, model: str, length: int, batch: int, batches: int) -> Row:
    """Return the floors of a text as a model's tokenizer reads it."""
    prepared = prepare.prepare_tokens(text, model, paths.cache_folder())
    tokens = np.load(prepared.path, mmap_mode="r")
    spec = TextSpec.model_construct(sequence_length=length, batch_size=batch, validation_batches=batches)
    both = [round(of(tokens, spec, prepared.vocabulary), 4) for of in (floor.unigram_floor, floor.bigram_floor)]
    return Row(experiment, text, *both)


def of_longer(length: int) -> list[float]:
    """Return the floors of the same text, over longer sequences."""
    spec = TextSpec.model_construct(sequence_length=length, batch_size=128, validation_batches=1)
    tokens = characters.characters()
    return [round(of(tokens, spec, characters.VOCABULARY), 4) for of in (floor.unigram_floor, floor.bigram_floor)]


def of_characters() -> list[float]:
    """Return the floors of the text of single characters, over the validation sequences of `characters`."""
    text, length, vocabulary = characters.characters(), characters.SEQUENCE, characters.VOCABULARY
    starts = windows.cut_windows(len(text), length).train
    train, tested = text[starts[:, None] + np.arange(length + 1)], characters.validation().numpy()
    counts = np.bincount(train[:, 1:].ravel(), minlength=vocabulary) + 1.0
    unigram = float(-np.log(counts / counts.sum())[tested[:, 1:]].mean())
    return [round(value, 4) for value in (unigram, floor.of_pairs([train], tested, vocabulary))]


def rows() -> list[Row]:
    """Return the rows of floors.csv."""
    made = [Row(name, "bundled, characters", *of_characters()) for name in CHARACTERS]
    made += [Row(name, "bundled, characters", *of_longer(length)) for name, length in LONGER.items()]
    return sorted([*made, *(of_text(name, *text) for name, text in [*TEXTS.items(), RANDOM])])


if __name__ == "__main__":
    csv_rows.write_rows(HERE / "floors.csv", Row._fields, rows())

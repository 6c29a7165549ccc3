"""Division of a text's tokens into sequences, with a validation split and an order. No torch.

The text consists of stretches of 4,096 tokens; every 20th, starting with the first, is for validation, for every seed
and sequence length. A window is n inputs and, shifted by one token, n targets; windows start n tokens apart and never
leave their stretch, so no validation token is trained on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from testbed import keyed
from testbed.errors import SpecError
from testbed.spec import TextSpec

STRETCH_TOKENS = 4096
VALIDATION_EVERY = 20

Starts = npt.NDArray[np.int64]


class Windows(NamedTuple):
    """Start of each window, in tokens from the text's start, ascending."""

    train: Starts
    validation: Starts


def cut_windows(tokens: int, sequence_length: int) -> Windows:
    """Cut a text of `tokens` tokens into windows. SpecError when a stretch cannot hold one."""
    fits = (STRETCH_TOKENS - 1) // sequence_length
    if fits == 0:
        raise SpecError(f"workload.sequence_length is {sequence_length}; set at most {STRETCH_TOKENS - 1}")
    stretches = np.arange(0, tokens, STRETCH_TOKENS, dtype=np.int64)
    starts = stretches[:, None] + np.arange(fits, dtype=np.int64) * sequence_length
    whole = starts + sequence_length + 1 <= tokens
    held_out = np.broadcast_to((np.arange(len(stretches)) % VALIDATION_EVERY == 0)[:, None], starts.shape)
    return Windows(starts[whole & ~held_out], starts[whole & held_out])


def shuffled(count: int, purpose: str) -> npt.NDArray[np.int64]:
    """Return a permutation of 0..count-1 that depends only on `purpose`: the order of Philox numbers keyed by its hash.

    numpy guarantees this raw stream (NEP 19), but not `Generator.permutation`.
    """
    return np.argsort(np.asarray(np.random.Philox(key=keyed.key(purpose)).random_raw(count)), kind="stable")


def choose_training_windows(train: Starts, count: int) -> Starts:
    """Choose `count` training windows from all over the text, independent of the seed; a larger count includes all of a
    smaller one.
    """
    return np.sort(train[shuffled(len(train), "training sequences")[:count]])


def check_text_for(spec: TextSpec, tokens: int) -> None:
    """Raise SpecError when a text of `tokens` tokens is too short for a training batch of a workload, or for its
    numbers of sequences and batches.
    """
    windows, batch = cut_windows(tokens, spec.sequence_length), spec.batch_size
    wanted = {"training": max(batch, spec.training_sequences or 0), "validation": batch * spec.validation_batches}
    for (name, need), starts in zip(wanted.items(), windows, strict=True):
        if len(starts) < need:
            raise SpecError(
                f"a text of {tokens} tokens has {len(starts)} {name} sequences of {spec.sequence_length}, but needs "
                f"{need}; use a longer text, or a smaller sequence_length, batch_size, training_sequences or "
                "validation_batches"
            )

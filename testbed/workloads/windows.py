"""How a text of tokens is cut into sequences, which of them are for validation, and in which order they come. No torch.

The text falls into stretches of 4,096 tokens; every 20th, beginning with the first, is for validation, whatever seed
and sequence length are. A window is n inputs and, one token later, n targets; windows begin n tokens apart and never
leave their stretch, so no token is learned that is validated on.
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
    """Where each window begins, in tokens from the text's start, ascending."""

    train: Starts
    validation: Starts


def cut_windows(tokens: int, sequence_length: int) -> Windows:
    """Cut a text of `tokens` tokens into windows. SpecError when a stretch cannot hold one."""
    fits = (STRETCH_TOKENS - 1) // sequence_length
    if fits == 0:
        raise SpecError(
            f"workload.sequence_length is {sequence_length}; at most {STRETCH_TOKENS - 1} can be cut from a text"
        )
    stretches = np.arange(0, tokens, STRETCH_TOKENS, dtype=np.int64)
    starts = stretches[:, None] + np.arange(fits, dtype=np.int64) * sequence_length
    whole = starts + sequence_length + 1 <= tokens
    held_out = np.broadcast_to((np.arange(len(stretches)) % VALIDATION_EVERY == 0)[:, None], starts.shape)
    return Windows(starts[whole & ~held_out], starts[whole & held_out])


def shuffled(count: int, purpose: str) -> npt.NDArray[np.int64]:
    """Return a permutation of 0..count-1 that depends on nothing but `purpose`: the order of Philox numbers keyed by
    its hash.

    numpy promises this raw stream for good (NEP 19), not what `Generator.permutation` makes of it.
    """
    return np.argsort(np.asarray(np.random.Philox(key=keyed.key(purpose)).random_raw(count)), kind="stable")


def choose_training_windows(train: Starts, count: int) -> Starts:
    """Choose `count` of the training windows, from all over the text; the same whatever the seed, and all of them among
    more.
    """
    return np.sort(train[shuffled(len(train), "training sequences")[:count]])


def check_text_for(spec: TextSpec, tokens: int) -> None:
    """Raise SpecError when a text of `tokens` tokens does not hold a training batch of a workload, or the sequences and
    batches that it asks for.
    """
    windows, batch = cut_windows(tokens, spec.sequence_length), spec.batch_size
    wanted = {"training": max(batch, spec.training_sequences or 0), "validation": batch * spec.validation_batches}
    for (name, need), starts in zip(wanted.items(), windows, strict=True):
        if len(starts) < need:
            raise SpecError(
                f"a text of {tokens} tokens has {len(starts)} {name} sequences of {spec.sequence_length}, and {need} "
                "are needed; use a longer text, or a smaller sequence_length, batch_size, training_sequences or "
                "validation_batches"
            )

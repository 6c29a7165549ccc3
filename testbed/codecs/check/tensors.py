"""Test tensors for codecs, all from seeds: the messages of a training run, and unusual ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import MessageKey
from testbed.message_key import Phase

BATCH, TOKENS, WIDTH = 2, 8, 16
MICROBATCHES = 3
_EXAMPLES = 9 * BATCH
"""Sequences per epoch of messages: each recurs every third step."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Draw standard normal numbers; the global generator is unchanged."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hidden(*shape: int, seed: int = 0) -> Tensor:
    """Draw something like a transformer's hidden states: normal, with one channel in 32 that is 20 times as large."""
    states = normal(*shape, seed=seed)
    if shape:
        states[..., ::32] *= 20
    return states


class TrialMessage(NamedTuple):
    """A message that a stage might send."""

    key: MessageKey
    tensor: Tensor


def key_at(step: int, microbatch: int = 0, phase: Phase = "train", batch: int = BATCH) -> MessageKey:
    """Make a message key with sample ids from an epoch of `_EXAMPLES` sequences; evaluations have separate ids."""
    first = (step * MICROBATCHES + microbatch) * batch % _EXAMPLES
    offset = 0 if phase == "train" else 1000
    return MessageKey(phase, step, microbatch, tuple(offset + first + i for i in range(batch)))


def messages(steps: int, *, evaluations: bool = True) -> Iterator[TrialMessage]:
    """Yield the messages of `steps` steps of three micro-batches, with an evaluation of two after every tenth step.

    The tensors, of shape (2, 8, 16), change slowly, as in training. The train messages are the same with and without
    evaluations.
    """
    states = [hidden(BATCH, TOKENS, WIDTH, seed=part) for part in range(MICROBATCHES)]
    for step in range(steps):
        for part in range(MICROBATCHES):
            moved = normal(BATCH, TOKENS, WIDTH, seed=step * MICROBATCHES + part + 17)
            states[part] = states[part] + 0.1 * moved
            yield TrialMessage(key_at(step, part), states[part])
        if evaluations and step % 10 == 0:
            for part in range(2):
                evaluated = hidden(BATCH, TOKENS, WIDTH, seed=5000 + step + part)
                yield TrialMessage(key_at(step, part, "evaluation"), evaluated)


def fitting(tensor: Tensor, step: int = 0) -> MessageKey:
    """Make a message key with one sample for each entry of the tensor's first axis."""
    return key_at(step, batch=tensor.shape[0] if tensor.ndim else 1)


LARGEST = torch.finfo(torch.float32).max


def odd() -> dict[str, Tensor]:
    """Make unusual tensors, by name. All of them are finite."""
    return {
        "a scalar": torch.tensor(-3.25),
        "empty, three axes": torch.empty(2, 0, 5),
        "empty, one axis": torch.empty(0),
        "an empty last axis": torch.empty(3, 0),
        "one value": torch.tensor([[7.0]]),
        "one row": normal(1, 37),
        "one column": normal(5, 1),
        "a vector": normal(130),
        "odd width": normal(2, 3, 67),
        "prime axes": normal(3, 7, 131),
        "transposed": normal(6, 10, 4).transpose(0, 2),
        "strided": normal(8, 140)[::2, ::3],
        "reversed in memory": normal(4, 64).flip(0).t(),
        "expanded": normal(1, 5).expand(4, 5),
        "all zeros": torch.zeros(3, 4, 8),
        "a zero row": torch.cat([torch.zeros(1, 64), normal(2, 64)]),
        "constant": torch.full((4, 64), 2.5),
        "denormals": torch.tensor([[1e-45, -1e-45, 3e-42], [1e-39, -1e-40, 0.0]]),
        "tiny": normal(4, 64) * 1e-30,
        "huge": normal(4, 64) * 1e30,
        "the largest": torch.tensor([[LARGEST, -LARGEST, 1.0, 0.0]]),
        "a wide range": torch.tensor([[1e30, 1.0, -1e-30], [0.0, -0.0, 127.0]]),
        "eight axes": normal(1, 2, 1, 3, 1, 2, 1, 2),
        "bf16": normal(5, 64).to(torch.bfloat16),
        "bf16 transposed": normal(5, 7).to(torch.bfloat16).t(),
        "needs a gradient": normal(3, 16).requires_grad_(),
    }

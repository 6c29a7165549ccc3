"""A language model of single characters, small enough to train many of them side by side, for experiments with
exchanges of gradients and of model differences.

The text is the bundled one, byte by byte; all but the 63 most frequent of its 99 different bytes share one symbol. The
model is one pre-norm transformer layer of 32 channels with two heads, without biases; its norms have no weights (Zhang
and Sennrich, arXiv 1910.07467). Everything is batched over B models: their parameters are the rows of one tensor.
"""

from __future__ import annotations

import functools
import lzma
import math
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from testbed.workloads import windows
from testbed.workloads.sources import ASSETS
from testbed.workloads.texts import BUNDLED

VOCABULARY: Final = 64
WIDTH: Final = 32
HEADS: Final = 2
SEQUENCE: Final = 32
ROWS: Final[tuple[int, ...]] = (VOCABULARY, SEQUENCE, 3 * WIDTH, WIDTH, 4 * WIDTH, 4 * WIDTH, VOCABULARY)
"""Rows of the matrices: characters, positions, queries, keys and values, the attention's output, both layers of the
feed-forward part, and the output layer. All have WIDTH columns, the channels of the stream that they read or write, so
that the model is also one matrix of sum(ROWS) rows."""
_READS = (2, 4, 6)
"""Matrices that are multiplied in transposed form."""
_SIZES = [rows * WIDTH for rows in ROWS]
VALUES: Final = sum(_SIZES)
_SPREAD = 0.02
"""Standard deviation of initial weights, as in GPT-2."""
VALIDATION_SEQUENCES: Final = 128
CUTS: Final = 3
"""Cuts of the model into four stages: after the embeddings, the attention, and the feed-forward part."""
Cut = Callable[[Tensor, int], Tensor]
"""Maps the stream at one of the CUTS to the stream after it."""


@functools.cache
def characters() -> npt.NDArray[np.uint8]:
    """Return the whole text as symbols, (t,); shared, so read-only."""
    return symbols_of(lzma.decompress((ASSETS / BUNDLED["bundled"]).read_bytes()))


def symbols_of(data: bytes) -> npt.NDArray[np.uint8]:
    """Return a text as symbols, (t,)."""
    text = np.frombuffer(data, np.uint8)
    frequent = np.argsort(-np.bincount(text, minlength=256), kind="stable")[: VOCABULARY - 1]
    symbols = np.full(256, VOCABULARY - 1, np.uint8)
    symbols[frequent] = np.arange(VOCABULARY - 1, dtype=np.uint8)
    return symbols[text]


@functools.cache
def _windows() -> windows.Windows:
    return windows.cut_windows(len(characters()), SEQUENCE)


class Batches:
    """The training sequences of all workers, in an order that depends only on the seed."""

    def __init__(self, *, workers: int, batch_size: int, seed: int) -> None:
        """`batch_size`: sequences per worker and batch."""
        self._workers, self._size, train = workers, batch_size, _windows().train
        self._starts = train[windows.shuffled(len(train), f"characters {seed}")]

    def batch(self, number: int) -> Tensor:
        """Return the workers' batches number `number`, (workers, batch_size, SEQUENCE + 1) int64."""
        count = self._workers * self._size
        places = np.arange(number * count, (number + 1) * count) % len(self._starts)
        return _at(self._starts[places]).view(self._workers, self._size, SEQUENCE + 1)


@functools.cache
def validation() -> Tensor:
    """Return the validation sequences, (VALIDATION_SEQUENCES, SEQUENCE + 1) int64."""
    starts = _windows().validation
    return _at(starts[windows.shuffled(len(starts), "characters validation")[:VALIDATION_SEQUENCES]])


def _at(starts: windows.Starts) -> Tensor:
    return torch.from_numpy(characters()[starts[:, None] + np.arange(SEQUENCE + 1)].astype(np.int64))


def first_weights(seed: int) -> Tensor:
    """Draw the weights of one model, (VALUES,); matrices that add to the stream are smaller, as in GPT-2."""
    draw = torch.Generator().manual_seed(seed)
    parts = [torch.randn(size, generator=draw) * _SPREAD for size in _SIZES]
    for added in (3, 5):
        parts[added] /= math.sqrt(2)
    return torch.cat(parts)


def matrices(weights: Tensor) -> list[Tensor]:
    """Return views (B, rows, WIDTH) of weights (B, VALUES)."""
    return [part.view(len(weights), -1, WIDTH) for part in torch.split(weights, _SIZES, dim=1)]


def losses(weights: Tensor, sequences: Tensor, at_cut: Cut = lambda stream, cut: stream) -> Tensor:
    """Return the mean cross-entropies in nats, (B,), of B models, each on its own sequences (B, m, SEQUENCE + 1).

    `at_cut` transforms the stream, (B, m SEQUENCE, WIDTH), between stages.
    """
    count, each = sequences.shape[:2]
    parts = matrices(weights)
    symbols, positions, attend, attended, widen, narrow, out = (
        part.mT if place in _READS else part for place, part in enumerate(parts)
    )
    first_rows = VOCABULARY * torch.arange(count)[:, None, None]
    hidden = functional.embedding(
        (sequences[..., :-1] + first_rows).view(count, -1), symbols.reshape(-1, WIDTH)
    ) + positions.repeat(1, each, 1)
    hidden = at_cut(hidden, 0)
    asked = (_norm(hidden) @ attend).view(count * each, SEQUENCE, 3, HEADS, WIDTH // HEADS)
    query, key, value = (asked[:, :, which].transpose(1, 2) for which in range(3))
    seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = at_cut(hidden + seen.transpose(1, 2).reshape(count, -1, WIDTH) @ attended, 1)
    hidden = at_cut(hidden + functional.gelu(_norm(hidden) @ widen, approximate="tanh") @ narrow, 2)
    outputs = (_norm(hidden) @ out).view(-1, VOCABULARY)
    nats = functional.cross_entropy(outputs, sequences[..., 1:].reshape(-1), reduction="none")
    return nats.view(count, -1).mean(1)


def gradients(weights: Tensor, sequences: Tensor, at_cut: Cut = lambda stream, cut: stream) -> Tensor:
    """Return the gradients of `losses`, (B, VALUES)."""
    leaf = weights.detach().requires_grad_()
    return torch.autograd.grad(losses(leaf, sequences, at_cut).sum(), leaf)[0]


def _norm(hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, (WIDTH,))

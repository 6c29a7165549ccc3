"""Count the floating point operations of a stage: what the model needs, whatever a device does besides.

A product of (m, k) and (k, n) counts 2 m k n. A layer's matrix products count, and attention's two products of n
queries with n keys, 4 n^2 d per sequence: the half that the causal mask throws away counts too, as it does in model
FLOPs utilisation. Embeddings, norms, activation functions and biases count nothing. Backward is twice forward.
"""

from __future__ import annotations

from typing import NamedTuple

from testbed.errors import UnknownNameError
from testbed.workloads.table import Size


class _FamilyShape(NamedTuple):
    """What a family's layers have besides the products that all families share."""

    feed_forward_matrices: int
    """Matrices of width x inner values in each layer: 2 with a plain activation function, 3 with a gated one."""
    biases: bool
    """Whether linear layers and norms have a bias: LayerNorm does, RMSNorm does not."""
    learned_positions: bool
    """Whether positions have an embedding with one row per token of the context."""


FAMILIES: dict[str, _FamilyShape] = {
    "gpt2": _FamilyShape(feed_forward_matrices=2, biases=True, learned_positions=True),
    "llama": _FamilyShape(feed_forward_matrices=3, biases=False, learned_positions=False),
}
"""Every family of `workloads` has its row here; a family without one is refused."""

ADAMW_BYTES = 28
"""Memory traffic per parameter: fp32 weight, gradient and two moments are read; weight and moments are written."""


def layer(size: Size, *, sequence_length: int, sequences: int) -> int:
    """Count one layer's forward pass."""
    products = 2 * _layer_products(size) * sequence_length * sequences
    return products + 4 * sequence_length**2 * size.width * sequences


def head(size: Size, *, sequence_length: int, sequences: int) -> int:
    """Count the output layer's forward pass."""
    return 2 * size.width * size.vocabulary * sequence_length * sequences


def stage(size: Size, layers: range, *, sequence_length: int, sequences: int) -> int:
    """Count one stage's forward pass, for one micro-batch."""
    count = len(layers) * layer(size, sequence_length=sequence_length, sequences=sequences)
    if layers.stop == size.layers:
        count += head(size, sequence_length=sequence_length, sequences=sequences)
    return count


def parameters(size: Size, layers: range) -> int:
    """Count the parameters of one stage: its layers, the embeddings of the first, the last norm and output layer of the
    last.
    """
    shape = _shape(size)
    norm = size.width * (2 if shape.biases else 1)
    # The attention's queries, keys, values and output have 4 biases of `width`; the feed-forward part has one of
    # `inner` and one of `width`.
    biases = 5 * size.width + size.inner if shape.biases else 0
    count = len(layers) * (_layer_products(size) + biases + 2 * norm)
    if layers.start == 0:
        count += size.width * (size.vocabulary + (size.context if shape.learned_positions else 0))
    if layers.stop == size.layers:
        count += size.width * size.vocabulary + norm
    return count


def _shape(size: Size) -> _FamilyShape:
    if size.family not in FAMILIES:
        raise UnknownNameError("row in devices/flops.py for the model family", size.family, FAMILIES)
    return FAMILIES[size.family]


def _layer_products(size: Size) -> int:
    """Count the parameters of one layer that are matrices."""
    keys = size.width * size.key_heads // size.heads
    attention = size.width * (2 * size.width + 2 * keys)
    return attention + size.width * size.inner * _shape(size).feed_forward_matrices

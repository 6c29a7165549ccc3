"""Floating point operations of a stage: what the model needs, whatever a device does besides.

A product of (m, k) and (k, n) counts 2 m k n. Of a layer its matrix products count, and attention's two products of n queries
with n keys, 4 n^2 d a sequence: the half that the causal mask throws away counts too, as it does in model FLOPs utilisation.
Embeddings, norms, activation functions and biases count nothing. Backward is twice forward.
"""

from __future__ import annotations

from testbed.workloads.table import Size

ADAMW_BYTES = 28
"""Of memory traffic per parameter: fp32 weight, gradient and two moments are read; weight and moments are written."""


def layer(size: Size, *, sequence_length: int, sequences: int) -> int:
    """Forward through one layer."""
    products = 2 * _layer_products(size) * sequence_length * sequences
    return products + 4 * sequence_length**2 * size.width * sequences


def head(size: Size, *, sequence_length: int, sequences: int) -> int:
    """Forward through the output layer."""
    return 2 * size.width * size.vocabulary * sequence_length * sequences


def stage(size: Size, layers: range, *, sequence_length: int, sequences: int) -> int:
    """Forward through one stage, for one micro-batch."""
    found = len(layers) * layer(size, sequence_length=sequence_length, sequences=sequences)
    if layers.stop == size.layers:
        found += head(size, sequence_length=sequence_length, sequences=sequences)
    return found


def parameters(size: Size, layers: range) -> int:
    """Parameters of one stage: its layers, the embeddings of the first, the last norm and the output layer of the last."""
    gpt2 = size.family == "gpt2"
    norm = size.width * (2 if gpt2 else 1)  # a LayerNorm has a bias, an RMSNorm none
    biases = (
        5 * size.width + size.inner if gpt2 else 0
    )  # of queries, keys, values; output; the two of the feed-forward part
    found = len(layers) * (_layer_products(size) + biases + 2 * norm)
    if layers.start == 0:
        found += size.width * (size.vocabulary + (size.context if gpt2 else 0))
    if layers.stop == size.layers:
        found += size.width * size.vocabulary + norm
    return found


def _layer_products(size: Size) -> int:
    """Parameters of one layer that are matrices."""
    keys = size.width * size.key_heads // size.heads
    attention = size.width * (2 * size.width + 2 * keys)
    return attention + size.width * size.inner * (2 if size.family == "gpt2" else 3)

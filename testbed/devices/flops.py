"""Count the floating point operations of a stage: what the model needs, whatever a device does besides.

A product of (m, k) and (k, n) counts 2 m k n. A layer's matrix products count, and attention's two products of n
queries with n keys, 4 n^2 d per sequence: the half that the causal mask throws away counts too, as it does in model
FLOPs utilisation. Embeddings, norms, activation functions and biases count nothing. Backward is twice forward.
"""

from __future__ import annotations

import math

from testbed.spec import ImagesSpec, Workload
from testbed.workloads import models, networks
from testbed.workloads.models import ModelSize

ADAMW_BYTES = 28
"""Memory traffic per parameter: fp32 weight, gradient and two moments are read; weight and moments are written."""


def layer(size: ModelSize, *, sequence_length: int, sequences: int) -> int:
    """Count one layer's forward pass."""
    products = 2 * _layer_products(size) * sequence_length * sequences
    return products + 4 * sequence_length**2 * size.width * sequences


def head(size: ModelSize, *, sequence_length: int, sequences: int) -> int:
    """Count the output layer's forward pass."""
    return 2 * size.width * size.vocabulary * sequence_length * sequences


def stage(size: ModelSize, layers: range, *, sequence_length: int, sequences: int) -> int:
    """Count one stage's forward pass, for one micro-batch."""
    count = len(layers) * layer(size, sequence_length=sequence_length, sequences=sequences)
    if layers.stop == size.layers:
        count += head(size, sequence_length=sequence_length, sequences=sequences)
    return count


def parameters(size: ModelSize, layers: range) -> int:
    """Count the parameters of one stage: its layers, the embeddings of the first, the last norm and output layer of the
    last.
    """
    family = models.family(size.family)
    norm = size.width * (2 if family.biases else 1)
    count = len(layers) * sum(map(math.prod, family.layer_shapes(size)))
    if layers.start == 0:
        count += size.width * (size.vocabulary + (size.context if family.learned_positions else 0))
    if layers.stop == size.layers:
        count += size.width * size.vocabulary + norm
    return count


def image(spec: ImagesSpec) -> int:
    """Count a small network's forward pass for one image."""
    return 2 * networks.products(spec)


def whole_model(spec: Workload) -> int:
    """Count the parameters of a workload's whole model. SpecError or UnknownNameError where there is none."""
    return sum(map(math.prod, models.parameter_shapes(spec)))


def _layer_products(size: ModelSize) -> int:
    """Count the parameters of one layer that are matrices."""
    keys = size.width * size.key_heads // size.heads
    attention = size.width * (2 * size.width + 2 * keys)
    return attention + size.width * size.inner * models.family(size.family).feed_forward_matrices

"""Count the floating point operations of a stage that the model requires, without a device's extra work.

A product of (m, k) and (k, n) counts 2 m k n. Counted are a layer's matrix products, and attention's two products of n
queries with n keys, 4 n^2 d per sequence, including the half that the causal mask discards, as in model FLOPs
utilisation. Embeddings, norms, activation functions and biases count nothing. Backward is twice forward.
"""

from __future__ import annotations

import math

from testbed.spec import ImagesSpec, Workload
from testbed.workloads import models, networks
from testbed.workloads.models import ModelSize

ADAMW_BYTES = 28
"""Memory traffic per parameter: reads fp32 weight, gradient and two moments; writes weight and moments."""


def layer(size: ModelSize, *, sequence_length: int, sequences: int) -> int:
    """Count one layer's forward pass."""
    matrices = [shape for shape in models.family(size.family).layer_shapes(size) if len(shape) == 2]
    products = 2 * sum(map(math.prod, matrices)) * sequence_length * sequences
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
    """Count the parameters of one stage."""
    return sum(map(math.prod, models.shapes_of(size, layers)))


def image(spec: ImagesSpec) -> int:
    """Count a small network's forward pass for one image."""
    return 2 * networks.products(spec)


def whole_model(spec: Workload) -> int:
    """Count the parameters of a workload's whole model. SpecError or UnknownNameError for an unavailable model."""
    return sum(map(math.prod, models.parameter_shapes(spec)))

"""Predict the memory that a training needs, and read the memory available. No torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

from testbed.devices import flops
from testbed.frozen import Frozen
from testbed.jobs.schedule import depth
from testbed.spec import ImagesSpec, Recipe
from testbed.workloads import models as workloads
from testbed.workloads import networks

_CGROUP = Path("/sys/fs/cgroup")
_IMPORTS_BYTES = 450_000_000
"""Python, torch, transformers and the allocator's reserve; measured with torch 2.13."""
_IMAGE_IMPORTS_BYTES = 400_000_000
"""The same without transformers, which small networks do not need."""
_STAGE_BYTES = 100_000_000
"""Private memory of a stage's process besides its part of the model."""
_LAYER_VALUES = 16
"""Multiples of the hidden width per token that a layer keeps for its backward pass: inputs of norms and of matrix
products, queries, keys, values, residual sums."""
_INNER_VALUES = 6
"""Multiples of the inner width per token: the feed-forward product and the steps of its activation function."""
_LOGIT_VALUES = 4
"""Multiples of the vocabulary per token: logits, their fp32 copy, log-softmax, gradient."""

_IMAGE_VALUES = 4
"""Values kept per activation of an image network: itself, its ReLU, its gradient, and a convolution's rearranged
copy."""


class DeviceMemory(Frozen):
    """Memory of the device that recipes are trained on, measured by a process that has used it."""

    free_bytes: int
    """Free beside that process."""
    process_bytes: int
    """Upper bound of what a process takes there besides its tensors; what others use is included."""
    host_bytes: int
    """Peak memory of that process on the host."""


def predict_memory(recipe: Recipe) -> int:
    """Predict the peak memory of training a recipe in one process, in bytes.

    Weights, gradients and AdamW's two moments of all stages, fp32 (Muon and SGD need less); the whole model once more
    while a stage is built; the activations of the micro-batches that each stage holds between forward and backward
    (with recomputation: the inputs, and one micro-batch in full). State of codecs is not included. A training on a GPU
    needs as much there.
    tests/sweep/test_trainings.py compares it with getrusage.
    """
    spec, pipeline, data = recipe.workload, recipe.pipeline, recipe.data
    parts = pipeline.microbatches * pipeline.accumulation * (1 if data is None else sum(data.parts))
    tokens = spec.batch_tokens // parts
    model = flops.whole_model(spec)
    # A replica also holds its message, its codec's state and pending aggregates.
    copies = 4 if data is None else (4 + 2 + 2 + max(data.staleness)) * data.workers
    trained = 4 * (copies + 1) * model
    if isinstance(spec, ImagesSpec):
        scored = networks.scored_together(networks.image_counts(spec.images).shape.pixels)
        return _IMAGE_IMPORTS_BYTES + trained + 4 * _IMAGE_VALUES * max(tokens, scored) * networks.values(spec)
    total = _IMPORTS_BYTES + trained
    size = workloads.workload_size(spec)
    for stage, layers in enumerate(workloads.split_layers(size.layers, pipeline.stages, pipeline.layers)):
        keeps_weights = spec.dropout or recipe.training.device != "cpu"  # of attention: see `accelerator`
        scores = size.heads * spec.sequence_length if keeps_weights else 0
        kept = kept_values(size, layers, scores)
        held = depth(
            pipeline.schedule,
            stage=stage,
            stages=pipeline.stages,
            microbatches=pipeline.microbatches,
            in_flight=pipeline.in_flight,
        )
        in_full = 1 if pipeline.recompute else held
        total += 4 * tokens * (in_full * kept + held * 2 * size.width)
    return total


def kept_values(size: workloads.ModelSize, layers: range, scores: int = 0) -> int:
    """Return the values per token that a stage keeps from the forward for the backward pass of a micro-batch.

    `scores`: of those, the attention weights per layer, if they are kept.
    """
    kept = len(layers) * (_LAYER_VALUES * size.width + _INNER_VALUES * size.inner + 2 * scores)
    return kept + (_LOGIT_VALUES * size.vocabulary if layers.stop == size.layers else 0)


def predict_live_memory(recipe: Recipe) -> int:
    """Predict the memory of training a recipe with one process per stage. Processes share imported modules; every stage
    builds the whole model to take its part, and has its own allocator.
    """
    own = 4 * flops.whole_model(recipe.workload) + _STAGE_BYTES
    return predict_memory(recipe) + (recipe.nodes - 1) * own


def available_memory() -> int:
    """Return the bytes of memory still available to this process and its children, from /proc/meminfo and the control
    group (version 2).
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no group, or "max": no limit
        own = _CGROUP / Path("/proc/self/cgroup").read_text(encoding="utf8").strip().rpartition("::/")[2]
        limit = int((own / "memory.max").read_text())
        free = min(free, limit - int((own / "memory.current").read_text()))
    return free


def peak_memory() -> int:
    """Return this process's peak memory in bytes; getrusage would include the parent's at the time of the fork."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) * 1024

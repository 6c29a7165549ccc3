"""How much memory does a training need, and how much is there? No torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

from testbed.devices import flops
from testbed.jobs.schedule import depth
from testbed.spec import ImagesSpec, Recipe
from testbed.workloads import models as workloads
from testbed.workloads import networks

_CGROUP = Path("/sys/fs/cgroup")
_IMPORTS_BYTES = 450_000_000
"""Python, torch, transformers and what the allocator keeps back; seen with torch 2.13."""
_IMAGE_IMPORTS_BYTES = 400_000_000
"""The same without transformers, which small networks do not need."""
_STAGE_BYTES = 100_000_000
"""What a stage's process has to itself besides its piece of the model."""
_LAYER_VALUES = 16
"""Of hidden width per token, that a layer keeps for its backward pass: inputs of norms and of matrix products, queries,
keys, values, residual sums."""
_INNER_VALUES = 6
"""Of the inner width per token: the feed-forward part's product and the steps of its activation function."""
_LOGIT_VALUES = 4
"""Of the vocabulary per token: logits, their fp32 copy, log-softmax, gradient."""

_IMAGE_VALUES = 4
"""Per value that a layer makes of an image: itself, its ReLU, its gradient, and what a convolution rearranges."""


def predict_memory(recipe: Recipe) -> int:
    """Predict the memory that training a recipe in one process needs at most, in bytes.

    Weights, gradients and AdamW's two moments of all stages, fp32; the whole model once more while a stage is built;
    what layers keep of the micro-batches that each stage holds between forward and backward (with recomputation: what
    came in, and one micro-batch in full). What codecs remember is not in it. Seen against getrusage: see
    tests/sweep/test_trainings.py.
    """
    spec, pipeline, data = recipe.workload, recipe.pipeline, recipe.data
    parts = pipeline.microbatches * pipeline.accumulation * (1 if data is None else sum(data.parts))
    tokens = spec.batch_tokens // parts
    model = flops.whole_model(spec)
    # A replica has in addition what it sends, what its codec remembers, and the aggregates that are under way.
    copies = 4 if data is None else (4 + 2 + 2 + max(data.staleness)) * data.workers
    trained = 4 * (copies + 1) * model
    if isinstance(spec, ImagesSpec):
        scored = networks.scored_together(networks.image_counts(spec.images).shape.pixels)
        return _IMAGE_IMPORTS_BYTES + trained + 4 * _IMAGE_VALUES * max(tokens, scored) * networks.values(spec)
    total = _IMPORTS_BYTES + trained
    size = workloads.workload_size(spec)
    for stage, layers in enumerate(workloads.split_layers(size.layers, pipeline.stages, pipeline.layers)):
        scores = size.heads * spec.sequence_length if spec.dropout else 0  # attention that drops out keeps its weights
        kept = len(layers) * (_LAYER_VALUES * size.width + _INNER_VALUES * size.inner + 2 * scores)
        if layers.stop == size.layers:
            kept += _LOGIT_VALUES * size.vocabulary
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


def predict_live_memory(recipe: Recipe) -> int:
    """Predict the memory that training a recipe needs with a process for each stage, all of which share what they have
    imported: every stage builds the whole model to take its piece, and has its own allocator.
    """
    own = 4 * flops.whole_model(recipe.workload) + _STAGE_BYTES
    return predict_memory(recipe) + (recipe.nodes - 1) * own


def available_memory() -> int:
    """Return how many bytes of memory this process and its children may still take, as /proc/meminfo and the control
    group (version 2) say.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no such group, or "max": no limit
        own = _CGROUP / Path("/proc/self/cgroup").read_text(encoding="utf8").strip().rpartition("::/")[2]
        limit = int((own / "memory.max").read_text())
        free = min(free, limit - int((own / "memory.current").read_text()))
    return free

"""Time the parts of a model, and codecs, on this machine; a program started by `testbed.devices.record`.

It is a separate program, so that torch starts with one thread and is unloaded afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from testbed.devices.stopwatch import DeviceStopwatch
from testbed.errors import CapabilityError
from testbed.process import Parent
from testbed.spec import TextSpec
from testbed.workloads import models
from testbed.workloads.build_stage import build_stage
from testbed.workloads.precision import autocast
from testbed.workloads.stage_model import StageModel

_PART_S = 1.0
"""Time for repetitions of one part, or of one codec."""
_PARTS = ("embedding", "layer", "head")
"""Field names of `device.RecordedTimes`."""


def _passes(watch: DeviceStopwatch, forward: Callable[[], Tensor]) -> dict[str, int]:
    """Time forward and backward of one part; `forward` returns the tensor to differentiate."""

    def once() -> dict[str, int]:
        forward_ns, outputs = watch.time(forward)
        gradient = torch.ones_like(outputs)
        return {"forward_ns": forward_ns, "backward_ns": watch.time(lambda: outputs.backward(gradient))[0]}

    return watch.medians(once, _PART_S)


def _updates(watch: DeviceStopwatch, parameters: list[nn.Parameter]) -> dict[str, int]:
    """Time one step of torch's default AdamW on that device, with clipping."""
    adamw = torch.optim.AdamW(parameters)

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adamw.step()

    return watch.medians(lambda: {"update_ns": watch.time(step)[0]}, _PART_S)


def _parameters(model: StageModel) -> list[list[nn.Parameter]]:
    """Return the parameters of the embedding, of all layers and of the head, as in a first, middle and last stage."""
    parts, tables = model.parts, [table.module for table in model.tables()]
    owners = (tables, [parts[model.layers_name]], [parts[model.norm_name], model.lm_head])
    return [[parameter for module in modules for parameter in module.parameters()] for modules in owners]


def time_parts(asked: dict[str, Any]) -> dict[str, Any]:
    """Handle a request of `record.py`; times are in nanoseconds. CapabilityError for a missing device."""
    device, sequences, length = asked["device"], asked["sequences"], asked["sequence_length"]
    if device == "cuda" and not torch.cuda.is_available():
        raise CapabilityError(
            f"torch {torch.__version__} finds no CUDA device; use --device cpu, or install torch with CUDA"
        )
    torch.set_num_threads(1)
    watch = DeviceStopwatch(device)
    size = models.model_size(asked["model"])
    shape = (sequences, length, size.width)
    codecs = [watch.codec(text, way, shape, _PART_S) for text in asked["codecs"] for way in ("forward", "backward")]
    spec = TextSpec(
        family=size.family,
        model=asked["model"],
        text="bundled",
        sequence_length=length,
        batch_size=sequences,
        validation_batches=1,
        precision=asked["precision"],
    )
    model = build_stage(spec, stage=0, stages=1, seed=1, vocabulary=size.vocabulary).to(device)
    with torch.device(device):  # the model creates positions on the default device
        generator = torch.Generator(device).manual_seed(1)
        ids = torch.randint(size.vocabulary, (sequences, length), generator=generator)
        hidden = torch.randn((sequences, length, size.width), generator=generator, requires_grad=True)

        precisely = functools.partial(autocast, device, bf16=spec.precision == "bf16")

        def embed() -> Tensor:
            with precisely():
                return model.embed(ids)

        def layers() -> Tensor:
            with precisely():
                outputs = hidden
                for block in model.blocks(hidden):
                    outputs = block(outputs)
                return outputs.float()

        def head() -> Tensor:
            with precisely():
                return model.loss(model.head(hidden), ids)

        passes = [_passes(watch, forward) for forward in (embed, layers, head)]
        updates = [_updates(watch, parameters) for parameters in _parameters(model)]
    parts = {
        name: {what: max(1, round(ns / share)) for what, ns in (there_and_back | update).items()}
        for name, there_and_back, update, share in zip(_PARTS, passes, updates, (1, size.layers, 1), strict=True)
    }
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else None,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None,
        "torch": torch.__version__,
        "parts": parts,
        "codecs": codecs,
    }


def main() -> None:
    """Handle one request."""
    parent = Parent()
    parent.answer(time_parts(parent.request))


if __name__ == "__main__":
    main()

"""Time the parts of a model on this machine; a program started by `testbed.devices.record`.

It is a separate program, so that torch starts with one thread and is unloaded afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from testbed.errors import CapabilityError
from testbed.process import Parent
from testbed.spec import TextSpec
from testbed.workloads import models
from testbed.workloads.build_stage import build_stage
from testbed.workloads.precision import autocast
from testbed.workloads.stage_model import StageModel

_WARM_UP = 3
_FEWEST, _MOST = 5, 200
"""Minimum and maximum repetitions of one part."""
_PART_S = 1.0
"""Time for repetitions of one part."""
_PARTS = ("embedding", "layer", "head")
"""Field names of `device.RecordedTimes`."""


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _timed(device: str, work: Callable[[], Any]) -> tuple[int, Any]:
    """Return the duration of work on the device in nanoseconds, and its result."""
    _wait(device)
    begin = time.monotonic_ns()
    result = work()
    _wait(device)
    return time.monotonic_ns() - begin, result


def _repeat(once: Callable[[], None]) -> None:
    """Repeat at least _FEWEST times and then for _PART_S, after warming up."""
    for _ in range(_WARM_UP):
        once()
    end = time.monotonic() + _PART_S
    for count in range(_MOST):
        if count >= _FEWEST and time.monotonic() > end:
            return
        once()


def _passes(device: str, forward: Callable[[], Tensor]) -> dict[str, list[int]]:
    """Time forward and backward of one part; `forward` returns the tensor to differentiate."""
    times: dict[str, list[int]] = {"forward_ns": [], "backward_ns": []}

    def once() -> None:
        took, outputs = _timed(device, forward)
        gradient = torch.ones_like(outputs)
        times["forward_ns"].append(took)
        times["backward_ns"].append(_timed(device, lambda: outputs.backward(gradient))[0])

    _repeat(once)
    return times


def _updates(device: str, parameters: list[nn.Parameter]) -> dict[str, list[int]]:
    """Time one step of torch's default AdamW on that device, with clipping."""
    adamw = torch.optim.AdamW(parameters)
    updates_ns: list[int] = []

    def step() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adamw.step()

    _repeat(lambda: updates_ns.append(_timed(device, step)[0]))
    return {"update_ns": updates_ns}


def _part(times: dict[str, list[int]], share: int) -> dict[str, int]:
    """Return the medians for one of `share` equal layers, without the initial warm-up."""
    return {name: max(1, round(statistics.median(seen[_WARM_UP:]) / share)) for name, seen in times.items()}


def _parameters(model: StageModel) -> list[list[nn.Parameter]]:
    """Return the parameters of the embedding, of all layers and of the head, as in a first, middle and last stage."""
    parts, tables = model.parts, [table.module for table in model.tables()]
    owners = (tables, [parts[model.layers_name]], [parts[model.norm_name], model.lm_head])
    return [[parameter for module in modules for parameter in module.parameters()] for modules in owners]


def time_parts(asked: dict[str, Any]) -> dict[str, Any]:
    """Handle a request of `record.py`; times are in nanoseconds. CapabilityError for a missing device."""
    device, sequences, length = asked["device"], asked["sequences"], asked["sequence_length"]
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise CapabilityError(
            f"torch {torch.__version__} finds no CUDA device; use --device cpu, or install torch with CUDA"
        )
    torch.set_num_threads(1)
    size = models.model_size(asked["model"])
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

        def precisely() -> AbstractContextManager[None]:
            return autocast(torch.device(device).type, bf16=spec.precision == "bf16")

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

        passes = [_passes(device, forward) for forward in (embed, layers, head)]
        updates = [_updates(device, parameters) for parameters in _parameters(model)]
    parts = {
        name: _part(there_and_back | update, share)
        for name, there_and_back, update, share in zip(_PARTS, passes, updates, (1, size.layers, 1), strict=True)
    }
    return {
        "machine": torch.cuda.get_device_name() if device.startswith("cuda") else None,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if device.startswith("cuda") else None,
        "torch": torch.__version__,
        "parts": parts,
    }


def main() -> None:
    """Handle one request."""
    parent = Parent()
    parent.answer(time_parts(parent.request))


if __name__ == "__main__":
    main()

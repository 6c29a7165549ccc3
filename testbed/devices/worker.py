"""Time the parts of a model on this machine, as a program that `testbed.devices.record` asks.

It is a program of its own, so that torch has one thread from the start and is gone afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from testbed.errors import CapabilityError
from testbed.process import Parent
from testbed.spec import TextSpec
from testbed.workloads import models
from testbed.workloads.build import build_stage
from testbed.workloads.stage_model import StageModel

_WARM_UP = 3
_FEWEST, _MOST = 5, 200
"""How often one part is repeated."""
_PART_S = 1.0
"""How long one part is repeated."""
_PARTS = ("embedding", "layer", "head")
"""As `devices.RecordedTimes` calls them."""


class _Times(NamedTuple):
    forward_ns: list[int]
    backward_ns: list[int]


class _Stopwatch:
    """Times work on the device, until all of it is done."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")

    def time(self, work: Callable[[], Any]) -> tuple[int, Any]:
        """Return the nanoseconds that `work` took, and what it returned."""
        self._wait()
        begin = time.monotonic_ns()
        result = work()
        self._wait()
        return time.monotonic_ns() - begin, result

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _repeat(once: Callable[[], None]) -> None:
    """Repeat at least _FEWEST times and then for _PART_S, after warming up."""
    for _ in range(_WARM_UP):
        once()
    end = time.monotonic() + _PART_S
    for count in range(_MOST):
        if count >= _FEWEST and time.monotonic() > end:
            return
        once()


def _passes(watch: _Stopwatch, forward: Callable[[], Tensor]) -> _Times:
    """Time forward and backward of one part; `forward` returns what is differentiated."""
    times = _Times([], [])

    def once() -> None:
        took, outputs = watch.time(forward)
        gradient = torch.ones_like(outputs)
        times.forward_ns.append(took)
        times.backward_ns.append(watch.time(lambda: outputs.backward(gradient))[0])

    _repeat(once)
    return times


def _updates(watch: _Stopwatch, parameters: Iterable[nn.Parameter]) -> list[int]:
    """Time one step of AdamW as torch does it there by default, with clipping."""
    own = list(parameters)
    adamw = torch.optim.AdamW(own)
    updates_ns: list[int] = []

    def step() -> None:
        nn.utils.clip_grad_norm_(own, 1.0)
        adamw.step()

    def once() -> None:
        updates_ns.append(watch.time(step)[0])

    _repeat(once)
    return updates_ns


def _part(times: _Times, updates: list[int], share: int = 1) -> dict[str, int]:
    """Return the medians for one of `share` equal layers, without the warm-up at the start."""
    return {
        name: max(1, round(statistics.median(seen[_WARM_UP:]) / share))
        for name, seen in (("forward_ns", times.forward_ns), ("backward_ns", times.backward_ns), ("update_ns", updates))
    }


def _parameters(model: StageModel) -> list[list[nn.Parameter]]:
    """Return the parameters of the embedding, of all layers and of the head, as a first, middle and last stage has
    them.
    """
    parts, tables = model.parts, [table.module for table in model.tables()]
    owners = (tables, [parts[model.layers_name]], [parts[model.norm_name], model.lm_head])
    return [[parameter for module in modules for parameter in module.parameters()] for modules in owners]


def time_parts(asked: dict[str, Any]) -> dict[str, Any]:
    """Answer a request of `record.py`; times are in nanoseconds. CapabilityError where there is no such device."""
    device, sequences, length = asked["device"], asked["sequences"], asked["sequence_length"]
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise CapabilityError(
            f"torch {torch.__version__} finds no CUDA device here; use --device cpu, or install a torch with CUDA"
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
    watch = _Stopwatch(device)
    model = build_stage(spec, stage=0, stages=1, seed=1, vocabulary=size.vocabulary).to(device)
    with torch.device(device):  # the model makes positions where its default device is
        generator = torch.Generator(device).manual_seed(1)
        ids = torch.randint(size.vocabulary, (sequences, length), generator=generator)
        hidden = torch.randn((sequences, length, size.width), generator=generator, requires_grad=True)

        def autocast() -> torch.autocast:
            return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=spec.precision == "bf16")

        def embed() -> Tensor:
            with autocast():
                return model.embed(ids)

        def layers() -> Tensor:
            with autocast():
                outputs = hidden
                for block in model.blocks(hidden):
                    outputs = block(outputs)
                return outputs.float()

        def head() -> Tensor:
            with autocast():
                return model.loss(model.head(hidden), ids)

        times = [_passes(watch, forward) for forward in (embed, layers, head)]
        updates = [_updates(watch, parameters) for parameters in _parameters(model)]
    parts = {
        name: _part(seen, update, share)
        for name, seen, update, share in zip(_PARTS, times, updates, (1, size.layers, 1), strict=True)
    }
    return {
        "machine": torch.cuda.get_device_name() if device.startswith("cuda") else None,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if device.startswith("cuda") else None,
        "torch": torch.__version__,
        "parts": parts,
    }


def main() -> None:
    """Answer one request."""
    parent = Parent()
    parent.answer(time_parts(parent.request))


if __name__ == "__main__":
    main()

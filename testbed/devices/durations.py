"""Durations of a model's stages on a device, recorded there or computed from FLOPs."""

from __future__ import annotations

import math
from typing import NamedTuple

from testbed import units
from testbed.devices import flops
from testbed.devices.device import ComputeDevice, RecordedTimes
from testbed.errors import SpecError
from testbed.spec import ImagesSpec, PipelineSpec, Workload
from testbed.workloads import models
from testbed.workloads.models import ModelSize


class Durations(NamedTuple):
    """Durations in nanoseconds, one per stage."""

    forward_ns: tuple[int, ...]
    """Forward pass of one micro-batch."""
    backward_ns: tuple[int, ...]
    """Backward pass, including recomputation."""
    update_ns: tuple[int, ...]
    source: str
    """The device, and the source of the durations."""


def durations(device: ComputeDevice, workload: Workload, pipeline: PipelineSpec) -> Durations:
    """Return the durations of the stages on a device.

    Uses durations recorded for exactly this model, sequence length, micro-batch and precision if the device has them;
    otherwise, and always for images, computes them from FLOPs. SpecError when the device has neither for the precision,
    or when the model cannot be split like this.
    """
    examples = workload.batch_size // (pipeline.microbatches * pipeline.accumulation)
    recorded = None
    if isinstance(workload, ImagesSpec):
        what = f"{examples} images"
        counts, parameters = [examples * flops.image(workload)], [flops.whole_model(workload)]
    else:
        length, size = workload.sequence_length, models.workload_size(workload)
        stages = models.split_layers(size.layers, pipeline.stages, pipeline.layers)
        what = f"{examples} x {length} tokens"
        counts = [flops.stage(size, own, sequence_length=length, sequences=examples) for own in stages]
        parameters = [flops.parameters(size, own) for own in stages]
        if (recorded := device.recording(workload.model, length, examples, workload.precision)) is not None:
            forward, backward, update = _as_recorded(recorded, size, stages)
            source = f"{device.name}: recorded with {recorded.software}"
    if recorded is None:
        speed = device.speed(workload.precision)
        if speed is None:
            raise SpecError(
                f"device {device.name} has no speed in {workload.precision}, and no recording of {workload.model} at "
                f"that precision with {what}; use another precision, or run: python -m testbed record"
            )
        forward = [_ns(count / speed.effective_flops) for count in counts]
        backward = [_ns(2 * count / speed.effective_flops) for count in counts]
        update = [_ns(flops.ADAMW_BYTES * count / device.bandwidth_bytes_per_s) for count in parameters]
        source = (
            f"{device.name}: from FLOPs at {units.write_fraction(speed.utilisation)} of "
            f"{units.format_flops(speed.peak_flops)} in {speed.format}"
        )
    if pipeline.recompute:
        backward = [once + again for once, again in zip(backward, forward, strict=True)]
    return Durations(tuple(forward), tuple(backward), tuple(update), source)


def _as_recorded(
    recorded: RecordedTimes, size: ModelSize, stages: tuple[range, ...]
) -> tuple[list[int], list[int], list[int]]:
    def of(what: str) -> list[int]:
        return [
            len(own) * getattr(recorded.layer, what)
            + (getattr(recorded.embedding, what) if own.start == 0 else 0)
            + (getattr(recorded.head, what) if own.stop == size.layers else 0)
            for own in stages
        ]

    return of("forward_ns"), of("backward_ns"), of("update_ns")


def _ns(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1e9))

"""The records of a device: what its data sheet promises, how much of that training reaches, and what was measured on it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from testbed.frozen import Frozen
from testbed.spec import DurationNs

Precision = Literal["fp32", "bf16"]


class Speed(Frozen):
    """Of matrix products in one precision, dense, with sums in fp32."""

    peak_flops: int = Field(ge=1)
    """Floating point operations per second."""
    format: Literal["fp32", "bf16", "fp16"]
    """Of the factors: fp16 stands in for bf16 on a device that lacks that."""
    derived: str | None = None
    """How the peak follows from what the source states; None: it is stated there."""
    utilisation: float = Field(gt=0, le=1)
    """Share of the peak that training reaches, in FLOPs that the model needs (`devices.flops`): model FLOPs utilisation as in
    Chowdhery et al., PaLM, 2022, appendix B."""
    utilisation_source: str = Field(min_length=1)

    @property
    def effective_flops(self) -> float:
        """What training reaches, in FLOPs of the model per second."""
        return self.peak_flops * self.utilisation


class Part(Frozen):
    """One part of a model."""

    forward_ns: DurationNs
    """Of one micro-batch."""
    backward_ns: DurationNs
    """Without recomputation."""
    update_ns: DurationNs
    """The optimiser's, once a step."""


class Recorded(Frozen):
    """What `testbed record` measured: medians, for one model, precision and shape of a micro-batch."""

    model: str
    sequence_length: int = Field(ge=2, strict=True)
    sequences: int = Field(ge=1, strict=True)
    """In one micro-batch."""
    precision: Precision
    software: str = Field(min_length=1)
    """What computed it, and when."""
    embedding: Part
    layer: Part
    """One of them."""
    head: Part
    """The last norm, the output layer and the loss."""


class Device(Frozen):
    """What computes."""

    name: str
    summary: str = Field(min_length=1)
    """What it is, in one line."""
    source: str = Field(min_length=1)
    """Where the numbers come from."""
    memory_bytes: int | None = Field(default=None, ge=1)
    bandwidth_bytes_per_s: int = Field(ge=1)
    """Of its memory: what the optimiser's update takes, which computes little and touches much."""
    fp32: Speed | None = None
    """None: not known."""
    half: Speed | None = None
    """In a 16-bit format; None: it has none, or it is not known."""
    recorded: tuple[Recorded, ...] = ()

    def speed(self, precision: Precision) -> Speed | None:
        """In a workload's precision."""
        return self.fp32 if precision == "fp32" else self.half

    def recording(self, model: str, sequence_length: int, sequences: int, precision: Precision) -> Recorded | None:
        """What was measured for exactly this."""
        asked = (model, sequence_length, sequences, precision)
        for found in self.recorded:
            if (found.model, found.sequence_length, found.sequences, found.precision) == asked:
                return found
        return None

"""A pipeline's trace from shapes alone: a model that is too large to train here, on a device, cut into stages.

A table describes the job (experiments/README.md, "Predicted"); every number is resolved before play: the duration of an
action follows from its FLOPs on the device, the size of a message from the codec's formula or from a paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from testbed import units
from testbed.codecs.catalogue import placement
from testbed.devices.codec_cost import device_codec_ns, rates_of
from testbed.devices.device import ComputeDevice, Precision, load_device
from testbed.devices.flops import ADAMW_BYTES, parameters, stage
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import Frozen, explain, read_toml
from testbed.message_key import Direction
from testbed.metrics.wires import wire_bytes
from testbed.profiles import LinkProfile
from testbed.spec import ScheduleName, Topology
from testbed.trace.format import Trace
from testbed.trace.synthetic import pipeline_trace
from testbed.workloads.models import FAMILIES, MADE, SIZES, ModelSize, model_size, split_layers

_WAYS: tuple[Direction, ...] = ("forward", "backward")
Table = TypeVar("Table", bound=Frozen)
Made = TypeVar("Made")
Count = Annotated[int, Field(ge=1, strict=True)]


class PayloadPerToken(Frozen):
    """Message sizes published in a paper."""

    forward: Annotated[float, Field(gt=0, le=1e12)]
    """Bytes of activations per token."""
    backward: Annotated[float, Field(gt=0, le=1e12)]


class ModelTable(Frozen):
    """Fields of a job's table about its model."""

    model: str | dict[str, Any]
    """Name of a model with known shapes, or a table with the fields of `ModelSize`."""
    precision: Precision
    compute: Annotated[float, Field(gt=0)] = 1.0
    """Factor applied to the device file's duration of every action."""
    sequence_length: Count
    sequences: Count
    """Sequences per micro-batch; in data parallel training, per iteration of a worker."""


class PipelineTable(ModelTable):
    """A pipeline."""

    parallelism: Literal["pipeline"] = "pipeline"
    device: str
    recompute: bool = False
    update: str | None = None
    """Duration from the last gradient to the end of the step; None: AdamW's memory traffic on the device."""
    microbatches: Count
    stages: Count
    layers: tuple[int, ...] | None = None
    schedule: ScheduleName
    in_flight: Count | None = None
    """Micro-batches in flight; None: the number of stages."""
    sends: Literal["overlapped", "blocking"] = "overlapped"
    codec: str | None = None
    payload: PayloadPerToken | None = None
    """Published message sizes, instead of a codec."""
    codec_cost: Literal["device", "zero"] = "zero"


class Shape(Frozen):
    """The numbers of a pipeline's step, which determine a trace."""

    stages: int
    microbatches: int
    schedule: ScheduleName
    in_flight: int
    blocking: bool
    forward_ns: tuple[int, ...]
    """Duration of the forward pass of one micro-batch, by stage; `backward_ns` includes recomputation."""
    backward_ns: tuple[int, ...]
    update_ns: tuple[int, ...]
    message_bytes: tuple[int, int]
    """Sizes of a micro-batch's activations and gradients."""
    encode_ns: tuple[int, int]
    decode_ns: tuple[int, int]
    tokens: int
    """Tokens per step."""

    @property
    def nodes(self) -> int:
        return self.stages

    @property
    def least_steps(self) -> int:
        """Minimum number of steps to reach the steady state."""
        return 2

    @property
    def period(self) -> int:
        """Number of steps after which the job repeats: 1, because all stages synchronise at the end of a step."""
        return 1

    def steady_ns(self, steps_ns: Sequence[int]) -> float:
        """Return the steady step time."""
        return float(median(steps_ns))

    @property
    def payload_bytes(self) -> int:
        """Payload bytes per step, over all nodes."""
        return (self.stages - 1) * self.microbatches * sum(self.message_bytes)

    def columns(self) -> dict[str, float]:
        """Return the table columns that are known before play, in seconds and bytes, by name."""
        return {
            "forward_s": max(self.forward_ns) / 1e9,
            "backward_s": max(self.backward_ns) / 1e9,
            "activation_bytes": self.message_bytes[0],
            "gradient_bytes": self.message_bytes[1],
        }

    def formula_s(self, topology: Topology, profiles: Sequence[LinkProfile]) -> float:
        """Return `(microbatches + stages - 1) (max(f, a) + max(b, g)) + 2 (stages - 1) delay + update`, a
        back-of-the-envelope estimate. f and b are the forward and backward times of the slowest stage, a and g the
        times of their messages on the slowest link.

        If sends block, f + a and b + g replace the maxima. Ignores stalls of the schedule.
        """
        times, delay_s = [0.0, 0.0], 0.0
        for profile in profiles:
            for number, pipe in enumerate((profile.up, profile.down)):
                if pipe is not None:
                    wire = wire_bytes(self.message_bytes[number], profile)
                    times[number] = max(times[number], wire * 8 / pipe.rate_bps)
                    delay_s = max(delay_s, pipe.delay_ns / 1e9)
        works = (max(self.forward_ns) / 1e9, max(self.backward_ns) / 1e9)
        rounds = sum(map(sum if self.blocking else max, zip(works, times, strict=True)))
        rest = 2 * (self.stages - 1) * delay_s + max(self.update_ns) / 1e9
        return (self.microbatches + self.stages - 1) * rounds + rest

    def trace(self, steps: int, scale: int = 1) -> Trace:
        """Return the trace of `steps` steps, with messages divided by `scale`."""
        numbers = self.model_dump(exclude={"tokens", "message_bytes"})
        first, second = (-(-size // scale) for size in self.message_bytes)
        return pipeline_trace(steps=steps, message_bytes=(first, second), **numbers)


def resolve_shape(table: Mapping[str, Any], where: str) -> Shape:
    """Resolve a job's table to its shape. SpecError, prefixed with `where`, if that is impossible."""
    return resolve(PipelineTable, _shape, table, where)


def resolve(kind: type[Table], make: Callable[[Table], Made], table: Mapping[str, Any], where: str) -> Made:
    """Validate a table as `kind`, and return the result of `make`. SpecError as from `resolve_shape`."""
    try:
        return make(kind.model_validate(table))
    except ValidationError as error:
        raise explain(error, kind, where) from None
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


PUBLISHED: Mapping[str, ModelSize] = {
    name: ModelSize(**shape) for name, shape in read_toml(Path(__file__).with_name("models.toml")).items()
}
"""Shapes of published models that are too large to train here."""


def named_size(model: str) -> ModelSize:
    """Return the size of a published model, or as `model_size`. UnknownNameError or SpecError for anything else."""
    if model in PUBLISHED:
        return PUBLISHED[model]
    try:
        return model_size(model)
    except UnknownNameError:
        raise UnknownNameError("model", model, (*SIZES, *MADE, *PUBLISHED)) from None


def model_on_device(
    model: str | Mapping[str, Any], device: str, precision: Precision
) -> tuple[ModelSize, ComputeDevice, float]:
    """Return a model's size, the device, and its FLOP/s in this precision. SpecError or UnknownNameError if unknown."""
    size = named_size(model) if isinstance(model, str) else _stated_size(model)
    machine = load_device(device)
    if (speed := machine.speed(precision)) is None:
        raise SpecError(f"device {machine.name} has no speed in {precision}")
    return size, machine, speed.effective_flops


def _shape(asked: PipelineTable) -> Shape:
    size, device, flops = model_on_device(asked.model, asked.device, asked.precision)
    parts = split_layers(size.layers, asked.stages, asked.layers)
    counts = [stage(size, own, sequence_length=asked.sequence_length, sequences=asked.sequences) for own in parts]
    forward = [count / flops * asked.compute for count in counts]
    backward = [(3 if asked.recompute else 2) * seconds for seconds in forward]
    if asked.update is None:
        update = [ADAMW_BYTES * parameters(size, own) / device.bandwidth_bytes_per_s for own in parts]
    else:
        update = [units.parse_time(asked.update) / 1e9] * asked.stages
    shape = (asked.sequences, asked.sequence_length, size.width)
    messages, encode, decode = _messages(asked, shape, device)
    return Shape(
        stages=asked.stages,
        microbatches=asked.microbatches,
        schedule=asked.schedule,
        in_flight=asked.in_flight or asked.stages,
        blocking=asked.sends == "blocking",
        forward_ns=_ns(forward),
        backward_ns=_ns(backward),
        update_ns=_ns(update),
        message_bytes=messages,
        encode_ns=encode,
        decode_ns=decode,
        tokens=asked.sequences * asked.sequence_length * asked.microbatches,
    )


def _messages(
    asked: PipelineTable, shape: tuple[int, int, int], device: ComputeDevice
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return the size of a message and the durations of its encode and decode, for activations and for gradients."""
    if (asked.codec is None) == (asked.payload is None):
        raise SpecError("state either a codec, or the bytes per token: payload = {forward, backward}")
    if asked.payload is not None:
        if asked.codec_cost != "zero":
            raise SpecError("the codec cost of a stated payload is unknown; set codec_cost = 'zero'")
        tokens = shape[0] * shape[1]
        stated = math.ceil(asked.payload.forward * tokens), math.ceil(asked.payload.backward * tokens)
        return stated, (0, 0), (0, 0)
    assert asked.codec is not None
    sizes = codec_bytes(asked.codec, shape)
    if asked.codec_cost == "zero":
        return sizes, (0, 0), (0, 0)
    return sizes, *coding_ns(asked.codec, shape, device)


def coding_ns(
    codec: str, shape: tuple[int, int, int], device: ComputeDevice
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the durations of encode and decode on a device, each for a micro-batch's activations and gradients.

    SpecError for a codec or a device without the necessary numbers.
    """
    rates = rates_of(device)
    specs = (placement.parse_placement(codec).at(0, way) for way in _WAYS)
    (e1, d1), (e2, d2) = (device_codec_ns(spec, way, shape, rates) for spec, way in zip(specs, _WAYS, strict=True))
    return (e1, e2), (d1, d2)


def codec_bytes(codec: str, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Return the encoded sizes of a micro-batch's activations and gradients of this shape, without headers, by the
    codec's formula: an upper bound if the size depends on the values. SpecError if the codec has none.
    """
    specs = [placement.parse_placement(codec).at(0, way) for way in _WAYS]
    for spec in specs:
        if spec.row.bits is None:
            raise SpecError(f"codec {spec.text} has no formula for the size of its messages; state a payload")
    values = math.prod(shape)
    first, second = (math.ceil(spec.bits(way, shape) * values / 8) for spec, way in zip(specs, _WAYS, strict=True))
    return first, second


def _stated_size(table: Mapping[str, Any]) -> ModelSize:
    try:
        size = ModelSize(**table)
    except TypeError as error:
        raise SpecError(f"model: {error}; it has {', '.join(ModelSize.__annotations__)}") from None
    if size.family not in FAMILIES:
        raise SpecError(f"model: family is {size.family!r}, not one of {', '.join(FAMILIES)}")
    for name, value in table.items():
        if name != "family" and (not isinstance(value, int) or value < 1):
            raise SpecError(f"model: {name} is {value!r}; state a whole number of at least 1")
    return size


def _ns(seconds: list[float]) -> tuple[int, ...]:
    return tuple(math.ceil(each * 1e9) for each in seconds)

"""A job's trace from shapes alone: a model that is too large to train here, on a device, cut into stages.

A table says what the job is (experiments/README.md, "Predicted"); every number is resolved before anything is played:
how long an action takes follows from its FLOPs on the device, how large a message is from the codec's own formula or
from what a paper states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from testbed import units
from testbed.codecs.catalogue import placement
from testbed.devices.codec_cost import device_codec_ns, rates_of
from testbed.devices.device import ComputeDevice, Precision, load_device
from testbed.devices.flops import ADAMW_BYTES, parameters, stage
from testbed.errors import SpecError
from testbed.frozen import Frozen, explain
from testbed.message_key import Direction
from testbed.metrics.wires import wire_bytes
from testbed.play.synthetic import pipeline_trace
from testbed.play.trace import Trace
from testbed.profiles import LinkProfile
from testbed.spec import ScheduleName, Topology
from testbed.workloads.models import FAMILIES, ModelSize, model_size, split_layers

_WAYS: tuple[Direction, ...] = ("forward", "backward")
Table = TypeVar("Table", bound=Frozen)
Made = TypeVar("Made")
Count = Annotated[int, Field(ge=1, strict=True)]


class PayloadPerToken(Frozen):
    """What a paper states of its messages."""

    forward: Annotated[float, Field(gt=0)]
    """Bytes that a token's activations take."""
    backward: Annotated[float, Field(gt=0)]


class ModelTable(Frozen):
    """A job as a file states it: what it trains."""

    model: str | dict[str, Any]
    """The name of a model whose shapes are known here, or a table with the fields of `ModelSize`."""
    precision: Precision
    compute: Annotated[float, Field(gt=0)] = 1.0
    """Every action takes so many times as long as the device file says."""
    sequence_length: Count
    sequences: Count
    """In a micro-batch; of whole models, in an iteration of one worker."""


class PipelineTable(ModelTable):
    """A pipeline."""

    parallelism: Literal["pipeline"] = "pipeline"
    device: str
    recompute: bool = False
    update: str | None = None
    """From the last gradient to the end of the step; None: AdamW's memory traffic on the device."""
    microbatches: Count
    stages: Count
    layers: tuple[int, ...] | None = None
    schedule: ScheduleName
    in_flight: Count | None = None
    """None: as many as there are stages."""
    sends: Literal["overlapped", "blocking"] = "overlapped"
    codec: str | None = None
    payload: PayloadPerToken | None = None
    """Instead of a codec: bytes that were published."""
    codec_cost: Literal["device", "zero"] = "zero"


class Shape(Frozen):
    """A pipeline's step in numbers. A trace follows from it."""

    stages: int
    microbatches: int
    schedule: ScheduleName
    in_flight: int
    blocking: bool
    forward_ns: tuple[int, ...]
    """Of one micro-batch, by stage; recomputation is in `backward_ns`."""
    backward_ns: tuple[int, ...]
    update_ns: tuple[int, ...]
    message_bytes: tuple[int, int]
    """Of a micro-batch's activations, and of its gradients."""
    encode_ns: tuple[int, int]
    decode_ns: tuple[int, int]
    tokens: int
    """In a step."""

    @property
    def nodes(self) -> int:
        return self.stages

    @property
    def least_steps(self) -> int:
        """Fewer tell nothing of the steady state."""
        return 2

    @property
    def period(self) -> int:
        """After how many steps the same is done again: at the end of a step all stages wait for each other, so that it
        tells nothing of the steps before.
        """
        return 1

    def steady_ns(self, steps_ns: Sequence[int]) -> float:
        """Return the time of a step in the steady state."""
        return float(median(steps_ns))

    @property
    def payload_bytes(self) -> int:
        """What all nodes send in a step."""
        return (self.stages - 1) * self.microbatches * sum(self.message_bytes)

    def columns(self) -> dict[str, float]:
        """Return what is known of a step before it is played, in seconds and bytes, by its name in a table."""
        return {
            "forward_s": max(self.forward_ns) / 1e9,
            "backward_s": max(self.backward_ns) / 1e9,
            "activation_bytes": self.message_bytes[0],
            "gradient_bytes": self.message_bytes[1],
        }

    def formula_s(self, topology: Topology, profiles: Sequence[LinkProfile]) -> float:
        """Return `(microbatches + stages - 1) (max(f, a) + max(b, g)) + 2 (stages - 1) delay + update`: what one
        reckons on the back of an envelope, from the slowest stage and the slowest link; a and g are a message's time on
        that link.

        f and b are added to a and g where sends block. It knows nothing of what a schedule keeps waiting.
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
        """Return the trace of so many steps; messages are divided by `scale`."""
        numbers = self.model_dump(exclude={"tokens", "message_bytes"})
        first, second = (-(-size // scale) for size in self.message_bytes)
        return pipeline_trace(steps=steps, message_bytes=(first, second), **numbers)


def resolve_shape(table: Mapping[str, Any], where: str) -> Shape:
    """Return the numbers of a job. SpecError, which starts with `where`, for what cannot be resolved."""
    return resolve(PipelineTable, _shape, table, where)


def resolve(kind: type[Table], make: Callable[[Table], Made], table: Mapping[str, Any], where: str) -> Made:
    """Return what `make` makes of a table of this kind. SpecError as from `resolve_shape`."""
    try:
        return make(kind.model_validate(table))
    except ValidationError as error:
        raise explain(error, kind, where) from None
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def model_on_device(
    model: str | Mapping[str, Any], device: str, precision: Precision
) -> tuple[ModelSize, ComputeDevice, float]:
    """Return a model's size, the device, and its FLOP/s in this precision. SpecError or UnknownNameError without."""
    size = model_size(model) if isinstance(model, str) else _stated_size(model)
    found = load_device(device)
    if (speed := found.speed(precision)) is None:
        raise SpecError(f"device {found.name} has no speed in {precision}")
    return size, found, speed.effective_flops


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
    """Return the bytes of a message, and what encoding and decoding it takes, of activations and of gradients."""
    if (asked.codec is None) == (asked.payload is None):
        raise SpecError("state either a codec, or the payload that a token takes: payload = {forward, backward}")
    if asked.payload is not None:
        if asked.codec_cost != "zero":
            raise SpecError("nobody can count what the codec of a stated payload costs; set codec_cost = 'zero'")
        tokens = shape[0] * shape[1]
        stated = math.ceil(asked.payload.forward * tokens), math.ceil(asked.payload.backward * tokens)
        return stated, (0, 0), (0, 0)
    assert asked.codec is not None
    sizes = codec_bytes(asked.codec, shape)
    if asked.codec_cost == "zero":
        return sizes, (0, 0), (0, 0)
    rates = rates_of(device)
    specs = (placement.parse_placement(asked.codec).at(0, way) for way in _WAYS)
    (e1, d1), (e2, d2) = (device_codec_ns(spec, way, shape, rates) for spec, way in zip(specs, _WAYS, strict=True))
    return sizes, (e1, e2), (d1, d2)


def codec_bytes(codec: str, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Return how large a micro-batch's activations and gradients of this shape are as a codec sends them, without
    headers: by its formula, which is the most where the size depends on the values. SpecError where it has none.
    """
    specs = [placement.parse_placement(codec).at(0, way) for way in _WAYS]
    for spec in specs:
        if spec.row.bits is None:
            raise SpecError(f"how large the messages of {spec.text} are follows from no formula; state a payload")
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
    return size


def _ns(seconds: list[float]) -> tuple[int, ...]:
    return tuple(math.ceil(each * 1e9) for each in seconds)

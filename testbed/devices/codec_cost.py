"""Duration of a codec on a device: bytes moved / memory bandwidth + operations / rate.

The catalogue counts bytes and operations (`codecs.catalogue.counting` has the rules). The rate is the one that training
reaches in fp32, because codecs compute in fp32, whatever the precision of the layers. No overlap is assumed, which
overestimates kernels that overlap both by at most a factor of 2; kernel launches, some 5 us each on a GPU, and copies
between device and host are not included.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from testbed.codecs.catalogue.codec_spec import CodecSpec, parse_codec
from testbed.codecs.catalogue.counting import Counted, count_work
from testbed.devices.device import ComputeDevice
from testbed.errors import SpecError
from testbed.message_key import Direction


class DeviceRates(NamedTuple):
    """The rates of a device that determine the cost of codecs."""

    bandwidth_bytes_per_s: float
    operations_per_s: float


def rates_of(device: ComputeDevice) -> DeviceRates:
    """Return the rates of a device. SpecError if its speed in fp32 is unknown."""
    if device.fp32 is None:
        raise SpecError(
            f"cannot compute the cost of codecs on device {device.name}, which has no speed in fp32; add [fp32] to "
            "its file, or set codec_cost = 'host' or 'zero'"
        )
    return DeviceRates(device.bandwidth_bytes_per_s, device.fp32.effective_flops)


def device_codec_ns(
    codec: CodecSpec | str, direction: Direction, shape: tuple[int, ...], rates: DeviceRates
) -> tuple[int, int]:
    """Return the durations of encoding and decoding one message of this shape, in nanoseconds.

    `codec` is one codec, not a placement. SpecError, with the advice to use host or zero, for a codec without counts;
    an empty tensor takes no time.
    """
    if not math.prod(shape):
        return 0, 0
    spec = parse_codec(codec) if isinstance(codec, str) else codec
    encode, decode = count_work(spec, direction, shape)
    return _ns(encode, rates), _ns(decode, rates)


def _ns(counted: Counted, rates: DeviceRates) -> int:
    seconds = counted.moved_bytes / rates.bandwidth_bytes_per_s + counted.operations / rates.operations_per_s
    return math.ceil(seconds * 1e9)

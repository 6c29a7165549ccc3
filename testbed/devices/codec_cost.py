"""How long a codec would take on a device: bytes moved / memory bandwidth + operations / rate.

What is moved and done is the catalogue's own count (`codecs.catalogue.counting`, with the rules of counting). The rate
is what training reaches in fp32: codecs compute in fp32, whatever the layers do. Nothing overlaps, so this is high by
at most a factor of 2 for kernels that hide one behind the other; launching kernels, some 5 us each on a GPU, and the
copy between device and host are not in it.
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
    """What of a device decides the cost of codecs."""

    bandwidth_bytes_per_s: float
    operations_per_s: float


def rates_of(device: ComputeDevice) -> DeviceRates:
    """Return the rates of a device. SpecError where its speed in fp32 is unknown."""
    if device.fp32 is None:
        raise SpecError(
            f"cannot say what codecs cost on device {device.name}: it has no speed in fp32, in which they compute; "
            "state [fp32] in its file, or set codec_cost = 'host' or 'zero'"
        )
    return DeviceRates(device.bandwidth_bytes_per_s, device.fp32.effective_flops)


def device_codec_ns(
    codec: CodecSpec | str, direction: Direction, shape: tuple[int, ...], rates: DeviceRates
) -> tuple[int, int]:
    """Return how long encoding and decoding one message of this shape take, in nanoseconds.

    `codec` is one codec, not a placement. SpecError, which says to use host or zero, for a codec whose work nobody
    can count; a tensor without values takes no time.
    """
    if not math.prod(shape):
        return 0, 0
    spec = parse_codec(codec) if isinstance(codec, str) else codec
    encode, decode = count_work(spec, direction, shape)
    return _ns(encode, rates), _ns(decode, rates)


def _ns(counted: Counted, rates: DeviceRates) -> int:
    seconds = counted.moved_bytes / rates.bandwidth_bytes_per_s + counted.operations / rates.operations_per_s
    return math.ceil(seconds * 1e9)

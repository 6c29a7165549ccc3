"""What codecs cost on a device."""

from __future__ import annotations

import pytest

from testbed.devices import device_codec_ns, device_files, load_device, rates_of
from testbed.devices.codec_cost import DeviceRates
from testbed.errors import SpecError

SHAPE = (1, 128, 256)


@pytest.mark.parametrize("name", device_files())
def test_every_shipped_device_has_rates(name: str) -> None:
    rates = rates_of(load_device(name))
    encode, decode = device_codec_ns("int8", "forward", SHAPE, rates)
    assert encode > decode > 0


def test_time_is_traffic_over_bandwidth_plus_operations_over_rate() -> None:
    slow_memory = device_codec_ns("bf16", "forward", SHAPE, DeviceRates(1e9, 1e30))
    slow_arithmetic = device_codec_ns("bf16", "forward", SHAPE, DeviceRates(1e30, 1e9))
    both = device_codec_ns("bf16", "forward", SHAPE, DeviceRates(1e9, 1e9))
    assert slow_memory == (128 * 256 * 6,) * 2
    assert slow_arithmetic == (128 * 256,) * 2
    assert both == (128 * 256 * 7,) * 2


def test_a_tensor_without_values_costs_nothing() -> None:
    assert device_codec_ns("int8", "backward", (4, 0, 8), DeviceRates(1e9, 1e9)) == (0, 0)


def test_a_device_without_fp32_is_refused() -> None:
    with pytest.raises(SpecError, match=r"fp32.*codec_cost = 'host' or 'zero'"):
        rates_of(load_device("t4").model_copy(update={"fp32": None}))

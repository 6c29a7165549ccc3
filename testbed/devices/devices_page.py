"""Draw the README of the shipped devices, in Markdown, from their files."""

from __future__ import annotations

from pathlib import Path

from testbed import units
from testbed.devices.device import SHIPPED, ComputeDevice, MatrixSpeed, read_device
from testbed.devices.durations import durations
from testbed.devices.this_machine import SHARE_OF_CORES
from testbed.profiles.profiles_page import fill_template
from testbed.spec import PipelineSpec, TextSpec

_TEMPLATE = Path(__file__).with_name("devices_page.md.j2")
_TOKENS = 1024


def draw_devices_page() -> str:
    """Draw the README. SpecError where a device cannot be read."""
    devices = [read_device(path) for path in sorted(SHIPPED.glob("*.toml"))]
    return fill_template(
        _TEMPLATE,
        devices=devices,
        rows=[_row(device) for device in devices],
        notes=_notes(devices),
        tokens=_TOKENS,
        share=SHARE_OF_CORES,
    )


def _row(device: ComputeDevice) -> tuple[str, ...]:
    return (
        device.name,
        device.summary,
        units.format_size(device.memory_bytes) if device.memory_bytes else "-",
        f"{device.bandwidth_bytes_per_s / 1e9:g}",
        *(
            f"{speed.peak_flops / 1e12:g} x {speed.utilisation:.0%}" if speed else "-"
            for speed in (device.fp32, device.half)
        ),
        *(f"{_pass_ms(device, precision):.3g}" if speed else "-" for precision, speed in _speeds(device).items()),
    )


def _speeds(device: ComputeDevice) -> dict[str, MatrixSpeed | None]:
    return {"fp32": device.fp32, "bf16": device.half}


def _pass_ms(device: ComputeDevice, precision: str) -> float:
    """Return how long forward and backward of GPT-2 124M take: one sequence, the whole model as one stage."""
    learned = {"family": "gpt2", "model": "gpt2", "text": "bundled", "precision": precision}
    sequence = {"sequence_length": _TOKENS, "batch_size": 1, "validation_batches": 1}
    workload = TextSpec.model_validate(learned | sequence)
    took = durations(device, workload, PipelineSpec(stages=1, microbatches=1, schedule="gpipe", in_flight=1))
    return (took.forward_ns[0] + took.backward_ns[0]) / 1e6


def _notes(devices: list[ComputeDevice]) -> list[str]:
    """Say where every number comes from; what holds for several devices is said once."""
    notes: dict[str, list[str]] = {}
    for device in devices:
        notes.setdefault(f"peak and bandwidth: {device.source}", []).append(device.name)
        for name, speed in _speeds(device).items():
            if speed is not None and speed.derived:
                notes.setdefault(f"peak derived: {speed.derived}.", []).append(f"{device.name} {name}")
            if speed is not None:
                said = f"{speed.utilisation:.0%} reached: {speed.utilisation_source}"
                notes.setdefault(said, []).append(f"{device.name} {name}")
            if speed is not None and name != speed.format:
                notes.setdefault(f"{speed.format} stands in for {name}, which it lacks.", []).append(device.name)
    return [f"{', '.join(names)}: {text}" for text, names in notes.items()]

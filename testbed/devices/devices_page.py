"""Generate the README of the shipped devices, in Markdown, from their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from testbed import units
from testbed.devices.device import SHIPPED, ComputeDevice, MatrixSpeed, read_device
from testbed.devices.durations import durations
from testbed.devices.this_machine import SHARE_OF_CORES
from testbed.profiles.profiles_page import fill_template
from testbed.spec import PipelineSpec, TextSpec
from testbed.workloads.models import model_size

_TEMPLATE = Path(__file__).with_name("devices_page.md.j2")
_TOKENS = 1024


def draw_devices_page() -> str:
    """Generate the README. SpecError for a device that cannot be read."""
    devices = [read_device(path) for path in sorted(SHIPPED.glob("*.toml"))]
    return fill_template(
        _TEMPLATE,
        devices=devices,
        rows=[_row(device) for device in devices],
        recorded=[row for device in devices for row in _recorded_rows(device)],
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
    """Return the computed duration of forward and backward of GPT-2 124M for one sequence."""
    return _whole_ms(device.model_copy(update={"recorded": ()}), "gpt2", precision, _TOKENS, 1)[0]


def _recorded_rows(device: ComputeDevice) -> Iterator[tuple[str, ...]]:
    """Compare the times of each recording with those that the device would have without it."""
    for recorded in device.recorded:
        shape = recorded.model, recorded.precision, recorded.sequence_length, recorded.sequences
        took, computed = (_whole_ms(each, *shape) for each in (device, device.model_copy(update={"recorded": ()})))
        what = f"{recorded.model}, {recorded.sequences} x {recorded.sequence_length}, {recorded.precision}"
        pairs = zip(took, computed, strict=True)
        yield device.name, what, *(f"{one:.3g} / {other:.3g} = {one / other:.2g}" for one, other in pairs)


def _whole_ms(
    device: ComputeDevice, model: str, precision: str, sequence_length: int, sequences: int
) -> tuple[float, float]:
    """Return the durations of forward and backward, and of the update, of a whole model as one stage."""
    learned = {"family": model_size(model).family, "model": model, "text": "bundled", "precision": precision}
    batch = {"sequence_length": sequence_length, "batch_size": sequences, "validation_batches": 1}
    workload = TextSpec.model_validate(learned | batch)
    took = durations(device, workload, PipelineSpec(stages=1, microbatches=1, schedule="gpipe", in_flight=1))
    return (took.forward_ns[0] + took.backward_ns[0]) / 1e6, took.update_ns[0] / 1e6


def _notes(devices: list[ComputeDevice]) -> list[str]:
    """List the source of every number; a note shared by several devices appears once."""
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
                notes.setdefault(f"{speed.format} in place of {name}, which it lacks.", []).append(device.name)
    return [f"{', '.join(names)}: {text}" for text, names in notes.items()]

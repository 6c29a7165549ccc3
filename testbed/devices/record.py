"""Measure how long the parts of a model take on this machine, and keep that in a device file. The worker does the measuring."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from testbed import paths
from testbed.devices import flops
from testbed.devices.files import read_device, write_device
from testbed.devices.model import Device, Part, Precision, Recorded, Speed
from testbed.errors import CapabilityError, SpecError, StageError
from testbed.workloads import table

_SOURCE = "measured by: python -m testbed record"


class Recording(NamedTuple):
    """What was measured, and on what."""

    recorded: Recorded
    machine: str
    """The processor, or the GPU, as it calls itself."""
    memory_bytes: int | None
    """A GPU's."""


def record(model: str, *, sequence_length: int, sequences: int, precision: Precision, device: str) -> Recording:
    """Medians of each part's passes and update, here, with one thread; it takes a few seconds. `device` is cpu, or cuda.

    SpecError for a model that cannot be had or a length that it cannot read, CapabilityError where there is no such device or
    no Python for the invoking user, StageError when measuring fails.
    """
    size = table.size_of(model)
    if not 2 <= sequence_length <= size.context or sequences < 1:
        raise SpecError(
            f"cannot record {sequences} sequences of {sequence_length} tokens; at least one, of 2 to {size.context} tokens: "
            f"{model} reads no more at once"
        )
    found = _ask(
        {
            "parent": os.getpid(),
            "model": model,
            "sequence_length": sequence_length,
            "sequences": sequences,
            "precision": precision,
            "device": device,
        }
    )
    recorded = Recorded(
        model=model,
        sequence_length=sequence_length,
        sequences=sequences,
        precision=precision,
        software=f"torch {found['torch']}, one thread, {datetime.now(UTC):%Y-%m-%d}",
        embedding=Part(**found["embedding"]),
        layer=Part(**found["layer"]),
        head=Part(**found["head"]),
    )
    return Recording(recorded, found["machine"] or cpu_model(), found["memory_bytes"])


def _ask(asked: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "testbed.devices.worker", json.dumps(asked)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            **paths.as_invoking_user(),
        )
    except OSError as error:
        raise CapabilityError(f"cannot record: cannot start {sys.executable}: {error.strerror}") from None
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        ended = f"its process ended with status {done.returncode}: {done.stderr.strip()[-2000:]}"
        raise StageError(f"recording {asked['model']} on {asked['device']} failed: {ended}") from None
    if refused := found.get("refused"):
        raise SpecError(f"cannot record {asked['model']}: {refused['message']}")
    recorded: dict[str, Any] = found["recorded"]
    return recorded


def with_recording(device: Device | None, name: str, found: Recording, *, anew: bool = False) -> Device:
    """The device with one recording more, which takes the place of one for the same. None: a new device, whose bandwidth is what
    was measured. So is its speed in the recording's precision, where that was not known or is to be found `anew`.
    """
    recorded = found.recorded
    known = device or Device(
        name=name,
        summary=f"{found.machine}, as recorded",
        source=f"{_SOURCE}; {recorded.software}",
        memory_bytes=found.memory_bytes,
        bandwidth_bytes_per_s=_bandwidth(recorded),
    )
    key = (recorded.model, recorded.sequence_length, recorded.sequences, recorded.precision)
    others = [r for r in known.recorded if (r.model, r.sequence_length, r.sequences, r.precision) != key]
    changes: dict[str, Any] = {"recorded": (*others, recorded)}
    if anew or known.speed(recorded.precision) is None:
        changes["fp32" if recorded.precision == "fp32" else "half"] = Speed(
            peak_flops=_reached(recorded),
            format=recorded.precision,
            derived="what training reached, not what the device could do at most",
            utilisation=1.0,
            utilisation_source=f"{_SOURCE}: {recorded.model}, {recorded.sequences} x {recorded.sequence_length} tokens",
        )
    return known.model_copy(update=changes)


def keep(path: Path, found: Recording) -> Device:
    """Write a recording to a device file, into the one that is there where there is one. SpecError when that is none, or the
    file cannot be written.
    """
    device = with_recording(read_device(path) if path.exists() else None, path.stem, found)
    write(path, device)
    return device


def write(path: Path, device: Device) -> None:
    """Put a device file there, for the person behind sudo. SpecError when that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write_device(device), encoding="utf8")
        paths.give_to_user(path)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from None


def cpu_model() -> str:
    """As /proc/cpuinfo calls it; where it does not, the architecture."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf8"), re.MULTILINE)
    return found[1].strip() if found else os.uname().machine


def _reached(found: Recorded) -> int:
    """FLOPs of a whole model's two passes over the time that they took, in FLOP/s."""
    size = table.size_of(found.model)
    counted = 3 * flops.stage(
        size, range(size.layers), sequence_length=found.sequence_length, sequences=found.sequences
    )
    took_ns = sum(part.forward_ns + part.backward_ns for part in (found.embedding, found.head))
    took_ns += size.layers * (found.layer.forward_ns + found.layer.backward_ns)
    return round(counted * 1e9 / took_ns)


def _bandwidth(found: Recorded) -> int:
    """Of memory, from the optimiser's update, in bytes per second."""
    size = table.size_of(found.model)
    took_ns = found.embedding.update_ns + found.head.update_ns + size.layers * found.layer.update_ns
    return round(flops.ADAMW_BYTES * flops.parameters(size, range(size.layers)) * 1e9 / took_ns)

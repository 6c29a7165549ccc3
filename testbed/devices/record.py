"""Measure the parts of a model on this machine, and store the result in a device file. record_worker.py measures."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from testbed import paths, process
from testbed.devices import flops
from testbed.devices.codec_cost import DeviceRates, device_codec_ns
from testbed.devices.device import ComputeDevice, MatrixSpeed, Precision, RecordedTimes, read_device, write_device
from testbed.errors import SpecError, StageError
from testbed.frozen import Frozen
from testbed.message_key import Direction
from testbed.workloads import models

_SOURCE = "measured by: python -m testbed record"


class RecordedCodec(Frozen):
    """Times of one codec for one message of a model, and by the rule of `codec_cost`, encode and decode."""

    codec: str
    direction: Direction
    copied: bool
    """Whether it works only on the CPU."""
    encode_ns: int
    decode_ns: int

    def by_rule(self, recorded: RecordedTimes, rates: DeviceRates) -> tuple[int, ...]:
        """Return what the rule says at the rates of the device; empty for a codec without counts."""
        shape = (recorded.sequences, recorded.sequence_length, models.model_size(recorded.model).width)
        with contextlib.suppress(SpecError):
            return device_codec_ns(self.codec, self.direction, shape, rates)
        return ()


class MachineRecording(NamedTuple):
    """A measurement and its machine."""

    recorded: RecordedTimes
    machine: str
    """The name of the processor or GPU."""
    memory_bytes: int | None
    """A GPU's memory; None for a processor."""
    codecs: tuple[RecordedCodec, ...] = ()


def record_model(
    model: str, *, sequence_length: int, sequences: int, precision: Precision, device: str, codecs: Sequence[str] = ()
) -> MachineRecording:
    """Measure median passes and updates of each part on this machine, with one thread, and `codecs` on messages
    between its layers; takes a few seconds, and two per codec.

    `device` is cpu or cuda. SpecError for an unavailable model or an unsupported length, CapabilityError without such a
    device or without Python for the invoking user, StageError when measuring fails.
    """
    size = models.model_size(model)
    if not 2 <= sequence_length <= size.context or sequences < 1:
        raise SpecError(
            f"cannot record {sequences} sequences of {sequence_length} tokens; {model} needs at least one sequence, of "
            f"2 to {size.context} tokens"
        )
    shape = {"model": model, "sequence_length": sequence_length, "sequences": sequences, "precision": precision}
    answer = process.ask(
        "testbed.devices.record_worker",
        {**shape, "device": device, "codecs": list(codecs)},
        attempt=f"record {model} on {device}",
        failure=StageError,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=None,  # a model may be named by its folder's path
        **paths.as_invoking_user(),
    )
    software = f"torch {answer['torch']}, one thread, {datetime.now(UTC):%Y-%m-%d}"
    recorded = RecordedTimes.model_validate({**shape, "software": software, **answer["parts"]})
    times = tuple(map(RecordedCodec.model_validate, answer["codecs"]))
    return MachineRecording(recorded, answer["machine"] or cpu_model(), answer["memory_bytes"], times)


def with_recording(
    device: ComputeDevice | None, name: str, recording: MachineRecording, *, anew: bool = False
) -> ComputeDevice:
    """Add a recording to a device, in place of an earlier one for the same model, shape and precision.

    `device` None makes a new device with the measured bandwidth. The speed in the recording's precision is also the
    measured one if it was unknown or `anew` is set.
    """
    recorded = recording.recorded
    known = device or ComputeDevice(
        name=name,
        summary=f"{recording.machine}, as recorded",
        source=f"{_SOURCE}; {recorded.software}",
        memory_bytes=recording.memory_bytes,
        bandwidth_bytes_per_s=_bandwidth(recorded),
    )
    others = [other for other in known.recorded if other.key != recorded.key]
    changes: dict[str, Any] = {"recorded": (*others, recorded)}
    if anew or known.speed(recorded.precision) is None:
        changes["fp32" if recorded.precision == "fp32" else "half"] = MatrixSpeed(
            peak_flops=_reached(recorded),
            format=recorded.precision,
            derived="the speed that training reached, not the device's peak",
            utilisation=1.0,
            utilisation_source=f"{_SOURCE}: {recorded.model}, {recorded.sequences} x {recorded.sequence_length} tokens",
        )
    return known.model_copy(update=changes)


def keep_recording(path: Path, recording: MachineRecording, *, anew: bool = False) -> ComputeDevice:
    """Write a recording into a device file, creating it if needed, as the user who invoked sudo; see `with_recording`.

    SpecError for an existing file that is not a device file, or one that cannot be written.
    """
    device = with_recording(read_device(path) if path.exists() else None, path.stem, recording, anew=anew)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write_device(device), encoding="utf8")
        paths.give_to_user(path)
    except OSError as error:
        raise SpecError(f"cannot write {path}: {error.strerror}") from None
    return device


def cpu_model() -> str:
    """Return the processor's name in /proc/cpuinfo, or else the architecture."""
    name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf8"), re.MULTILINE)
    return name[1].strip() if name else os.uname().machine


def _reached(recorded: RecordedTimes) -> int:
    """Return the speed of a whole model's two passes, in FLOP/s."""
    size = models.model_size(recorded.model)
    counted = 3 * flops.stage(
        size, range(size.layers), sequence_length=recorded.sequence_length, sequences=recorded.sequences
    )
    took_ns = sum(part.forward_ns + part.backward_ns for part in (recorded.embedding, recorded.head))
    took_ns += size.layers * (recorded.layer.forward_ns + recorded.layer.backward_ns)
    return round(counted * 1e9 / took_ns)


def _bandwidth(recorded: RecordedTimes) -> int:
    """Return the memory bandwidth that the optimiser's update reached, in bytes per second."""
    size = models.model_size(recorded.model)
    took_ns = recorded.embedding.update_ns + recorded.head.update_ns + size.layers * recorded.layer.update_ns
    return round(flops.ADAMW_BYTES * flops.parameters(size, range(size.layers)) * 1e9 / took_ns)

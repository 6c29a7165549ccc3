"""What this machine reaches, measured once and kept, and how busy it would be with the real maths of a paced cell."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
from pathlib import Path

from testbed import paths
from testbed.devices import record
from testbed.devices.durations import durations
from testbed.devices.files import read_device
from testbed.devices.model import Device, Precision
from testbed.spec import Cell, Measured

_MODEL, _SEQUENCE_LENGTH, _SEQUENCES = "gpt2-mini", 64, 4
"""What a machine is measured with: the default experiment's micro-batch."""
SHARE_OF_CORES = 0.5
"""How much of them paced stages may need. Four stages on two cores that needed a quarter of them ended their steps 3 % late, half
of them 8 %; beyond that a third to three quarters of all actions ended late."""

_RETRANSMISSION_FLOOR_MS, _DELAYED_ACKNOWLEDGEMENT_MS = 200, 40
"""Linux: TCP_RTO_MIN and TCP_DELACK_MIN in include/net/tcp.h."""


def host_file() -> Path:
    """Where this machine's speed is kept: another processor or torch has another file."""
    name = f"host {record.cpu_model()} torch {importlib.metadata.version('torch')}".lower()
    return paths.cache_folder() / f"{re.sub('[^a-z0-9.]+', '-', name)}.toml"


def host(precision: Precision = "fp32", *, again: bool = False) -> Device:
    """This machine, one thread of it. Where it is not known in that precision, or `again`, it is measured now: 10 s, in bf16 on a
    processor without such instructions 30 s. Errors as `record.record`, SpecError where the cache cannot be written.
    """
    path = host_file()
    device = read_device(path) if path.exists() else None
    if device is None or device.speed(precision) is None or again:
        found = record.record(
            _MODEL, sequence_length=_SEQUENCE_LENGTH, sequences=_SEQUENCES, precision=precision, device="cpu"
        )
        device = record.with_recording(device, path.stem, found, anew=True)
        record.write(path, device)
    return device


def duty(cell: Cell, machine: Device) -> float:
    """Cores of `machine` that all stages' maths needs while the pipeline is full, at a dilation of 1: forward and backward of a
    micro-batch there, the sum over all stages, by forward and backward of the slowest stage on the emulated device.

    Codecs, the optimiser, the relay and the network stack come on top; bubbles are not counted off.
    """
    real = durations(machine, cell.workload, cell.pipeline)
    needed = [there + back for there, back in zip(real.forward_ns, real.backward_ns, strict=True)]
    if isinstance(cell.compute, Measured):
        return sum(needed) / max(needed)
    stages = range(cell.pipeline.stages)
    forward, backward = cell.compute.forward_ns, cell.compute.backward_ns
    return sum(needed) / max(forward[stage % len(forward)] + backward[stage % len(backward)] for stage in stages)


def needed_dilation(cell: Cell, machine: Device, cores: int | None = None) -> int:
    """The smallest dilation with which `duty` is at most SHARE_OF_CORES of the cores; `cores`: those of this process where None.

    1 for a cell whose compute is measured, which takes what it takes.
    """
    if isinstance(cell.compute, Measured):
        return 1
    available = SHARE_OF_CORES * (cores or len(os.sched_getaffinity(0)))
    return max(1, math.ceil(duty(cell, machine) / available - 1e-9))


def caveat(dilation: int) -> str:
    """What a dilation does not stretch, as one sentence for people; empty at 1."""
    if dilation == 1:
        return ""
    floor, acknowledgement = (
        f"{constant / dilation:.3g} ms" for constant in (_RETRANSMISSION_FLOOR_MS, _DELAYED_ACKNOWLEDGEMENT_MS)
    )
    return (
        f"dilation {dilation} does not stretch TCP's constants or the kernel's clock tick: in emulated time the floor of the "
        f"retransmission timer is {floor} instead of {_RETRANSMISSION_FLOOR_MS} ms, a delayed acknowledgement waits at most "
        f"{acknowledgement} instead of {_DELAYED_ACKNOWLEDGEMENT_MS} ms"
    )

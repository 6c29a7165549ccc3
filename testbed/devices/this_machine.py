"""This machine's speed, measured once and cached, and its load from the real maths of a paced cell."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
from pathlib import Path

from testbed import paths
from testbed.devices import record
from testbed.devices.device import ComputeDevice, Precision, read_device
from testbed.devices.durations import durations
from testbed.spec import Cell, Paced

_MODEL, _SEQUENCE_LENGTH, _SEQUENCES = "gpt2-mini", 64, 4
"""Model and shape used to measure a machine: the default experiment's micro-batch."""
SHARE_OF_CORES = 0.5
"""Maximum share of the cores that paced stages may need. Four stages on two cores ended their steps 3 % late when they
needed a quarter of the cores, 8 % with half of them; beyond that a third to three quarters of all actions ended
late."""

_RETRANSMISSION_FLOOR_MS, _DELAYED_ACKNOWLEDGEMENT_MS = 200, 40
"""Linux: TCP_RTO_MIN and TCP_DELACK_MIN in include/net/tcp.h."""


def host_file() -> Path:
    """Return the file with this machine's speed, which depends on processor and torch version."""
    name = f"host {record.cpu_model()} torch {importlib.metadata.version('torch')}".lower()
    return paths.cache_folder() / f"{re.sub('[^a-z0-9.]+', '-', name)}.toml"


def host(precision: Precision = "fp32", *, again: bool = False) -> ComputeDevice:
    """Return this machine as a device with one thread.

    Measures it if its speed in that precision is unknown or `again` is set, which takes 10 s, or 30 s for bf16 on a
    processor without such instructions. Raises the errors of `record.record_model`, and SpecError if the cache cannot
    be written.
    """
    path = host_file()
    device = read_device(path) if path.exists() else None
    if device is None or device.speed(precision) is None or again:
        recording = record.record_model(
            _MODEL, sequence_length=_SEQUENCE_LENGTH, sequences=_SEQUENCES, precision=precision, device="cpu"
        )
        device = record.keep_recording(path, recording, anew=True)
    return device


def cores_needed(cell: Cell, machine: ComputeDevice) -> float:
    """Return the number of cores of `machine` that the maths of all stages needs in a full pipeline, at dilation 1.

    This is the time of forward and backward of a micro-batch on `machine`, summed over all stages, divided by that of
    the slowest stage on the emulated device. It excludes codecs, the optimiser, the relay and the network stack, and
    ignores bubbles.
    """
    real = durations(machine, cell.workload, cell.pipeline)
    needed = [there + back for there, back in zip(real.forward_ns, real.backward_ns, strict=True)]
    if not isinstance(cell.compute, Paced):
        return sum(needed) / max(needed)
    stages = range(cell.nodes)  # workers of data parallel training are one stage each
    forward, backward = cell.compute.forward_ns, cell.compute.backward_ns
    return sum(needed) / max(forward[stage % len(forward)] + backward[stage % len(backward)] for stage in stages)


def needed_dilation(cell: Cell, machine: ComputeDevice, cores: int | None = None) -> int:
    """Return the smallest dilation at which the stages need at most SHARE_OF_CORES of the cores.

    `cores` None: those available to this process. Returns 1 for a cell that is played or not paced.
    """
    if not isinstance(cell.compute, Paced) or cell.timing == "played":
        return 1
    available = SHARE_OF_CORES * (cores or len(os.sched_getaffinity(0)))
    return max(1, math.ceil(cores_needed(cell, machine) / available - 1e-9))


def caveat(dilation: int) -> str:
    """Return a caveat on the effects of a dilation; empty at 1."""
    if dilation == 1:
        return ""
    floor, acknowledgement = (
        f"{constant / dilation:.3g} ms" for constant in (_RETRANSMISSION_FLOOR_MS, _DELAYED_ACKNOWLEDGEMENT_MS)
    )
    return (
        f"dilation {dilation}: time in the lab runs {dilation} times slower, and reported times are divided by "
        f"{dilation}. TCP's constants and the kernel's clock tick are not dilated: in emulated time the minimum "
        f"retransmission timeout is {floor} instead of {_RETRANSMISSION_FLOOR_MS} ms, and a delayed acknowledgement "
        f"waits at most {acknowledgement} instead of {_DELAYED_ACKNOWLEDGEMENT_MS} ms"
    )

"""What this machine reaches, measured once and kept, and how busy it would be with the real maths of a paced cell."""

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
"""The model and shape that a machine is measured with: the default experiment's micro-batch."""
SHARE_OF_CORES = 0.5
"""The share of the cores that paced stages may need. Four stages on two cores that needed a quarter of them ended their
steps 3 % late, with half of them 8 %; beyond that a third to three quarters of all actions ended late."""

_RETRANSMISSION_FLOOR_MS, _DELAYED_ACKNOWLEDGEMENT_MS = 200, 40
"""Linux: TCP_RTO_MIN and TCP_DELACK_MIN in include/net/tcp.h."""


def host_file() -> Path:
    """Return the file that keeps this machine's speed; another processor or torch has another file."""
    name = f"host {record.cpu_model()} torch {importlib.metadata.version('torch')}".lower()
    return paths.cache_folder() / f"{re.sub('[^a-z0-9.]+', '-', name)}.toml"


def host(precision: Precision = "fp32", *, again: bool = False) -> ComputeDevice:
    """Return this machine as a device of one thread.

    It is measured now where its speed in that precision is unknown, or `again`: this takes 10 s, or 30 s in bf16 on a
    processor without such instructions. Errors as `record.record_model`, SpecError where the cache cannot be written.
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
    """Return how many cores of `machine` the maths of all stages needs while the pipeline is full, at a dilation of 1.

    That is the time for forward and backward of a micro-batch there, summed over all stages, over the time for both of
    the slowest stage on the emulated device. Codecs, the optimiser, the relay and the network stack come on top;
    bubbles are not deducted.
    """
    real = durations(machine, cell.workload, cell.pipeline)
    needed = [there + back for there, back in zip(real.forward_ns, real.backward_ns, strict=True)]
    if not isinstance(cell.compute, Paced):
        return sum(needed) / max(needed)
    stages = range(cell.pipeline.stages)
    forward, backward = cell.compute.forward_ns, cell.compute.backward_ns
    return sum(needed) / max(forward[stage % len(forward)] + backward[stage % len(backward)] for stage in stages)


def needed_dilation(cell: Cell, machine: ComputeDevice, cores: int | None = None) -> int:
    """Return the smallest dilation with which the stages need at most SHARE_OF_CORES of the cores.

    `cores` None: those that this process may use. 1 for a cell whose compute is not paced, or that is played.
    """
    if not isinstance(cell.compute, Paced) or cell.timing == "played":
        return 1
    available = SHARE_OF_CORES * (cores or len(os.sched_getaffinity(0)))
    return max(1, math.ceil(cores_needed(cell, machine) / available - 1e-9))


def caveat(dilation: int) -> str:
    """Say what a dilation does, and what it does not stretch; empty at 1."""
    if dilation == 1:
        return ""
    floor, acknowledgement = (
        f"{constant / dilation:.3g} ms" for constant in (_RETRANSMISSION_FLOOR_MS, _DELAYED_ACKNOWLEDGEMENT_MS)
    )
    return (
        f"dilation {dilation}: everything takes {dilation} times as long in the lab, and reported times are divided by "
        f"{dilation}. TCP's constants and the kernel's clock tick are not stretched: in emulated time the floor of the "
        f"retransmission timer is {floor} instead of {_RETRANSMISSION_FLOOR_MS} ms, and a delayed acknowledgement "
        f"waits at most {acknowledgement} instead of {_DELAYED_ACKNOWLEDGEMENT_MS} ms"
    )

"""Emulated devices: how long would each stage's actions take on a given device? Imports no torch, except in
record_worker.py and stopwatch.py.

device          the record of a device, and device files (*.toml beside this module)
flops           FLOPs of a stage of a model
durations       durations of a model's stages on a device
codec_cost      duration of a codec on a device
compute         `[cell.compute]` of an experiment file
record          measures this machine for a device file
record_worker   the measuring program that record starts
stopwatch       times work and codecs on a device
this_machine    this machine's speed, and its load from a paced cell
devices_page    the README of the shipped devices
"""

from __future__ import annotations

from testbed.devices.codec_cost import device_codec_ns, rates_of
from testbed.devices.compute import compute_of, compute_of_job
from testbed.devices.device import ComputeDevice, device_files, load_device, read_device, write_device
from testbed.devices.this_machine import caveat, cores_needed, host, needed_dilation

__all__ = [
    "ComputeDevice",
    "caveat",
    "compute_of",
    "compute_of_job",
    "cores_needed",
    "device_codec_ns",
    "device_files",
    "host",
    "load_device",
    "needed_dilation",
    "rates_of",
    "read_device",
    "write_device",
]

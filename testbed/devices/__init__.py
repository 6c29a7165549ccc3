"""Emulated devices: how long would each stage's actions take on one? Imports no torch, except in worker.py.

device          the record of a device, and device files (*.toml beside this module)
flops           what a stage of a model needs
durations       how long the stages of a model take on a device
codec_cost      how long a codec would take on a device
compute         `[cell.compute]` of an experiment file
record          measure this machine for a device file
worker          the program that record starts to do so
this_machine    what this machine reaches, and how busy a paced cell would keep it
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

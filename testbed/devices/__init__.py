"""Devices that are emulated: how fast they compute, and so how long each stage's actions take. No torch but in worker.py.

model.py is the record of a device, files.py reads and writes device files (*.toml beside this module), flops.py counts what a
stage needs, durations.py turns both into times, compute.py reads `[cell.compute]`. record.py measures with worker.py, a program
of its own; machine.py keeps what this machine reaches, and says how busy it would be with a paced cell. page.py draws the README.
"""

from __future__ import annotations

from testbed.devices.compute import compute_of
from testbed.devices.files import device_files, load_device, read_device, write_device
from testbed.devices.machine import caveat, duty, host, needed_dilation
from testbed.devices.model import Device, Part, Recorded, Speed

__all__ = [
    "Device",
    "Part",
    "Recorded",
    "Speed",
    "caveat",
    "compute_of",
    "device_files",
    "duty",
    "host",
    "load_device",
    "needed_dilation",
    "read_device",
    "write_device",
]

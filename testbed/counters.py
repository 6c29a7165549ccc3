"""The kernel's traffic counters of network devices, for stages, which read their own, and for whole labs.

Reading them needs no privilege and touches no packet.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from testbed.closing import Closing
from testbed.errors import LabError
from testbed.records import CountersRecord


class DeviceRow(NamedTuple):
    """Traffic of a device since its creation, in its own bytes (on veth, including Ethernet headers)."""

    received_bytes: int
    received_packets: int
    received_dropped: int
    sent_bytes: int
    sent_packets: int
    sent_dropped: int


def parse_device_table(table: bytes) -> dict[str, DeviceRow]:
    """Parse the rows of a /proc/net/dev by device: 8 numbers received, then 8 sent."""
    rows = {}
    for line in table.split(b"\n")[2:]:
        name, _, fields = line.partition(b":")
        if fields:  # bytes, packets, errors, dropped ...
            numbers = [int(field) for field in fields.split()]
            rows[name.strip().decode()] = DeviceRow(*(numbers[i] for i in (0, 1, 3, 8, 9, 11)))
    return rows


class DeviceTable(Closing):
    """/proc/net/dev of the calling thread's network namespace at construction; a context manager."""

    def __init__(self) -> None:
        # The thread's, not the process's: a thread may have entered another namespace. The file stays bound to it.
        self._file = os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> dict[str, DeviceRow]:
        """Read the row of every device, by name."""
        at, parts = 0, []
        while part := os.pread(self._file, 65536, at):
            parts.append(part)
            at += len(part)
        return parse_device_table(b"".join(parts))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class DeviceCounters(Closing):
    """Summed counters of some devices of one namespace, in bytes of IP packets; a context manager."""

    def __init__(self, devices: Sequence[str], overhead_bytes: int) -> None:
        """Count from now. `overhead_bytes`: bytes counted in addition to each IP packet, 14 on veth, 0 on TUN.

        LabError if a device does not exist.
        """
        self.devices, self.overhead_bytes = tuple(devices), overhead_bytes
        self._table = DeviceTable()
        try:
            self._base = self._sums()
        except BaseException:
            self.close()
            raise

    def _sums(self) -> list[int]:
        rows = self._table.read()
        for device in self.devices:
            if device not in rows:
                raise LabError(
                    f"cannot read the counters of {device}: there is no such device in this network namespace"
                )
        return [sum(numbers) for numbers in zip(*(rows[device] for device in self.devices), strict=True)]

    def read(self) -> CountersRecord:
        """Read the traffic of the devices since this object was created. LabError if a device has disappeared."""
        new = DeviceRow(*(now - then for now, then in zip(self._sums(), self._base, strict=True)))
        return CountersRecord(
            sent_bytes=new.sent_bytes - self.overhead_bytes * new.sent_packets,
            received_bytes=new.received_bytes - self.overhead_bytes * new.received_packets,
            sent_packets=new.sent_packets,
            received_packets=new.received_packets,
        )

    def close(self) -> None:
        self._table.close()

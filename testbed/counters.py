"""Bytes on a stage's links, as its network devices count them. Needs no privilege: the stage itself reads its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from testbed.errors import LabError
from testbed.records import CountersRecord


class _Raw(NamedTuple):
    received_bytes: int
    received_packets: int
    sent_bytes: int
    sent_packets: int


def parse(table: bytes, device: str) -> _Raw | None:
    """One device's line of a /proc/net/dev table, or None if the device is not in it."""
    wanted = device.encode()
    for line in table.split(b"\n")[2:]:
        name, _, fields = line.partition(b":")
        if name.strip() == wanted:
            numbers = fields.split()
            return _Raw(int(numbers[0]), int(numbers[1]), int(numbers[8]), int(numbers[9]))
    return None


class DeviceCounters:
    """Counters of devices in the network namespace of the thread that makes this, added up, in bytes of IP packets."""

    def __init__(self, devices: Sequence[str], overhead_bytes: int) -> None:
        """Count from now. `overhead_bytes` is what each device counts on top of each IP packet: 14 on veth, 0 on TUN.

        LabError when a device is not there.
        """
        self.devices, self.overhead_bytes = tuple(devices), overhead_bytes
        # Of the thread, not of the process: a thread may have entered another namespace. The file stays bound to it.
        self._file = os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._base = self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> _Raw:
        at, parts = 0, []
        while part := os.pread(self._file, 65536, at):
            parts.append(part)
            at += len(part)
        table = b"".join(parts)
        found = [parse(table, device) for device in self.devices]
        if None in found:
            missing = self.devices[found.index(None)]
            raise LabError(f"cannot read the counters of {missing}: there is no such device in this network namespace")
        return _Raw(*(sum(numbers) for numbers in zip(*filter(None, found), strict=True)))

    def read(self) -> CountersRecord:
        """What has crossed the devices since this object was made. LabError when one has gone."""
        new = _Raw(*(now - then for now, then in zip(self._read(), self._base, strict=True)))
        return CountersRecord(
            sent_bytes=new.sent_bytes - self.overhead_bytes * new.sent_packets,
            received_bytes=new.received_bytes - self.overhead_bytes * new.received_packets,
            sent_packets=new.sent_packets,
            received_packets=new.received_packets,
        )

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> DeviceCounters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

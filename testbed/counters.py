"""Bytes on a stage's access link, as the network device counts them. Needs no privilege: the stage itself reads its own."""

from __future__ import annotations

import os
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
    """Counters of one device in the network namespace of the thread that makes this, in bytes of IP packets."""

    def __init__(self, device: str, overhead_bytes: int) -> None:
        """Count from now. `overhead_bytes` is what the device counts on top of each IP packet: 14 on veth, 0 on TUN.

        LabError when the device is not there.
        """
        self.device, self.overhead_bytes = device, overhead_bytes
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
        if (found := parse(b"".join(parts), self.device)) is None:
            raise LabError(f"cannot read the counters of {self.device}: there is no such device in this network namespace")
        return found

    def read(self) -> CountersRecord:
        """What has crossed the device since this object was made. LabError when the device has gone."""
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

"""Processor time statistics of this machine, from /proc."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class ProcessorTicks(NamedTuple):
    """Processor time since boot by state, in clock ticks."""

    idle: int
    waiting: int
    """Idle while waiting for a disk."""
    stolen: int
    """Taken by the hypervisor while there was work."""
    total: int


def read_processors() -> dict[str, ProcessorTicks]:
    """Read /proc/stat: every processor by its name there ("cpu0"), and their sum ("cpu")."""
    return parse_processors(Path("/proc/stat").read_text(encoding="ascii"))


def parse_processors(stat: str) -> dict[str, ProcessorTicks]:
    """Parse the processor lines of a /proc/stat: user nice system idle iowait irq softirq steal, then guest times."""
    processors = {}
    for line in stat.splitlines():
        name, *words = line.split()
        if name.startswith("cpu"):
            ticks = [int(word) for word in words[:8]]  # user time includes guests' time
            processors[name] = ProcessorTicks(idle=ticks[3], waiting=ticks[4], stolen=ticks[7], total=sum(ticks))
    return processors


def granted_share(pids: Iterable[int]) -> float:
    """Return the share of their runnable time that processes actually ran, since they started (/proc/PID/schedstat): 1
    without competition for their processor, or without such statistics in the kernel.
    """
    ran_ns = waited_ns = 0
    for pid in pids:
        with suppress(OSError):  # it has ended, or the kernel has no such statistics
            ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
    return ran_ns / (ran_ns + waited_ns) if ran_ns and waited_ns else 1.0

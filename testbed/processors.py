"""How this machine's processors spend their time, as /proc says."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class ProcessorTicks(NamedTuple):
    """How processors spent their time since the machine started, in clock ticks."""

    idle: int
    waiting: int
    """Idle too, but for a disk."""
    stolen: int
    """Taken by the machine around a virtual one while there was work."""
    total: int


def read_processors() -> dict[str, ProcessorTicks]:
    """Read /proc/stat: every processor by its name there ("cpu0"), and all together ("cpu")."""
    return parse_processors(Path("/proc/stat").read_text(encoding="ascii"))


def parse_processors(stat: str) -> dict[str, ProcessorTicks]:
    """Read the processors' lines of a /proc/stat: user nice system idle iowait irq softirq steal, then guests' time."""
    processors = {}
    for line in stat.splitlines():
        name, *words = line.split()
        if name.startswith("cpu"):
            ticks = [int(word) for word in words[:8]]  # guests' time is in user's already
            processors[name] = ProcessorTicks(idle=ticks[3], waiting=ticks[4], stolen=ticks[7], total=sum(ticks))
    return processors


def granted_share(pids: Iterable[int]) -> float:
    """Return in which share of the time that processes could have run they were let run, since they began: 1 where no
    other wanted their processor, and where the kernel does not say (/proc/PID/schedstat).
    """
    ran_ns = waited_ns = 0
    for pid in pids:
        with suppress(OSError):  # it has ended, or the kernel keeps no such statistics
            ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
    return ran_ns / (ran_ns + waited_ns) if ran_ns and waited_ns else 1.0

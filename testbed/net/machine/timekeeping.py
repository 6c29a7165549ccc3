"""This machine's timekeeping without a lab: lateness of sleeps, and load by other programs."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import NamedTuple

from testbed.errors import CapabilityError
from testbed.net.certificate.verdict import LATENESS_TOLERANCE_MS
from testbed.processors import ProcessorTicks, read_processors

_SLEEP_NS = 2_000_000
_SLEEPS = 250
_PRIORITY = 50
_BUSY = 0.5
"""Maximum share of the processors in use by others: with two, one remains for relay and probe."""


class Timekeeping(NamedTuple):
    """Measurements over half a second of mostly sleeping."""

    sleep_ms: float
    late_p99_ms: float
    """99th percentile of the lateness of sleeps."""
    late_worst_ms: float
    real_time: bool
    """Whether the sleeper had a real-time priority (SCHED_FIFO)."""
    fine_timers: bool
    """Whether the kernel's timers are finer than its tick (CONFIG_HIGH_RES_TIMERS), according to its packet
    scheduler."""
    processors: int
    """Number of processors available to this process."""
    busy: float
    """Share of all processors' time that was used, or stolen by a hypervisor."""
    load: float
    """Load average over one minute."""


def measure_timekeeping() -> Timekeeping:
    """Sleep 250 times for 2 ms, at a real-time priority if granted, and observe the machine."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
        real_time = True
    except PermissionError:
        real_time = False
    before = read_processors()["cpu"]
    late = []
    try:
        for _ in range(_SLEEPS):
            asked = time.monotonic_ns() + _SLEEP_NS
            time.sleep(_SLEEP_NS / 1e9)
            late.append(time.monotonic_ns() - asked)
    finally:
        os.sched_setscheduler(0, policy, parameters)
    late.sort()
    return Timekeeping(
        sleep_ms=_SLEEP_NS / 1e6,
        late_p99_ms=late[math.ceil(0.99 * _SLEEPS) - 1] / 1e6,
        late_worst_ms=late[-1] / 1e6,
        real_time=real_time,
        fine_timers=_fine_timers(),
        processors=len(os.sched_getaffinity(0)),
        busy=_busy(before, read_processors()["cpu"]),
        load=os.getloadavg()[0],
    )


def _busy(before: ProcessorTicks, after: ProcessorTicks) -> float:
    """Return the share of the time between two readings in which processors were not idle."""
    idle = after.idle + after.waiting - before.idle - before.waiting
    return 1 - idle / max(1, after.total - before.total)


def _fine_timers() -> bool:
    """Read the timers' frequency, the last number of /proc/net/psched: 10^9 Hz, or that of a coarse tick."""
    try:
        return int(Path("/proc/net/psched").read_text(encoding="ascii").split()[3], 16) == 1_000_000_000
    except (OSError, ValueError, IndexError):
        return time.clock_getres(time.CLOCK_MONOTONIC) < 1e-6


def judge_timers(kept: Timekeeping) -> str:
    """Describe the lateness of sleeps; CapabilityError where it is too large to emulate a link."""
    how = "at" if kept.real_time else "without"
    text = f"sleeps of {kept.sleep_ms:.0f} ms end {kept.late_p99_ms:.2f} ms late (p99, at worst "
    text += f"{kept.late_worst_ms:.2f}) {how} real-time priority"
    if not kept.fine_timers:
        raise CapabilityError(f"{text}: the kernel's timers are no finer than its tick (no CONFIG_HIGH_RES_TIMERS)")
    if kept.late_p99_ms > LATENESS_TOLERANCE_MS:
        raise CapabilityError(f"{text}: a certificate allows {LATENESS_TOLERANCE_MS:.0f} ms")
    return text


def judge_priority(kept: Timekeeping) -> str:
    """Report a granted real-time priority; CapabilityError where it is refused."""
    if not kept.real_time:
        raise CapabilityError("cannot get a real-time priority (SCHED_FIFO) here")
    return "SCHED_FIFO granted"


def judge_load(kept: Timekeeping) -> str:
    """Describe the load; CapabilityError where other programs cause too much."""
    text = f"{kept.processors} processors, load {kept.load:.1f}, {kept.busy:.0%} of the machine busy now"
    if kept.busy > _BUSY:
        raise CapabilityError(f"{text}: measurements will be affected")
    return text

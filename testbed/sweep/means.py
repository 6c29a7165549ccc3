"""What a sweep's runs are made with on this machine, and why."""

from __future__ import annotations

from typing import NamedTuple

from testbed.records import Calibration
from testbed.spec import Clock, Engine


class Means(NamedTuple):
    """The engine and the clock, and why they were taken."""

    engine: Engine
    """Of runs on the real clock."""
    engine_reason: str
    clock: Clock
    """Of played runs, and of live ones whose codecs are to cost nothing."""
    clock_reason: str
    calibration: Calibration | None = None
    """Durations that were given, in place of this machine's."""
    recalibrate: bool = False
    """Whether durations are measured anew."""

"""The ranges of a profile's numbers.

Errors use the units of profile files: `8kbit to 100Gbit`, not `>= 8000`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field

from testbed import units


def within(
    low: float, high: float, text: Callable[[float], str], *, low_open: bool = False, high_open: bool = False
) -> AfterValidator:
    """Make a range check whose error uses the units of profile files. Open ends are excluded from the range."""

    def check(value: float) -> float:
        if (value > low if low_open else value >= low) and (value < high if high_open else value <= high):
            return value
        limits = f"{'more than ' if low_open else ''}{text(low)} to {'less than ' if high_open else ''}{text(high)}"
        raise ValueError(f"{text(value)} is out of range; choose {limits}")

    return AfterValidator(check)


def _bytes(count: float) -> str:
    return f"{count} bytes"


def _is_congestion_control(name: str) -> str:
    if not re.fullmatch("[a-z0-9_]{1,15}", name, re.ASCII):
        raise ValueError(
            f"{name!r} is not a TCP congestion control; use a name that Linux knows, for example 'cubic' or 'bbr'"
        )
    return name


LONGEST_NS = 24 * 3_600 * 1_000_000_000
"""The longest schedule or trace: a day."""

RateBps = Annotated[int, within(8_000, 100_000_000_000, units.write_rate)]
DelayNs = Annotated[int, within(0, 10_000_000_000, units.write_time)]
MomentNs = Annotated[int, within(0, LONGEST_NS, units.write_time)]
PeriodNs = Annotated[int, within(1, LONGEST_NS, units.write_time)]
BufferBytes = Annotated[int, within(1, 10_000_000_000, units.write_size)]
Share = Annotated[float, within(0, 1, units.write_fraction)]
ShareBelowAll = Annotated[float, within(0, 1, units.write_fraction, high_open=True)]
Chance = Annotated[float, within(0, 1, units.write_fraction, low_open=True)]
"""A non-zero probability."""
Count = Annotated[int, Field(strict=True), within(0, 2**31 - 1, str)]
Seed = Annotated[int, Field(strict=True), within(0, 2**63 - 1, str)]
WaitNs = Annotated[int, within(1, 10_000_000_000, units.write_time)]
BurstBytes = Annotated[int, within(0, 2**31 - 1, units.write_size)]
Mtu = Annotated[int, Field(strict=True), within(576, 9000, _bytes)]
CongestionControl = Annotated[str, AfterValidator(_is_congestion_control)]

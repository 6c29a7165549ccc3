"""Converts numbers with units, as in files, to integers of the base unit, as in code, and back.

Files: `80Mbit`, `25ms`, `256kB`, `64KiB`, `0.1%`, `8.1TFLOP/s`, `320GB/s`. Code: bits per second, nanoseconds, bytes, a
fraction 0..1, floating point operations per second, bytes per second. `parse_` reads the form of files, `write_` is its
exact inverse, and `format_` is for display: four digits and a space. A bare number is rejected: tc and its libraries
interpret bare numbers in four different units.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

from testbed.errors import SpecError

_NUMBER = re.compile(r"\s*(\d{1,40}(?:\.\d{1,400})?)\s*([A-Za-z%/]+)\s*", re.ASCII)


class _Unit(NamedTuple):
    """The units of a quantity."""

    what: str
    example: str
    sizes: dict[str, int]
    """Size of each unit in base units, by its spelling; the first is the base unit."""
    fold: bool = False
    """Whether to ignore case and a final `/s`."""

    def parse(self, text: object) -> int:
        """Parse a number with a unit to base units. SpecError if it is malformed."""
        what, units = self.what, self.sizes
        if not isinstance(text, str) or not (match := _NUMBER.fullmatch(text)):
            raise SpecError(f"{what} {text!r} is not a number with a unit; write for example {self.example!r}")
        number, unit = match.groups()
        if self.fold:
            unit = {name.lower(): name for name in units}.get(unit.lower().removesuffix("/s"), unit)
        if unit not in units:
            raise SpecError(f"{what} {text!r} has the unit {match[2]!r}; known units: {', '.join(units)}")
        value = Decimal(number) * units[unit]
        if value != int(value):
            smallest = next(iter(units))
            raise SpecError(
                f"{what} {text!r} is not a whole number of {smallest}, the smallest unit; write fewer digits"
            )
        return int(value)

    def write(self, value: int) -> str:
        """Write a value in the largest decimal unit not above it, with all digits: `parse` reads it back exactly."""
        unit = self._reached(value)
        return f"{(Decimal(value) / self.sizes[unit]).normalize():f}{unit}"

    def format(self, value: float) -> str:
        """Format a value for display: four digits, in the largest decimal unit not above it."""
        unit = self._reached(abs(value))
        return f"{value / self.sizes[unit]:.4g} {unit}{'/s' if self.fold else ''}"

    def _reached(self, value: float) -> str:
        units = {unit: size for unit, size in self.sizes.items() if not unit.endswith("iB")}  # powers of ten end
        return max((u for u in units if units[u] <= value), key=units.__getitem__, default=next(iter(units)))


_RATE = _Unit("rate", "80Mbit", {"bit": 1, "kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}, fold=True)
_TIME = _Unit("time", "25ms", {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9})
_SPAN = _Unit("time", "10min", {**_TIME.sizes, "min": 60 * 10**9, "h": 3600 * 10**9})
_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = _Unit("size", "256kB", {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, **_BINARY})
_FLOPS = _Unit("speed", "8.1TFLOP/s", {"FLOP/s": 1, "MFLOP/s": 10**6, "GFLOP/s": 10**9, "TFLOP/s": 10**12})
_BANDWIDTH = _Unit("bandwidth", "320GB/s", {"B/s": 1, "kB/s": 10**3, "MB/s": 10**6, "GB/s": 10**9})

parse_rate, write_rate, format_rate = _RATE.parse, _RATE.write, _RATE.format
"""`80Mbit`, `1.5Mbit/s`, `9600bit`, as bits per second; displayed as `80 Mbit/s`."""
parse_time, write_time, format_time = _TIME.parse, _TIME.write, _TIME.format
"""`25ms`, `0.5us`, `2s`, as nanoseconds; displayed as `25 ms`."""
parse_span = _SPAN.parse
"""`10min`, `1h` and all that `parse_time` reads, as nanoseconds."""
parse_size, write_size, format_size = _SIZE.parse, _SIZE.write, _SIZE.format
"""`256kB`, `64KiB`, `1500B`, as bytes; displayed as `262.1 kB`. Case-sensitive: `kb` could mean bits."""
parse_flops, write_flops, format_flops = _FLOPS.parse, _FLOPS.write, _FLOPS.format
"""`8.1TFLOP/s`, as floating point operations per second; displayed as `8.1 TFLOP/s`."""
parse_bandwidth, write_bandwidth = _BANDWIDTH.parse, _BANDWIDTH.write
"""`320GB/s`, as bytes per second."""


def parse_fraction(text: object) -> float:
    """Read `0.1%` as 0.001. SpecError for anything that is not a percentage between 0 % and 100 %."""
    if not isinstance(text, str) or not (match := _NUMBER.fullmatch(text)) or match[2] != "%":
        raise SpecError(f"share {text!r} is not a percentage; write for example '0.1%'")
    if (value := Decimal(match[1])) > 100:
        raise SpecError(f"share {text!r} is more than 100%")
    return float(value / 100)


def write_fraction(share: float) -> str:
    """Write 0.001 -> '0.1%'; `parse_fraction` reads it back exactly, to the last bit of the float."""
    return f"{(Decimal(repr(float(share))) * 100).normalize():f}%"


def format_duration(seconds: float) -> str:
    """Format a duration: 75 -> '1 min 15 s'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"

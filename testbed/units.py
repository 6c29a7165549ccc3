"""Convert numbers with units, as files write them, to integers of the base unit, as code holds them, and back.

Files: `80Mbit`, `25ms`, `256kB`, `64KiB`, `0.1%`, `8.1TFLOP/s`, `320GB/s`. Code: bits per second, nanoseconds, bytes, a
fraction 0..1, floating point operations per second, bytes per second. `parse_` reads what a file says, `write_` is its
exact inverse, and `format_` is for people: four digits and a space. A bare number is refused: tc and its libraries read
bare numbers in four different units.
"""

from __future__ import annotations

import re
from decimal import Decimal

from testbed.errors import SpecError

_RATE = {"bit": 1, "kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9}
_TIME = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
_SIZE = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_FLOPS = {"FLOP/s": 1, "MFLOP/s": 10**6, "GFLOP/s": 10**9, "TFLOP/s": 10**12}
_BANDWIDTH = {"B/s": 1, "kB/s": 10**3, "MB/s": 10**6, "GB/s": 10**9}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%/]+)\s*", re.ASCII)


def _parse(text: object, units: dict[str, int], what: str, example: str, *, fold: bool) -> int:
    if not isinstance(text, str) or not (match := _NUMBER.fullmatch(text)):
        raise SpecError(f"{what} {text!r} is not a number with a unit; write for example {example!r}")
    number, unit = match.groups()
    if fold:
        unit = {name.lower(): name for name in units}.get(unit.lower().removesuffix("/s"), unit)
    if unit not in units:
        raise SpecError(f"{what} {text!r} has the unit {match[2]!r}; known units: {', '.join(units)}")
    value = Decimal(number) * units[unit]
    if value != int(value):
        smallest = next(iter(units))
        raise SpecError(f"{what} {text!r} is not a whole number of {smallest}, the smallest unit; write fewer digits")
    return int(value)


def parse_rate(text: object) -> int:
    """Read `80Mbit`, `1.5Mbit/s`, `9600bit` as bits per second.

    Decimal prefixes; case does not matter. SpecError otherwise.
    """
    return _parse(text, _RATE, "rate", "80Mbit", fold=True)


def parse_time(text: object) -> int:
    """Read `25ms`, `0.5us`, `2s` as nanoseconds. SpecError otherwise."""
    return _parse(text, _TIME, "time", "25ms", fold=False)


def parse_size(text: object) -> int:
    """Read `256kB`, `64KiB`, `1500B` as bytes. Case matters: `kb` could mean bits. SpecError otherwise."""
    return _parse(text, _SIZE, "size", "256kB", fold=False)


def parse_flops(text: object) -> int:
    """Read `8.1TFLOP/s` as floating point operations per second. SpecError otherwise."""
    return _parse(text, _FLOPS, "speed", "8.1TFLOP/s", fold=False)


def parse_bandwidth(text: object) -> int:
    """Read `320GB/s` as bytes per second. SpecError otherwise."""
    return _parse(text, _BANDWIDTH, "bandwidth", "320GB/s", fold=False)


def parse_fraction(text: object) -> float:
    """Read `0.1%` as 0.001. SpecError for anything that is not a percentage between 0 % and 100 %."""
    if not isinstance(text, str) or not (match := _NUMBER.fullmatch(text)) or match[2] != "%":
        raise SpecError(f"share {text!r} is not a percentage; write for example '0.1%'")
    if (value := Decimal(match[1])) > 100:
        raise SpecError(f"share {text!r} is more than 100%")
    return float(value / 100)


def _exact(value: int, units: dict[str, int]) -> str:
    """Write a value in the largest unit that it reaches, with as many digits as it needs.

    The units are powers of ten, so they end.
    """
    unit = max((u for u in units if units[u] <= value), key=units.__getitem__, default=next(iter(units)))
    return f"{(Decimal(value) / units[unit]).normalize():f}{unit}"


_WRITTEN_SIZE = {unit: size for unit, size in _SIZE.items() if not unit.endswith("iB")}


def write_rate(bps: int) -> str:
    """Write 18_880_000 -> '18.88Mbit'; `parse_rate` reads it back exactly, to the bit."""
    return _exact(bps, _RATE)


def write_time(ns: int) -> str:
    """Write 500 -> '500ns', 12_500_000 -> '12.5ms'; `parse_time` reads it back exactly, to the nanosecond."""
    return _exact(ns, _TIME)


def write_size(count: int) -> str:
    """Write 256_000 -> '256kB'; `parse_size` reads it back exactly, to the byte."""
    return _exact(count, _WRITTEN_SIZE)


def write_flops(per_second: int) -> str:
    """Write 8_100_000_000_000 -> '8.1TFLOP/s'; `parse_flops` reads it back."""
    return _exact(per_second, _FLOPS)


def write_bandwidth(per_second: int) -> str:
    """Write 320_000_000_000 -> '320GB/s'; `parse_bandwidth` reads it back."""
    return _exact(per_second, _BANDWIDTH)


def write_fraction(share: float) -> str:
    """Write 0.001 -> '0.1%'; `parse_fraction` reads it back exactly, to the last bit of the float."""
    return f"{(Decimal(repr(float(share))) * 100).normalize():f}%"


def _format(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for size, unit in steps:
        if abs(value) >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.4g} {steps[-1][1]}" if value else f"0 {steps[-1][1]}"


def format_rate(bps: float) -> str:
    """Write 80_000_000 -> '80 Mbit/s' for people."""
    return _format(bps, ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1, "bit/s")))


def format_time(ns: float) -> str:
    """Write 25_000_000 -> '25 ms' for people."""
    return _format(ns, ((1e9, "s"), (1e6, "ms"), (1e3, "us"), (1, "ns")))


def format_size(count: float) -> str:
    """Write 262144 -> '262.1 kB' (decimal) for people."""
    return _format(count, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def format_flops(per_second: float) -> str:
    """Write 8_100_000_000_000 -> '8.1 TFLOP/s' for people."""
    return _format(per_second, ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1, "FLOP/s")))


def format_duration(seconds: float) -> str:
    """Format a duration: 75 -> '1 min 15 s'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"

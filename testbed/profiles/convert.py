"""A CSV file of rates to a trace: each row's rate holds until the next row's time."""

from __future__ import annotations

import csv
import math
from itertools import pairwise

from testbed.errors import SpecError, UnknownNameError
from testbed.profiles.trace import from_rates

TIME_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
"""What a time of a CSV file may be counted in, in ms."""
RATE_UNITS_BPS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "B/s": 8.0, "kB/s": 8e3, "MB/s": 8e6}
"""What a rate of a CSV file may be counted in, in bits per second."""
_HIGHEST_BPS = 100e9


def from_csv(
    text: str, where: str, *, time_column: str, rate_column: str, time_unit: str, rate_unit: str
) -> tuple[int, ...]:
    """A trace from a CSV file with a header. Times count from the first row's; the last row only says where the trace ends.

    SpecError, which starts with `where`, names the line that is wrong; UnknownNameError a column or unit that is not there.
    """
    for kind, unit, known in (("unit of time", time_unit, TIME_UNITS_MS), ("unit of rate", rate_unit, RATE_UNITS_BPS)):
        if unit not in known:
            raise UnknownNameError(kind, unit, known)
    reader = csv.DictReader(text.splitlines(), strict=True)
    points: list[tuple[float, int]] = []
    try:
        for column in (time_column, rate_column):
            if column not in (reader.fieldnames or ()):
                raise UnknownNameError(f"column of {where}", column, reader.fieldnames or ())
        for row in reader:
            line = f"{where}, line {reader.line_num}"
            time = _number(row[time_column], line, time_column) * TIME_UNITS_MS[time_unit]
            rate = _number(row[rate_column], line, rate_column) * RATE_UNITS_BPS[rate_unit]
            if not 0 <= rate <= _HIGHEST_BPS:
                raise SpecError(
                    f"{line}: {rate_column} {row[rate_column]!r} is not a rate of 0 to 100 Gbit/s; is its unit {rate_unit}?"
                )
            if points and time <= points[-1][0]:
                raise SpecError(
                    f"{line}: {time_column} {row[time_column]!r} is not later than the row before it; sort the rows"
                )
            points.append((time, round(rate)))
    except csv.Error as error:
        raise SpecError(f"{where}, after line {reader.line_num}: {error}") from None
    if len(points) < 2:
        raise SpecError(f"{where} has {len(points)} rows; it needs two: the last one only says where the trace ends")
    first = points[0][0]
    edges = [round(time - first) for time, _ in points]
    steps = [(end - begin, rate) for (begin, end), (_, rate) in zip(pairwise(edges), points[:-1], strict=True)]
    if any(duration == 0 for duration, _ in steps):
        raise SpecError(
            f"{where}: two rows fall into one millisecond, the unit of a trace; is {time_column}'s unit {time_unit}?"
        )
    return from_rates(steps)


def _number(text: str | None, line: str, column: str) -> float:
    try:
        if text is not None and math.isfinite(number := float(text)):
            return number
    except ValueError:
        pass
    raise SpecError(f"{line}: {column} {text!r} is not a number")

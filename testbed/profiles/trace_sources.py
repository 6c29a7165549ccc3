"""Sources of traces: generated from a seed, or converted from a CSV file of rates.

Generated traces are the same bytes on every machine: they use only random.Random.random(), whose sequence Python
guarantees for a seed, and integer arithmetic. A kind describes the rate as weights around its mean, which are scaled so
that the trace has the requested mean. No recordings of real networks are shipped.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from testbed import units
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import Frozen, read_toml, validated
from testbed.profiles.ranges import RateBps, Seed, within
from testbed.profiles.rate_trace import trace_from_rates

_Weights = list[tuple[int, int]]
"""(duration in ms, rate in any unit)."""


class TraceKind(NamedTuple):
    """The rate model of a generated trace."""

    what: str
    """A description for users."""
    weights: Callable[[random.Random, int], _Weights]
    """Called with the generator and the trace's length in ms."""


def _constant(_draw: random.Random, length_ms: int) -> _Weights:
    return [(length_ms, 1)]


_CELL_MS = 50
_CELL_LEVELS = (25, 35, 50, 70, 100, 140, 200)
_CELL_MOVES = 0.25


def _cellular(draw: random.Random, length_ms: int) -> _Weights:
    """Draw a Markov-modulated rate.

    Its levels span 1:8. A deeper fade stops a job instead of slowing it.
    """
    level = len(_CELL_LEVELS) // 2
    weights: _Weights = []
    for begin in range(0, length_ms, _CELL_MS):
        weights.append((min(_CELL_MS, length_ms - begin), _CELL_LEVELS[level]))
        chance = draw.random()
        # One level up or down with equal probability; at either end only inwards.
        if chance < _CELL_MOVES:
            level += 1 if level == 0 or (chance < _CELL_MOVES / 2 and level < len(_CELL_LEVELS) - 1) else -1
    return weights


_GRID_MS = 15_000
_HANDOVER_MS = 100
_HANDOVER = 20
_BEAM_MS = 1_000


def _starlink(draw: random.Random, length_ms: int) -> _Weights:
    """Give every satellite its own rate, 60 % to 140 %, that varies by a tenth from second to second."""
    weights: _Weights = []
    for begin in range(0, length_ms, _GRID_MS):
        satellite = 60 + int(draw.random() * 81)
        end, now = min(begin + _GRID_MS, length_ms), begin
        if begin:
            now = min(begin + _HANDOVER_MS, end)
            weights.append((now - begin, _HANDOVER))
        while now < end:
            until = min(end, now - now % _BEAM_MS + _BEAM_MS)
            weights.append((until - now, satellite * (90 + int(draw.random() * 21)) // 100))
            now = until
    return weights


KINDS: dict[str, TraceKind] = {
    "constant": TraceKind("one rate throughout", _constant),
    "cellular": TraceKind(
        f"a Markov chain over {len(_CELL_LEVELS)} rates, the highest {_CELL_LEVELS[-1] // _CELL_LEVELS[0]} times the "
        f"lowest; every {_CELL_MS} ms it moves one level with probability {_CELL_MOVES:.0%}",
        _cellular,
    ),
    "starlink": TraceKind(
        f"a new satellite every {_GRID_MS // 1000} s with its own rate (60 % to 140 %, varying by a tenth from second "
        f"to second), and {_HANDOVER} % for {_HANDOVER_MS} ms at each change",
        _starlink,
    ),
}


def _kind_named(name: str) -> TraceKind:
    if name not in KINDS:
        raise UnknownNameError("kind of trace", name, KINDS)
    return KINDS[name]


class TraceRecipe(Frozen):
    """The parameters of a generated trace."""

    kind: str
    """One of KINDS."""
    seed: Seed
    seconds: Annotated[int, Field(strict=True), within(1, 86_400, lambda number: f"{number} s")]
    mean_rate_bps: RateBps

    def make(self) -> tuple[int, ...]:
        """Make the trace: its opportunities in ms.

        UnknownNameError for an unknown kind; SpecError for no packet, or too many.
        """
        length_ms = self.seconds * 1000
        weights = _kind_named(self.kind).weights(random.Random(self.seed), length_ms)
        total = sum(duration * weight for duration, weight in weights)
        return trace_from_rates(
            (duration, self.mean_rate_bps * length_ms * weight // total) for duration, weight in weights
        )

    def command(self, file: str) -> str:
        """Return the command line that makes this trace."""
        numbers = f"--seed {self.seed} --seconds {self.seconds} --mean-rate {units.write_rate(self.mean_rate_bps)}"
        return f"python -m testbed rate-trace generate {self.kind} {numbers} -o {file}"


def checked_recipe(where: str, *, kind: object, seed: object, seconds: object, mean_rate: object) -> TraceRecipe:
    """Check a recipe with `mean_rate` in the notation of files.

    SpecError that starts with `where`, or UnknownNameError.
    """
    content = {"kind": kind, "seed": seed, "seconds": seconds, "mean_rate_bps": units.parse_rate(mean_rate)}
    recipe = validated(TraceRecipe, content, where, lambda place: str(place[-1]).removesuffix("_bps"))
    _kind_named(recipe.kind)
    return recipe


def read_recipes(folder: Path) -> dict[str, TraceRecipe]:
    """Read the recipes of a folder's traces from its made.toml, by file name; empty without that file."""
    path = folder / "made.toml"
    if not path.is_file():
        return {}
    recipes = {}
    for file, table in read_toml(path).items():
        try:
            recipes[file] = checked_recipe(f"{path}: [{file}]", **table)
        except TypeError:
            raise SpecError(
                f"{path}: [{file}] must state kind, seed, seconds and mean_rate, and nothing else"
            ) from None
    return recipes


TIME_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
"""Units of times in a CSV file, in ms."""
RATE_UNITS_BPS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "B/s": 8.0, "kB/s": 8e3, "MB/s": 8e6}
"""Units of rates in a CSV file, in bits per second."""
_HIGHEST_BPS = 100e9


def trace_from_csv(
    text: str, where: str, *, time_column: str, rate_column: str, time_unit: str, rate_unit: str
) -> tuple[int, ...]:
    """Convert a CSV file with a header: each row's rate holds until the next row's time.

    Times count from the first row's; the last row only marks the trace's end. SpecError that starts with `where` and
    names the faulty line; UnknownNameError for an unknown column or unit.
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
            if not math.isfinite(time):
                raise SpecError(f"{line}: {time_column} {row[time_column]!r} is too large; is its unit {time_unit}?")
            if not 0 <= rate <= _HIGHEST_BPS:
                raise SpecError(
                    f"{line}: {rate_column} {row[rate_column]!r} is not a rate of 0 to 100 Gbit/s; is its unit "
                    f"{rate_unit}?"
                )
            if points and time <= points[-1][0]:
                raise SpecError(
                    f"{line}: {time_column} {row[time_column]!r} is not later than in the previous row; sort the rows"
                )
            points.append((time, round(rate)))
    except csv.Error as error:
        raise SpecError(f"{where}, after line {reader.line_num}: {error}") from None
    if len(points) < 2:
        raise SpecError(f"{where} has {len(points)} rows but needs two: the last one only marks the trace's end")
    first = points[0][0]
    edges = [round(time - first) for time, _ in points]
    steps = [(end - begin, rate) for (begin, end), (_, rate) in zip(pairwise(edges), points[:-1], strict=True)]
    if any(duration == 0 for duration, _ in steps):
        raise SpecError(
            f"{where}: two rows fall into one millisecond, the unit of a trace; is {time_column}'s unit {time_unit}?"
        )
    return trace_from_rates(steps)


def _number(text: str | None, line: str, column: str) -> float:
    try:
        if text is not None and math.isfinite(number := float(text)):
            return number
    except ValueError:
        pass
    raise SpecError(f"{line}: {column} {text!r} is not a number")

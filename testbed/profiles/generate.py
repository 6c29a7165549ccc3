"""Traces made here, from a seed: the same bytes on every machine. No recording of anybody's network is shipped.

A kind says how the rate moves, in weights around its mean; `generate` scales them so that the trace carries the mean asked for.
Only random.Random.random() is drawn from, and only integers are computed with: Python promises that sequence for a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from testbed import units
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import Frozen, explain, read_toml
from testbed.profiles.ranges import RateBps, Seed, within
from testbed.profiles.trace import from_rates

_Weights = list[tuple[int, int]]
"""(duration in ms, rate in any unit)."""


class Kind(NamedTuple):
    """How the rate of a trace moves."""

    what: str
    weights: Callable[[random.Random, int], _Weights]
    """Over so many ms."""


def _constant(_draw: random.Random, length_ms: int) -> _Weights:
    return [(length_ms, 1)]


_CELL_MS = 50
_CELL_LEVELS = (25, 35, 50, 70, 100, 140, 200)
_CELL_MOVES = 0.25


def _cellular(draw: random.Random, length_ms: int) -> _Weights:
    """A Markov-modulated rate. Its levels span 1:8; netem times a packet when it enters, so a deeper fade would last too long."""
    level, found = len(_CELL_LEVELS) // 2, []
    for begin in range(0, length_ms, _CELL_MS):
        found.append((min(_CELL_MS, length_ms - begin), _CELL_LEVELS[level]))
        chance = draw.random()
        # One level up or down, alike but for the ends, where the other way is the only one.
        if chance < _CELL_MOVES:
            level += 1 if level == 0 or (chance < _CELL_MOVES / 2 and level < len(_CELL_LEVELS) - 1) else -1
    return found


_GRID_MS = 15_000
_HANDOVER_MS = 100
_HANDOVER = 20
_BEAM_MS = 1_000


def _starlink(draw: random.Random, length_ms: int) -> _Weights:
    """Every satellite has its own rate, 60 % to 140 %; it wavers by a tenth from second to second."""
    found: _Weights = []
    for begin in range(0, length_ms, _GRID_MS):
        satellite = 60 + int(draw.random() * 81)
        end, now = min(begin + _GRID_MS, length_ms), begin
        if begin:
            now = min(begin + _HANDOVER_MS, end)
            found.append((now - begin, _HANDOVER))
        while now < end:
            until = min(end, now - now % _BEAM_MS + _BEAM_MS)
            found.append((until - now, satellite * (90 + int(draw.random() * 21)) // 100))
            now = until
    return found


KINDS: dict[str, Kind] = {
    "constant": Kind("one rate throughout", _constant),
    "cellular": Kind(
        f"a Markov chain over {len(_CELL_LEVELS)} rates, the highest {_CELL_LEVELS[-1] // _CELL_LEVELS[0]} times the lowest; "
        f"every {_CELL_MS} ms it moves one step with a chance of {_CELL_MOVES:.0%}",
        _cellular,
    ),
    "starlink": Kind(
        f"a new satellite every {_GRID_MS // 1000} s with a rate of its own (60 % to 140 %, and a tenth of that from second to "
        f"second), and {_HANDOVER} % for {_HANDOVER_MS} ms at each change",
        _starlink,
    ),
}


def _a_kind(name: str) -> None:
    if name not in KINDS:
        raise UnknownNameError("kind of trace", name, KINDS)


class Recipe(Frozen):
    """What a generated trace is made from."""

    kind: str
    """One of KINDS."""
    seed: Seed
    seconds: Annotated[int, Field(strict=True), within(1, 86_400, lambda number: f"{number} s")]
    mean_rate_bps: RateBps

    def make(self) -> tuple[int, ...]:
        """The trace's opportunities in ms. UnknownNameError for an unknown kind; SpecError for no packet, or too many."""
        _a_kind(self.kind)
        length_ms = self.seconds * 1000
        weights = KINDS[self.kind].weights(random.Random(self.seed), length_ms)
        total = sum(duration * weight for duration, weight in weights)
        return from_rates((duration, self.mean_rate_bps * length_ms * weight // total) for duration, weight in weights)

    def command(self, file: str) -> str:
        """What makes it on the command line."""
        numbers = f"--seed {self.seed} --seconds {self.seconds} --mean-rate {units.write_rate(self.mean_rate_bps)}"
        return f"python -m testbed trace generate {self.kind} {numbers} -o {file}"


def recipe(where: str, *, kind: object, seed: object, seconds: object, mean_rate: object) -> Recipe:
    """A checked recipe; `mean_rate` as files write it. SpecError, which starts with `where`, or UnknownNameError otherwise."""
    try:
        found = Recipe.model_validate(
            {"kind": kind, "seed": seed, "seconds": seconds, "mean_rate_bps": units.parse_rate(mean_rate)}
        )
        _a_kind(found.kind)
    except ValidationError as error:
        raise explain(error, Recipe, where, lambda place: str(place[-1]).removesuffix("_bps")) from None
    return found


def recipes(folder: Path) -> dict[str, Recipe]:
    """By file name, how the traces of a folder were made, as its made.toml says. Empty where there is none."""
    path = folder / "made.toml"
    if not path.is_file():
        return {}
    found = {}
    for file, table in read_toml(path).items():
        try:
            found[file] = recipe(f"{path}: [{file}]", **table)
        except TypeError:
            raise SpecError(
                f"{path}: [{file}] must state kind, seed, seconds and mean_rate, and nothing else"
            ) from None
    return found

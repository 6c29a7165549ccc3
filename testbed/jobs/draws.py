"""Durations that vary: by chance, by stragglers, and where a node slows down (`spec.Varied`).

A draw depends on the seed and on what it is for: node, step, kind of work and part of the step. An action thus has one
duration over every network, with every codec and schedule, and whichever program asks first, so cells that differ in
these are compared under the same draws.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import NormalDist, fmean
from typing import Any

from testbed import keyed
from testbed.errors import UserError
from testbed.frozen import Frozen
from testbed.jobs.actions import Action, Decode, Encode, Key, Work
from testbed.jobs.loop import Cost
from testbed.records import Duration
from testbed.spec import Compute, Measured, Spread

_BITS = 52
"""With more, the largest number would round to 1."""


def drawn(cost: Cost, compute: Compute, measured: object = None) -> Cost:
    """Return the durations of a cell's actions, given the stated ones. `measured`: the calibration's record of them.

    Work, Encode and Decode vary; what has no duration keeps none. UserError if samples are needed, but were not kept.
    """
    if isinstance(compute, Measured) or not compute.varied:
        return cost
    spread, late, slow, seed = compute.spread, compute.stragglers, compute.slow, compute.seed
    stretched = None if spread is None else _factors(spread, measured)

    def varied(place: int, action: Action) -> int | None:
        took_ns = cost(place, action)
        if not took_ns or not isinstance(action, Work | Encode | Decode):
            return took_ns
        kind, what, key = _named(action)
        of = f"{seed} {place} {what} {key.step} {key.part} {key.origin} {key.phase}"
        factor = 1.0 if slow is None else slow.at(place, key.step)
        if stretched is not None:
            factor *= stretched(kind, _uniform(f"spread {of}"))
        if late is not None and _uniform(f"straggler {of}") < late.share:
            factor *= late.factor
        return round(took_ns * factor)

    return varied


def _named(action: Work | Encode | Decode) -> tuple[str, str, Key]:
    """Return an action's kind of work, its name and its key."""
    if isinstance(action, Work):
        return action.what, action.what, action.key
    kind, key = ("encode", action.key) if isinstance(action, Encode) else ("decode", action.messages[0].key)
    return kind, f"{kind} {key.what}", key


def _uniform(purpose: str) -> float:
    """Return a number between 0 and 1, exclusive."""
    return ((keyed.key(purpose, 8) >> 64 - _BITS) + 0.5) / (1 << _BITS)


def _factors(spread: Spread, measured: object) -> Callable[[str, float], float]:
    """Return the distribution of durations relative to their mean: the quantile of a kind of work at a share."""
    cv = spread.cv
    if cv is None:
        ordered = {kind: sorted(each) for kind, each in _samples(measured).items()}
        return lambda kind, share: ordered[kind][int(share * len(ordered[kind]))] if kind in ordered else 1.0
    if spread.kind == "exponential":
        return lambda kind, share: 1 - cv - cv * math.log1p(-share)
    sigma, quantile = math.sqrt(math.log1p(cv * cv)), NormalDist().inv_cdf
    return lambda kind, share: math.exp(sigma * quantile(share) - sigma * sigma / 2)


def _samples(measured: object) -> Mapping[str, list[float]]:
    """Return a calibration's samples, relative to the mean of their action, by kind of work."""
    found: dict[str, list[float]] = defaultdict(list)

    def look(kind: str, of: Any) -> None:
        if isinstance(of, Duration):
            if not of.quantiles_ns:
                raise UserError("the calibration has no samples to draw durations from; measure it: --recalibrate")
            mean_ns = fmean(of.quantiles_ns)
            found[kind] += [ns / mean_ns for ns in of.quantiles_ns]
        elif isinstance(of, Frozen):
            for name, value in of:
                look(name.replace("_", " "), value)
        elif isinstance(of, Mapping):
            for name, value in of.items():
                look(name if kind == "work" else kind, value)  # a job's own names
        elif isinstance(of, tuple):
            for value in of:
                look(kind, value)

    look("", measured)
    return found

"""Choose the bits of each boundary by a greedy search on measured harm, and the widths that training may draw.

The search starts with the most bits everywhere, and repeatedly reduces the width of the boundary that saves most per
harm; each setting on the path suits one budget. Harm is a measurement of a setting, such as a divergence of the outputs
in nats; or the sum of each boundary's separate harm (`total`), which needs far fewer measurements and is exact only if
harms add up.

Source: one-shot mixed precision (Tang et al., arXiv 2401.01543), according to its authors' code, which has layers and
BitOPs, searches in both directions, and temporarily withholds the least stable widths from the draw.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from testbed.errors import SpecError

Widths = tuple[int, ...]
"""Bits of each boundary."""
Table = Sequence[Mapping[int, float]]
"""A number for each width of each boundary."""


def greedy_path(harm: Callable[[Widths], float], cost: Table) -> list[Widths]:
    """Return the settings from the most bits everywhere down to the fewest, each cheaper than the one before.

    `cost` has the allowed widths of each boundary with their cost, in bytes or in seconds on its link, which must fall
    with the bits. SpecError otherwise.
    """
    for boundary, costs in enumerate(cost):
        ordered = sorted(costs, reverse=True)
        if any(costs[low] >= costs[high] for high, low in itertools.pairwise(ordered)):
            raise SpecError(f"boundary {boundary} has costs {dict(costs)}, which must fall with the bits")
    now = tuple(max(costs) for costs in cost)
    path, before = [now], harm(now)
    while True:
        steps = []
        for at, costs in enumerate(cost):
            if lower := [width for width in costs if width < now[at]]:
                after = (*now[:at], max(lower), *now[at + 1 :])
                worse = harm(after)
                steps.append(((worse - before) / (costs[now[at]] - costs[max(lower)]), worse, after))
        if not steps:
            return path
        _, before, now = min(steps)
        path.append(now)


def within(path: Sequence[Widths], cost: Table, budget: float) -> Widths:
    """Return the first setting of a path within the budget. SpecError if there is none."""
    fitting = next((widths for widths in path if total(widths, cost) <= budget * (1 + 1e-12)), None)
    if fitting is None:
        raise SpecError(f"no setting is within the budget of {budget:g}; the cheapest costs {total(path[-1], cost):g}")
    return fitting


def total(widths: Widths, table: Table) -> float:
    """Return the sum of the cost or harm of the boundaries' widths."""
    return math.fsum(by[width] for by, width in zip(table, widths, strict=True))


def withheld(errors: Sequence[float], progress: float, first: float = 0.5, last: float = 0.2) -> frozenset[int]:
    """Return the boundaries whose smallest width training currently does not draw: those with the largest `errors` at
    it.

    Their share falls from `first` to `last` along a cosine while `progress` goes from 0 to 1.
    """
    share = last + (first - last) * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    ranked = sorted(range(len(errors)), key=lambda boundary: (-errors[boundary], boundary))
    return frozenset(ranked[: round(share * len(errors))])

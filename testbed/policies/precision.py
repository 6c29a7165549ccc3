"""How many bits does each boundary get? A greedy search on measured harm, and which widths training may draw.

The search starts with the most bits everywhere, and takes the step to one boundary's next smaller width that saves most
per harm, until none is left: the settings on the way are one for each budget. Harm is what a measurement says of a
setting, such as a divergence of the outputs in nats; or a sum of what each boundary's width costs alone (`total`),
which needs far fewer measurements and is right only as far as harms add up.

Source: one-shot mixed precision (Tang et al., arXiv 2401.01543), read in its authors' code: there layers and BitOPs, a
search in both directions, and the widths that are drawn least stable are withheld from the draw for a while.
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

    `cost` says which widths each boundary may have: in bytes, or in seconds of its own link, falling with the bits.
    SpecError where it does not fall.
    """
    for boundary, costs in enumerate(cost):
        ordered = sorted(costs, reverse=True)
        if any(costs[low] >= costs[high] for high, low in itertools.pairwise(ordered)):
            raise SpecError(f"boundary {boundary} costs {dict(costs)}: state costs that fall with the bits")
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
    """Return the first setting of a path that costs at most the budget. SpecError where none does."""
    fitting = next((widths for widths in path if total(widths, cost) <= budget * (1 + 1e-12)), None)
    if fitting is None:
        raise SpecError(f"no setting costs at most {budget:g}; the cheapest costs {total(path[-1], cost):g}")
    return fitting


def total(widths: Widths, table: Table) -> float:
    """Return the sum over the boundaries of what their widths cost, or harm."""
    return math.fsum(by[width] for by, width in zip(table, widths, strict=True))


def withheld(errors: Sequence[float], progress: float, first: float = 0.5, last: float = 0.2) -> frozenset[int]:
    """Return the boundaries whose smallest width training does not draw for now: those of the largest `errors` at it.

    Their share falls from `first` to `last` along a cosine while `progress` goes from 0 to 1.
    """
    share = last + (first - last) * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))
    ranked = sorted(range(len(errors)), key=lambda boundary: (-errors[boundary], boundary))
    return frozenset(ranked[: round(share * len(errors))])

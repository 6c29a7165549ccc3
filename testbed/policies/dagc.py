"""DAGC: workers with more data compress less, at a given mean ratio.

DAGC-R is for a relative compressor such as top-k. Ratios are proportional to the data share to the power 2/3, which
minimises the heterogeneity term of the convergence bound for a fixed least ratio. DAGC-A is for an absolute one, a hard
threshold, which is inversely proportional to it.

`released_ratios` is the released code's search. Its candidates do not minimise that term, and its result is not
monotone in the shares, so this project uses the underlying rule, `ratios`.

Source: DAGC, INFOCOM 2023 and IEEE TMC 2024, arXiv 2311.07324; github.com/Jiang-Yutong/DAGC, MFL/algo.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from testbed.errors import SpecError

POWER = 2 / 3


def ratios(shares: Sequence[float], mean: float) -> tuple[float, ...]:
    """Return a ratio for each worker, in proportion to its share of the data to the power 2/3, with this mean.

    A ratio above 1 becomes 1, and the others share the excess. SpecError unless the shares are positive and the mean is
    above 0 and at most 1.
    """
    weights = _weights(shares)
    if not 0 < mean <= 1:
        raise SpecError(f"mean ratio {mean:g} must be above 0 and at most 1")
    free, budget = set(range(len(weights))), mean * len(weights)
    while free:
        scale = budget / math.fsum(weights[worker] for worker in free)
        capped = {worker for worker in free if weights[worker] * scale > 1.0}
        if not capped:
            break
        budget -= len(capped)
        free -= capped
    return tuple(weight * scale if worker in free else 1.0 for worker, weight in enumerate(weights))


def released_ratios(shares: Sequence[float], mean: float) -> tuple[float, ...]:
    """Return the result of the released code's search, for two or more workers in order of descending share. A ratio
    may exceed 1. SpecError for shares that do not descend, or are not positive.
    """
    weights, count = _weights(shares), len(shares)
    if count < 2 or any(later > earlier for earlier, later in itertools.pairwise(shares)):
        raise SpecError(f"the released search needs at least two shares in descending order, found {list(shares)}")
    total = math.fsum(shares)
    best, chosen = math.inf, [0.0] * count
    for least in reversed(range(count)):
        # The last worker, or the one before it, shares the least ratio.
        other = count - 2 if least == count - 1 else count - 1
        if least != count - 1 and shares[least] == shares[least + 1]:
            continue
        rest = (sum(weights) - weights[least]) / weights[other]
        own, others = shares[least] / total, shares[other] / total
        term = own * (1 + rest) + others * rest * (1 + rest)
        if term < best:
            best = term
            chosen = [weight / weights[other] / (1 + rest) for weight in weights]
            chosen[least] = 1 / (1 + rest)
    return tuple(ratio * count * mean for ratio in chosen)


def thresholds(shares: Sequence[float], mean: float) -> tuple[float, ...]:
    """Return DAGC-A's threshold for each worker; their harmonic mean is `mean`. SpecError unless all are positive."""
    weights = _weights(shares)
    if mean <= 0:
        raise SpecError(f"mean threshold {mean:g} must be positive")
    return tuple(mean * math.fsum(weights) / len(weights) / weight for weight in weights)


def _weights(shares: Sequence[float]) -> list[float]:
    if not shares or min(shares) <= 0:
        raise SpecError(f"shares of the data must be positive, found {list(shares)}")
    return [share**POWER for share in shares]

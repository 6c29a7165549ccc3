"""DAGC: workers with more data compress less, under a mean that all share.

This is DAGC-R, which gives ratios to a relative compressor such as top-k. They go by the data share to the power 2/3,
from minimising the heterogeneity term of the convergence bound for a fixed least ratio.

`released_ratios` is the released code's search. Its candidates are not the minimum of that term, and the result is not
monotone in the shares, so `ratios`, the rule behind it, is what is used here.

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

    Where one would be above 1, it is 1, and the others share what is over. SpecError unless the shares are positive
    and the mean is above 0 and at most 1.
    """
    weights = _weights(shares)
    if not 0 < mean <= 1:
        raise SpecError(f"a mean ratio of {mean:g}: it is above 0 and at most 1")
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
    """Return what the released code's search gives, for two or more workers whose shares descend. A ratio may be above
    1. SpecError for shares that do not descend, or are not positive.
    """
    weights, count = _weights(shares), len(shares)
    if count < 2 or any(later > earlier for earlier, later in itertools.pairwise(shares)):
        raise SpecError(f"the released search takes two shares or more that descend, not {list(shares)}")
    total = math.fsum(shares)
    best, chosen = math.inf, [0.0] * count
    for least in reversed(range(count)):
        # Who shares the least ratio is the last worker, or the one before it.
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


def _weights(shares: Sequence[float]) -> list[float]:
    if not shares or min(shares) <= 0:
        raise SpecError(f"shares of the data are positive, not {list(shares)}")
    return [share**POWER for share in shares]

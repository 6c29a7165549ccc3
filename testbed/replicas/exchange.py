"""How workers' messages become the aggregate that each of them has: the weighted sum of what was decoded.

In a star the server sums, in the order of the workers, and what the workers apply is decoded from its answer. Where
every worker has all messages (all-to-all, all-gather) each sums for itself, in the same order. In a ring that reduces,
part p of the tensors is summed on its way round from worker p, so the order is p, p + 1, ...; it is encoded anew at
every hop, which leaves only codecs that are rounding and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

Tensors: TypeAlias = list[Tensor]


def weighted_sum(values: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """Return the weighted sum of each tensor, in order, beginning with the first; `values` are used up."""
    total: Tensors = []
    for each, weight in zip(values, weights, strict=True):
        weighed = [value.mul_(weight) for value in each]
        total = [before.add_(value) for before, value in zip(total, weighed, strict=True)] if total else weighed
    return total

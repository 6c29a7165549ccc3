"""How workers' messages become the aggregate that each of them has: the weighted sum of what was decoded.

In a star the server sums, in the order of the workers, and what the workers apply is decoded from its answer. Where
every worker has all messages (all-to-all, all-gather) each sums for itself, in the same order. In a ring that reduces,
part p of the tensors is summed on its way round from worker p, so the order is p, p + 1, ...; it is encoded anew at
every hop, which leaves only codecs that are rounding and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from testbed.codecs.contract import Payload
from testbed.replicas.bucket import Bucket
from testbed.replicas.fragments import ring_parts

Tensors: TypeAlias = list[Tensor]


def weighted_sum(values: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """Return the weighted sum of each tensor, in order, beginning with the first; `values` are used up."""
    total: Tensors = []
    for each, weight in zip(values, weights, strict=True):
        weighed = [value.mul_(weight) for value in each]
        total = [before.add_(value) for before, value in zip(total, weighed, strict=True)] if total else weighed
    return total


class RingParts:
    """The parts of a worker's tensors that go round a ring, one per worker, as even as can be; and their codecs."""

    def __init__(self, shapes: Sequence[Sequence[int]], codec: str, workers: int, seed: int) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._lengths = ring_parts(self._shapes, workers)
        self.buckets = [Bucket([(length,)], codec, seed=seed, sender=part) for part, length in enumerate(self._lengths)]

    def cut(self, tensors: Tensors, weight: float) -> tuple[Tensor, ...]:
        """Return a worker's parts, weighted."""
        return torch.split(torch.cat([value.reshape(-1) for value in tensors]).mul_(weight), self._lengths)

    def encode(self, part: int, value: Tensor, step: int) -> bytes:
        """Return the message of a part."""
        return self.buckets[part].encode([value], step)

    def decode(self, part: int, payload: Payload, step: int) -> Tensor:
        """Return a part from its message, a new tensor."""
        return self.buckets[part].decode(payload, step)[0]

    def shaped(self, parts: Sequence[Tensor]) -> Tensors:
        """Return the tensors that all parts together are."""
        flat = torch.split(torch.cat(list(parts)), [torch.Size(shape).numel() for shape in self._shapes])
        return [value.view(shape).clone() for value, shape in zip(flat, self._shapes, strict=True)]

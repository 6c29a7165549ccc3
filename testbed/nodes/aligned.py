"""Rows that all workers send alike, so that a ring can sum them: ARC-Top-K (arXiv 2510.26709).

Each worker projects its matrices onto a few random directions, the same for all; the ring sums these sketches; every
worker sends the rows whose summed sketches are longest, and keeps all others for the next message (error feedback).
Written from the abstract: sketch, error feedback and the choice by rows of a tensor's first axis are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from testbed.codecs.in_model import bases
from testbed.nodes.fragments import aligned_rows
from testbed.spec import AlignedSpec


class AlignedRows:
    """One worker's part of the agreement, for messages of tensors of these shapes."""

    keeps = ("_left_out", "_pending", "_rows")

    def __init__(self, shapes: Sequence[Sequence[int]], spec: AlignedSpec, seed: int) -> None:
        self._shapes, self._spec, self._seed = [tuple(shape) for shape in shapes], spec, seed
        self._kept = [aligned_rows(shape, spec) for shape in self._shapes]
        """By tensor: the number of rows that are sent; 0: it has no rows, and is sent in full."""
        self._left_out = [torch.zeros(shape) for shape in self._shapes]
        self._pending: list[Tensor] = []
        self._rows: dict[int, list[Tensor]] = {}
        """The chosen rows, by step, until its aggregate is applied."""

    def sketch(self, tensors: Sequence[Tensor], step: int) -> Tensor:
        """Add what was left out to a step's tensors; returns their sketches, flat."""
        self._pending = [tensor + left for tensor, left in zip(tensors, self._left_out, strict=True)]
        sketches = [
            tensor.reshape(len(tensor), -1)
            @ bases.normal(f"sketch {self._seed} {step} {number}", _width(shape), self._spec.directions)
            for number, (tensor, shape, kept) in enumerate(zip(self._pending, self._shapes, self._kept, strict=True))
            if kept
        ]
        return torch.cat([torch.empty(0), *(sketch.reshape(-1) for sketch in sketches)])

    def choose(self, sketches: Tensor, step: int) -> Tensor:
        """Choose the rows by the sum of all workers' sketches; returns their values and all tensors without rows, flat,
        and keeps the rest.
        """
        self._rows[step], sent = [], []
        for tensor, left, kept in zip(self._pending, self._left_out, self._kept, strict=True):
            if not kept:
                sent.append(tensor.reshape(-1))
                continue
            lengths = sketches[: len(tensor) * self._spec.directions].view(len(tensor), -1).square().sum(1)
            sketches = sketches[len(tensor) * self._spec.directions :]
            rows = lengths.argsort(descending=True, stable=True)[:kept].sort().values
            self._rows[step].append(rows)
            sent.append(tensor[rows].reshape(-1))
            left.copy_(tensor).index_fill_(0, rows, 0.0)
        self._pending = []
        return torch.cat(sent)

    def spread(self, flat: Tensor, step: int) -> list[Tensor]:
        """Return the tensors of an aggregate of what `choose` returned, with zeros in all other rows."""
        tensors, rows = [], iter(self._rows.pop(step))
        for shape, kept in zip(self._shapes, self._kept, strict=True):
            size = kept * _width(shape) if kept else math.prod(shape)
            values, flat = flat[:size], flat[size:]
            if kept:
                values = torch.zeros(shape).index_copy_(0, next(rows), values.view(kept, *shape[1:]))
            tensors.append(values.view(shape).clone())
        return tensors


def _width(shape: Sequence[int]) -> int:
    return math.prod(shape[1:])

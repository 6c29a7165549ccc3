"""Positions as an octree, and RAHT, the transform of attributes over it.

A scene's bounding box is cut into 2**depth voxels along each axis. A voxel's code interleaves the bits of its
coordinates, the coarsest first, so that sorted codes are the leaves of an octree in order. The octree is sent as a byte
for each inner node, level by level: which of its eight children there are.

RAHT (de Queiroz and Chou, IEEE TIP 2016) joins, axis by axis from the leaves up, siblings of weights v and w and values
a and b: (sqrt(v) a + sqrt(w) b) / sqrt(v + w) moves up with the weight v + w, and the detail (sqrt(v) b - sqrt(w) a) /
sqrt(v + w) stays; a node without a sibling moves up unchanged. It is orthonormal and depends on the positions alone, so
the receiver has it, too.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Codes = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def codes_of(cells: Codes, depth: int) -> Codes:
    """Return the codes (n,) of voxels (n, 3)."""
    codes = np.zeros(len(cells), np.int64)
    for bit in reversed(range(depth)):
        for axis in range(3):
            codes = codes << 1 | cells[:, axis] >> bit & 1
    return codes


def cells_of(codes: Codes, depth: int) -> Codes:
    """Return the voxels (n, 3) of codes (n,)."""
    cells = np.zeros((len(codes), 3), np.int64)
    for bit in range(depth):
        for axis in range(3):
            cells[:, axis] |= (codes >> (3 * bit + 2 - axis) & 1) << bit
    return cells


def encode(codes: Codes, depth: int) -> Bytes:
    """Return the octree of sorted, distinct codes."""
    levels = []
    for level in range(depth):
        children = np.unique(codes >> 3 * (depth - level - 1))
        _, first = np.unique(children >> 3, return_index=True)
        levels.append(np.bitwise_or.reduceat(1 << (children & 7), first).astype(np.uint8))
    return np.concatenate(levels)


def decode(tree: Bytes, depth: int) -> Codes:
    """Return the codes of an octree, sorted."""
    nodes, at = np.zeros(1, np.int64), 0
    for _ in range(depth):
        masks = tree[at : at + len(nodes)]
        at += len(nodes)
        parent, child = np.nonzero(np.unpackbits(masks[:, None], axis=1, bitorder="little"))
        nodes = nodes[parent] << 3 | child
    return nodes


class _Level(NamedTuple):
    """One level of RAHT's tree, from the leaves up."""

    left: Tensor
    """Of each parent, its first child."""
    pairs: Tensor
    """The parents with two children."""
    first: Tensor
    """sqrt(v / (v + w)) of each pair, (pairs, 1)."""
    second: Tensor
    """sqrt(w / (v + w))."""


class Raht:
    """The transform over the voxels of sorted, distinct codes."""

    def __init__(self, codes: Codes, depth: int) -> None:
        self._levels, weights, nodes = list[_Level](), np.ones(len(codes)), codes
        for _ in range(3 * depth):
            nodes, left, count = np.unique(nodes >> 1, return_index=True, return_counts=True)
            pairs = np.flatnonzero(count == 2)
            v, w = weights[left[pairs]], weights[left[pairs] + 1]
            shares = (torch.from_numpy(np.sqrt(part / (v + w))).float()[:, None] for part in (v, w))
            self._levels.append(_Level(torch.from_numpy(left), torch.from_numpy(pairs), *shares))
            weights = np.add.reduceat(weights, left)

    def transform(self, values: Tensor) -> Tensor:
        """Return the coefficients (n, channels) of values (n, channels): the root, then details, coarse ones first."""
        details = []
        for left, pairs, first, second in self._levels:
            a, b = values[left[pairs]], values[left[pairs] + 1]
            details.append(first * b - second * a)
            values = values[left].index_copy(0, pairs, first * a + second * b)
        return torch.cat((values, *reversed(details)))

    def inverse(self, coefficients: Tensor) -> Tensor:
        """Invert `transform`."""
        values, at = coefficients[:1], 1
        for left, pairs, first, second in reversed(self._levels):
            low, high = values[pairs], coefficients[at : at + len(pairs)]
            at += len(pairs)
            children = torch.empty(len(left) + len(pairs), values.shape[1])
            children = children.index_copy(0, left, values.index_copy(0, pairs, first * low - second * high))
            values = children.index_copy(0, left[pairs] + 1, second * low + first * high)
        return values

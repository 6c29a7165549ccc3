"""dct(inner): a cosine transform of a tensor's blocks, which concentrates smooth content in few values, then any codec.

A matrix is cut into blocks of G x G values, a vector into runs of G; blocks at the edges may be smaller. Each gets an
orthonormal discrete cosine transform (type II, in both axes). The inner codec sees a tensor of the same shape with
blocks consecutive in memory: `topk-chunk` with chunks of G x G keeps the largest of each block. The leading axes of a
tensor with more than two are merged.

Law: the error's L2 norm is the inner codec's, so no value's error exceeds the root of the sum of squared bounds in its
block. Bits per element: the inner codec's; nothing is added to its payload. Source: DeMo (Peng et al., arXiv
2411.19870), which sends the 32 largest of each 64 x 64. A block of 32 x 32 takes half as long, and on one core only
that stays within the time limit of codecs here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload, Stateful
from testbed.codecs.wire import header
from testbed.codecs.wire.header import Shape, rows_of
from testbed.codecs.wire.scratch import Scratch
from testbed.codecs.wrap import States, parts_with


@functools.cache
def matrix(size: int) -> Tensor:
    """Return the orthonormal DCT-II, fp32 (size, size), a row for each frequency; read-only."""
    frequency, place = torch.arange(size, dtype=torch.float64)[:, None], torch.arange(size, dtype=torch.float64)[None]
    cosines = torch.cos(math.pi * frequency * (2 * place + 1) / (2 * size)) * math.sqrt(2 / size)
    cosines[0] /= math.sqrt(2)
    return cosines.to(torch.float32)


class _Region(NamedTuple):
    """Blocks of one size, side by side in a matrix."""

    rows: slice
    columns: slice
    height: int
    width: int

    @property
    def blocks(self) -> tuple[int, int]:
        """Number of blocks vertically and horizontally."""
        high, wide = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        return high // self.height, wide // self.width

    @property
    def values(self) -> int:
        return math.prod(self.blocks) * self.height * self.width


def _cuts(length: int, size: int) -> Iterator[tuple[slice, int]]:
    whole = length // size * size
    if whole:
        yield slice(0, whole), size
    if whole < length:
        yield slice(whole, length), length - whole


def regions(shape: Shape, size: int) -> Iterator[_Region]:
    """Yield the parts of a tensor, as a matrix, with blocks of one size each: at most four."""
    high, wide = rows_of(shape)
    for rows, height in _cuts(high, size):
        for columns, width in _cuts(wide, size):
            yield _Region(rows, columns, height, width)


class Transform:
    """The transform and its inverse, with memory reused for every message."""

    def __init__(self, size: int) -> None:
        self._size, self._scratch, self._blocks, self._rows = size, Scratch(), Scratch(), Scratch()

    def of(self, x: Tensor, out: Tensor) -> Tensor:
        """Write the coefficients of fp32 x, block after block, to the contiguous `out` of its shape, and return it."""
        source, flat, start = x.contiguous().view(rows_of(x.shape)), out.view(-1), 0
        for region in regions(x.shape, self._size):
            high, wide = region.blocks
            part = source[region.rows, region.columns].reshape(high, region.height, -1)
            down = torch.matmul(matrix(region.height), part, out=self._scratch.of(part.shape))
            blocks = self._blocks.of((high, wide, region.height, region.width))
            blocks.copy_(down.view(high, region.height, wide, region.width).transpose(1, 2))
            rows = flat[start : start + region.values].view(-1, region.width)
            torch.mm(blocks.view(-1, region.width), matrix(region.width).T, out=rows)
            start += region.values
        return out

    def inverse(self, coefficients: Tensor) -> Tensor:
        """Invert `of` in place on contiguous fp32, and return the result."""
        target, flat, start = self._scratch.of(rows_of(coefficients.shape)), coefficients.view(-1), 0
        for region in regions(coefficients.shape, self._size):
            high, wide = region.blocks
            rows = flat[start : start + region.values].view(-1, region.width)
            across = torch.mm(rows, matrix(region.width), out=self._blocks.of(rows.shape))
            part = self._rows.of((high, region.height, wide, region.width))
            part.copy_(across.view(high, wide, region.height, region.width).transpose(1, 2))
            stacked = part.view(high, region.height, -1)
            restored = torch.matmul(matrix(region.height).T, stacked, out=self._blocks.of(stacked.shape))
            target[region.rows, region.columns] = restored.view(high * region.height, -1)
            start += region.values
        return coefficients.copy_(target.view(coefficients.shape))


class Cosine:
    """A cosine transform around any other codec."""

    def __init__(self, context: Context, inner: Codec, size: int = 32) -> None:
        """Blocks have `size` x `size` values."""
        self.inner, self._transform, self._coefficients = inner, Transform(size), Scratch()
        self._states = States(parts_with({"inner": inner}, Stateful))

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Transform, and encode with the inner codec. CodecError that names the message key for a coefficient that is
        not finite, or too large to be transformed back after rounding.
        """
        x = header.check_input(tensor).to(torch.float32)
        coefficients = self._transform.of(x, self._coefficients.of(x.shape)) if x.numel() else x
        header.check_transformed(coefficients, key)
        return self.inner.encode(coefficients, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the inner codec, and transform back. Raises the inner codec's CodecError, and CodecError for a
        result that is not finite.
        """
        with self._states.parts_unchanged_on_error():
            coefficients = self.inner.decode(payload, key)  # a new contiguous tensor, which we own
            values = self._transform.inverse(coefficients) if coefficients.numel() else coefficients
            header.check_finite(values, key, "a transform", doing="decode")
        return values

"""Groups: runs of neighbouring channels of one token that share a scale, and their bf16 scales and offsets.

A row is the last axis; a group is `size` values of one row; the last may be shorter. Scales and offsets are sent as
bf16 instead of the papers' fp16: the same bits, with fp32's range. A gradient shrinks with the number of tokens in the
batch, and a scale below 6e-5 would be denormal in fp16. bf16's coarser steps cost little, because values are quantised
with the rounded scale: it is rounded up, so that no value exceeds the last level, by at most 2**-7 relative to the
exact one. An offset is rounded down, by up to 2**-7 of itself: for groups far from zero, such as a rotated tile with
one outlier, that widens the step.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from testbed.codecs.contract import MessageKey
from testbed.codecs.wire.header import CPU, Shape, rows_of
from testbed.errors import CodecError

SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
"""Smallest scale: denormal numbers would be too coarse to divide by. Equals fp32's smallest normal number."""
_MANTISSA_BITS = {torch.bfloat16: 8, torch.float32: 24}


class Grouping(NamedTuple):
    """The groups of a shape. An empty tensor has no rows; a scalar is one row of one value."""

    rows: int
    width: int
    size: int
    """Values in a group, at most the width."""

    @classmethod
    def of(cls, shape: Shape, size: int) -> Grouping:
        """Cut rows into groups of `size` values; 0 means one group per row."""
        rows, width = rows_of(shape)
        return cls(rows, width, min(size, width) if size else width)

    @property
    def per_row(self) -> int:
        """Groups per row, including a shorter last one."""
        return -(-self.width // self.size) if self.width else 0

    @property
    def groups(self) -> int:
        """Groups of the whole tensor."""
        return self.rows * self.per_row

    @property
    def values(self) -> int:
        """Values of the tensor, without padding."""
        return self.rows * self.width

    @property
    def padding(self) -> int:
        """Padding values of the last group of a row."""
        return self.per_row * self.size - self.width

    def split(self, x: Tensor, *, edge: bool = False) -> Tensor:
        """Return an fp32 tensor as contiguous (groups, size): a view if all groups are full, otherwise a copy padded
        with zeros.

        With `edge` it is padded with the row's last value, which changes no group's minimum or maximum.
        """
        x = x.reshape(self.rows, self.width).contiguous()
        if self.padding and edge:
            x = torch.cat([x, x[:, -1:].expand(-1, self.padding)], dim=1)
        elif self.padding:
            x = functional.pad(x, (0, self.padding))
        return x.view(self.groups, self.size)

    def trim(self, grouped: Tensor) -> Tensor:
        """Return (groups, size) as flat values without padding, a view if groups are full: the inverse of `split`."""
        if not self.padding:
            return grouped.view(-1)
        return grouped.view(self.rows, -1)[:, : self.width].reshape(-1)

    def spread(self, flat: Tensor) -> Tensor:
        """Return flat values without padding as (groups, size), padded with zeros: the inverse of `trim`. It is a view
        if all groups are full.
        """
        if not self.padding:
            return flat.view(self.groups, self.size)
        return functional.pad(flat.view(self.rows, self.width), (0, self.padding)).view(self.groups, self.size)


def to_codes(numbers: Tensor) -> Tensor:
    """Truncate contiguous fp32 numbers from 0 to below 256 to uint8.

    Uses numpy on the CPU: torch's cast to uint8 takes six times as long.
    """
    if numbers.device.type != CPU.type:
        return numbers.to(torch.uint8)
    return torch.from_numpy(numbers.numpy().astype(np.uint8))


def largest_magnitude(grouped: Tensor, dim: int = -1) -> Tensor:
    """Return max|x| along `dim`, kept as an axis of length 1; NaN and infinity are preserved.

    Two reductions are faster than one pass for |x| and one more.
    """
    return torch.maximum(grouped.amax(dim, keepdim=True), grouped.amin(dim, keepdim=True).neg_())


def bf16_up(numbers: Tensor) -> Tensor:
    """Round finite fp32 numbers away from zero to bf16; those beyond bf16's largest become infinity."""
    words = (numbers.contiguous().view(torch.int32) + 0xFFFF) >> 16
    return words.to(torch.int16).view(torch.bfloat16)


def bf16_down(numbers: Tensor) -> Tensor:
    """Round finite fp32 numbers towards minus infinity to bf16."""
    words = numbers.contiguous().view(torch.int32)
    words = torch.where(words < 0, words + 0xFFFF, words) >> 16
    return words.to(torch.int16).view(torch.bfloat16)


def scales(ranges: Tensor, levels: float) -> Tensor:
    """Return steps (bf16) such that `levels` steps cover each of the `ranges` (fp32, not negative, finite).

    No step is larger than `largest_scale(levels)`: values beyond it, by a few per mille, are clipped.
    """
    return bf16_up((ranges / levels).clamp_(SMALLEST_SCALE, largest_scale(levels)))


@functools.cache
def largest_scale(levels: float, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the largest number of the type (bf16 or fp32) that `levels` times is still finite in fp32."""
    exact = min(torch.finfo(torch.float32).max / levels, torch.finfo(dtype).max)
    mantissa, exponent = math.frexp(exact)
    bits = _MANTISSA_BITS[dtype]
    return math.ldexp(math.floor(math.ldexp(mantissa, bits)), exponent - bits)


def scales_are_sound(steps: Tensor, levels: float) -> bool:
    """Return whether an encoder can produce all of these scales, bf16 or fp32."""
    largest = largest_scale(levels, steps.dtype)
    steps = steps.to(torch.float32)
    return bool(((steps >= SMALLEST_SCALE) & (steps <= largest)).all())


def check_ends(ends: Tensor, key: MessageKey) -> None:
    """Raise a CodecError that names the message key unless the ends of all groups are finite."""
    if not bool(ends.isfinite().all()):
        raise CodecError(
            f"cannot encode {key}: the tensor holds NaN or infinity, or its range exceeds fp32's largest number"
        )


class Affine(NamedTuple):
    """Levels between a group's minimum and maximum: value = offset + step * code. Both are bf16, (groups, 1).

    The offset is rounded down and the step up, so that the codes cover the group despite bf16 rounding.
    """

    step: Tensor
    offset: Tensor

    @classmethod
    def fit(cls, x: Tensor, top: int | Tensor, key: MessageKey) -> Affine:
        """Fit codes 0..top to groups x, fp32 (groups, size); `top` may differ by group, (groups, 1).

        CodecError that names the message key if no two bf16 numbers cover a group.
        """
        lowest, highest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        offset = bf16_down(lowest)
        base = offset.to(torch.float32)
        step = bf16_up(((highest - base) / top).clamp_(SMALLEST_SCALE, torch.finfo(torch.bfloat16).max))
        # Check the lowest itself, too: NaN has another bit pattern in bf16, and might become finite.
        check_ends(0 * (lowest + (highest - base)) + (base + top * step.to(torch.float32)), key)
        return cls(step, offset)

    def scaled_(self, x: Tensor) -> Tensor:
        """Turn groups into steps above their offset, in place: 0..top, with fractions."""
        return x.sub_(self.offset.to(torch.float32)).mul_(self.step.to(torch.float32).reciprocal_())

    def values_(self, codes: Tensor) -> Tensor:
        """Turn fp32 codes (groups, size) into values, in place."""
        return codes.mul_(self.step.to(torch.float32)).add_(self.offset.to(torch.float32))

    def is_sound(self, top: int | Tensor) -> bool:
        """Return whether `fit` can produce these numbers, so that every code has a finite value."""
        step, offset = self.step.to(torch.float32), self.offset.to(torch.float32)
        # A NaN fails the comparison, an infinite offset or step the other test.
        return bool((step >= SMALLEST_SCALE).all()) and bool((offset + top * step).isfinite().all())

"""Groups: runs of neighbouring channels of one token that share a scale, and the 16-bit numbers that they share.

A row is the last axis; a group is `size` values of one row, the last of a row as many as are left. Scales and zero points go
over as bf16, not as the papers' fp16: as many bits, and fp32's range. A gradient shrinks with the number of tokens in the
batch, and a scale below 6e-5 would be denormal in fp16. bf16's coarser steps cost little, because values are quantised with the
rounded scale: it is rounded up, so that no value lies beyond the last level, and is at most 2**-7 above the true one. An offset
is rounded down, by up to 2**-7 of itself: of groups far from zero, as a rotated tile with one outlier is, that widens the step.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from testbed.codecs.contract import MessageKey
from testbed.codecs.wire.header import Shape, rows_of
from testbed.errors import CodecError

SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
"""Scales stay normal numbers: a denormal one would be too coarse to divide by."""
LARGEST_BF16 = torch.finfo(torch.bfloat16).max
SCALE_BITS = 16


class Layout(NamedTuple):
    """How a shape falls into groups. An empty tensor has no rows; a scalar is one row of one value."""

    rows: int
    width: int
    size: int
    """Values in a group, at most the width."""

    @property
    def per_row(self) -> int:
        """Groups in a row, the last one perhaps short."""
        return -(-self.width // self.size) if self.width else 0

    @property
    def number(self) -> int:
        """Groups in all."""
        return self.rows * self.per_row

    @property
    def values(self) -> int:
        """Of the tensor, without padding."""
        return self.rows * self.width

    @property
    def padding(self) -> int:
        """Values that the last group of a row lacks."""
        return self.per_row * self.size - self.width


def layout(shape: Shape, size: int) -> Layout:
    """Groups of `size` values; 0 means one group a row."""
    rows, width = rows_of(shape)
    return Layout(rows, width, min(size, width) if size else width)


def split(x: Tensor, of: Layout, *, edge: bool = False) -> Tensor:
    """An fp32 tensor as contiguous (groups, size): a view where the groups are whole, else a copy padded with zeros.

    `edge`: padded with the row's last value instead, which changes no group's least or largest.
    """
    x = x.reshape(of.rows, of.width).contiguous()
    if of.padding and edge:
        x = torch.cat([x, x[:, -1:].expand(-1, of.padding)], dim=1)
    elif of.padding:
        x = functional.pad(x, (0, of.padding))
    return x.view(of.number, of.size)


def trim(grouped: Tensor, of: Layout) -> Tensor:
    """(groups, size) as the flat values without padding: the inverse of `split`. A view where the groups are whole."""
    if not of.padding:
        return grouped.view(-1)
    return grouped.view(of.rows, -1)[:, : of.width].reshape(-1)


def spread(flat: Tensor, of: Layout) -> Tensor:
    """Flat values without padding as (groups, size), padded with zeros: what `trim` undoes. A view where the groups are whole."""
    if not of.padding:
        return flat.view(of.number, of.size)
    return functional.pad(flat.view(of.rows, of.width), (0, of.padding)).view(of.number, of.size)


def to_codes(numbers: Tensor) -> Tensor:
    """Contiguous fp32 numbers from 0 to below 256 as uint8, fractions cut off.

    By numpy: torch's cast to uint8 takes six times as long.
    """
    return torch.from_numpy(numbers.numpy().astype(np.uint8))


def largest_magnitude(grouped: Tensor) -> Tensor:
    """max|x| of each group, (groups, 1); NaN and infinity stay. Two reductions are faster than one pass for |x| and one more."""
    return torch.maximum(grouped.amax(-1, keepdim=True), grouped.amin(-1, keepdim=True).neg_())


def bf16_up(numbers: Tensor) -> Tensor:
    """Finite fp32 numbers as bf16, rounded away from zero where they do not fit; beyond bf16's largest, infinity."""
    words = (numbers.contiguous().view(torch.int32) + 0xFFFF) >> 16
    return words.to(torch.int16).view(torch.bfloat16)


def bf16_down(numbers: Tensor) -> Tensor:
    """Finite fp32 numbers as bf16, rounded towards minus infinity."""
    words = numbers.contiguous().view(torch.int32)
    words = torch.where(words < 0, words + 0xFFFF, words) >> 16
    return words.to(torch.int16).view(torch.bfloat16)


def scales(ranges: Tensor, levels: float) -> Tensor:
    """Steps (bf16) of which `levels` reach over each of the `ranges` (fp32, not negative, finite), within what bf16 holds.

    None is larger than `largest_scale(levels)`: of a group beyond it the last few per mille are clipped.
    """
    return bf16_up((ranges / levels).clamp_(SMALLEST_SCALE, largest_scale(levels)))


def largest_scale(levels: float) -> float:
    """The largest bf16 number that `levels` times is still finite in fp32."""
    exact = min(torch.finfo(torch.float32).max / levels, LARGEST_BF16)
    mantissa, exponent = math.frexp(exact)
    return math.ldexp(math.floor(mantissa * 256), exponent - 8)


def scales_are_sound(found: Tensor, levels: float) -> bool:
    """Whether every scale (bf16) is one that `scales` makes."""
    found = found.to(torch.float32)
    return bool(((found >= SMALLEST_SCALE) & (found <= largest_scale(levels))).all())


def check_ends(ends: Tensor, key: MessageKey) -> None:
    """CodecError that names the message key unless what groups reach to is finite."""
    if not bool(ends.isfinite().all()):
        raise CodecError(
            f"cannot encode {key}: it holds NaN or infinity, or values that reach beyond fp32's largest number"
        )

"""onebit, twobit: one or two bits per value, and a magnitude per token and per channel, whose product scales them.

Let M be the matrix of a message, one row per token. u_i = mean_j |M_ij| and v_j = mean_i |M_ij| / mean |M|, both bf16;
s_ij = u_i v_j is the rank-one fit of |M| that keeps its row and column means. One bit is the sign, decoded as +-s. Two
bits are the sign and whether |M_ij| > 1.230 s, decoded as +-0.567 s or +-1.893 s: the four levels of least squared
error for normal values (Max, IRE Trans. 1960) in units of their mean magnitude.

Bits per element: 1 + 16/d + 16/bn and 2 + 16/d + 16/bn. Alone the error is large (0.60 and 0.34 of the norm for normal
values): they are for a closed loop, `compactfusion(onebit)` or `ef(onebit)`. Source: after the 1-bit and 2-bit
compressors of CompactFusion ("Accelerating Parallel Diffusion Model Serving with Residual Compression"), from memory.
The rank-one scale comes from there; the fit and the two-bit levels are derived here.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.wire import bits
from testbed.codecs.wire.header import Shape, check_finite, rows_of
from testbed.codecs.wire.message import Body, BodyCodec, Field, check_written
from testbed.errors import CodecError

_SMALL, _EDGE, _LARGE = 0.5675, 1.2303, 1.8925
_LARGEST = 2.0**100
"""Largest magnitude that is sent, which keeps products of means far within fp32."""


class OneBit(BodyCodec):
    """Signs. Law: signs are preserved, and the error of a value is at most the larger of |x| and s."""

    on_device = True
    code = 63
    width: ClassVar[int] = 1
    """Bits per value."""
    largest: ClassVar[float] = 1.0
    """The largest level, in units of s."""

    def __init__(self, context: Context) -> None:
        """Ignores the context, because there are no random numbers."""

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return magnitudes of rows, magnitudes of columns, and packed codes."""
        rows, width = rows_of(shape)
        packed = Field(torch.uint8, bits.packed_bytes(rows * width, self.width))
        return Field(torch.bfloat16, rows), Field(torch.bfloat16, width), packed

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Write the fields. CodecError names the message key for NaN, infinity, or a magnitude above 2**100."""
        of_rows, of_columns, packed = body
        x = x.view(rows_of(x.shape))
        magnitudes = x.abs()
        for field, means in zip((of_rows, of_columns), _means(magnitudes, key), strict=True):
            field.copy_(means)
        codes = (x < 0).view(torch.uint8)
        if self.width == 2:
            edges = torch.outer(of_rows.to(torch.float32) * _EDGE, of_columns.to(torch.float32))
            codes |= (magnitudes > edges).view(torch.uint8) << 1
        bits.pack(codes.view(-1), self.width, packed)

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return level * u * v. CodecError for magnitudes that `fill` does not write, or an infinite product."""
        of_rows, of_columns = (field.to(torch.float32) for field in body[:2])
        sound = (((field >= 0) & (field <= _LARGEST)).all() for field in (of_rows, of_columns))
        check_written(all(map(bool, sound)), key, "such a magnitude")
        rows, width = rows_of(shape)
        values = self._in_scales(bits.unpack(body[2], self.width, rows * width)).view(rows, width)
        values.mul_(of_rows[:, None]).mul_(of_columns)
        check_finite(values, key, "a scale times a scale", doing="decode")
        return values

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of each value, which is at most the larger of the value and its level, because signs
        agree.
        """
        of_rows, of_columns = _means(tensor.abs().reshape(rows_of(tensor.shape)), None)
        rounded = (1 + 2.0**-8) ** 2 * self.largest
        return torch.maximum(tensor.abs(), torch.outer(of_rows, of_columns).mul_(rounded).view(tensor.shape))

    @staticmethod
    def _in_scales(codes: Tensor) -> Tensor:
        """Return the levels in units of s, as a new fp32 tensor."""
        return codes.to(torch.float32).mul_(-2).add_(1)


class TwoBit(OneBit):
    """Signs and whether a value is large. Law: that of OneBit, with 1.893 s for s."""

    code = 64
    width = 2
    largest = _LARGE

    @staticmethod
    def _in_scales(codes: Tensor) -> Tensor:
        sizes = (codes >> 1).to(torch.float32).mul_(_LARGE - _SMALL).add_(_SMALL)
        return sizes.mul_(OneBit._in_scales(codes & 1))


def _means(magnitudes: Tensor, key: MessageKey | None) -> tuple[Tensor, Tensor]:
    """Return u and v. CodecError if they do not exist."""
    of_rows, of_columns = magnitudes.mean(-1), magnitudes.mean(0)
    if not float(largest := magnitudes.amax()) <= _LARGEST:
        raise CodecError(
            f"cannot encode {key}: the tensor holds NaN, infinity or a magnitude above 2**100, found {float(largest):g}"
        )
    return of_rows, of_columns / of_rows.mean().clamp_min(torch.finfo(torch.float32).tiny)

"""One or two bits a value, and a magnitude for each token and each channel: strong compression, made for residuals.

For the matrix M of a message, one row a token: u_i = mean_j |M_ij|, v_j = mean_i |M_ij| / mean |M|, both as bf16, and s_ij =
u_i v_j is the rank-one fit of |M| that keeps its row and column means. One bit: the sign, decoded as +-s. Two bits: the sign and
whether |M_ij| > 1.230 s, decoded as +-0.567 s or +-1.893 s: the four levels of least squared error for normal values (Max, IRE
Trans. 1960) in units of their mean magnitude.

Bits per element: 1 + 16/d + 16/bn and 2 + 16/d + 16/bn. Alone the error is large (0.60 and 0.34 of the norm for normal values):
they are for a closed loop, `compactfusion(onebit)` or `ef(onebit)`.
Source: after the 1-bit and 2-bit compressors of CompactFusion ("Accelerating Parallel Diffusion Model Serving with Residual
Compression"), from memory: that the scale has rank one is its; the fit and the two-bit levels are derived here.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.wire import bits, header
from testbed.errors import CodecError

_SMALL, _EDGE, _LARGE = 0.5675, 1.2303, 1.8925
_LARGEST = 2.0**100
"""Of a magnitude: products of means then stay far within fp32."""


class OneBit:
    """Signs. Law: a sign is kept, and the error of a value is at most the larger of |x| and s."""

    code: ClassVar[int] = header.ONE_BIT
    width: ClassVar[int] = 1
    largest: ClassVar[float] = 1.0
    """Level, in units of s."""

    def __init__(self, context: Context) -> None:
        """Nothing in the context matters: no number is drawn."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """CodecError names the message key for NaN, infinity, or a magnitude above 2**100."""
        shape = tuple(tensor.shape)
        rows, width = header.rows_of(shape)
        payload, body = header.allocate(self.code, shape, self._body_bytes(shape))
        x = header.check_input(tensor).to(torch.float32).reshape(rows, width)
        if rows == 0:
            return payload
        of_rows, of_columns = _means(magnitudes := x.abs(), key)
        scales = body[: 2 * (rows + width)].view(torch.bfloat16)
        scales[:rows].copy_(of_rows)
        scales[rows:].copy_(of_columns)
        codes = (x < 0).view(torch.uint8)
        if self.width == 2:
            edges = torch.outer(scales[:rows].to(torch.float32) * _EDGE, scales[rows:].to(torch.float32))
            codes |= (magnitudes > edges).view(torch.uint8) << 1
        bits.pack(codes.reshape(-1), self.width, body[2 * (rows + width) :])
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """CodecError for scales that no encoder writes."""
        opened = header.open_payload(payload, self.code, self._body_bytes)
        rows, width = header.rows_of(opened.shape)
        if opened.visit != 0:
            raise CodecError(
                f"cannot decode {key}: visit number {opened.visit} of a codec that remembers nothing and writes 0"
            )
        if rows == 0:
            return torch.empty(opened.shape)
        scales = header.as_tensor(opened.body, torch.bfloat16, rows + width).to(torch.float32)
        if not bool(((scales >= 0) & (scales <= _LARGEST)).all()):
            raise CodecError(f"cannot decode {key}: it holds a scale that no encoder writes")
        packed = header.as_tensor(
            opened.body, torch.uint8, len(opened.body) - 2 * (rows + width), offset=2 * (rows + width)
        )
        codes = bits.unpack(packed, self.width, rows * width)
        value = self._in_scales(codes).view(rows, width)
        value.mul_(scales[:rows, None]).mul_(scales[rows:])
        header.check_finite(value, key, "a scale times a scale", doing="decode")
        return value.view(opened.shape)

    def bound(self, tensor: Tensor) -> Tensor:
        """|decoded - x| value by value: the signs agree."""
        x = tensor.detach().to(torch.float32)
        if not x.numel():
            return x
        rows, width = header.rows_of(tuple(x.shape))
        of_rows, of_columns = _means(x.abs().reshape(rows, width), None)
        rounded = (1 + 2.0**-8) ** 2 * self.largest
        return torch.maximum(x.abs(), torch.outer(of_rows, of_columns).mul_(rounded).view(x.shape))

    def payload_bytes(self, shape: header.Shape) -> int:
        """The length of a payload of this shape."""
        return header.header_bytes(len(shape)) + self._body_bytes(shape)

    def _body_bytes(self, shape: header.Shape) -> int:
        rows, width = header.rows_of(shape)
        return 2 * (rows + width) + bits.packed_bytes(rows * width, self.width) if rows else 0

    @staticmethod
    def _in_scales(codes: Tensor) -> Tensor:
        """Values in units of s, as a new fp32 tensor."""
        return codes.to(torch.float32).mul_(-2).add_(1)


class TwoBit(OneBit):
    """Signs and whether a value is large. Law: as OneBit's, with 1.893 s for s."""

    code = header.TWO_BIT
    width = 2
    largest = _LARGE

    @staticmethod
    def _in_scales(codes: Tensor) -> Tensor:
        sizes = (codes >> 1).to(torch.float32).mul_(_LARGE - _SMALL).add_(_SMALL)
        return sizes.mul_(OneBit._in_scales(codes & 1))


def _means(magnitudes: Tensor, key: MessageKey | None) -> tuple[Tensor, Tensor]:
    """u and v. CodecError for what they cannot be made of."""
    of_rows, of_columns = magnitudes.mean(-1), magnitudes.mean(0)
    if not float(largest := magnitudes.amax()) <= _LARGEST:
        raise CodecError(
            f"cannot encode {key}: it holds NaN, infinity or a magnitude above 2**100, found {float(largest):g}"
        )
    return of_rows, of_columns / of_rows.mean().clamp_min(torch.finfo(torch.float32).tiny)

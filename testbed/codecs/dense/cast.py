"""Casts: a tensor's values as fp32, bf16 or fp16, stateless. NaN and infinity pass through."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.wire.header import Shape
from testbed.codecs.wire.message import Body, BodyCodec, Field
from testbed.errors import CodecError


class Cast(BodyCodec):
    """A cast to the nearest value of a type, ties to even. Subclasses choose the type."""

    on_device = True
    dtype: ClassVar[torch.dtype]

    def __init__(self, context: Context) -> None:
        """Ignores the context."""

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return the values."""
        return (Field(self.dtype, math.prod(shape)),)

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Cast in one pass: the copy into the payload."""
        body[0].copy_(x.view(-1))

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return the values as fp32, which represents every value of the smaller types exactly."""
        return body[0].to(torch.float32, copy=True)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest errors: half a unit in the last place; infinity where the type rounds to infinity."""
        kind = torch.finfo(self.dtype)
        size = tensor.detach().to(torch.float64).abs()
        half = torch.maximum(size, size.new_tensor(kind.tiny)) * (kind.eps / 2)
        return torch.where(size > kind.max, torch.inf, 0.0 if self.dtype == torch.float32 else half)


class Fp32(Cast):
    """32 bits per value: the identity for fp32 tensors, bit for bit, NaN payloads too. The reference of every ratio."""

    code = 1
    dtype = torch.float32


class Bf16(Cast):
    """16 bits per value: torch's own cast."""

    code = 2
    dtype = torch.bfloat16


class Fp16(Cast):
    """16 bits per value, three bits finer than bf16. Its range, 6e-8 to 65504, is often too small for gradients."""

    code = 10
    dtype = torch.float16

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Cast. CodecError for finite values that would become infinity."""
        super().fill(x, body, key)
        (halves,) = body
        if not math.isfinite(halves.sum(dtype=torch.float32).item()) and bool(
            (halves.isinf() & ~x.view(-1).isinf()).any()
        ):
            raise CodecError(f"cannot encode {key}: a value is beyond fp16's largest, 65504; bf16 has fp32's range")

"""Casts: a tensor's values as fp32, bf16 or fp16, nothing remembered. NaN and infinity pass through."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.wire import header
from testbed.errors import CodecError


class _Cast:
    code: ClassVar[int]
    dtype: ClassVar[torch.dtype]

    def __init__(self, context: Context) -> None:
        """Nothing in the context matters to a cast."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """The values in the codec's type, rounded to nearest even. One pass: the copy into the payload is the cast."""
        tensor = header.check_input(tensor)
        payload, body = header.allocate(self.code, tuple(tensor.shape), self._bytes(tuple(tensor.shape)))
        if tensor.numel():
            body.view(self.dtype).view(tensor.shape).copy_(tensor)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """The values as fp32, which holds every bf16 value exactly."""
        opened = header.open_payload(payload, self.code, self._bytes)
        values = torch.empty(opened.shape, dtype=torch.float32)
        values.view(-1).copy_(header.as_tensor(opened.body, self.dtype, opened.elements))
        return values

    def bound(self, tensor: Tensor) -> Tensor:
        """The largest error of each value: half a unit in its last place, or all of it where the type rounds to infinity."""
        kind = torch.finfo(self.dtype)
        size = tensor.detach().to(torch.float64).abs()
        half = torch.maximum(size, size.new_tensor(kind.tiny)) * (kind.eps / 2)
        return torch.where(size > kind.max, torch.inf, 0.0 if self.dtype == torch.float32 else half)

    def payload_bytes(self, shape: header.Shape) -> int:
        """Header and values."""
        return header.header_bytes(len(shape)) + self._bytes(shape)

    def _bytes(self, shape: header.Shape) -> int:
        return math.prod(shape) * self.dtype.itemsize


class Fp32(_Cast):
    """32 bits a value: the identity for fp32 tensors, bit for bit, NaN payloads too. The reference of every ratio."""

    code = header.FP32
    dtype = torch.float32


class Bf16(_Cast):
    """16 bits a value: torch's own cast."""

    code = header.BF16
    dtype = torch.bfloat16


class Fp16(_Cast):
    """16 bits a value: three bits finer than bf16, of the range 6e-8 to 65504: gradients are often too small for it."""

    code = header.FP16
    dtype = torch.float16

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """CodecError for finite values that would become infinity."""
        payload = super().encode(tensor, key)
        halves = header.as_tensor(memoryview(payload)[header.header_bytes(tensor.ndim) :], self.dtype, tensor.numel())
        if not math.isfinite(halves.sum(dtype=torch.float32).item()) and bool(
            (halves.isinf() & ~tensor.flatten().isinf()).any()
        ):
            raise CodecError(f"cannot encode {key}: a value is beyond fp16's largest, 65504; bf16 has fp32's range")
        return payload

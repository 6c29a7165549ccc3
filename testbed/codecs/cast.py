"""Casts: a tensor's values as fp32 or bf16, nothing remembered. NaN and infinity pass through."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from testbed.codecs import framing
from testbed.codecs.base import Context, Payload, Slot


class _Cast:
    code: ClassVar[int]
    dtype: ClassVar[torch.dtype]

    def __init__(self, context: Context) -> None:
        """Nothing in the context matters to a cast."""

    def encode(self, tensor: Tensor, slot: Slot) -> Payload:
        """The values in the codec's type, rounded to nearest even. One pass: the copy into the payload is the cast."""
        tensor = framing.check_input(tensor)
        payload, body = framing.allocate(self.code, tuple(tensor.shape), self._bytes(tuple(tensor.shape)))
        if tensor.numel():
            body.view(self.dtype).view(tensor.shape).copy_(tensor)
        return payload

    def decode(self, payload: Payload, slot: Slot) -> Tensor:
        """The values as fp32, which holds every bf16 value exactly."""
        opened = framing.open_payload(payload, self.code, self._bytes)
        values = torch.empty(opened.shape, dtype=torch.float32)
        values.view(-1).copy_(framing.as_tensor(opened.body, self.dtype, opened.elements))
        return values

    def _bytes(self, shape: framing.Shape) -> int:
        return math.prod(shape) * self.dtype.itemsize


class Fp32(_Cast):
    """32 bits a value: the identity for fp32 tensors, bit for bit, NaN payloads too. The reference of every ratio."""

    code = framing.FP32
    dtype = torch.float32


class Bf16(_Cast):
    """16 bits a value: torch's own cast."""

    code = framing.BF16
    dtype = torch.bfloat16

"""acsgd: fixed-point codes of b bits with one scale per channel over all tokens of the micro-batch.

For channel c, s = max|x_c|, h = 2**(b-1): q = x / s * h rounded to the nearest in -h..h-1, decoded as s * q / h. The positive
extreme is clipped to (h-1)/h of itself, as published. The wire holds s / h as bf16 (published: s as fp16, to which 1e-6 is
added against division by zero, which gradients of a mean over many tokens do not survive), rounded up, then the codes, packed.
Law: bounded by s / 2h, and by s / h where x is above (h - 1/2) s / h. Bits per element: b + 16/(b n) for b sequences of n
tokens, so another micro-batch is another codec: one outlier token coarsens its channel for all.
Source: AQ-SGD (Wang et al., NeurIPS 2022), its direct quantiser, from the code published as AC-SGD.
"""

from __future__ import annotations

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.dense import groups
from testbed.codecs.wire import bits, header
from testbed.errors import CodecError

FORWARD_BITS, BACKWARD_BITS = 4, 8
"""Published for GPT-2 XL."""


class FixedPoint:
    """Nothing is remembered."""

    def __init__(self, context: Context, bits: int = 0) -> None:
        """2 to 8 bits; 0: 4 forward, 8 backward. ValueError for others."""
        bits = bits or (FORWARD_BITS if context.direction == "forward" else BACKWARD_BITS)
        if not 2 <= bits <= 8:
            raise ValueError(f"{bits} bits: fixed point has 2 to 8")
        self._bits, self._half = bits, 1 << (bits - 1)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """CodecError names the message key where the tensor holds NaN or infinity."""
        tensor = header.check_input(tensor)
        shape = tuple(tensor.shape)
        rows, width = header.rows_of(shape)
        payload, body = header.allocate(header.FIXED_POINT, shape, self._body_bytes(shape))
        if rows == 0:
            return payload
        x = tensor.to(torch.float32).reshape(rows, width).contiguous()
        step = self._step(x, key)
        body[: 2 * width].view(torch.bfloat16).copy_(step)
        codes = torch.mul(x, step.to(torch.float32).reciprocal_())
        codes = groups.to_codes(codes.add_(self._half + 0.5).clamp_(0, 2 * self._half - 1))  # cut off, so rounded
        bits.pack(codes.view(-1), self._bits, body[2 * width :])
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """CodecError for bytes that `encode` does not write."""
        opened = header.open_payload(payload, header.FIXED_POINT, self._body_bytes)
        rows, width = header.rows_of(opened.shape)
        if rows == 0:
            return torch.empty(opened.shape, dtype=torch.float32)
        step = header.as_tensor(opened.body, torch.bfloat16, width)
        if opened.visit or not groups.scales_are_sound(step, self._half):
            raise CodecError(f"cannot decode {key}: it holds a scale or a visit number that no encoder writes")
        packed = header.as_tensor(opened.body, torch.uint8, len(opened.body) - 2 * width, offset=2 * width)
        values = bits.unpack(packed, self._bits, rows * width).to(torch.float32).view(rows, width)
        return values.sub_(self._half).mul_(step.to(torch.float32)).view(opened.shape)

    def bound(self, tensor: Tensor) -> Tensor:
        """The largest error of each value."""
        rows, width = header.rows_of(tuple(tensor.shape))
        if rows == 0:
            return torch.zeros(tensor.shape)
        x = tensor.detach().to(torch.float32).reshape(rows, width)
        step = self._step(x, MessageKey("train", 0, 0, ())).to(torch.float64)
        half = torch.maximum(step / 2, x.to(torch.float64) - (self._half - 1) * step)
        clipped = (x.abs().to(torch.float64) - self._half * step).clamp_min(0)
        return (half * (1 + 2**-14) + x.abs() * 2**-20 + clipped).view(tensor.shape)

    def payload_bytes(self, shape: header.Shape) -> int:
        """Header, a scale a channel, codes."""
        return header.header_bytes(len(shape)) + self._body_bytes(shape)

    def _step(self, x: Tensor, key: MessageKey) -> Tensor:
        """s / h: bf16 (width)."""
        largest = torch.maximum(x.amax(0), x.amin(0).neg_())
        groups.check_ends(largest, key)
        return groups.scales(largest, self._half)

    def _body_bytes(self, shape: header.Shape) -> int:
        rows, width = header.rows_of(shape)
        return 2 * width + bits.packed_bytes(rows * width, self._bits) if rows else 0

"""acsgd: fixed-point codes of b bits with one scale per channel over all tokens of the micro-batch.

For channel c, s = max|x_c|, h = 2**(b-1): q = x / s * h rounded to the nearest in -h..h-1, decoded as s * q / h. The
positive extreme is clipped to (h-1)/h of itself, as published. The wire holds s / h as bf16 (published: s as fp16, plus
1e-6 against division by zero, which destroys gradients of a mean over many tokens), rounded up, then the packed codes.
Law: bounded by s / 2h, and by s / h where x is above (h - 1/2) s / h. Bits per element: b + 16/(b n) for b sequences of
n tokens, so the codec depends on the micro-batch: one outlier token coarsens its channel for all. Source: AQ-SGD (Wang
et al., NeurIPS 2022), its direct quantiser, from the code published as AC-SGD.
"""

from __future__ import annotations

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.dense import groups
from testbed.codecs.wire import bits
from testbed.codecs.wire.header import Shape, rows_of
from testbed.codecs.wire.message import Body, BodyCodec, Field, check_written

FORWARD_BITS, BACKWARD_BITS = 4, 8
"""Published bits for GPT-2 XL."""


class FixedPoint(BodyCodec):
    """Fixed point per channel. Stateless."""

    on_device = True
    code = 15

    def __init__(self, context: Context, bits: int = 0) -> None:
        """`bits` is 2 to 8, or 0 for 4 forward and 8 backward. ValueError for others."""
        bits = bits or (FORWARD_BITS if context.direction == "forward" else BACKWARD_BITS)
        if not 2 <= bits <= 8:
            raise ValueError(f"{bits} bits: fixed point supports 2 to 8")
        self._bits, self._half = bits, 1 << (bits - 1)

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return a scale per channel, and the packed codes."""
        rows, width = rows_of(shape)
        return Field(torch.bfloat16, width), Field(torch.uint8, bits.packed_bytes(rows * width, self._bits))

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Write the fields. CodecError names the message key where x holds NaN or infinity."""
        scales, packed = body
        x = x.view(rows_of(x.shape))
        largest = groups.largest_magnitude(x, 0)
        groups.check_ends(largest, key)
        step = groups.scales(largest, self._half)
        scales.copy_(step.view(-1))
        codes = torch.mul(x, step.to(torch.float32).reciprocal_())
        codes = groups.to_codes(codes.add_(self._half + 0.5).clamp_(0, 2 * self._half - 1))  # truncation rounds
        bits.pack(codes.view(-1), self._bits, packed)

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return step * code. CodecError for scales that are not finite."""
        scales, packed = body
        check_written(groups.scales_are_sound(scales, self._half), key, "such a scale")
        rows, width = rows_of(shape)
        values = bits.unpack(packed, self._bits, rows * width).to(torch.float32).view(rows, width)
        return values.sub_(self._half).mul_(scales.to(torch.float32))

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of each value."""
        x = tensor.reshape(rows_of(tensor.shape))
        step = groups.scales(groups.largest_magnitude(x, 0), self._half).to(torch.float64)
        half = torch.maximum(step / 2, x.to(torch.float64) - (self._half - 1) * step)
        clipped = (x.abs().to(torch.float64) - self._half * step).clamp_min(0)
        return (half * (1 + 2**-14) + x.abs() * 2**-20 + clipped).view(tensor.shape)

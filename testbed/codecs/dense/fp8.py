"""8-bit floating point with a bf16 scale per token: e4m3 for activations, e5m2 for gradients, by default.

A token x is divided by s = max|x| / m, m the format's largest number (448, 57344), and cast, to nearest even. Law:
bounded by 2**-4 |x| and 2**-10 s in e4m3, by 2**-3 |x| and 2**-17 s in e5m2 (the larger of the two): the error is
relative, whereas int8's is absolute, so this is better than int8 only if few values of a token are large. Bits per
element: 8 + 16/d. Source: Micikevicius et al., "FP8 formats for deep learning", 2022.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.dense import groups
from testbed.codecs.wire.header import Shape, rows_of
from testbed.codecs.wire.message import Body, BodyCodec, Field, check_written


class _Format(NamedTuple):
    code: int
    dtype: torch.dtype
    largest: float
    last_finite: int
    """Highest code of a finite number, without the sign."""
    up: float
    """Factor of a code's value if its exponent and mantissa are interpreted as fp16."""


_E4M3 = _Format(11, torch.float8_e4m3fn, 448.0, 0x7E, 2.0**8)
_E5M2 = _Format(12, torch.float8_e5m2, 57344.0, 0x7B, 1.0)


class Fp8(BodyCodec):
    """Stateless. NaN and infinity are refused, because they would spread over their token."""

    on_device = True

    def __init__(self, context: Context, format: Literal["auto", "e4m3", "e5m2"] = "auto") -> None:
        """'auto' is e4m3 forward and e5m2, which has the larger range, backward."""
        if format == "auto":
            format = "e4m3" if context.direction == "forward" else "e5m2"
        self._format = {"e4m3": _E4M3, "e5m2": _E5M2}[format]
        self.code = self._format.code

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return a scale per token, and a byte per value."""
        rows, width = rows_of(shape)
        return Field(torch.bfloat16, rows), Field(torch.uint8, rows * width)

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Write the fields. CodecError names the message key where x holds NaN or infinity."""
        scales, codes = body
        x = x.view(rows_of(x.shape))
        largest = groups.largest_magnitude(x)
        groups.check_ends(largest, key)
        scale = groups.scales(largest, self._format.largest)
        scales.copy_(scale.view(-1))
        codes.view(self._format.dtype).view(x.shape).copy_(x * scale.to(torch.float32).reciprocal_())

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return scale * value. CodecError for scales and values that are not finite."""
        scales, codes = body
        sound = groups.scales_are_sound(scales, self._format.largest)
        check_written(sound and int((codes & 0x7F).amax()) <= self._format.last_finite, key, "this scale or value")
        # Converted through fp16, which has e5m2's exponent, and e4m3's plus a bias of 8: ten times faster than torch's
        # cast.
        halves = codes.to(torch.int16) << 8
        if self._format is _E4M3:
            halves = (halves >> 1) & ~0x4000
        values = halves.view(torch.float16).to(torch.float32).view(len(scales), -1)
        if self._format.up != 1:  # multiplying with the scale first might overflow
            values.mul_(self._format.up)
        return values.mul_(scales.to(torch.float32).view(-1, 1))

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of each value."""
        x = tensor.reshape(rows_of(tensor.shape))
        scale = groups.scales(groups.largest_magnitude(x), self._format.largest).to(torch.float64)
        kind = torch.finfo(self._format.dtype)
        half = torch.maximum(x.abs().to(torch.float64), kind.tiny * scale) * (kind.eps / 2)
        clipped = (x.abs().to(torch.float64) - self._format.largest * scale).clamp_min(0)
        return (half * (1 + 2**-14) + clipped).view(tensor.shape)

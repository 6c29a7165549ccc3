"""8-bit floating point with a bf16 scale per token: e4m3 for activations, e5m2 for gradients, unless told otherwise.

A token x is divided by s = max|x| / m, m the format's largest number (448, 57344), and cast, to nearest even.
Law: bounded by 2**-4 |x| and 2**-10 s in e4m3, by 2**-3 |x| and 2**-17 s in e5m2 (the larger of the two): the error is relative
where int8's is absolute, so this is better than int8 only where few values of a token are large.
Bits per element: 8 + 16/d. Source: Micikevicius et al., "FP8 formats for deep learning", 2022.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.dense import groups
from testbed.codecs.wire import header
from testbed.errors import CodecError


class _Format(NamedTuple):
    code: int
    dtype: torch.dtype
    largest: float
    last_finite: int
    """Of the codes without their sign."""
    up: float
    """What a code's value is to be multiplied by when its exponent and mantissa are read as fp16's."""


_E4M3 = _Format(header.FP8_E4M3, torch.float8_e4m3fn, 448.0, 0x7E, 2.0**8)
_E5M2 = _Format(header.FP8_E5M2, torch.float8_e5m2, 57344.0, 0x7B, 1.0)


class Fp8:
    """Nothing is remembered. NaN and infinity are refused: they would spread over their token."""

    def __init__(self, context: Context, format: Literal["auto", "e4m3", "e5m2"] = "auto") -> None:
        """'auto' is e4m3 forward and e5m2, of the larger range, backward."""
        if format == "auto":
            format = "e4m3" if context.direction == "forward" else "e5m2"
        self._format = {"e4m3": _E4M3, "e5m2": _E5M2}[format]

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """CodecError names the message key where the tensor holds NaN or infinity."""
        tensor = header.check_input(tensor)
        shape = tuple(tensor.shape)
        payload, body = header.allocate(self._format.code, shape, _body_bytes(shape))
        of = groups.layout(shape, 0)
        if of.rows == 0:
            return payload
        x = groups.split(tensor.to(torch.float32), of)
        largest = groups.largest_magnitude(x)
        if not bool(largest.isfinite().all()):
            raise CodecError(
                f"cannot encode {key}: the tensor of shape {shape} holds NaN or infinity, which fp8 cannot carry"
            )
        scale = groups.scales(largest, self._format.largest)
        body[: 2 * of.rows].view(torch.bfloat16).copy_(scale.view(-1))
        body[2 * of.rows :].view(self._format.dtype).view(x.shape).copy_(x * scale.to(torch.float32).reciprocal_())
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """CodecError for bytes that `encode` does not write."""
        opened = header.open_payload(payload, self._format.code, _body_bytes)
        of = groups.layout(opened.shape, 0)
        if of.rows == 0:
            return torch.empty(opened.shape, dtype=torch.float32)
        scale = header.as_tensor(opened.body, torch.bfloat16, of.rows).view(-1, 1)
        codes = header.as_tensor(opened.body, torch.uint8, of.values, offset=2 * of.rows)
        if (
            opened.visit
            or int((codes & 0x7F).amax()) > self._format.last_finite
            or not groups.scales_are_sound(scale, self._format.largest)
        ):
            raise CodecError(f"cannot decode {key}: it holds a scale, a value or a visit number that no encoder writes")
        # By way of fp16, which has e5m2's exponent, and e4m3's with a bias of 8 more: torch's own cast takes ten times as long.
        halves = codes.to(torch.int16) << 8
        if self._format is _E4M3:
            halves = (halves >> 1) & ~0x4000
        values = halves.view(torch.float16).to(torch.float32).view(of.rows, of.width)
        # Not multiplied with the scale first: that might overflow.
        return (
            (values.mul_(self._format.up) if self._format.up != 1 else values)
            .mul_(scale.to(torch.float32))
            .view(opened.shape)
        )

    def bound(self, tensor: Tensor) -> Tensor:
        """The largest error of each value."""
        of = groups.layout(tuple(tensor.shape), 0)
        if of.rows == 0:
            return torch.zeros(tensor.shape)
        x = groups.split(tensor.detach().to(torch.float32), of)
        scale = groups.scales(groups.largest_magnitude(x), self._format.largest).to(torch.float64)
        kind = torch.finfo(self._format.dtype)
        half = torch.maximum(x.abs().to(torch.float64), kind.tiny * scale) * (kind.eps / 2)
        clipped = (x.abs().to(torch.float64) - self._format.largest * scale).clamp_min(0)
        return (half * (1 + 2**-14) + clipped).view(tensor.shape)

    def payload_bytes(self, shape: header.Shape) -> int:
        """Header, scales, codes."""
        return header.header_bytes(len(shape)) + _body_bytes(shape)


def _body_bytes(shape: header.Shape) -> int:
    rows, width = header.rows_of(shape)
    return rows * (2 + width)

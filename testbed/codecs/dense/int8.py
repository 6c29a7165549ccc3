"""int8 with one scale per token: nearest rounding forward, keyed stochastic rounding backward.

A row is the last axis: with s = max|x| / 127, q = x / s rounded to an integer in -127..127, decoded as s * q.
The wire holds the header, an fp32 s per row, then the q: 8 + 32/d bits a value for rows of d, and the header.
"""

from __future__ import annotations

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.wire import header, noise
from testbed.codecs.wire.scratch import Scratch
from testbed.errors import CodecError

LEVELS = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scales stay normal numbers: a denormal one would be too coarse to divide by. Rows below 127 times this lose precision."""
LARGEST_SCALE = float.fromhex("0x1.020406p+121")
"""The largest fp32 that LEVELS times is still finite."""


def body_bytes(shape: header.Shape) -> int:
    """A scale and the codes for each row."""
    rows, width = header.rows_of(shape)
    return rows * (4 + width)


def write(
    tensor: Tensor, key: MessageKey, scratch: Scratch, *, visit: int = 0, context: Context | None = None
) -> memoryview:
    """A tensor (fp32 or bf16) as a payload; rounded to nearest even, or up with the fraction's probability where a context is
    given, whose noise it then is. CodecError names the message key when the tensor holds NaN or infinity.
    """
    shape = tuple(tensor.shape)
    rows, width = header.rows_of(shape)
    payload, body = header.allocate(header.INT8_ROWS, shape, body_bytes(shape), visit=visit)
    if rows == 0:
        return payload
    x = tensor.to(torch.float32).reshape(rows, width)
    largest = torch.maximum(x.amax(-1, keepdim=True), x.amin(-1, keepdim=True).neg_())
    if not bool(torch.isfinite(largest).all()):
        raise CodecError(
            f"cannot encode {key}: the tensor of shape {shape} holds NaN or infinity, which int8 cannot carry"
        )
    scales = largest.div_(LEVELS).clamp_(SMALLEST_SCALE, LARGEST_SCALE)
    inverse = scales.reciprocal()
    q = scratch.of(x.shape)
    if context is None:
        torch.mul(x, inverse, out=q).round_()  # at most 127 * (1 + 2**-22), so no value needs clipping
    else:
        noise.fill(q.view(-1), context, key, "int8 rounding")
        q.addcmul_(x, inverse).round_().clamp_(-LEVELS, LEVELS)
    body[: 4 * rows].view(torch.float32).copy_(scales.view(-1))
    body[4 * rows :].view(torch.int8).view(rows, width).copy_(q)
    return payload


def read(payload: Payload) -> tuple[int, Tensor]:
    """(visit, values as a new fp32 tensor). CodecError for bytes that `write` does not make."""
    opened = header.open_payload(payload, header.INT8_ROWS, body_bytes)
    rows, width = header.rows_of(opened.shape)
    if rows == 0:
        return opened.visit, torch.empty(opened.shape, dtype=torch.float32)
    scales = header.as_tensor(opened.body, torch.float32, rows).view(rows, 1)
    codes = header.as_tensor(opened.body, torch.int8, rows * width, offset=4 * rows).view(rows, width)
    if not bool(((scales >= SMALLEST_SCALE) & (scales <= LARGEST_SCALE)).all()) or int(codes.amin()) < -LEVELS:
        raise CodecError(
            f"cannot decode a payload of shape {opened.shape}: it holds a scale or a code that no encoder writes"
        )
    return opened.visit, codes.to(torch.float32).mul_(scales).view(opened.shape)


class Int8Nearest:
    """Rounds to nearest even: the error of a value is at most half its row's scale."""

    def __init__(self, context: Context) -> None:
        """Nothing in the context matters: nearest rounding draws no numbers."""
        self._scratch = Scratch()

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """See `write`."""
        return write(header.check_input(tensor), key, self._scratch)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """See `read`."""
        return _stateless(payload)


class Int8Stochastic:
    """Rounds up with the fraction's probability: unbiased over message keys, the error of a value is less than its row's scale.

    For gradients, whose rounding errors add up over steps. The noise is keyed by the message key, so a repeated run repeats it.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._scratch = context, Scratch()

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """See `write`."""
        return write(header.check_input(tensor), key, self._scratch, context=self._context)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """See `read`."""
        return _stateless(payload)


def _stateless(payload: Payload) -> Tensor:
    visit, values = read(payload)
    if visit != 0:
        raise CodecError(f"cannot decode a payload with visit number {visit}: int8 remembers nothing and writes 0")
    return values

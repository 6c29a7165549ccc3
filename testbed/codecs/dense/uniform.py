"""uniform: multiples of one step for a whole message, so that a following entropy coder determines the size.

Codecs with a range per group use all their codes in every group; here a group of small values has small codes, which
`zstd(...)` or `entropy(...)` compresses well: the size depends on the values. The step is relative to the message's
root mean square, or absolute; it is enlarged if a value would otherwise exceed 32,767 steps.

Wire after the common header: the step, fp32; bytes per code, 1 or 2, and three zeros; the codes q, signed in 1 byte; in
2 bytes as 2 q, or -2 q - 1 where q is negative, low bytes first, then high ones. Law: bounded by half a step. Source:
the uniform scalar quantiser, which, with an ideal entropy coder, is within 1/4 bit of any code at high rates (Gish and
Pierce, IEEE TIT 1968).
"""

from __future__ import annotations

import math
import struct
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.dense import groups
from testbed.codecs.wire import header
from testbed.codecs.wire.header import Shape
from testbed.codecs.wire.message import check_written

_FIELDS = struct.Struct("<fBBBB")
_SMALL, _REACH = 127, 2**15 - 1
"""The largest codes of one byte and of two."""


class Uniform:
    """Codes in whole steps."""

    code = 91
    law = "bounded"

    def __init__(self, context: Context, *, step: float = 0.25, unit: Literal["rms", "absolute"] = "rms") -> None:
        """`step` is relative to the message's root mean square, or absolute. Ignores the context."""
        self._share, self._unit = step, unit

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """See the contract. CodecError that names the message key if the tensor holds NaN or infinity."""
        x = header.check_input(tensor).to(torch.float32)
        shape = tuple(x.shape)
        if not x.numel():
            return header.allocate(self.code, shape, 0)[0]
        step, reach = self._step(x, key)
        width = 1 if reach <= _SMALL else 2
        # fp64 for many steps: fp32 would have errors of more than half a step.
        whole = x.contiguous().view(-1).to(torch.float32 if width == 1 else torch.float64).div(step).round_().numpy()
        payload, body = header.allocate(self.code, shape, _FIELDS.size + width * x.numel())
        _FIELDS.pack_into(payload, header.header_bytes(len(shape)), step, width, 0, 0, 0)
        planes = body[_FIELDS.size :].numpy().reshape(width, -1)
        if width == 1:
            planes[0] = whole.astype(np.int8).view(np.uint8)
        else:
            codes = whole.clip(-_REACH, _REACH).astype(np.int32)
            folded = np.where(codes < 0, -2 * codes - 1, 2 * codes).astype("<u2").view(np.uint8)
            planes[0], planes[1] = folded[0::2], folded[1::2]
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """See the contract. CodecError for bytes that no encoder writes."""
        opened = header.open_payload(payload, self.code, lambda shape: _body_bytes(payload, shape))
        check_written(not opened.visit, key, f"visit number {opened.visit} here")
        if not opened.elements:
            return torch.empty(opened.shape)
        step, width, *zeros = _FIELDS.unpack_from(opened.body)
        sound = math.isfinite(step) and groups.SMALLEST_SCALE <= step <= groups.largest_scale(_REACH, torch.float32)
        check_written(sound and not any(zeros), key, f"a step of {step}")
        planes = np.frombuffer(opened.body, np.uint8, offset=_FIELDS.size).reshape(width, -1)
        if width == 1:
            whole = planes[0].view(np.int8)
        else:
            folded = planes[0] | planes[1].astype(np.int32) << 8
            whole = np.where(folded & 1, -(folded + 1 >> 1), folded >> 1)
        check_written(int(whole.min()) >= -(_SMALL if width == 1 else _REACH), key, "such a code")
        return torch.from_numpy(whole).to(torch.float32).mul_(step).view(opened.shape)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of each value."""
        step, _ = self._step(tensor, MessageKey("train", 0, 0, ()))
        clipped = (tensor.abs().double() - _REACH * step).clamp_min(0)
        return 0.5 * step + tensor.abs().double() * 2**-20 + clipped

    def _step(self, x: Tensor, key: MessageKey) -> tuple[float, float]:
        """Return the step in fp32, and the largest value in steps."""
        largest = groups.largest_magnitude(x.reshape(1, -1))
        groups.check_ends(largest, key)
        top = float(largest)
        # Divided first, because squares of large numbers overflow and those of small ones vanish.
        rms = float(torch.linalg.vector_norm(x / top)) / math.sqrt(x.numel()) * top if top else 0.0
        wanted = self._share * (rms if self._unit == "rms" else 1.0)
        most = groups.largest_scale(_REACH, torch.float32)
        step = float(np.float32(min(max(wanted, top / _REACH, groups.SMALLEST_SCALE), most)))
        return step, top / step


def _body_bytes(payload: Payload, shape: Shape) -> int:
    """Return the length of a body of this shape with its stated bytes per code; -1, which never matches, unless that is
    1 or 2.
    """
    view = memoryview(payload).cast("B")
    at = header.header_bytes(len(shape)) + 4
    if not (values := math.prod(shape)):
        return 0
    return _FIELDS.size + view[at] * values if len(view) > at and view[at] in (1, 2) else -1

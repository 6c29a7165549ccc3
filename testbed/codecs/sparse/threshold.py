"""ht: the values of at least a fixed magnitude, up to a maximum share, so a payload's length depends on the values.

If more values reach the threshold than may be sent, the largest are sent, as in top-k: a spike of the gradient does not
stall the link, and error feedback keeps the rest. A payload states its number of values, so only the sender needs to
know a threshold that changes during training, such as gamma-FedHT's.

Wire, after the common header: the number of kept values, u32; the values; their positions, as a bitmap or as indices,
whichever is shorter; zeros up to 1/1,024 of the tensor's bytes, so that a decoder allocates at most 1,024 times what it
received.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.sparse.positions import LargestInRows, PositionCoding, Positions, kept_of
from testbed.codecs.sparse.sparsifier import DTYPES, Floats, ValueType, within_range
from testbed.codecs.wire import header
from testbed.codecs.wire.header import Shape
from testbed.codecs.wire.message import check_written

_COUNT = struct.Struct("<I")
_MOST = 1024
"""The largest ratio of a decoded tensor's bytes to its payload's."""


class HardThreshold:
    """The values x with |x| >= threshold; if they exceed a share `most` of the tensor, the largest of them.

    Law: a value that is not sent is below the threshold or, if the maximum share is sent, at most the smallest sent
    one; kept values are rounded to bf16, or exact in fp32. Bits per value: at most those of topk(most, tensor).
    Stateless; inside `ef`, every element of a message's error is below the threshold.
    Source: Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021.
    """

    code = 47
    law = "bounded"

    def __init__(self, context: Context, *, threshold: float, most: float = 0.25, values: ValueType = "bf16") -> None:
        """The context has no effect: no random numbers are drawn."""
        self._threshold, self._most, self._dtype = threshold, most, DTYPES[values]
        self._largest = LargestInRows()

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """See the contract. CodecError names the message key if the tensor holds NaN or infinity."""
        x = header.check_input(tensor)
        shape = tuple(x.shape)
        header.check_finite(x, key, "a sparsifier")
        flat: Floats = x.to(torch.float32).contiguous().view(-1).numpy()
        positions = self._choose(flat)
        payload, body = header.allocate(self.code, shape, self._body_bytes(shape, positions.size))
        if flat.size:
            coding = PositionCoding(1, flat.size, kept := positions.size)
            start = header.header_bytes(len(shape))
            _COUNT.pack_into(payload, start, kept)
            values = header.as_tensor(payload, self._dtype, kept, offset=start + _COUNT.size)
            values.copy_(torch.from_numpy(within_range(flat[positions], self._dtype)))
            coded, zeros = body[_COUNT.size + values.nbytes :].tensor_split((coding.coded_bytes,))
            coding.write(positions, coded.numpy())
            zeros.zero_()
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """See the contract. CodecError for bytes that no encoder writes."""
        opened = header.open_payload(payload, self.code, lambda shape: self._body_bytes(shape, _kept(payload, shape)))
        check_written(not opened.visit, key, f"visit number {opened.visit} here")
        if not (size := opened.elements):
            return torch.empty(opened.shape)
        kept = _kept(payload, opened.shape)
        coding = PositionCoding(1, size, kept)
        first = _COUNT.size
        last = first + kept * self._dtype.itemsize
        values = header.as_tensor(opened.body, self._dtype, kept, offset=first).to(torch.float32)
        rest = header.as_tensor(opened.body, torch.uint8, len(opened.body) - last, offset=last).numpy()
        sound = bool(values.isfinite().all()) and not rest[coding.coded_bytes :].any()
        check_written(sound, key, "a kept value that is NaN or infinite, or bytes after the positions")
        out: Floats = np.zeros(size, np.float32)
        if kept:
            out[coding.read(rest[: coding.coded_bytes])] = values.numpy()
        return torch.from_numpy(out).view(opened.shape)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of each value."""
        x = tensor.abs()
        most = kept_of(self._most, x.numel())
        # Of several values equal to the smallest kept one, some may not be sent.
        limit = max(self._threshold, float(x.flatten().kthvalue(x.numel() - most).values) if most < x.numel() else 0.0)
        return torch.where(x > limit, x * (2.0**-8 if self._dtype is torch.bfloat16 else 0.0), x)

    def _choose(self, flat: Floats) -> Positions:
        magnitudes = np.abs(flat)
        positions = np.flatnonzero(magnitudes >= self._threshold)
        if flat.size and positions.size > (most := kept_of(self._most, flat.size)):
            return self._largest.positions(magnitudes[np.newaxis], most)
        return positions

    def _body_bytes(self, shape: Shape, kept: int) -> int:
        """Return the length of a body of `kept` values; 0 if the tensor does not have that many, or is empty."""
        size = math.prod(shape)
        if not size or kept > size:
            return 0
        content = _COUNT.size + kept * self._dtype.itemsize + PositionCoding(1, size, kept).coded_bytes
        return max(content, -(-4 * size // _MOST))


def _kept(payload: Payload, shape: Shape) -> int:
    """Return the number of values that a payload states; 0 if it is too short to state one."""
    start = header.header_bytes(len(shape))
    view = memoryview(payload).cast("B")
    return int(_COUNT.unpack_from(view, start)[0]) if len(view) >= start + _COUNT.size else 0

"""ht: the values of at least a fixed magnitude, at most a stated share of them, so that a payload's length follows the
values.

Where more values reach the threshold than may be sent, the largest are, which is top-k then: a spike of the gradient
does not stall the link, and error feedback keeps the rest. A payload says how many values it has, so a threshold that
changes during training, as gamma-FedHT's does, is the sender's matter alone.

Wire behind the common header: the number of kept values, u32; the values; their positions, as a bitmap or as indices,
whichever is shorter; zeros, where all this has fewer bytes than a 1,024th of the tensor: a decoder then sets aside at
most 1,024 times what it was sent.
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
    """The values x with |x| >= threshold; of more than `most` of a tensor, the largest.

    Law: no value that is not sent is larger than the threshold, or than the smallest of as many as may be sent; kept
    values are rounded to bf16, or exact in fp32. Bits per value: at most those of topk(most, tensor). Remembers
    nothing; inside `ef`, what is left of a message is below the threshold in each place.
    Source: Sahu et al., "Rethinking gradient sparsification as total error minimization", NeurIPS 2021.
    """

    code = 47
    law = "bounded"

    def __init__(self, context: Context, *, threshold: float, most: float = 0.25, values: ValueType = "bf16") -> None:
        """Nothing in the context matters here: no number is drawn."""
        self._threshold, self._most, self._dtype = threshold, most, DTYPES[values]
        self._largest = LargestInRows()

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode as the contract says. CodecError names the message key where the tensor holds NaN or infinity."""
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
        """Decode as the contract says. CodecError for bytes that no encoder writes."""
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
        check_written(sound, key, "a kept value that is NaN or infinite, or anything behind the positions")
        out: Floats = np.zeros(size, np.float32)
        if kept:
            out[coding.read(rest[: coding.coded_bytes])] = values.numpy()
        return torch.from_numpy(out).view(opened.shape)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of each value."""
        x = tensor.abs()
        most = kept_of(self._most, x.numel())
        # Of values equal to the smallest that there is room for, some may have to stay.
        limit = max(self._threshold, float(x.flatten().kthvalue(x.numel() - most).values) if most < x.numel() else 0.0)
        return torch.where(x > limit, x * (2.0**-8 if self._dtype is torch.bfloat16 else 0.0), x)

    def _choose(self, flat: Floats) -> Positions:
        magnitudes = np.abs(flat)
        positions = np.flatnonzero(magnitudes >= self._threshold)
        if flat.size and positions.size > (most := kept_of(self._most, flat.size)):
            return self._largest.positions(magnitudes[np.newaxis], most)
        return positions

    def _body_bytes(self, shape: Shape, kept: int) -> int:
        """Return the length of a body of so many kept values; of more than there are, as if there were none."""
        size = math.prod(shape)
        if not size or kept > size:
            return 0
        content = _COUNT.size + kept * self._dtype.itemsize + PositionCoding(1, size, kept).coded_bytes
        return max(content, -(-4 * size // _MOST))


def _kept(payload: Payload, shape: Shape) -> int:
    """Return how many values a payload says it has; 0 where it is too short to say so."""
    start = header.header_bytes(len(shape))
    view = memoryview(payload).cast("B")
    return int(_COUNT.unpack_from(view, start)[0]) if len(view) >= start + _COUNT.size else 0

"""blockwise-8: 8-bit codes of a dynamic map, with an fp32 absmax per block of 4096 values in memory order.

The map has 256 numbers in -1..1: 0, 1 and, for i = 0..6, both signs of the 2**i midpoints of 0.1..1 cut into 2**i equal
parts, times 10**(i - 6). It is fine near zero, and has 64 steps of 0.9/64 near 1. A block is divided by its absmax, and
each value is rounded to the nearest number.

Law: bounded by absmax * 0.45/64. Bits per element: 8 + 32/block. The map is a constant of the code and costs nothing
(hivemind sends its 1 KiB with each tensor).
Sources: Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022; on the wire: Ryabinin et al.,
SWARM, ICML 2023.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.dense import groups
from testbed.codecs.dense.groups import Grouping
from testbed.codecs.wire.header import Shape
from testbed.codecs.wire.message import Body, BodyCodec, Field, check_written

HALF_GAP = 0.45 / 64
"""Half the map's largest gap."""
_SMALLEST = torch.finfo(torch.float32).tiny
_PIECE = 2**16
"""Values looked up at a time. An index has 8 bytes, so a whole tensor's indices exceed the cache, and page faults for
every message may double the time.
"""


def dynamic_map() -> npt.NDArray[np.float64]:
    """Return the 256 numbers, in order."""
    edges = [np.linspace(0.1, 1.0, 2**i + 1) for i in range(7)]
    positive = np.concatenate([(edge[:-1] + edge[1:]) / 2 * 10.0 ** (i - 6) for i, edge in enumerate(edges)])
    return np.sort(np.concatenate([-positive, [0.0], positive, [1.0]]))


class _Tables(NamedTuple):
    """The map, and a look-up of the nearest number by the upper 16 bits, fifteen times faster than bisection."""

    numbers: npt.NDArray[np.float32]
    lower: npt.NDArray[np.uint8]
    """By the upper 16 bits: the code of the smallest number with this prefix."""
    border: npt.NDArray[np.float32]
    """Numbers above this have the next code. The map is coarse enough that no two borders share a prefix."""


@functools.cache
def _tables() -> _Tables:
    exact = dynamic_map()
    borders = ((exact[:-1] + exact[1:]) / 2).astype(np.float32)
    heads = np.arange(2**16, dtype=np.uint32) << 16
    with np.errstate(invalid="ignore"):
        ends = np.stack([heads.view(np.float32), (heads | 0xFFFF).view(np.float32)])
    low, high = np.fmin(*ends), np.fmax(*ends)
    lower = np.searchsorted(borders, low, side="left")
    upper = np.searchsorted(borders, high, side="left")
    assert np.max(upper - lower, where=np.isfinite(low), initial=0) == 1
    border = np.append(borders, np.float32(np.inf))[np.minimum(lower, 255)]
    return _Tables(exact.astype(np.float32), np.minimum(lower, 255).astype(np.uint8), border)


def _pieces(values: int) -> Iterator[slice]:
    return (slice(start, start + _PIECE) for start in range(0, values, _PIECE))


class Blockwise8(BodyCodec):
    """A block crosses token boundaries, so one outlier coarsens several tokens. Stateless."""

    code = 13

    def __init__(self, context: Context, block: int = 4096) -> None:
        """`block` values share an absmax; the last block may be shorter."""
        self._block = block

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return an absmax per block, and a byte per value."""
        of = self._grouping(shape)
        return Field(torch.float32, of.groups), Field(torch.uint8, of.values)

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Write the fields. CodecError names the message key where x holds NaN or infinity."""
        absmax, codes = body
        of = self._grouping(x.shape)
        x = of.split(x)
        largest = groups.largest_magnitude(x)
        groups.check_ends(largest, key)
        largest.clamp_(min=_SMALLEST)
        absmax.copy_(largest.view(-1))
        scaled = of.trim(x * largest.reciprocal()).numpy()
        tables, out = _tables(), codes.numpy()
        for piece in _pieces(of.values):
            part = scaled[piece]
            heads = (part.view(np.uint32) >> 16).astype(np.intp)
            np.add(tables.lower.take(heads), part > tables.border.take(heads), out=out[piece])

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Look the values up. CodecError for an absmax that is not finite, or smaller than any that is sent."""
        absmax, codes = body
        check_written(bool((absmax.isfinite() & (absmax >= _SMALLEST)).all()), key, "this absmax")
        of = self._grouping(shape)
        numbers, values = _tables().numbers, np.empty(of.values, np.float32)
        for piece in _pieces(of.values):
            values[piece] = numbers.take(codes.numpy()[piece].astype(np.intp))
        return of.trim(of.spread(torch.from_numpy(values)).mul_(absmax.view(-1, 1)))

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of each value."""
        of = self._grouping(tensor.shape)
        x = of.split(tensor)
        largest = groups.largest_magnitude(x).clamp_min_(_SMALLEST).to(torch.float64)
        return of.trim((HALF_GAP * (1 + 2**-14) * largest).expand(x.shape).contiguous()).view(tensor.shape)

    def _grouping(self, shape: Shape) -> Grouping:
        return Grouping.of((math.prod(shape),), self._block)

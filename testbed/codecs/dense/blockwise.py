"""blockwise-8: 8-bit codes of a dynamic map, with an fp32 absmax per block of 4096 values in memory order.

The map has 256 numbers in -1..1: 0, 1 and, for i = 0..6, both signs of the 2**i midpoints of 0.1..1 cut into 2**i equal parts,
times 10**(i - 6). Near zero it is fine, near 1 it has 64 steps of 0.9/64. A block is divided by its absmax, each value goes to
the nearest.
Law: bounded by absmax * 0.45/64. Bits per element: 8 + 32/block. The map is a constant of the code and costs nothing (hivemind
sends its 1 KiB with each tensor).
Source: Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022; on the wire: Ryabinin et al., SWARM, ICML
2023.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.dense import groups
from testbed.codecs.wire import header
from testbed.errors import CodecError

HALF_GAP = 0.45 / 64
"""Half the map's largest gap."""
_SMALLEST = torch.finfo(torch.float32).tiny
_PIECE = 2**16
"""Values looked up at a time. An index has 8 bytes: those of a whole tensor leave the cache, and may be fetched from the system
page by page at every message, which doubles the time."""


def dynamic_map() -> npt.NDArray[np.float64]:
    """The 256 numbers, in order."""
    edges = [np.linspace(0.1, 1.0, 2**i + 1) for i in range(7)]
    positive = np.concatenate([(edge[:-1] + edge[1:]) / 2 * 10.0 ** (i - 6) for i, edge in enumerate(edges)])
    return np.sort(np.concatenate([-positive, [0.0], positive, [1.0]]))


class _Tables(NamedTuple):
    """The map, and the search for the nearest as a look-up by the upper 16 bits: a bisection takes fifteen times as long."""

    numbers: npt.NDArray[np.float32]
    lower: npt.NDArray[np.uint8]
    """By the upper 16 bits: the code of the least number that begins so."""
    border: npt.NDArray[np.float32]
    """Numbers above this have the next code. The map is nowhere so fine that two borders begin alike."""


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


class Blockwise8:
    """Nothing is remembered. A block runs over the ends of tokens, so one outlier coarsens several of them."""

    def __init__(self, context: Context, block: int = 4096) -> None:
        """`block` values share an absmax; the last block has what is left."""
        if block < 1:
            raise ValueError(f"a block of {block} values: it has at least 1")
        self._block = block

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """CodecError names the message key where the tensor holds NaN or infinity."""
        tensor = header.check_input(tensor)
        shape = tuple(tensor.shape)
        payload, body = header.allocate(header.BLOCKWISE_8, shape, self._body_bytes(shape))
        of = self._layout(shape)
        if of.rows == 0:
            return payload
        x = groups.split(tensor.to(torch.float32), of)
        largest = groups.largest_magnitude(x)
        if not bool(largest.isfinite().all()):
            raise CodecError(f"cannot encode {key}: the tensor of shape {shape} holds NaN or infinity")
        largest.clamp_(min=_SMALLEST)
        body[: 4 * of.number].view(torch.float32).copy_(largest.view(-1))
        scaled = groups.trim(x * largest.reciprocal(), of).numpy()
        tables = _tables()
        codes = body[4 * of.number :].numpy()
        for piece in _pieces(of.values):
            part = scaled[piece]
            heads = (part.view(np.uint32) >> 16).astype(np.intp)
            np.add(tables.lower.take(heads), part > tables.border.take(heads), out=codes[piece])
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """CodecError for bytes that `encode` does not write."""
        opened = header.open_payload(payload, header.BLOCKWISE_8, self._body_bytes)
        of = self._layout(opened.shape)
        if of.rows == 0:
            return torch.empty(opened.shape, dtype=torch.float32)
        largest = header.as_tensor(opened.body, torch.float32, of.number).view(-1, 1)
        if opened.visit or not bool((largest.isfinite() & (largest >= _SMALLEST)).all()):
            raise CodecError(f"cannot decode {key}: it holds an absmax or a visit number that no encoder writes")
        codes = header.as_tensor(opened.body, torch.uint8, of.values, offset=4 * of.number).numpy()
        numbers, values = _tables().numbers, np.empty(of.values, np.float32)
        for piece in _pieces(of.values):
            values[piece] = numbers.take(codes[piece].astype(np.intp))
        return groups.trim(groups.spread(torch.from_numpy(values), of).mul_(largest), of).view(opened.shape)

    def bound(self, tensor: Tensor) -> Tensor:
        """The largest error of each value."""
        of = self._layout(tuple(tensor.shape))
        if of.rows == 0:
            return torch.zeros(tensor.shape)
        x = groups.split(tensor.detach().to(torch.float32), of)
        largest = groups.largest_magnitude(x).clamp_min_(_SMALLEST).to(torch.float64)
        return groups.trim((HALF_GAP * (1 + 2**-14) * largest).expand(x.shape).contiguous(), of).view(tensor.shape)

    def payload_bytes(self, shape: header.Shape) -> int:
        """Header, an absmax a block, codes."""
        return header.header_bytes(len(shape)) + self._body_bytes(shape)

    def _layout(self, shape: header.Shape) -> groups.Layout:
        rows, width = header.rows_of(shape)
        return groups.layout((rows * width,), self._block)

    def _body_bytes(self, shape: header.Shape) -> int:
        of = self._layout(shape)
        return 4 * of.number + of.values

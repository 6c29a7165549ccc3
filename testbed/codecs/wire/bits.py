"""Packs small integers: codes of 1 to 8 bits as bytes, wasting only the last few bits of a part.

A width is split into powers of two from the low end (6 = 4 + 2, 3 = 2 + 1, 7 = 4 + 2 + 1), and each part is packed
separately. A part of w bits puts 8/w codes that are far apart into a byte: byte i of n holds the codes i, i + n,
i + 2n, ..., so packing is a few shifts of long runs and never an operation on single bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def packed_bytes(count: int, bits: int) -> int:
    """Return the packed length of `count` codes of 0..8 bits: count * bits / 8, each part rounded up to whole bytes."""
    return sum(-(-count * width // 8) for width, _ in _parts(bits))


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Pack flat uint8 codes below 2**bits into `out`, a flat uint8 tensor of `packed_bytes`."""
    count, start = codes.numel(), 0
    for width, shift in _parts(bits):
        size = -(-count * width // 8)
        target = out[start : start + size]
        part = codes >> shift if shift else codes
        if width + shift < bits:
            part = part & (1 << width) - 1
        target.copy_(part[:size])
        for plane in range(1, 8 // width):
            piece = part[plane * size : (plane + 1) * size]
            target[: piece.numel()] |= piece << plane * width
        start += size


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the `count` codes in the first `packed_bytes` bytes of `packed` as a new flat uint8 tensor. Any bytes are
    valid.
    """
    codes = (torch.empty if bits else torch.zeros)(count, dtype=torch.uint8, device=packed.device)
    start = 0
    for width, shift in _parts(bits):
        size = -(-count * width // 8)
        source, mask = packed[start : start + size], (1 << width) - 1
        for plane in range(8 // width):
            target = codes[plane * size : (plane + 1) * size]
            piece = source[: target.numel()] >> plane * width & mask
            if shift:
                target |= piece << shift
            else:
                target.copy_(piece)
        start += size
    return codes


def _parts(bits: int) -> Iterator[tuple[int, int]]:
    """Yield (width, shift) of each part of a code, lowest bits first."""
    shift = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            yield width, shift
            shift += width

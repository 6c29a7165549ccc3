"""hadamard(inner): each token rotated in tiles of neighbouring channels, which spreads an outlier over its tile.

A tile x of G channels becomes x H / sqrt(G), H Sylvester's matrix of -+1: orthonormal and symmetric, hence its own
inverse. G is a power of two, at most the width; remaining channels at a token's end stay unchanged. It helps only if
channels differ greatly in size: on nearly normal values it has no benefit, or does slight harm.

Law: within a tile the error's L2 norm is the inner codec's, so no value's error exceeds the root of the sum of its
tile's squared bounds. Bits per element: the inner codec's; nothing is added to its payload. Source: QuaRot (Ashkboos et
al., NeurIPS 2024) for the idea, TAH-Quant (He et al., arXiv 2506.01352) for tiles.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload, Stateful
from testbed.codecs.wire import header
from testbed.codecs.wire.scratch import Scratch
from testbed.codecs.wrap import States, bound_of, law_of_bound, parts_with


@functools.cache
def matrix(size: int) -> Tensor:
    """Return H / sqrt(size), fp32 (size, size), read-only. ValueError unless the size is a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"a tile of {size} channels: its size must be a power of two, such as 64")
    signs = torch.ones(1, 1)
    while len(signs) < size:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs / math.sqrt(size)


def tile_size(width: int, most: int) -> int:
    """Return the largest power of two that is neither above the width nor above `most`."""
    return 1 << (min(width, most).bit_length() - 1) if width else 1


def rotate(x: Tensor, size: int, out: Tensor | None = None) -> Tensor:
    """Rotate each row of fp32 x in tiles; applied twice, it is the identity up to rounding.

    Returns a new tensor, or `out`, which must be contiguous, of x's shape, and in other memory.
    """
    out = torch.empty(x.shape) if out is None else out
    tile = tile_size(x.shape[-1], size) if x.ndim else 1
    whole = x.shape[-1] // tile * tile if x.ndim else 0
    if not x.numel() or not whole:
        return out.copy_(x)
    if whole == x.shape[-1]:
        torch.mm(x.reshape(-1, tile), matrix(tile), out=out.view(-1, tile))
    else:
        out.copy_(x)
        out[..., :whole] = (x[..., :whole].reshape(-1, tile) @ matrix(tile)).view(*x.shape[:-1], whole)
    return out


class Hadamard:
    """A rotation around any other codec."""

    def __init__(self, context: Context, inner: Codec, size: int = 64) -> None:
        """Tiles have `size` channels. ValueError unless that is a power of two."""
        self.law = law_of_bound(inner)
        matrix(size)
        self.inner, self._size, self._scratch = inner, size, Scratch()
        self._states = States(parts_with({"inner": inner}, Stateful))

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Rotate, and encode with the inner codec. CodecError that names the message key if the rotated tensor is not
        finite, or too large to be rotated back.
        """
        x = header.check_input(tensor).to(torch.float32)
        rotated = rotate(x, self._size, self._scratch.of(x.shape))
        header.check_transformed(rotated, key)
        return self.inner.encode(rotated, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the inner codec, and rotate back. Raises the inner codec's CodecError, and CodecError for a
        result that is not finite.
        """
        with self._states.parts_unchanged_on_error():
            values = self.inner.decode(payload, key)  # a new contiguous tensor, which we own
            values.copy_(rotate(values, self._size, self._scratch.of(values.shape)))
            header.check_finite(values, key, "a rotation", doing="decode")
        return values

    def bound(self, x: Tensor) -> Tensor:
        """Return the largest error of each value; infinity if the inner codec states no bound."""
        if not x.ndim:
            return bound_of(self.inner, x)
        bounds = bound_of(self.inner, rotate(x, self._size)).to(torch.float64).expand(x.shape).clone()
        tile = tile_size(x.shape[-1], self._size)
        whole = x.shape[-1] // tile * tile
        tiles, values = (part[..., :whole].view(*x.shape[:-1], -1, tile) for part in (bounds, x.to(torch.float64)))
        # Both rotations round in fp32, relative to the tile's norm.
        tiles.copy_((tiles.norm(dim=-1, keepdim=True) + 2**-20 * values.norm(dim=-1, keepdim=True)).expand(tiles.shape))
        return bounds

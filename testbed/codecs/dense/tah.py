"""TAH-Quant: tiles of neighbouring channels at 4 or 3 bits by their entropy, tiles with an outlier rotated first.

Forward, each token is cut into tiles of G channels (a power of two; the last is padded with zeros, which are sent):

1. p_k = |x_k| / sum|x|, H = -sum p_k log p_k. Of the T tiles of a token, or of a sample's tokens together, the
   ceil(share * T) with the highest entropy get 4 bits, the others 3. In a narrow model with two tiles per token, ceil
   selects both.
2. a1 and a2 are the two largest |x|. If a1 > tau * a2, a1 is swapped with channel 0 (its position is the pivot) and the
   tile is rotated by Hadamard's matrix.
3. The tile is quantised between its minimum and maximum in equal steps, rounded to the nearest (`groups.Affine`).

Backward, gradients get `bits`-bit codes, symmetric, with one step per tile, rounded to the nearest.

A tile's metadata: 16 bits each for step and offset (bf16; published: fp16), 1 for its width, log2 G for the pivot, 1
for the rotation: 39 at G = 32, 40 at G = 64. Bits per element: 3.8 + 40/64 = 4.425 at G = 64 where share * T is whole;
the paper's 4.41 omits the rotation's bit. The paper's own tile is 32; its 4.41 is for 64. Law: bounded by half a step;
in a rotated tile by sqrt(G) / 2 steps (the L2 norm of all its errors). The source does not state the rounding, whether
tiles are ranked in a token or in a sample, nor which values of a gradient share a step. Source: He et al., "TAH-Quant",
arXiv 2506.01352, sections 3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.dense import groups, hadamard
from testbed.codecs.dense.groups import Affine, Grouping
from testbed.codecs.dense.integer import Integer
from testbed.codecs.wire import bits
from testbed.codecs.wire.header import Shape, check_finite, check_transformed, rows_of
from testbed.codecs.wire.message import Body, BodyCodec, Field, check_written
from testbed.codecs.wire.scratch import Scratch

Per = Literal["token", "sample"]
_AT_ONCE = 2**20
"""Values processed at once, if ranking groups are this small: 8 MiB of temporaries, 8 bytes per value."""


class _Ranked(NamedTuple):
    """Number of tiles ranked together, number of those with 4 bits, and total number of tiles with 4 bits."""

    tiles: int
    wide: int
    wide_in_all: int


class _Plan(NamedTuple):
    """The treatment of the tiles, in their order in the tensor."""

    wide: Tensor
    """bool (tiles, 1): has 4 bits."""
    pivot: Tensor
    """uint8 (tiles): 0 for tiles that are not rotated."""
    rotated: Tensor
    """bool (tiles)."""
    x: Tensor
    """fp32 (tiles, G), the input of quantisation."""
    affine: Affine
    """(tiles, 1)."""


class Tah(BodyCodec):
    """The codec of activations. Stateless."""

    code = 14

    def __init__(
        self, context: Context, tile: int = 64, share: float = 0.8, tau: float = 2.0, bits: int = 6, per: Per = "token"
    ) -> None:
        """`bits` is only for gradients. ValueError for tiles that are not a power of two."""
        hadamard.matrix(tile)
        self._tile, self._share, self._tau, self._per = tile, share, tau, per
        self._scratch, self._sizes = Scratch(), Scratch()

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return steps, offsets, codes of 4 bits, codes of 3 bits, flags of tiles with 4 bits and of rotated tiles, and
        the pivots.
        """
        of = self._grouping(shape)
        wide = self._ranked(shape, of).wide_in_all
        codes = (
            (wide * of.size, 4),
            ((of.groups - wide) * of.size, 3),
            (of.groups, 1),
            (of.groups, 1),
            (of.groups, _pivot_bits(of)),
        )
        packed = (Field(torch.uint8, bits.packed_bytes(count, width)) for count, width in codes)
        return *[Field(torch.bfloat16, of.groups)] * 2, *packed

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Write the fields. CodecError names the message key where x holds NaN or infinity, or reaches beyond fp32's
        largest number.
        """
        of = self._grouping(x.shape)
        ranked = self._ranked(x.shape, of)
        some = max(1, _AT_ONCE // (ranked.tiles * of.size)) * ranked.tiles
        coded = (self._code(part, ranked, key) for part in torch.split(of.split(x), some))
        wide, rotated, pivot, step, offset, codes = map(torch.cat, zip(*coded, strict=True))
        body[0].copy_(step.view(-1))
        body[1].copy_(offset.view(-1))
        for width, tiles, packed in _by_width(wide, body):
            bits.pack(codes.index_select(0, tiles).view(-1), width, packed)
        bits.pack(wide.view(-1).to(torch.uint8), 1, body[4])
        bits.pack(rotated.to(torch.uint8), 1, body[5])
        bits.pack(pivot, _pivot_bits(of), body[6])

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return the tiles, rotated back. CodecError for metadata that `fill` does not write, or a rotation that is not
        finite.
        """
        of = self._grouping(shape)
        ranked = self._ranked(shape, of)
        affine = Affine(body[0].view(-1, 1), body[1].view(-1, 1))
        wide = bits.unpack(body[4], 1, of.groups).view(torch.bool).view(-1, 1)
        rotated = bits.unpack(body[5], 1, of.groups).view(torch.bool)
        pivot = bits.unpack(body[6], _pivot_bits(of), of.groups)
        sound = (
            bool((wide.view(-1, ranked.tiles).sum(1) == ranked.wide).all())
            and not bool(pivot[~rotated].any())
            and affine.is_sound(_top(wide))
        )
        check_written(sound, key, "this metadata of tiles")
        # Reordered as bytes, a quarter of the fp32 size. numpy assigns items of a tile's size fastest.
        codes = np.empty(of.groups, f"V{of.size}")
        for width, tiles, packed in _by_width(wide, body):
            codes[tiles.numpy()] = bits.unpack(packed, width, len(tiles) * of.size).numpy().view(codes.dtype)
        values = affine.values_(torch.from_numpy(codes.view(np.uint8)).view(-1, of.size).to(torch.float32))
        if len(turned := rotated.nonzero().view(-1)):
            check_finite(_rotate(values, turned), key, "a rotation", doing="decode")
            _swap(values, turned, pivot)
        return of.trim(values)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of each value."""
        of = self._grouping(tensor.shape)
        x, ranked = of.split(tensor), self._ranked(tensor.shape, of)
        plan = self._plan(x, ranked, MessageKey("train", 0, 0, ()))
        bounds = plan.affine.step.to(torch.float64) / 2 * (1 + 2**-12)
        bounds += plan.x.abs().amax(-1, keepdim=True) * 2**-18
        bounds *= torch.where(plan.rotated, math.sqrt(of.size), 1.0).view(-1, 1)
        return of.trim(bounds.expand(-1, of.size).contiguous()).view(tensor.shape)

    def _grouping(self, shape: Shape) -> Grouping:
        rows, width = rows_of(shape)
        return Grouping(rows, width, min(self._tile, 1 << (width - 1).bit_length() if width else 1))

    def _ranked(self, shape: Shape, of: Grouping) -> _Ranked:
        tokens = of.rows // (shape[0] if len(shape) > 2 else 1) if self._per == "sample" else 1
        tiles = tokens * of.per_row
        wide = math.ceil(self._share * tiles - 1e-9)
        return _Ranked(tiles, wide, of.groups // tiles * wide)

    def _plan(self, x: Tensor, ranked: _Ranked, key: MessageKey) -> _Plan:
        """Plan for tiles x, whose number is a multiple of those ranked together."""
        size = torch.abs(x, out=self._sizes.of(x.shape))
        largest = size.amax(-1, keepdim=True)
        groups.check_ends(largest, key)
        buffer = self._scratch.of(x.shape)
        # If the largest exceeds tau times the second, only it exceeds 1/tau of itself.
        rotated = (torch.ge(size, largest / self._tau, out=buffer).sum(-1) <= 1).logical_and_(largest.view(-1) > 0)
        wide = _choose(_entropy(size, largest.view(-1), buffer).view(-1, ranked.tiles), ranked.wide).view(-1, 1)
        turned = rotated.nonzero().view(-1)
        pivot = torch.zeros(len(x), dtype=torch.uint8)
        x = buffer.copy_(x)
        if len(turned):
            pivot[turned] = x.index_select(0, turned).abs_().argmax(-1).to(torch.uint8)
            _swap(x, turned, pivot)
            check_transformed(_rotate(x, turned), key)
        return _Plan(wide, pivot, rotated, x, Affine.fit(x, _top(wide), key))

    def _code(self, x: Tensor, ranked: _Ranked, key: MessageKey) -> tuple[Tensor, ...]:
        """Return, for tiles x: wide, rotated, pivot, step, offset, and the codes, uint8 (tiles, G)."""
        plan = self._plan(x, ranked, key)
        # The cast truncates, hence rounds; the step covers the tile, so no code is too high.
        codes = groups.to_codes(plan.affine.scaled_(plan.x).add_(0.5))
        return plan.wide, plan.rotated, plan.pivot, *plan.affine, codes


class TahGradients(Integer):
    """The codec of gradients: `bits`-bit codes with a step per tile."""

    def __init__(self, context: Context, tile: int = 64, bits: int = 6, **_: Any) -> None:
        """The other parameters are only for activations."""
        super().__init__(context, tile, "nearest", bits=bits)


def _by_width(wide: Tensor, body: Body) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (bits, indices of the tiles, their packed codes) for both widths."""
    flat = wide.view(-1)
    for width, which, packed in zip((4, 3), (flat, ~flat), body[2:4], strict=True):
        yield width, which.nonzero().view(-1), packed


def _choose(entropy: Tensor, count: int) -> Tensor:
    """Return a mask, bool (rows, T), of the `count` tiles with the highest entropy in each row of entropy (rows, T)."""
    wide = np.zeros(entropy.shape, np.bool_)
    first = entropy.shape[-1] - count
    # Uses numpy, because torch's topk of many short rows takes ten times as long.
    np.put_along_axis(wide, np.argpartition(entropy.numpy(), -count, axis=-1)[:, first:], True, -1)
    return torch.from_numpy(wide)


def _pivot_bits(of: Grouping) -> int:
    return of.size.bit_length() - 1


def _top(wide: Tensor) -> Tensor:
    return torch.where(wide, 15.0, 7.0)


def _entropy(size: Tensor, largest: Tensor, buffer: Tensor) -> Tensor:
    """Return log S - sum(|x| log|x|) / S for S = sum|x|, (tiles), given |x| of tiles; 0 for zeros. Overwrites `size`
    and `buffer`.

    For tiles of values beyond 1e36 or below 1e-36 the result, and hence the ranking, is meaningless.
    """
    total = size.sum(-1)
    # 0 log 0 = 0 through a finite logarithm; torch's xlogy and entr take ten times as long.
    torch.log(size.clamp_min_(groups.SMALLEST_SCALE), out=buffer)
    entropy = total.log() - buffer.mul_(size).sum(-1) / total
    return entropy.masked_fill_(largest == 0, 0.0)


def _swap(x: Tensor, turned: Tensor, pivot: Tensor) -> None:
    """Exchange channel 0 and the channel of the pivot in the tiles `turned`, in place; twice is the identity."""
    flat = x.numpy().reshape(-1)
    first = turned.numpy() * x.shape[-1]
    other = first + pivot[turned].numpy()
    flat[first], flat[other] = flat[other], flat[first]


def _rotate(x: Tensor, turned: Tensor) -> Tensor:
    """Rotate the tiles `turned` in place, and return a tensor of their new values."""
    some = len(turned) < len(x)
    tiles = hadamard.rotate(x.index_select(0, turned) if some else x, x.shape[-1])
    if some:
        x.numpy()[turned.numpy()] = tiles.numpy()  # numpy assigns rows five times as fast
    else:
        x.copy_(tiles)
    return tiles

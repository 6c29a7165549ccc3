"""Top-k for gradients: the largest values of each chunk of a tensor, in memory order, with a few bits per value and as
few bits per position as a chunk allows. Optionally, only of a random sample of the tensor.

A chunk's positions are a bitmap or packed indices, whichever is shorter: 12 bits each among 4,096 values. Kept values
are quantised together, in the order of their positions; a subclass defines how.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.dense import groups
from testbed.codecs.dense.groups import Grouping
from testbed.codecs.sparse.positions import Bytes, LargestInRows, PositionCoding, Positions, kept_of, shortest
from testbed.codecs.wire import bits, noise
from testbed.codecs.wire.header import Shape, check_finite
from testbed.codecs.wire.message import Body, BodyCodec, Field, check_written


class _Chunks(NamedTuple):
    """Consecutive chunks of one length in a flat tensor."""

    start: int
    coding: PositionCoding

    @property
    def stop(self) -> int:
        return self.start + self.coding.rows * self.coding.width


def chunks(size: int, chunk: int, share: float) -> tuple[_Chunks, ...]:
    """Cut `size` values into chunks of `chunk` (0: a single one), of which the last may be shorter. Of each, a share is
    kept.
    """
    length = min(chunk or size, size)
    whole, rest = divmod(size, length)
    parts = [_Chunks(0, shortest(whole, length, kept_of(share, length)))]
    if rest:
        parts.append(_Chunks(whole * length, shortest(1, rest, kept_of(share, rest))))
    return tuple(parts)


class QuantisedTopK(BodyCodec):
    """Common part of `ChunkTopK` and `Cocktail`."""

    def __init__(self, context: Context, *, share: float, chunk: int, every: int, width: int) -> None:
        """Keep a `share` of each `chunk` of a sample of the tensor, with `width` bits per kept value.

        The sample has one of every `every` neighbours, drawn from the message key.
        """
        self._context, self._share, self._chunk, self._every, self._width = context, share, chunk, every, width
        self._largest = LargestInRows()
        self._magnitudes: npt.NDArray[np.float32] = np.empty(0, np.float32)

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return the fields of the scales, the packed codes and the coded positions."""
        kept, coded = self._sizes(shape)
        return self.scales(kept), Field(torch.uint8, bits.packed_bytes(kept, self._width)), Field(torch.uint8, coded)

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Write the fields. CodecError names the message key if x holds NaN or infinity."""
        check_finite(x, key, "a sparsifier")
        scales, packed, coded = body
        sampled = x.view(-1).numpy()
        if (places := self._places(sampled.size, key)) is not None:
            sampled = sampled[places]
        if self._magnitudes.size != sampled.size:
            self._magnitudes = np.empty(sampled.size, np.float32)
        magnitudes, positions = np.abs(sampled, out=self._magnitudes), []
        for (start, coding), stop, out in self._parts(sampled.size, coded.numpy()):
            chosen = self._largest.positions(magnitudes[start:stop].reshape(coding.rows, coding.width), coding.kept)
            coding.write(chosen, out)
            positions.append(start + chosen)
        kept = torch.from_numpy(sampled[np.concatenate(positions)])
        bits.pack(self.quantise(kept, scales), self._width, packed)

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return the kept values among zeros. CodecError for fields that `fill` does not write."""
        scales, packed, coded = body
        size = math.prod(shape)
        places = self._places(size, key)
        sampled = size if places is None else places.size
        positions = np.concatenate(
            [start + coding.read(out) for (start, coding), _, out in self._parts(sampled, coded.numpy())]
        )
        kept = self.dequantise(bits.unpack(packed, self._width, positions.size), scales, key)
        out = np.zeros(size, np.float32)
        out[positions if places is None else places[positions]] = kept.numpy()
        return torch.from_numpy(out)

    @abstractmethod
    def scales(self, kept: int) -> Field:
        """Return the field of the scales for `kept` values."""

    @abstractmethod
    def quantise(self, kept: Tensor, scales: Tensor) -> Tensor:
        """Write the scales of flat fp32 values, and return the values' codes, uint8."""

    @abstractmethod
    def dequantise(self, codes: Tensor, scales: Tensor, key: MessageKey) -> Tensor:
        """Return the values of codes. CodecError for scales or codes that `quantise` does not produce."""

    def _places(self, size: int, key: MessageKey) -> Positions | None:
        """Draw the sample's positions, ascending; None if the sample is the whole tensor."""
        if self._every == 1:
            return None
        starts = np.arange(0, size, self._every)
        lengths = np.minimum(size - starts, self._every)
        return starts + noise.words(self._context, key, starts.size, "sampled places") % lengths

    def _sizes(self, shape: Shape) -> tuple[int, int]:
        """Return how many values are kept, and the bytes of their positions."""
        parts = chunks(-(-math.prod(shape) // self._every), self._chunk, self._share)
        return sum(part.coding.values for part in parts), sum(part.coding.coded_bytes for part in parts)

    def _parts(self, sampled: int, coded: Bytes) -> Iterator[tuple[_Chunks, int, Bytes]]:
        """Yield the chunks of the sample, the end of each, and its part of the coded positions."""
        parts = chunks(sampled, self._chunk, self._share)
        ends = itertools.accumulate(part.coding.coded_bytes for part in parts)
        for part, end in zip(parts, ends, strict=True):
            yield part, part.stop, coded[end - part.coding.coded_bytes : end]


class ChunkTopK(QuantisedTopK):
    """The largest values of each chunk, with 2 bits: the sign, and whether the magnitude exceeds the kept ones' mean.

    A tensor has four levels, the means of the values with each code, sent as fp32, which preserves the sum of the kept
    values. SparseLoCo's deployed code divides 6 standard deviations into 4 bins instead; values far from zero, such as
    top-k's, leave one of them empty.

    Law: a kept value keeps its sign, and its magnitude does not exceed the tensor's largest. Bits per value:
    share * (2 + 12) for chunks of 4,096. Stateless; meant for use inside `ef-decay`.
    Source: SparseLoCo (Sarfi et al., arXiv 2508.15706); its deployed code: github.com/tplr-ai/templar.
    """

    code = 48

    def __init__(self, context: Context, *, share: float, chunk: int = 4096) -> None:
        """See `QuantisedTopK`."""
        super().__init__(context, share=share, chunk=chunk, every=1, width=2)

    def scales(self, kept: int) -> Field:
        """See `QuantisedTopK`."""
        return Field(torch.float32, 4)

    def quantise(self, kept: Tensor, scales: Tensor) -> Tensor:
        """See `QuantisedTopK`."""
        wide: npt.NDArray[np.float64] = kept.numpy().astype(np.float64)
        sizes = np.abs(wide)
        codes = (2 * (wide < 0) + (sizes > sizes.mean())).astype(np.uint8)
        sums, counts = np.bincount(codes, wide, 4), np.bincount(codes, minlength=4)
        scales.copy_(torch.from_numpy((sums / np.maximum(counts, 1)).astype(np.float32)))
        return torch.from_numpy(codes)

    def dequantise(self, codes: Tensor, scales: Tensor, key: MessageKey) -> Tensor:
        """See `QuantisedTopK`."""
        sound = bool(scales.isfinite().all()) and float(scales[:2].amin()) >= 0 and float(scales[2:].amax()) <= 0
        check_written(sound, key, "such levels")
        return torch.from_numpy(scales.numpy()[codes.numpy()])

    def kept_bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of a kept value: less than the tensor's largest magnitude."""
        x = tensor.detach().to(torch.float32).abs()
        return x.amax() if x.numel() else x


class Cocktail(QuantisedTopK):
    """CocktailSGD's three methods in one: a random sample, its largest values, a few bits per value.

    Both ends draw the same sample from the message key, each worker its own: one of every ten neighbours. The published
    code draws a mask once, for all workers, and shifts it from step to step. Codes are symmetric about zero, with a
    bf16 step per 128 kept values: as many bits as the published fp16, and fp32's range.

    Law: the error of a kept value is at most half a step; the others are zero. Bits per value: (1 + share * (bits +
    16/128)) / every, including the bitmap of the sample's kept values. Stateless; meant for use inside `ef`.
    Source: CocktailSGD, Wang et al., ICML 2023; its code's defaults: github.com/DS3Lab/CocktailSGD.
    """

    code = 49
    BUCKET = 128

    def __init__(self, context: Context, *, share: float = 0.2, every: int = 10, bits: int = 4) -> None:
        """`bits` is 2 to 8."""
        super().__init__(context, share=share, chunk=0, every=every, width=bits)
        self._reach = (1 << bits - 1) - 1

    def scales(self, kept: int) -> Field:
        """See `QuantisedTopK`."""
        return Field(torch.bfloat16, Grouping.of((kept,), self.BUCKET).groups)

    def quantise(self, kept: Tensor, scales: Tensor) -> Tensor:
        """See `QuantisedTopK`."""
        of = Grouping.of(kept.shape, self.BUCKET)
        x = of.split(kept)
        step = groups.scales(groups.largest_magnitude(x), self._reach)
        scales.copy_(step.view(-1))
        # The conversion to codes truncates, so adding 1/2 rounds.
        codes = (x * step.to(torch.float32).reciprocal()).add_(self._reach + 0.5).clamp_(0, 2 * self._reach)
        return of.trim(groups.to_codes(codes))

    def dequantise(self, codes: Tensor, scales: Tensor, key: MessageKey) -> Tensor:
        """See `QuantisedTopK`."""
        of = Grouping.of(codes.shape, self.BUCKET)
        sound = groups.scales_are_sound(scales, self._reach) and int(codes.amax()) <= 2 * self._reach
        check_written(sound, key, "such a step or code")
        values = of.spread(codes).to(torch.float32).sub_(self._reach).mul_(scales.view(-1, 1).to(torch.float32))
        return of.trim(values).contiguous()

    def kept_bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of a kept value: half the step of the tensor's largest magnitude."""
        x = tensor.detach().to(torch.float32).abs()
        return x.amax() * ((0.5 + 2**-10) * (1 + 2**-7) / self._reach) if x.numel() else x

"""Sparsifiers send some of a tensor's values; the others are zero at the receiver. Their common part, and top-k of
values and of blocks.

They differ in which values they keep. Top-k keeps the largest and sends their positions; `random_places` draws them at
both ends from the message key; `shared_mask` uses one mask for both directions.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.sparse.positions import (
    Bytes,
    Form,
    LargestInRows,
    PositionCoding,
    Positions,
    every_row,
    kept_of,
    largest_on,
    shortest,
)
from testbed.codecs.wire.header import CPU, Shape, check_finite, rows_of
from testbed.codecs.wire.message import Body, BodyCodec, Field, check_written

ValueType = Literal["bf16", "fp32"]
Floats = npt.NDArray[np.float32]

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LARGEST_BF16 = np.float32(torch.finfo(torch.bfloat16).max)


def within_range(kept: Floats, dtype: torch.dtype) -> Floats:
    """Clip values, in place, to the range of the type they will be rounded to: bf16's ends before fp32's."""
    return np.clip(kept, -_LARGEST_BF16, _LARGEST_BF16, out=kept) if dtype is torch.bfloat16 else kept


class Sparsifier(BodyCodec):
    """Common part of sparsifiers: gathers, writes, reads and scatters values. A subclass chooses the positions.

    Kept values are sent in the order of their positions, rounded to the nearest bf16 (relative error at most 2**-8) or
    as fp32; then the positions, if they are sent.
    """

    def __init__(self, context: Context, *, share: float, values: ValueType) -> None:
        """`share` of the values is kept, 0 < share <= 1."""
        self._context, self._share, self._dtype = context, share, DTYPES[values]
        self._largest = LargestInRows()

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return the kept values and the coded positions."""
        return Field(self._dtype, self.count(shape)), Field(torch.uint8, self.positions_bytes(shape))

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Write the fields. CodecError names the message key if x holds NaN or infinity."""
        check_finite(x, key, "a sparsifier")
        values, coded = body
        flat: Floats = x.view(-1).numpy()
        shape = tuple(x.shape)
        positions = self.choose(flat, shape, key)
        values.copy_(torch.from_numpy(self.adjust(flat[positions], shape, key)))
        self.write_positions(positions, shape, coded.numpy())
        self.passed(key, shape, positions)

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return the kept values among zeros. CodecError for positions or values that `fill` does not write."""
        kept = body[0].to(torch.float32)
        check_written(bool(torch.isfinite(kept).all()), key, "a kept value that is NaN or infinite")
        positions = self.read_positions(body[1].numpy(), shape, key)
        out: Floats = np.zeros(math.prod(shape), np.float32)
        out[positions] = kept.numpy()
        self.passed(key, shape, positions)
        return torch.from_numpy(out)

    def kept_bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of a kept value: half a bf16 step, a whole one at its range's end; zero in fp32."""
        return tensor.detach().to(torch.float32).abs() * (2.0**-8 if self._dtype is torch.bfloat16 else 0.0)

    @abstractmethod
    def choose(self, flat: Floats, shape: Shape, key: MessageKey) -> Positions:
        """At the encoder: return the positions of the values that are kept."""

    @abstractmethod
    def count(self, shape: Shape) -> int:
        """Return how many values are kept. It is called before memory for them is allocated."""

    def positions_bytes(self, shape: Shape) -> int:
        """Return how many bytes the positions take."""
        return 0

    def write_positions(self, positions: Positions, shape: Shape, out: Bytes) -> None:
        """Write the positions to `out`, which has `positions_bytes`."""

    @abstractmethod
    def read_positions(self, coded: Bytes, shape: Shape, key: MessageKey) -> Positions:
        """At the decoder: return the positions, checked."""

    def adjust(self, kept: Floats, shape: Shape, key: MessageKey) -> Floats:
        """Return the kept values, ready to be rounded. `kept` is a fresh array and may be changed in place."""
        return within_range(kept, self._dtype)

    def passed(self, key: MessageKey, shape: Shape, positions: Positions) -> None:
        """Act on a message that has passed, at either end. Most sparsifiers do nothing."""


class WithPositions(Sparsifier):
    """A sparsifier that sends its positions, in the `PositionCoding` of the shape."""

    def __init__(self, context: Context, *, share: float, values: ValueType, positions: Form) -> None:
        super().__init__(context, share=share, values=values)
        self._form: Form = positions

    @abstractmethod
    def coding(self, shape: Shape) -> PositionCoding:
        """Return the rows in which values are chosen, the number kept in each, and how positions are coded."""

    def count(self, shape: Shape) -> int:
        """See `Sparsifier`."""
        return self.coding(shape).values

    def positions_bytes(self, shape: Shape) -> int:
        """See `Sparsifier`."""
        return self.coding(shape).coded_bytes

    def write_positions(self, positions: Positions, shape: Shape, out: Bytes) -> None:
        """See `Sparsifier`."""
        self.coding(shape).write(positions, out)

    def read_positions(self, coded: Bytes, shape: Shape, key: MessageKey) -> Positions:
        """See `Sparsifier`."""
        return self.coding(shape).read(coded)


class TopK(WithPositions):
    """The k largest magnitudes of each token (k = share * d), each sample, or the tensor; of equal ones, the first.

    Law: kept values are exact (fp32) or rounded (bf16), the others zero; no other choice of k values has a smaller
    squared error.
    Bits per value: share * 16, plus 1 for a bitmap, or share * w for indices of w = 8 bits (up to 256 values), 16 (up
    to 65,536) or 32.
    Source: top-k of activations as in Rudakov et al., arXiv 2401.07788, who choose per `sample`. Stateless.
    """

    on_device = True
    code = 40

    def __init__(
        self,
        context: Context,
        *,
        share: float,
        per: Literal["token", "sample", "tensor"] = "token",
        values: ValueType = "bf16",
        positions: Form = "smaller",
    ) -> None:
        super().__init__(context, share=share, values=values, positions=positions)
        self._per = per
        self._magnitudes: Floats = np.empty((0, 0), np.float32)

    def coding(self, shape: Shape) -> PositionCoding:
        """Choose within tokens, within samples (the first axis), or within everything."""
        rows, width = rows_of(shape)
        if self._per == "tensor" or (self._per == "sample" and len(shape) < 3):
            rows, width = 1, rows * width
        elif self._per == "sample":
            rows, width = shape[0], rows // shape[0] * width
        return PositionCoding(rows, width, kept_of(self._share, width), self._form)

    def choose(self, flat: Floats, shape: Shape, key: MessageKey) -> Positions:
        """Choose by magnitude, see `LargestInRows`."""
        coding = self.coding(shape)
        if self._magnitudes.shape != (coding.rows, coding.width):
            self._magnitudes = np.empty((coding.rows, coding.width), np.float32)
        np.abs(flat.reshape(coding.rows, coding.width), out=self._magnitudes)
        return self._largest.positions(self._magnitudes, coding.kept)

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """See `Sparsifier`. Off the CPU, with torch alone: the same bytes."""
        if x.device.type == CPU.type:
            return super().fill(x, body, key)
        check_finite(x, key, "a sparsifier")
        coding = self.coding(tuple(x.shape))
        positions = largest_on(x.abs().view(coding.rows, coding.width), coding.kept)
        largest = float(torch.finfo(self._dtype).max)
        body[0].copy_(x.view(-1)[positions].clamp_(-largest, largest))
        coding.write_on(positions, body[1])
        return None

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """See `Sparsifier`."""
        if body[0].device.type == CPU.type:
            return super().values(body, shape, key)
        kept = body[0].to(torch.float32)
        check_written(bool(torch.isfinite(kept).all()), key, "a kept value that is NaN or infinite")
        out = kept.new_zeros(math.prod(shape))
        out[self.coding(shape).read_on(body[1])] = kept
        return out


class BlockTopK(WithPositions):
    """The blocks with the largest energy (sum of squares) in the tensor; of equal ones, the first.

    A block has `channels` neighbouring values of each of `tokens` successive rows. There is one position per block, so
    positions cost little. If blocks do not divide a row, or the rows, the last ones overlap the blocks before them.

    Law: kept values are exact (fp32) or rounded (bf16), the others zero.
    Bits per value: share * 16, plus a bit per block or, if that is shorter, a packed index per kept block.
    Source: modelled on Block Top-k of OmniReduce (Fei et al., SIGCOMM 2021, not re-read), which is for gradients.
    Stateless.
    """

    code = 54

    def __init__(
        self, context: Context, *, share: float, channels: int = 8, tokens: int = 1, values: ValueType = "bf16"
    ) -> None:
        super().__init__(context, share=share, values=values, positions="packed")
        self._channels, self._tokens = channels, tokens

    def coding(self, shape: Shape) -> PositionCoding:
        """Code one row: the blocks, in order of tokens, then of channels."""
        blocks = math.prod(-(-length // step) for length, step in self._sides(shape))
        return shortest(1, blocks, kept_of(self._share, blocks))

    def count(self, shape: Shape) -> int:
        """See `Sparsifier`."""
        return self.coding(shape).values * math.prod(step for _, step in self._sides(shape))

    def choose(self, flat: Floats, shape: Shape, key: MessageKey) -> Positions:
        """Choose by the sum of squares in fp64, which no fp32 value overflows."""
        energy = np.square(flat.reshape(rows_of(shape)), dtype=np.float64)
        for axis, (length, step) in enumerate(self._sides(shape)):
            if step > 1:
                energy = np.add.reduceat(energy, np.arange(0, length, step), axis=axis)
        return self._inside(self._largest.positions(energy.reshape(1, -1), self.coding(shape).kept), shape)

    def write_positions(self, positions: Positions, shape: Shape, out: Bytes) -> None:
        """Write the blocks. A block's last value identifies it even if it overlaps the block before."""
        (_, tall), (width, wide) = self._sides(shape)
        last = positions.reshape(-1, tall * wide)[:, -1]
        self.coding(shape).write(last // width // tall * -(-width // wide) + last % width // wide, out)

    def read_positions(self, coded: Bytes, shape: Shape, key: MessageKey) -> Positions:
        """See `write_positions`."""
        return self._inside(super().read_positions(coded, shape, key), shape)

    def _sides(self, shape: Shape) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return, for rows and then for channels, how many the tensor has and how many a block has."""
        rows, width = rows_of(shape)
        return (rows, min(self._tokens, rows)), (width, min(self._channels, width))

    def _inside(self, blocks: Positions, shape: Shape) -> Positions:
        """Return the positions of the values of blocks, block by block."""
        (rows, tall), (width, wide) = self._sides(shape)
        first, left = np.divmod(blocks, -(-width // wide))
        corners: Positions = np.minimum(first * tall, rows - tall) * width + np.minimum(left * wide, width - wide)
        inside: Positions = corners[:, np.newaxis] + every_row(np.arange(wide), tall, width)
        return inside.reshape(-1)

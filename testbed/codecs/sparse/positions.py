"""Positions of a tensor's kept values: finds the largest values, and codes positions as a bitmap or as indices.

Positions are flat indices over consecutive rows, ascending, with the same number `kept` in every row. The coded length
therefore follows from the shape and is not sent.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from testbed.errors import CodecError

Positions: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Form = Literal["smaller", "bitmap", "index", "packed"]

_INDEX_TYPES = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8"))


def kept_of(share: float, width: int) -> int:
    """Return how many of `width` values a share amounts to: rounded, at least one, at most all."""
    return min(width, max(1, round(share * width)))


class LargestInRows:
    """Finds the largest keys of each row. Its buffers are reused for every message of the same shape."""

    def __init__(self) -> None:
        self._ordered: npt.NDArray[Any] = np.empty((0, 0), np.float32)
        self._mask: npt.NDArray[np.bool_] = np.empty((0, 0), np.bool_)

    def positions(self, keys: npt.NDArray[Any], kept: int) -> Positions:
        """Return the positions of the `kept` largest keys in each row of (rows, width); of equal keys, the first ones.

        No key may be NaN.
        """
        rows, width = keys.shape
        if kept == width:
            return np.arange(rows * width)
        if self._ordered.shape != keys.shape or self._ordered.dtype != keys.dtype:
            self._ordered, self._mask = np.empty_like(keys), np.empty(keys.shape, np.bool_)
        # A partition finds the smallest kept key in a fraction of the time of a full sort.
        np.copyto(self._ordered, keys)
        self._ordered.partition(width - kept, axis=-1)
        threshold = self._ordered[:, width - kept, np.newaxis]
        mask = np.greater_equal(keys, threshold, out=self._mask)
        positions = np.flatnonzero(mask)
        if positions.size > rows * kept:
            _drop_surplus(mask, keys, threshold, kept)
            positions = np.flatnonzero(mask)
        return positions


def largest_on(keys: Tensor, kept: int) -> Tensor:
    """Return the positions of `LargestInRows` for a tensor on any device."""
    threshold = keys.topk(kept, sorted=False).values.amin(-1, keepdim=True)
    above, equal = keys > threshold, keys == threshold
    room = kept - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= room))).view(-1).nonzero().view(-1)


def _drop_surplus(mask: npt.NDArray[np.bool_], keys: npt.NDArray[Any], threshold: npt.NDArray[Any], kept: int) -> None:
    """Of the keys equal to their row's threshold, keep only the first ones, as many as there is room for."""
    crowded = np.flatnonzero(np.count_nonzero(mask, axis=1) > kept)
    above = keys[crowded] > threshold[crowded]
    equal = keys[crowded] == threshold[crowded]
    room = kept - np.count_nonzero(above, axis=1)[:, np.newaxis]
    mask[crowded] = above | (equal & (np.cumsum(equal, axis=1, dtype=np.int32) <= room))


def every_row(columns: Positions, rows: int, width: int) -> Positions:
    """Return the positions of the same columns in each of the rows."""
    return (np.arange(0, rows * width, width)[:, np.newaxis] + columns).reshape(-1)


class PositionCoding(NamedTuple):
    """How to code the positions of `kept` values in each of `rows` rows of `width` values."""

    rows: int
    width: int
    kept: int
    form: Form = "smaller"
    """bitmap: a bit per value; index: 1, 2, 4 or 8 bytes per kept value, the fewest that address the width; packed: the
    fewest bits that do; smaller: the shorter of bitmap and index.
    """

    @property
    def values(self) -> int:
        """Number of kept values in all rows."""
        return self.rows * self.kept

    @property
    def coded_bytes(self) -> int:
        """Length of the coded positions; 0 if all values are kept."""
        if self.kept == self.width:
            return 0
        return self._bitmap_bytes if self._is_bitmap else self._index_bytes

    def write(self, positions: Positions, out: Bytes) -> None:
        """Write the coded positions to `out`, which has `coded_bytes`."""
        if self.kept == self.width:
            return
        if self._is_bitmap:
            out[:] = pack(positions, self.rows * self.width)
            return
        columns = (positions.reshape(self.rows, self.kept) - self._starts).ravel()
        if self.form == "packed":
            out[:] = np.packbits(columns[:, np.newaxis] >> self._places & 1, bitorder="little")
        else:
            out.view(self._index_type)[:] = columns

    def read(self, coded: Bytes) -> Positions:
        """Read positions. CodecError for bytes that `write` does not produce: too few or too many positions in a row,
        out of range, out of order.
        """
        if self.kept == self.width:
            return np.arange(self.values)
        if self._is_bitmap:
            positions = unpack(coded, self.rows * self.width)
            if positions.size != self.values:
                raise CodecError(f"cannot decode a bitmap of {positions.size} positions: {self} has {self.values}")
            in_rows = positions.reshape(self.rows, self.kept)
        else:
            columns = self._unpacked(coded) if self.form == "packed" else coded.view(self._index_type).astype(np.int64)
            columns = columns.reshape(self.rows, self.kept)
            if bool((columns[:, 1:] <= columns[:, :-1]).any()):
                raise CodecError(f"cannot decode the indices of {self}: they do not ascend")
            in_rows = columns + self._starts
        ends = in_rows[:, [0, -1]] - self._starts
        if bool(((ends < 0) | (ends >= self.width)).any()):
            raise CodecError(f"cannot decode the positions of {self}: one lies outside its row")
        return in_rows.reshape(-1)

    def write_on(self, positions: Tensor, out: Tensor) -> None:
        """Write as `write` does, on any device; not packed."""
        if self.kept == self.width:
            return
        if self._is_bitmap:
            bits = out.new_zeros(8 * len(out)).index_fill_(0, positions, 1).view(-1, 8) << _eight(out)
            out.copy_(bits.sum(-1, dtype=torch.uint8))
        else:
            words = (positions % self.width).view(torch.uint8).view(-1, 8)  # little-endian
            out.copy_(words[:, : self._index_type.itemsize].reshape(-1))

    def read_on(self, coded: Tensor) -> Tensor:
        """Read as `read` does, on any device; not packed. CodecError for bytes that `write_on` does not produce."""
        starts = torch.arange(self.rows, device=coded.device)[:, None] * self.width
        if self.kept == self.width:
            flat = torch.arange(self.values, device=coded.device)
        elif self._is_bitmap:
            flat = (coded[:, None] >> _eight(coded) & 1).view(-1).nonzero().view(-1)
        else:
            words = functional.pad(coded.view(self.values, -1), (0, 8 - self._index_type.itemsize)).view(torch.int64)
            flat = (words.view(self.rows, -1) + starts).view(-1)
        columns = flat.view(self.rows, -1) - starts if len(flat) == self.values else starts - 1
        if not bool(((columns >= 0) & (columns < self.width)).all() & (columns.diff() > 0).all()):
            raise CodecError(f"cannot decode the positions of {self}: too few or too many, out of order, or outside")
        return flat

    @property
    def _is_bitmap(self) -> bool:
        return self.form == "bitmap" or (self.form == "smaller" and self._bitmap_bytes <= self._index_bytes)

    @property
    def _bitmap_bytes(self) -> int:
        return -(-self.rows * self.width // 8)

    @property
    def _index_bytes(self) -> int:
        if self.form == "packed":
            return -(-self.values * self._places.size // 8)
        return self.values * self._index_type.itemsize

    @property
    def _places(self) -> Positions:
        """The bit shifts of a packed index, lowest first."""
        return np.arange((self.width - 1).bit_length())

    def _unpacked(self, coded: Bytes) -> Positions:
        bits = np.unpackbits(coded, bitorder="little")
        if bool(bits[self.values * self._places.size :].any()):
            raise CodecError(f"cannot decode the indices of {self}: a bit after the last one is set")
        places = bits[: self.values * self._places.size].reshape(self.values, -1)
        return places.astype(np.int64) @ (1 << self._places)

    @property
    def _index_type(self) -> np.dtype[Any]:
        return next(kind for kind in _INDEX_TYPES if self.width <= 1 << (8 * kind.itemsize))

    @property
    def _starts(self) -> Positions:
        return np.arange(0, self.rows * self.width, self.width)[:, np.newaxis]


def shortest(rows: int, width: int, kept: int) -> PositionCoding:
    """Return the shorter of a bitmap and packed indices."""
    bitmap, packed = PositionCoding(rows, width, kept, "bitmap"), PositionCoding(rows, width, kept, "packed")
    return bitmap if bitmap.coded_bytes <= packed.coded_bytes else packed


def _eight(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def pack(positions: Positions, count: int) -> Bytes:
    """Return a bitmap over `count` positions, the first in the lowest bit."""
    mask = np.zeros(count, np.bool_)
    mask[positions] = True
    return np.packbits(mask, bitorder="little")


def unpack(bitmap: Bytes, count: int) -> Positions:
    """Return the positions that are set in a bitmap. CodecError if a bit after the last position is set."""
    bits = np.unpackbits(bitmap, bitorder="little")
    if bool(bits[count:].any()):
        raise CodecError(f"cannot decode a bitmap of {count} positions: a bit after the last one is set")
    return np.flatnonzero(bits[:count].view(np.bool_))

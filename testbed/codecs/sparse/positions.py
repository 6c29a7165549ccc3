"""Where the kept values of a tensor stand: chosen here, and coded as a bitmap or as indices.

Positions are flat, over rows one after another, ascending, and the same number `kept` in every row; the length of the
coded form therefore follows from the shape, and nothing else has to be sent.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from testbed.errors import CodecError

Positions: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Form = Literal["smaller", "bitmap", "index", "packed"]

_INDEX_TYPES = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<u4"), np.dtype("<u8"))


def kept_of(share: float, width: int) -> int:
    """Return how many of `width` values a share comes to: the nearest whole number, at least one, at most all."""
    return min(width, max(1, round(share * width)))


class LargestInRows:
    """The search for the largest keys of each row. Its buffers serve every message of one shape."""

    def __init__(self) -> None:
        self._ordered: npt.NDArray[Any] = np.empty((0, 0), np.float32)
        self._mask: npt.NDArray[np.bool_] = np.empty((0, 0), np.bool_)

    def positions(self, keys: npt.NDArray[Any], kept: int) -> Positions:
        """Return the positions of the `kept` largest keys in each row of (rows, width); of equal ones those that come
        first.

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


def _drop_surplus(mask: npt.NDArray[np.bool_], keys: npt.NDArray[Any], threshold: npt.NDArray[Any], kept: int) -> None:
    """Leave, of the keys equal to their row's threshold, the first ones, as many as there is room for."""
    crowded = np.flatnonzero(np.count_nonzero(mask, axis=1) > kept)
    above = keys[crowded] > threshold[crowded]
    equal = keys[crowded] == threshold[crowded]
    room = kept - np.count_nonzero(above, axis=1)[:, np.newaxis]
    mask[crowded] = above | (equal & (np.cumsum(equal, axis=1, dtype=np.int32) <= room))


def every_row(columns: Positions, rows: int, width: int) -> Positions:
    """Return the positions of the same columns in each of the rows."""
    return (np.arange(0, rows * width, width)[:, np.newaxis] + columns).reshape(-1)


class PositionCoding(NamedTuple):
    """The code of the positions of `kept` values in each of `rows` rows of `width`."""

    rows: int
    width: int
    kept: int
    form: Form = "smaller"
    """A bitmap has a bit for each value; an index 1, 2, 4 or 8 bytes for each kept one, the fewest that hold the
    width, or packed as many bits as hold it; smaller: the shorter of bitmap and index.
    """

    @property
    def values(self) -> int:
        """Kept values of all rows."""
        return self.rows * self.kept

    @property
    def coded_bytes(self) -> int:
        """Bytes of the code; 0 where everything is kept, as there is nothing to tell."""
        if self.kept == self.width:
            return 0
        return self._bitmap_bytes if self._is_bitmap else self._index_bytes

    def write(self, positions: Positions, out: Bytes) -> None:
        """Write the code to `out`, of `coded_bytes`."""
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
        """Read positions. CodecError for bytes that `write` does not make: too few or too many in a row, out of range,
        out of order.
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
        if bool(
            (in_rows[:, 0] < self._starts[:, 0]).any() or (in_rows[:, -1] >= self._starts[:, 0] + self.width).any()
        ):
            raise CodecError(f"cannot decode the positions of {self}: one lies outside its row")
        return in_rows.reshape(-1)

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
        """The binary places of a packed index, lowest first."""
        return np.arange((self.width - 1).bit_length())

    def _unpacked(self, coded: Bytes) -> Positions:
        bits = np.unpackbits(coded, bitorder="little")
        if bool(bits[self.values * self._places.size :].any()):
            raise CodecError(f"cannot decode the indices of {self}: a bit behind the last one is set")
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


def pack(positions: Positions, count: int) -> Bytes:
    """Return a bitmap over `count` places, the first in the lowest bit."""
    mask = np.zeros(count, np.bool_)
    mask[positions] = True
    return np.packbits(mask, bitorder="little")


def unpack(bitmap: Bytes, count: int) -> Positions:
    """Return the positions that are set in a bitmap. CodecError where one is set behind the last place."""
    bits = np.unpackbits(bitmap, bitorder="little")
    if bool(bits[count:].any()):
        raise CodecError(f"cannot decode a bitmap of {count} places: a bit behind the last one is set")
    return np.flatnonzero(bits[:count].view(np.bool_))

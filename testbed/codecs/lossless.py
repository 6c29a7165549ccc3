"""Lossless wrappers pack the inner codec's payload. They decode to what the inner codec decodes to, bit for bit.

A payload of whole fp32, bf16 or fp16 values is cut into byte planes first: signs and exponents lie in one plane, which
packs well, and the low bits of mantissas in others, which do not (BloomBee, arXiv 2604.21072, splits fp16 so). Each
plane is packed or, where that gains nothing, kept.

Wire: 4 bytes (code, planes, 0, 0), u64 length of the inner payload, u64 length of each plane as sent, the planes,
zeros. The zeros fill up to 1/256 of the inner length: a decoder then sets aside at most 256 times what it was sent.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import zstandard
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.dense.cast import Bf16, Fp16, Fp32
from testbed.codecs.wrap import frame, open_frame
from testbed.errors import CodecError

Bytes = npt.NDArray[np.uint8]
Split = Literal["auto", "whole"]

MOST = 256
"""The largest ratio of inner to sent bytes."""
_PLANES = {cast.code: cast.dtype.itemsize for cast in (Fp32, Bf16, Fp16)}
_SAMPLE = 16384
_WORTH_BITS = 7.95
"""A plane whose bytes carry more than this each is kept: no coder would win 1 %."""


class Lossless:
    """What the two wrappers have in common; they differ in how a plane is packed."""

    code: ClassVar[int]

    def __init__(self, context: Context, inner: Codec, split: Split = "auto") -> None:
        """`split='auto'` cuts payloads of whole 16 or 32-bit values into byte planes; 'whole' never does."""
        self.inner, self._split = inner, split

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode with the inner codec, and pack the payload."""
        plain = np.frombuffer(memoryview(self.inner.encode(tensor, key)).cast("B"), np.uint8)
        width = _PLANES.get(int(plain[0]), 1) if self._split == "auto" and plain.size else 1
        planes = [self._shorter(plane) for plane in _cut(plain, width)]
        lengths = struct.pack(f"<Q{width}Q", plain.size, *(len(plane) for plane in planes))
        sent = 4 + len(lengths) + sum(map(len, planes))
        return frame(self.code, lengths, *planes, bytes(max(0, -(-plain.size // MOST) - sent)), kind=width)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Unpack, and decode with the inner codec."""
        return self.inner.decode(self._open(payload, key), key)

    def _open(self, payload: Payload, key: MessageKey) -> memoryview:
        """Return the inner payload. CodecError before more than MOST times the payload is set aside."""
        width, visit, body = open_frame(payload, self.code)
        lengths_bytes = 8 * (1 + width)
        if width not in (1, 2, 4) or visit or len(body) < lengths_bytes:
            raise CodecError(f"cannot decode {key}: {len(body)} bytes in {width} planes, which no encoder writes")
        size, *lengths = struct.unpack_from(f"<Q{width}Q", body)
        sent = lengths_bytes + sum(lengths)
        filled = max(sent, -(-size // MOST) - 4)
        if len(body) != filled or np.frombuffer(body[sent:], np.uint8).any():
            raise CodecError(
                f"cannot decode {key}: {len(body)} bytes where {size} bytes in planes of {lengths} take {filled}"
            )
        plain: Bytes = np.empty(size, np.uint8)
        start = lengths_bytes
        for plane, length in zip(_cut(plain, width), lengths, strict=True):
            part = body[start : start + length]
            start += length
            if length > plane.size:
                raise CodecError(f"cannot decode {key}: a plane of {plane.size} bytes in {length}")
            plane[:] = np.frombuffer(part if length == plane.size else self._unpack(part, plane.size, key), np.uint8)
        return plain.data

    def _shorter(self, plane: Bytes) -> bytes:
        whole = plane.tobytes()
        if _bits(plane) > _WORTH_BITS or len(packed := self._pack(whole)) >= len(whole):
            return whole
        return packed

    def _pack(self, plane: bytes) -> bytes:
        """Return the plane as one zstd frame."""
        raise NotImplementedError

    def _unpack(self, packed: memoryview, size: int, key: MessageKey) -> bytes:
        """Return exactly `size` bytes, or raise CodecError."""
        try:
            if (said := zstandard.get_frame_parameters(packed).content_size) != size:
                raise CodecError(f"cannot decode {key}: a zstd frame of {said} bytes where {size} belong")
            return zstandard.ZstdDecompressor().decompress(packed, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"cannot decode {key}: {error}") from error


class Zstd(Lossless):
    """zstd: matches of repeated bytes (tokens that occur twice, early in the net), then entropy coding of what is left.

    The level is 1 because a higher one seldom gives more: on activations and gradients of a GPT-2 of width 768, level 3
    took 1.3 to 1.8 times as long; bf16 payloads came out 1 to 2 % longer, int8 ones 2 % shorter or the same. Only
    int4's activations got 11 % shorter, for 2 ms more: worth the time at 80 Mbit/s, not at 1 Gbit/s.
    """

    code = 66

    def __init__(self, context: Context, inner: Codec, level: int = 1, split: Split = "auto") -> None:
        """`level` is zstd's own, 1 (fast) to 19."""
        super().__init__(context, inner, split)
        self._level = level

    def _pack(self, plane: bytes) -> bytes:
        return zstandard.ZstdCompressor(level=self._level, write_content_size=True).compress(plane)


class Entropy(Lossless):
    """Huffman codes of single bytes, new ones for every 128 KiB: what the distribution of the codes alone is worth
    (order 0).

    It is zstd's own Huffman coder, with the search for matches cut down as far as it goes: a table of 64 places, and
    matches of at least 7 bytes. Tokens that repeat many times over still gain 5 to 8 % by it, where zstd itself gains
    96 %; codes of 2 bits come out up to 8 % longer than order 0. DEFLATE's Huffman-only mode is free of both and was
    ten times as slow, too slow for int8 at 80 Mbit/s. Codes of 8, 4, 2 and 1 bits lie within a byte; some of those of 3
    and 6 bits lie across two.
    """

    code = 67

    def _pack(self, plane: bytes) -> bytes:
        settings = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7, write_content_size=True
        )
        return zstandard.ZstdCompressor(compression_params=settings).compress(plane)


def _cut(plain: Bytes, width: int) -> Iterator[Bytes]:
    """Yield the byte planes as views: every `width`th byte. Headers are multiples of 4 bytes, so a plane holds one byte
    of each value.
    """
    return (plain[offset::width] for offset in range(width))


def _bits(plane: Bytes) -> float:
    """Return the entropy of the plane's bytes in bits per byte, from a sample."""
    counts = np.bincount(plane[:: max(1, plane.size // _SAMPLE)], minlength=256)
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log2(shares)).sum())

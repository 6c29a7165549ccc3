"""Lossless wrappers compress the inner codec's payload. Decoded tensors are bit-identical to the inner codec's.

A payload of fp32, bf16 or fp16 values is first split into byte planes: the plane of signs and exponents compresses
well, those of the low mantissa bits do not (BloomBee, arXiv 2604.21072, splits fp16 in this way). Each plane is
compressed, or stored as it is if compression does not make it shorter.

Wire: 4 bytes (code, planes, 0, 0), u64 length of the inner payload, u64 length of each plane as sent, the planes,
zeros. Zeros pad the payload to 1/256 of the inner length, so a decoder allocates at most 256 times what it received.
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
"""Entropy in bits per byte above which a plane is stored as it is: no coder would save 1 %."""


class Lossless:
    """Common part of the two wrappers, which differ in how they compress a plane."""

    code: ClassVar[int]

    def __init__(self, context: Context, inner: Codec, split: Split = "auto") -> None:
        """`split='auto'` splits payloads of 16-bit or 32-bit values into byte planes; 'whole' never does."""
        self.inner, self._split = inner, split

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode with the inner codec, and compress the payload."""
        plain = np.frombuffer(memoryview(self.inner.encode(tensor, key)).cast("B"), np.uint8)
        width = _PLANES.get(int(plain[0]), 1) if self._split == "auto" and plain.size else 1
        planes = [self._shorter(plane) for plane in _cut(plain, width)]
        lengths = struct.pack(f"<Q{width}Q", plain.size, *(len(plane) for plane in planes))
        sent = 4 + len(lengths) + sum(map(len, planes))
        return frame(self.code, lengths, *planes, bytes(max(0, -(-plain.size // MOST) - sent)), kind=width)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decompress, and decode with the inner codec."""
        return self.inner.decode(self._open(payload, key), key)

    def _open(self, payload: Payload, key: MessageKey) -> memoryview:
        """Return the inner payload. CodecError before more than MOST times the payload is allocated."""
        width, visit, body = open_frame(payload, self.code)
        lengths_bytes = 8 * (1 + width)
        if width not in (1, 2, 4) or visit or len(body) < lengths_bytes:
            raise CodecError(f"cannot decode {key}: {len(body)} bytes in {width} planes, which no encoder writes")
        size, *lengths = struct.unpack_from(f"<Q{width}Q", body)
        sent = lengths_bytes + sum(lengths)
        filled = max(sent, -(-size // MOST) - 4)
        if len(body) != filled or np.frombuffer(body[sent:], np.uint8).any():
            raise CodecError(
                f"cannot decode {key}: {len(body)} bytes, but {size} bytes in planes of {lengths} take {filled}"
            )
        plain: Bytes = np.empty(size, np.uint8)
        start = lengths_bytes
        for plane, length in zip(_cut(plain, width), lengths, strict=True):
            part = body[start : start + length]
            start += length
            if length > plane.size:
                raise CodecError(f"cannot decode {key}: a plane of {plane.size} bytes in {length} bytes")
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
                raise CodecError(f"cannot decode {key}: a zstd frame of {said} bytes, expected {size}")
            return zstandard.ZstdDecompressor().decompress(packed, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CodecError(f"cannot decode {key}: {error}") from error


class Zstd(Lossless):
    """zstd: matches repeated bytes (early in the network, tokens that occur twice), then entropy-codes the rest.

    The default level is 1, because higher levels seldom help: on activations and gradients of a GPT-2 of width 768,
    level 3 took 1.3 to 1.8 times as long, made bf16 payloads 1 to 2 % longer and int8 payloads at most 2 % shorter.
    Only int4's activations became 11 % shorter, for 2 ms more, which pays at 80 Mbit/s but not at 1 Gbit/s.
    """

    code = 66

    def __init__(self, context: Context, inner: Codec, level: int = 1, split: Split = "auto") -> None:
        """`level` is zstd's own, 1 (fast) to 19."""
        super().__init__(context, inner, split)
        self._level = level

    def _pack(self, plane: bytes) -> bytes:
        return zstandard.ZstdCompressor(level=self._level, write_content_size=True).compress(plane)


class Entropy(Lossless):
    """Huffman codes of single bytes, rebuilt every 128 KiB: exploits only the distribution of the bytes (order 0).

    This is zstd's Huffman coder with the search for matches reduced to its minimum: a table of 64 entries, and matches
    of at least 7 bytes. Heavily repeated tokens still save 5 to 8 % through matches, where zstd saves 96 %; 2-bit codes
    take up to 8 % more than order 0. DEFLATE's Huffman-only mode has neither effect but was ten times as slow, too slow
    for int8 at 80 Mbit/s. Codes of 8, 4, 2 and 1 bits lie within a byte; some codes of 3 and 6 bits span two.
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

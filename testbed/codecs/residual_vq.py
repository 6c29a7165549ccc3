"""Residual vector quantisation of a learned projection: `PowerSGD`'s two factors, a few values at a time as the sum of
vectors from codebooks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.low_rank import CodedLowRank
from testbed.codecs.wire.bits import pack, packed_bytes, unpack
from testbed.codecs.wire.header import Shape, check_finite, check_transformed
from testbed.codecs.wire.message import Body, BodyCodec, Field

_SAMPLE, _ROUNDS, _CHUNK = 1024, 3, 8192
"""Vectors and rounds to learn a codebook from, and vectors coded at once, which fit a cache."""


class Codebooks(BodyCodec):
    """Sends each `group` of values in memory order as `levels` indices of `bits` bits; every level quantises what the
    levels before leave. The message carries its codebooks as bf16, learned from a sample of it by k-means.

    Law: none; a group is the sum of the nearest vectors, level by level. Bits per value: levels * bits / group, and
    16 * levels * 2**bits * group over the number of values.
    """

    code = 70

    def __init__(self, context: Context, *, levels: int, bits: int, group: int) -> None:
        """Rounding draws no random numbers, so the context has no effect."""
        self._levels, self._bits, self._group = levels, bits, group

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return the codebooks and the indices."""
        indices = self._levels * -(-math.prod(shape) // self._group)
        books = self._levels * self._group << self._bits
        return Field(torch.bfloat16, books), Field(torch.uint8, packed_bytes(indices, self._bits))

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Learn the codebooks and write the indices. CodecError for values that are not finite, or above 2**120."""
        check_transformed(x, key)
        scale = x.abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        flat = x.reshape(-1) / scale
        vectors = functional.pad(flat, (0, -flat.numel() % self._group)).view(-1, self._group)
        rest, books = vectors[:: -(-len(vectors) // _SAMPLE)], body[0].view(self._levels, -1, self._group)
        for book in books:
            book.copy_(_learned(rest, len(book)) * scale)
            rest = rest - _nearest(rest, book.float() / scale)[1]
        indices = torch.empty(self._levels, len(vectors), dtype=torch.uint8)
        for at, part in zip(torch.split(indices, _CHUNK, 1), torch.split(vectors, _CHUNK), strict=True):
            for level, book in zip(at, books, strict=True):
                found, vector = _nearest(part, book.float() / scale)
                level.copy_(found)
                part = part - vector
        pack(indices.view(-1), self._bits, body[1])

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return the sums. CodecError for codebooks that are not finite."""
        books = body[0].float().view(self._levels, -1, self._group)
        check_finite(books, key, "a codebook", doing="decode")
        count = self._levels * -(-math.prod(shape) // self._group)
        indices = unpack(body[1], self._bits, count).view(self._levels, -1).int()
        total = sum(functional.embedding(at, book) for at, book in zip(indices, books, strict=True))
        assert isinstance(total, Tensor)
        return total.view(-1)[: math.prod(shape)].clone()


class ResidualVQ(CodedLowRank):
    """Sends P and Q of `PowerSGD`, whose subspace follows that of the messages, each through `Codebooks`.

    Source: MDCP-PP (openreview 9ztCmwxYxN), from its abstract. Its projection is learned with the model; here each
    message's is one step of power iteration from the one before.
    """

    code = 69

    def __init__(self, context: Context, *, rank: int, levels: int, bits: int, group: int) -> None:
        super().__init__(context, Codebooks(context, levels=levels, bits=bits, group=group), rank)


def _nearest(vectors: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the nearest vector of a codebook to each of some vectors, and these."""
    index = torch.addmm(book.square().sum(1).mul_(-0.5), vectors, book.T).argmax(1)
    return index, functional.embedding(index, book)


def _learned(vectors: Tensor, count: int) -> Tensor:
    """Return a codebook for vectors: k-means from vectors that are evenly spaced in memory."""
    book = vectors[torch.linspace(0, len(vectors) - 1, count).long()]
    for _ in range(_ROUNDS):
        members = functional.one_hot(_nearest(vectors, book)[0], count).float()
        counts = members.sum(0)[:, None]
        book = torch.where(counts > 0, members.T @ vectors / counts.clamp_min(1), book)
    return book

"""haar(inner): each channel as one mean over all tokens and differences between neighbouring ones, then any codec.

The tokens of a message, in order, are the leaves of a binary tree. Two siblings of weights v and w and values a and b
become (sqrt(v) a + sqrt(w) b) / sqrt(v + w), which moves up with the weight v + w, and the detail (sqrt(v) b - sqrt(w)
a) / sqrt(v + w), which stays; a node without a sibling moves up unchanged. This is orthonormal, and Haar's transform
for 2**k tokens. The root, one number per channel, is sent as fp32; the inner codec sees the details as a tensor
(channels, tokens - 1), the coarsest of a channel first, so that its groups are runs of one channel's details.

It helps only if neighbouring tokens are similar: on activations of a language model it has no benefit, or does harm.

Wire: the common header, the roots, the inner payload. Law: the error's L2 norm over a channel is the inner codec's.
Bits per element: the inner codec's, plus 32 per channel: 32/bn. Source: RAHT (de Queiroz and Chou, IEEE TIP 2016) along
a line, as MesonGS (Xie et al., ECCV 2024, arXiv 2409.09756) has it over a scene's voxels; its chain is this, 8-bit
codes with a range for each run of coefficients, and an entropy coder: `zstd(haar(int8(group=64, asymmetric)))`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload, Stateful
from testbed.codecs.wire import header
from testbed.codecs.wire.header import Shape, rows_of
from testbed.codecs.wire.message import check_written
from testbed.codecs.wrap import States, bound_of, decode_as, law_of_bound, parts_with, size_of


class _Level(NamedTuple):
    """One level of the tree: its pairs of nodes."""

    nodes: int
    first: Tensor
    """sqrt(v / (v + w)) of each pair, fp32 (pairs, 1)."""
    second: Tensor
    """sqrt(w / (v + w))."""

    @property
    def parents(self) -> int:
        return self.nodes - len(self.first)


@functools.cache
def _levels(leaves: int) -> tuple[_Level, ...]:
    """Return the levels, from the leaves up."""
    levels, weights = [], torch.ones(leaves, dtype=torch.float64)
    while (nodes := len(weights)) > 1:
        pairs = weights[: nodes // 2 * 2].view(-1, 2)
        sums = pairs.sum(1)
        shares = (pairs / sums[:, None]).sqrt().to(torch.float32)
        levels.append(_Level(nodes, shares[:, :1], shares[:, 1:]))
        weights = torch.cat([sums, weights[nodes // 2 * 2 :]])
    return tuple(levels)


def transform(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the roots (channels,) and the details (channels, tokens - 1) of fp32 x (tokens, channels)."""
    details, values = torch.empty_like(x), x
    for level in _levels(len(x)):
        pairs = len(level.first)
        a, b = values[0 : 2 * pairs : 2], values[1 : 2 * pairs : 2]
        torch.mul(b, level.first, out=details[level.parents : level.nodes]).addcmul_(a, level.second, value=-1.0)
        up = torch.empty(level.parents, x.shape[1])
        torch.mul(a, level.first, out=up[:pairs]).addcmul_(b, level.second)
        up[pairs:] = values[2 * pairs :]
        values = up
    return values[0], details[1:].T.contiguous()


def inverse(roots: Tensor, details: Tensor, *, sign: float = 1.0) -> Tensor:
    """Invert `transform`; returns (tokens, channels). With `sign=-1.0` all terms of a value are added, which turns
    bounds into bounds.
    """
    rows, values = details.T.contiguous(), roots[None]
    for level in reversed(_levels(details.shape[1] + 1)):
        pairs = len(level.first)
        detail = rows[level.parents - 1 : level.nodes - 1]
        down = torch.empty(level.nodes, len(roots), dtype=roots.dtype)
        torch.mul(values[:pairs], level.first, out=down[0 : 2 * pairs : 2]).addcmul_(detail, level.second, value=-sign)
        torch.mul(values[:pairs], level.second, out=down[1 : 2 * pairs : 2]).addcmul_(detail, level.first)
        down[2 * pairs :] = values[pairs:]
        values = down
    return values


class Haar:
    """The transform around any other codec."""

    code = 90
    payload_bytes: Callable[[Shape], int]
    """The length of a payload of a shape. Missing if the inner codec does not state its own."""

    def __init__(self, context: Context, inner: Codec) -> None:
        """Ignores the context, because there are no random numbers."""
        self.law = law_of_bound(inner)
        self.inner = inner
        self._states = States(parts_with({"inner": inner}, Stateful))
        if (of_inner := size_of(inner)) is not None:
            self.payload_bytes = lambda shape: (
                header.header_bytes(len(shape)) + _roots_bytes(shape) + of_inner(_details_shape(shape))
            )

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Transform, and encode with the inner codec. CodecError names the message key if a coefficient is not finite,
        or too large to be transformed back after rounding.
        """
        x = header.check_input(tensor).to(torch.float32)
        shape = tuple(x.shape)
        start, body = header.allocate(self.code, shape, _roots_bytes(shape))
        details = torch.empty(_details_shape(shape))
        if x.numel():
            roots, details = transform(x.reshape(rows_of(shape)))
            header.check_transformed(roots, key)
            header.check_transformed(details, key)
            body.copy_(roots.contiguous().view(torch.uint8))
        return b"".join((start, self.inner.encode(details, key)))

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the inner codec, and transform back. Raises the inner codec's CodecError, and CodecError for a
        header or roots that no encoder writes.
        """
        opened = header.open_any(payload, self.code)
        shape, size = opened.shape, _roots_bytes(opened.shape)
        check_written(not opened.visit, key, f"visit number {opened.visit} here")
        check_written(len(opened.body) >= size, key, f"{len(opened.body)} bytes, less than the {size} of the roots")
        expected = torch.Size(_details_shape(shape))
        with self._states.parts_unchanged_on_error():
            details = decode_as(self.inner, opened.body[size:], key, expected)
            if not opened.elements:
                return torch.empty(shape)
            roots = header.as_tensor(opened.body, torch.float32, len(details))
            values = inverse(roots, details)
            header.check_finite(values, key, "a transform", doing="decode")
        return values.view(shape)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of each value; infinity if the inner codec states no bound."""
        rows = tensor.reshape(rows_of(tuple(tensor.shape)))
        roots, details = transform(rows)
        bounds = bound_of(self.inner, details).to(torch.float64).expand(details.shape)
        largest = inverse(torch.zeros(len(roots), dtype=torch.float64), bounds, sign=-1.0)
        # Each level rounds in fp32, relative to the channel's norm.
        norms: Tensor = torch.linalg.vector_norm(rows.to(torch.float64), dim=0)
        return (largest + 2**-19 * norms).view(tensor.shape)


def _roots_bytes(shape: Shape) -> int:
    return 4 * rows_of(shape)[1] if 0 not in shape else 0


def _details_shape(shape: Shape) -> Shape:
    tokens, width = rows_of(shape)
    return (width, tokens - 1) if 0 not in shape else (0, 0)

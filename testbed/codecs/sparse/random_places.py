"""Sparsifiers whose positions both ends draw at random from the message key, so that none are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.sparse.positions import Bytes, Positions, every_row, kept_of
from testbed.codecs.sparse.sparsifier import Floats, Sparsifier, ValueType
from testbed.codecs.wire import noise
from testbed.codecs.wire.header import Shape, rows_of
from testbed.errors import CodecError

_SCALES: dict[str, Callable[[float], float]] = {
    "none": lambda _: 1.0,
    "inverse": lambda p: 1 / p,
    "rms": lambda p: p**-0.5,
}


class _Keyed(Sparsifier):
    """k values of each token, or k whole channels, at positions that both ends draw from the message key."""

    purpose: ClassVar[str]
    laws: ClassVar[dict[str, str]]
    """The `row.Law` for each `scale`."""

    def __init__(
        self,
        context: Context,
        *,
        share: float,
        per: Literal["token", "channels"],
        scale: Literal["none", "inverse", "rms"],
        values: ValueType,
    ) -> None:
        super().__init__(context, share=share, values=values)
        self._per, self._scale = per, _SCALES[scale]
        self.law = self.laws[scale]

    def count(self, shape: Shape) -> int:
        """See `Sparsifier`."""
        rows, width = rows_of(shape)
        return rows * kept_of(self._share, width)

    def choose(self, flat: Floats, shape: Shape, key: MessageKey) -> Positions:
        """Choose the largest of random 32-bit words, one per value or channel: every choice of k is equally likely."""
        rows, width = rows_of(shape)
        kept = kept_of(self._share, width)
        lines = rows if self._per == "token" else 1
        words = noise.words(self._context, key, lines * width, self.purpose).reshape(lines, width)
        positions = self._largest.positions(words, kept)
        return positions if lines == rows else every_row(positions, rows, width)

    def read_positions(self, coded: Bytes, shape: Shape, key: MessageKey) -> Positions:
        """Draw the positions again: none were sent."""
        return self.choose(np.empty(0, np.float32), shape, key)

    def adjust(self, kept: Floats, shape: Shape, key: MessageKey) -> Floats:
        """Scale. CodecError names the message key if a value overflows."""
        _, width = rows_of(shape)
        factor = np.float32(self._scale(kept_of(self._share, width) / width))
        with np.errstate(over="ignore"):
            kept *= factor
        if not bool(np.isfinite(kept).all()):
            raise CodecError(f"cannot encode {key}: a kept value times {factor:g} overflows fp32; use scale=none")
        return super().adjust(kept, shape, key)


class RandK(_Keyed):
    """k random values of each token, times d/k: unbiased over message keys. No positions are sent.

    Each direction draws its own positions. bf16 values are rounded stochastically, so that rounding adds no bias. Law:
    unbiased; for scale=none, kept values are rounded and the others zero. Bits per value: share * 16. Stateless.
    Inside error feedback, `scale` must be none: otherwise the fed-back error grows from step to step.
    Source: rand-k as in Stich et al., NeurIPS 2018 (scaled as in Wangni et al., NeurIPS 2018).
    """

    code = 42
    purpose = "rand-k places"
    laws: ClassVar[dict[str, str]] = {"inverse": "unbiased", "none": "support", "rms": "none"}

    def kept_bound(self, tensor: Tensor) -> Tensor:
        """Return, for scale=none, a whole step of bf16, because values are rounded up or down; zero in fp32."""
        return 2 * super().kept_bound(tensor)

    def adjust(self, kept: Floats, shape: Shape, key: MessageKey) -> Floats:
        """Scale; for bf16, round up with a probability equal to the fraction cut off."""
        kept = super().adjust(kept, shape, key)
        if self._dtype is torch.bfloat16:
            words = noise.words(self._context, key, -(-kept.size // 2), "rand-k rounding")
            patterns = kept.view(np.uint32)
            patterns += words.view("<u2")[: kept.size]
            patterns &= np.uint32(0xFFFF0000)
        return kept


class KeyedMask(_Keyed):
    """One random mask for both directions: k of d values of each token, drawn from the message key without its
    direction.

    The gradient sent back is the exact gradient of masking, so the mask acts as a layer of the network that is redrawn
    for each micro-batch. scale: none; inverse, d/k; rms, (d/k)**0.5, which preserves the mean square. Law for
    scale=none: kept values are rounded, the others zero. Bits per value: share * 16. Stateless; no positions are sent.
    Source: random activation masks of 90 and 95 %, arXiv 2609.14339 (from a summary: how it scales is not known).
    """

    code = 43
    purpose = "mask of both directions"
    laws: ClassVar[dict[str, str]] = {"none": "support", "inverse": "none", "rms": "none"}

    def __init__(self, context: Context, **parameters: Any) -> None:
        super().__init__(context._replace(direction="forward"), **parameters)

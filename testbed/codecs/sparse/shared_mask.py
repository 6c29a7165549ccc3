"""One mask for both directions: the gradient is sent at the activations' positions, so no positions are sent back.

The forward codec stores each micro-batch's mask at either end; the backward codec at the same end is paired with it and
looks the mask up. The decoded gradient is exactly that of masking, with zeros for the other elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import AfterValidator, InstanceOf
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey
from testbed.codecs.remembered import MicrobatchKey, Rows
from testbed.codecs.sparse.positions import Bytes, PositionCoding, Positions, every_row, kept_of, pack, unpack
from testbed.codecs.sparse.sparsifier import Floats, Sparsifier, TopK, ValueType, WithPositions
from testbed.codecs.wire.header import Shape, rows_of
from testbed.codecs.wrap import walk
from testbed.errors import CodecError, SpecError


class Kept(NamedTuple):
    """The mask of one micro-batch."""

    step: int
    shape: Shape
    bitmap: InstanceOf[Tensor]
    """uint8, one bit per element."""


def _whole(kept: Kept) -> Kept:
    if kept.bitmap.dtype != torch.uint8 or kept.bitmap.numel() != -(-math.prod(kept.shape) // 8):
        raise ValueError(f"not a bitmap of a tensor of shape {kept.shape}")
    return kept._replace(bitmap=kept.bitmap.clone())


class _Remembers(WithPositions, Rows[MicrobatchKey, Kept]):
    """A forward codec that keeps the mask of each (phase, micro-batch), one bit per element, until its next message."""

    on_device = False
    name = "masks"

    def __init__(self, context: Context, **parameters: Any) -> None:
        super().__init__(context, **parameters)
        Rows.__init__(self, dict[MicrobatchKey, Annotated[Kept, AfterValidator(_whole)]])

    def passed(self, key: MessageKey, shape: Shape, positions: Positions) -> None:
        """Store the mask."""
        bitmap = torch.from_numpy(pack(positions, math.prod(shape)))
        self.rows[key.phase, key.microbatch] = Kept(key.step, shape, bitmap)

    def kept(self, key: MessageKey) -> Kept | None:
        """Return the mask of this message key's activations, if they passed."""
        kept = self.rows.get((key.phase, key.microbatch))
        return kept if kept is not None and kept.step == key.step else None

    def shared(self) -> Mapping[str, Tensor]:
        """Return the masks."""
        return {f"{phase} {microbatch} mask": kept.bitmap for (phase, microbatch), kept in self.rows.items()}


class SharedTopK(_Remembers, TopK):
    """Forward: top-k, whose mask the gradient uses too. Bits per value and law are those of `TopK`.

    Source: the reused forward mask of Rudakov et al., arXiv 2401.07788, whose independent masks could diverge.
    """

    code = 41


class Columns(_Remembers):
    """Forward: whole channels, those with the largest Euclidean norm over all tokens of the message.

    Keeps k of the d channels; the gradient keeps the same ones, so their weight gradients stay exact. Law: kept values
    are exact (fp32) or rounded (bf16), the others zero. Bits per value: 16 * share, plus 1/(b n) for the bitmap of
    channels.
    Source: structured sparsification, "Beyond Top-K" (MCDC workshop at ICLR 2025), from a re-implementation: we have
    not seen the paper's selection rule.
    """

    code = 44

    def coding(self, shape: Shape) -> PositionCoding:
        """Code one row: the channels."""
        _, width = rows_of(shape)
        return PositionCoding(1, width, kept_of(self._share, width), self._form)

    def count(self, shape: Shape) -> int:
        """See `Sparsifier`."""
        return rows_of(shape)[0] * self.coding(shape).kept

    def choose(self, flat: Floats, shape: Shape, key: MessageKey) -> Positions:
        """Choose by the sum of squares in fp64, which no fp32 value overflows."""
        rows, width = rows_of(shape)
        x = flat.reshape(rows, width)
        squares: npt.NDArray[np.float64] = np.einsum("rw,rw->w", x, x, dtype=np.float64)
        return every_row(self._largest.positions(squares[np.newaxis], self.coding(shape).kept), rows, width)

    def write_positions(self, positions: Positions, shape: Shape, out: Bytes) -> None:
        """Write the channels of the first row; all rows keep the same ones."""
        coding = self.coding(shape)
        coding.write(positions[: coding.values], out)

    def read_positions(self, coded: Bytes, shape: Shape, key: MessageKey) -> Positions:
        """See `write_positions`."""
        return every_row(super().read_positions(coded, shape, key), *rows_of(shape))


class ForwardMask(Sparsifier):
    """Backward: the gradient's values at the positions that its activations kept. Paired with the forward instance at
    the same end.

    Stateless itself; a gradient of another shape, or one whose activations did not pass, is a CodecError. Law: values
    at the kept positions are rounded (bf16) or exact (fp32), the others zero. Bits per value: share * 16.
    """

    code = 45

    def __init__(self, context: Context, *, share: float, values: ValueType = "bf16", **_: Any) -> None:
        """Accept the forward codec's parameters, of which only `values` has an effect here."""
        super().__init__(context, share=share, values=values)
        self._forward: tuple[_Remembers, ...] = ()

    def pair(self, forward: Codec) -> None:
        """See `contract.Paired`. SpecError unless the forward codec, or what it wraps, remembers its masks."""
        self._forward = tuple(part for part in walk(forward) if isinstance(part, _Remembers))
        if not self._forward:
            raise SpecError(
                f"a gradient cannot use the mask of {type(forward).__name__}: the boundary's forward codec must be "
                "the same, as it is in 'topk-shared(0.1)' or in 'fwd=topk-shared(0.1), bwd=ef(topk-shared(0.1))'"
            )

    def choose(self, flat: Floats, shape: Shape, key: MessageKey) -> Positions:
        """Return the activations' positions."""
        return self._mask(shape, key)

    def count(self, shape: Shape) -> int:
        """Return the number of values that the activations keep."""
        return self._sources[0].count(shape)

    def read_positions(self, coded: Bytes, shape: Shape, key: MessageKey) -> Positions:
        """Return the activations' positions: both ends know them, so none were sent."""
        return self._mask(shape, key)

    @property
    def _sources(self) -> tuple[_Remembers, ...]:
        if not self._forward:
            raise CodecError(
                "cannot use the mask of the activations: this codec was not paired with theirs (see contract.Paired)"
            )
        return self._forward

    def _mask(self, shape: Shape, key: MessageKey) -> Positions:
        for forward in self._sources:
            if (kept := forward.kept(key)) is not None:
                if kept.shape != shape:
                    raise CodecError(
                        f"cannot use the mask of {key}: the gradient's shape is {shape}, the activations' {kept.shape}"
                    )
                return unpack(kept.bitmap.numpy(), math.prod(shape))
        raise CodecError(
            f"cannot use the mask of {key}: its activations did not pass here; a message was lost, or is out of order"
        )

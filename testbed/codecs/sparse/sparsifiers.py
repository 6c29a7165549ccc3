"""Sparsifiers: of a tensor's values some are sent, the others are zero to the receiver.

They differ in which: top-k takes the largest and says where they stand; rand-k and the keyed mask draw the places from the message key's
key at both ends, so that no places are sent. `shared_mask` holds those that use one mask in both directions.

A payload is the header, the kept values as bf16 or fp32 in the order of their positions, then the positions where they are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.sparse.positions import Form, Layout, Positions, Selection, kept_of
from testbed.codecs.wire import header, noise
from testbed.errors import CodecError

Values = Literal["bf16", "fp32"]
Floats = npt.NDArray[np.float32]

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LARGEST_BF16 = np.float32(torch.finfo(torch.bfloat16).max)


class Sparse:
    """What sparsifiers share: gather, write, read, scatter. A subclass says which positions.

    Kept values are rounded to the nearest bf16 (relative error at most 2**-8) or sent as they are.
    """

    code: ClassVar[int]

    def __init__(self, context: Context, *, share: float, values: Values) -> None:
        """`share` of the values is kept, 0 < share <= 1."""
        self._context, self._share, self._dtype = context, share, DTYPES[values]
        self._selection = Selection()

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """CodecError names the message key when the tensor holds NaN or infinity."""
        shape = tuple(tensor.shape)
        x = header.check_input(tensor).to(torch.float32).contiguous()
        header.check_finite(x, key, "a sparsifier")
        flat: Floats = x.view(-1).numpy()
        positions = self.choose(flat, shape, key)
        kept = self.adjust(flat[positions], shape, key)
        payload, body = header.allocate(self.code, shape, self._body_bytes(shape))
        values_bytes = kept.size * self._dtype.itemsize
        body[:values_bytes].view(self._dtype).copy_(torch.from_numpy(kept))
        self.write_positions(positions, shape, body[values_bytes:].numpy())
        self.sent(key, shape, positions)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """CodecError for positions or values that no encoder writes."""
        opened = header.open_payload(payload, self.code, self._body_bytes)
        if opened.visit != 0:
            raise CodecError(f"cannot decode a payload with visit number {opened.visit}: a sparsifier writes 0")
        count = self.count(opened.shape)
        values = header.as_tensor(opened.body, self._dtype, count).to(torch.float32)
        if not bool(torch.isfinite(values).all()):
            raise CodecError(f"cannot decode {key}: a kept value is NaN or infinity, which no encoder writes")
        coded = np.frombuffer(opened.body, np.uint8, offset=count * self._dtype.itemsize)
        positions = self.read_positions(coded, opened.shape, key)
        out: Floats = np.zeros(opened.elements, np.float32)
        out[positions] = values.numpy()
        self.sent(key, opened.shape, positions)
        return torch.from_numpy(out).view(opened.shape)

    def payload_bytes(self, shape: header.Shape) -> int:
        """The length of a payload of this shape."""
        return header.header_bytes(len(shape)) + self._body_bytes(shape)

    def kept_bound(self, tensor: Tensor) -> Tensor:
        """How wrong a kept value may be: half a step of bf16, the whole one where bf16 ends; nothing in fp32."""
        return tensor.detach().to(torch.float32).abs() * (2.0**-8 if self._dtype is torch.bfloat16 else 0.0)

    def choose(self, flat: Floats, shape: header.Shape, key: MessageKey) -> Positions:
        """At the encoder: which of the values are kept."""
        raise NotImplementedError

    def count(self, shape: header.Shape) -> int:
        """How many are kept, before memory is set aside for them."""
        raise NotImplementedError

    def positions_bytes(self, shape: header.Shape) -> int:
        """How many bytes say where they stand."""
        return 0

    def write_positions(self, positions: Positions, shape: header.Shape, out: npt.NDArray[np.uint8]) -> None:
        """Into `out`, of `positions_bytes`."""

    def read_positions(self, coded: npt.NDArray[np.uint8], shape: header.Shape, key: MessageKey) -> Positions:
        """At the decoder: the positions, checked."""
        raise NotImplementedError

    def adjust(self, kept: Floats, shape: header.Shape, key: MessageKey) -> Floats:
        """The kept values (a fresh array) as they are to be rounded: within bf16's range, which ends before fp32's."""
        return np.clip(kept, -_LARGEST_BF16, _LARGEST_BF16, out=kept) if self._dtype is torch.bfloat16 else kept

    def sent(self, key: MessageKey, shape: header.Shape, positions: Positions) -> None:
        """After a message, at either end: for those that remember."""

    def _body_bytes(self, shape: header.Shape) -> int:
        return self.count(shape) * self._dtype.itemsize + self.positions_bytes(shape)


class Told(Sparse):
    """Positions are sent, as a `Layout` of the shape."""

    def __init__(self, context: Context, *, share: float, values: Values, positions: Form) -> None:
        super().__init__(context, share=share, values=values)
        self._form: Form = positions

    def layout(self, shape: header.Shape) -> Layout:
        raise NotImplementedError

    def count(self, shape: header.Shape) -> int:
        """See `Sparse`."""
        return self.layout(shape).values

    def positions_bytes(self, shape: header.Shape) -> int:
        """See `Sparse`."""
        return self.layout(shape).coded_bytes

    def write_positions(self, positions: Positions, shape: header.Shape, out: npt.NDArray[np.uint8]) -> None:
        """See `Sparse`."""
        self.layout(shape).write(positions, out)

    def read_positions(self, coded: npt.NDArray[np.uint8], shape: header.Shape, key: MessageKey) -> Positions:
        """See `Sparse`."""
        return self.layout(shape).read(coded)


class TopK(Told):
    """The k largest magnitudes of each token (k = share * d), each sample, or the whole tensor; of equal ones the first.

    Law: kept values exact (fp32) or rounded (bf16), the others zero; no other choice of as many has a smaller squared error.
    Bits a value: share * 16, and 1 for the bitmap or share * w, indices of w = 8 bits among 256 values, 16 among 65,536, or 32.
    Source: top-k of activations as in Rudakov et al., arXiv 2401.07788, theirs is `sample`; both ends remember nothing.
    """

    code = header.TOP_K

    def __init__(
        self,
        context: Context,
        *,
        share: float,
        per: Literal["token", "sample", "tensor"] = "token",
        values: Values = "bf16",
        positions: Form = "smaller",
    ) -> None:
        super().__init__(context, share=share, values=values, positions=positions)
        self._per = per
        self._magnitudes: Floats = np.empty((0, 0), np.float32)

    def layout(self, shape: header.Shape) -> Layout:
        """Rows of tokens or of samples, the first axis, or one row of everything."""
        rows, width = header.rows_of(shape)
        if rows and (self._per == "tensor" or (self._per == "sample" and len(shape) < 3)):
            rows, width = 1, rows * width
        elif rows and self._per == "sample":
            rows, width = shape[0], rows // shape[0] * width
        return Layout(rows, width, kept_of(self._share, width), self._form)

    def choose(self, flat: Floats, shape: header.Shape, key: MessageKey) -> Positions:
        """See `Selection`."""
        layout = self.layout(shape)
        if self._magnitudes.shape != (layout.rows, layout.width):
            self._magnitudes = np.empty((layout.rows, layout.width), np.float32)
        np.abs(flat.reshape(layout.rows, layout.width), out=self._magnitudes)
        return self._selection.largest(self._magnitudes, layout.kept)


_SCALES: dict[str, Callable[[float], float]] = {
    "none": lambda _: 1.0,
    "inverse": lambda p: 1 / p,
    "rms": lambda p: p**-0.5,
}


class _Keyed(Sparse):
    """k values of each token, or k whole channels, at places drawn from the message key's key: the receiver draws the same."""

    purpose: ClassVar[str]
    laws: ClassVar[dict[str, str]]
    """By `scale`, in the words of `entry.Law`."""

    def __init__(
        self,
        context: Context,
        *,
        share: float,
        per: Literal["token", "channels"],
        scale: Literal["none", "inverse", "rms"],
        values: Values,
    ) -> None:
        super().__init__(context, share=share, values=values)
        self._per, self._scale = per, _SCALES[scale]
        self.law = self.laws[scale]

    def count(self, shape: header.Shape) -> int:
        """See `Sparse`."""
        rows, width = header.rows_of(shape)
        return rows * kept_of(self._share, width)

    def choose(self, flat: Floats, shape: header.Shape, key: MessageKey) -> Positions:
        """By the order of 32-bit words, one for each value or channel: every choice of k is as likely as any other."""
        rows, width = header.rows_of(shape)
        kept = kept_of(self._share, width)
        if rows == 0:
            return np.empty(0, np.int64)
        lines = rows if self._per == "token" else 1
        words = noise.words(self._context, key, lines * width, self.purpose).reshape(lines, width)
        positions = self._selection.largest(words, kept)
        return positions if lines == rows else every_row(positions, rows, width)

    def read_positions(self, coded: npt.NDArray[np.uint8], shape: header.Shape, key: MessageKey) -> Positions:
        """Nothing was sent: they are drawn again."""
        return self.choose(np.empty(0, np.float32), shape, key)

    def adjust(self, kept: Floats, shape: header.Shape, key: MessageKey) -> Floats:
        """Scaled."""
        factor = self._factor(shape)
        with np.errstate(over="ignore"):
            kept *= factor
        if not bool(np.isfinite(kept).all()):
            raise CodecError(f"cannot encode {key}: a kept value times {factor:g} is beyond fp32; use scale=none")
        return super().adjust(kept, shape, key)

    def _factor(self, shape: header.Shape) -> np.float32:
        _, width = header.rows_of(shape)
        return np.float32(self._scale(kept_of(self._share, width) / width) if width else 1)


def every_row(columns: Positions, rows: int, width: int) -> Positions:
    """The same columns in each of the rows."""
    return (np.arange(0, rows * width, width)[:, np.newaxis] + columns).reshape(-1)


class RandK(_Keyed):
    """k random values of each token, times d/k: right in the mean over message keys. No positions are sent.

    Both directions draw for themselves. bf16 values are rounded stochastically, or their rounding would be a bias. Law: unbiased,
    for scale=none kept values rounded and the others zero. Bits a value: share * 16. Remembers nothing. With
    error feedback around it `scale` must be none: scaled up, the error that is fed back grows from step to step.
    Source: rand-k as in Stich et al., NeurIPS 2018 (scaled as in Wangni et al., NeurIPS 2018).
    """

    code = header.RANDOM_K
    purpose = "rand-k places"
    laws: ClassVar[dict[str, str]] = {"inverse": "unbiased", "none": "support", "rms": "none"}

    def __init__(
        self,
        context: Context,
        *,
        share: float,
        per: Literal["token", "channels"] = "token",
        scale: Literal["none", "inverse", "rms"] = "inverse",
        values: Values = "bf16",
    ) -> None:
        super().__init__(context, share=share, per=per, scale=scale, values=values)

    def kept_bound(self, tensor: Tensor) -> Tensor:
        """With scale=none: a whole step of bf16, because it is rounded up or down; nothing in fp32."""
        return 2 * super().kept_bound(tensor)

    def adjust(self, kept: Floats, shape: header.Shape, key: MessageKey) -> Floats:
        """Scaled, and for bf16 rounded up with the probability of the part that is cut off."""
        kept = super().adjust(kept, shape, key)
        if self._dtype is torch.bfloat16:
            words = noise.words(self._context, key, -(-kept.size // 2), "rand-k rounding")
            patterns = kept.view(np.uint32)
            patterns += words.view("<u2")[: kept.size]
            patterns &= np.uint32(0xFFFF0000)
        return kept


class KeyedMask(_Keyed):
    """One random mask for both directions: k of d values of each token, drawn from the key of the message key without its direction.

    The gradient that comes back is that of masking, so the mask is a part of the network that is drawn anew for each micro-batch.
    scale: none; inverse, d/k; rms, (d/k)**0.5, which keeps the mean square. Law for scale=none: kept values rounded, the others
    zero. Bits a value: share * 16; nothing is remembered and no positions are sent.
    Source: random activation masks of 90 and 95 %, arXiv 2609.14339 (from a summary: how it scales is not known).
    """

    code = header.KEYED_MASK
    purpose = "mask of both directions"
    laws: ClassVar[dict[str, str]] = {"none": "support", "inverse": "none", "rms": "none"}

    def __init__(
        self,
        context: Context,
        *,
        share: float,
        per: Literal["token", "channels"] = "token",
        scale: Literal["none", "inverse", "rms"] = "none",
        values: Values = "bf16",
    ) -> None:
        super().__init__(context._replace(direction="forward"), share=share, per=per, scale=scale, values=values)

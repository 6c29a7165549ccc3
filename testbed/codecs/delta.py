"""Differences from the previous step's tensor of the same micro-batch, in a closed loop; and, as a control, in an open one.

Both ends hold P, what the receiver last decoded for the slot (zeros at first). D = X - P goes over, and P becomes P + decoded D
at both ends, so errors do not add up. A difference has as many values as the tensor: it saves bytes only if it is so much smaller
that fewer bits, or an entropy coder behind it, do.
Source: "activation delta" (Bedoya and Zhang), whose text leaves the loop open to reading; AQ-SGD closes it per example, and
CompactFusion ("Accelerating Parallel Diffusion Model Serving with Residual Compression") between denoising steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from testbed.codecs import framing, quantise
from testbed.codecs.base import Codec, Context, Payload, Slot
from testbed.codecs.cast import Bf16, Fp32
from testbed.codecs.history import History, Memory, following
from testbed.codecs.scratch import Scratch
from testbed.codecs.wrap import (
    HEADER_BYTES,
    ClosedLoop,
    bound_of,
    decode_as,
    frame,
    law_of_bound,
    open_frame,
    size_of,
    unchanged_on_error,
)
from testbed.errors import CodecError

First = Literal["inner", "fp32", "bf16"]
"""How a slot's first message goes over, while there is nothing to differ from."""

_INNER, _FULL = 0, 1
CASTS: dict[str, type[Fp32 | Bf16]] = {"fp32": Fp32, "bf16": Bf16}
"""What a first message may go over as."""


class DeltaInt8(History):
    """The difference as int8, in int8's own payload: the header's visit byte, which every codec has, is all it needs.

    So a payload is exactly as long as int8's. One P of the tensor's size per (phase, micro-batch) is kept at each end. A tensor
    of another shape than the slot's last starts the slot anew. The error of a value is at most half the difference's row's scale.
    """

    def __init__(self, context: Context) -> None:
        """Nothing in the context matters: nearest rounding draws no numbers."""
        super().__init__()
        self._scratch, self._differences = Scratch(), Scratch()

    def encode(self, tensor: Tensor, slot: Slot) -> Payload:
        """The difference as a payload. CodecError names the slot when it is not finite."""
        x = framing.check_input(tensor).to(torch.float32)
        last = self.last(slot)
        if last is None or last.value.shape != x.shape:
            payload = quantise.write(x, slot, self._scratch, visit=0)
        else:
            difference = torch.sub(x, last.value, out=self._differences.of(x.shape))
            payload = quantise.write(difference, slot, self._scratch, visit=following(last.visit))
        self._advance(payload, slot)
        return payload

    def decode(self, payload: Payload, slot: Slot) -> Tensor:
        """P after this message. CodecError when the payload does not follow the slot's last one."""
        return self._advance(payload, slot)

    def _advance(self, payload: Payload, slot: Slot) -> Tensor:
        """The one path by which either end moves on: from the bytes. A copy of the new P."""
        visit, value = quantise.read(payload)
        if (last := self.follow(slot, visit)) is not None:
            if last.value.shape != value.shape:
                raise CodecError(f"cannot decode {slot}: shape {tuple(value.shape)} does not follow {tuple(last.value.shape)}")
            value.add_(last.value)
        self.put(slot, value, visit)
        return value


class Delta(ClosedLoop):
    """The difference through any codec: 4 bytes (code, whether it is a first message in full, visit, 0), then the inner payload.

    Law: the error is that of the inner codec on the last difference, for ever (closed loop). One P of the tensor's size per
    (phase, micro-batch) at each end, besides what the inner codec remembers.
    """

    code: ClassVar[int] = framing.DELTA
    payload_bytes: Callable[[framing.Shape], int]
    """The length of a slot's first message, of a shape. Not there where the inner codec does not say its own."""

    def __init__(self, context: Context, inner: Codec, first: First = "inner", **_: Any) -> None:
        """`first`: a slot's first message goes through the inner codec too, or as it is, in fp32 or bf16."""
        self._history = History()
        super().__init__(inner, self._history)
        self._first = CASTS[first](context) if first in CASTS else None
        self.law = law_of_bound(inner)
        if (of_first := size_of(self._first or inner)) is not None:
            self.payload_bytes = lambda shape: HEADER_BYTES + of_first(shape)

    def encode(self, tensor: Tensor, slot: Slot) -> Payload:
        """The difference as a payload. CodecError names the slot when it is not finite."""
        x = framing.check_input(tensor).to(torch.float32)
        framing.check_finite(x, slot, "a difference")
        last = self._history.last(slot)
        with unchanged_on_error(self.inner, self._decoder):
            if last is None or last.value.shape != x.shape:
                payload = self._write(x, slot, _INNER if self._first is None else _FULL, 0)
            else:
                payload = self._write(self._difference(x, slot, last), slot, _INNER, following(last.visit))
            self._sent(payload, x, slot)
        return payload

    def decode(self, payload: Payload, slot: Slot) -> Tensor:
        """P after this message. CodecError when the payload does not follow the slot's last one."""
        with unchanged_on_error(self._decoder):
            return self._advance(payload, slot)

    def bound(self, tensor: Tensor) -> Tensor:
        """|decoded - x| of a slot's first message, value by value."""
        return bound_of(self._first or self.inner, tensor)

    def _write(self, tensor: Tensor, slot: Slot, kind: int, visit: int) -> Payload:
        coder = self.inner if kind == _INNER or self._first is None else self._first
        return frame(self.code, coder.encode(tensor, slot), kind=kind, visit=visit)

    def _difference(self, x: Tensor, slot: Slot, last: Memory) -> Tensor:
        """What goes over: its subtrahend is what the receiver holds."""
        return x - last.value

    def _sent(self, payload: Payload, x: Tensor, slot: Slot) -> None:
        """The sender moves on as the receiver will: from the bytes."""
        self._advance(payload, slot)

    def _advance(self, payload: Payload, slot: Slot) -> Tensor:
        """The one path by which a closed loop moves on, at either end. A copy of the new P."""
        kind, visit, body = open_frame(payload, self.code)
        last = self._history.follow(slot, visit)
        if kind not in (_INNER, _FULL) or (kind == _FULL) != (visit == 0 and self._first is not None):
            raise CodecError(f"cannot decode {slot}: kind {kind} with visit {visit}, which this encoder does not write")
        if last is None:
            value = (self._first or self._decoder).decode(body, slot)
        else:
            value = decode_as(self._decoder, body, slot, last.value.shape).add_(last.value)
        framing.check_finite(value, slot, "a difference", doing="decode")
        self._history.put(slot, value, visit)
        return value


class OpenDelta(Delta):
    """The same without closing the loop: D = X - the previous X. A negative control.

    What is decoded is summed up at the receiver, so the errors add up too and grow without bound, as a random walk's.
    """

    code = framing.OPEN_DELTA

    def __init__(self, context: Context, inner: Codec, first: First = "inner", **_: Any) -> None:
        """See `Delta`."""
        super().__init__(context, inner, first)
        self.law = "none"

    def shared(self) -> Mapping[str, Tensor]:
        """Nothing: the sender holds true tensors, the receiver sums of decoded ones. That is what is wrong with it."""
        return {}

    def _sent(self, payload: Payload, x: Tensor, slot: Slot) -> None:
        _, visit, _ = open_frame(payload, self.code)
        self._history.put(slot, x, visit)


def gradients(context: Context, *, backward: Codec, **_: Any) -> Codec:
    """What goes backward while activations go as differences: the codec named by `backward`, as it is.

    A gradient's difference from an earlier step's is larger than the gradient, early in training.
    """
    return backward

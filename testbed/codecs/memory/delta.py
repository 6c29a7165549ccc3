"""Differences from the previous step's tensor of the same micro-batch, in a closed loop; and, as a control, in an open one.

Both ends hold P, what the receiver last decoded for the message key (zeros at first). D = X - P goes over, and P becomes P + decoded D
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

from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.dense import int8
from testbed.codecs.dense.cast import Bf16, Fp32
from testbed.codecs.memory.history import History, Memory, following
from testbed.codecs.wire import header
from testbed.codecs.wire.scratch import Scratch
from testbed.codecs.wrap import (
    HEADER_BYTES,
    ClosedLoop,
    bound_of,
    decode_as,
    frame,
    law_of_bound,
    open_frame,
    size_of,
)
from testbed.errors import CodecError

First = Literal["inner", "fp32", "bf16"]
"""How a message key's first message goes over, while there is nothing to differ from."""

_INNER, _FULL = 0, 1
CASTS: dict[str, type[Fp32 | Bf16]] = {"fp32": Fp32, "bf16": Bf16}
"""What a first message may go over as."""


class DeltaInt8(History):
    """The difference as int8, in int8's own payload: the header's visit byte, which every codec has, is all it needs.

    So a payload is exactly as long as int8's. One P of the tensor's size per (phase, micro-batch) is kept at each end. A tensor
    of another shape than the message key's last starts the message key anew. The error of a value is at most half the difference's row's scale.
    """

    def __init__(self, context: Context) -> None:
        """Nothing in the context matters: nearest rounding draws no numbers."""
        super().__init__()
        self._scratch, self._differences = Scratch(), Scratch()

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """The difference as a payload. CodecError names the message key when it is not finite."""
        x = header.check_input(tensor).to(torch.float32)
        last = self.last(key)
        if last is None or last.value.shape != x.shape:
            payload = int8.write(x, key, self._scratch, visit=0)
        else:
            difference = torch.sub(x, last.value, out=self._differences.of(x.shape))
            payload = int8.write(difference, key, self._scratch, visit=following(last.visit))
        self._advance(payload, key)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """P after this message. CodecError when the payload does not follow the message key's last one."""
        return self._advance(payload, key)

    def _advance(self, payload: Payload, key: MessageKey) -> Tensor:
        """The one path by which either end moves on: from the bytes. A copy of the new P."""
        visit, value = int8.read(payload)
        if (last := self.follow(key, visit)) is not None:
            if last.value.shape != value.shape:
                raise CodecError(
                    f"cannot decode {key}: shape {tuple(value.shape)} does not follow {tuple(last.value.shape)}"
                )
            value.add_(last.value)
        self.put(key, value, visit)
        return value


class Delta(ClosedLoop):
    """The difference through any codec: 4 bytes (code, whether it is a first message in full, visit, 0), then the inner payload.

    Law: the error is that of the inner codec on the last difference, for ever (closed loop). One P of the tensor's size per
    (phase, micro-batch) at each end, besides what the inner codec remembers.
    """

    code: ClassVar[int] = header.DELTA
    payload_bytes: Callable[[header.Shape], int]
    """The length of a message key's first message, of a shape. Not there where the inner codec does not say its own."""

    def __init__(self, context: Context, inner: Codec, first: First = "inner", **_: Any) -> None:
        """`first`: a message key's first message goes through the inner codec too, or as it is, in fp32 or bf16."""
        self._history = History()
        super().__init__(inner, self._history)
        self._first = CASTS[first](context) if first in CASTS else None
        self.law = law_of_bound(inner)
        if (of_first := size_of(self._first or inner)) is not None:
            self.payload_bytes = lambda shape: HEADER_BYTES + of_first(shape)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """The difference as a payload. CodecError names the message key when it is not finite."""
        x = header.check_input(tensor).to(torch.float32)
        header.check_finite(x, key, "a difference")
        last = self._history.last(key)
        with self.parts_unchanged_on_error():
            if last is None or last.value.shape != x.shape:
                payload = self._write(x, key, _INNER if self._first is None else _FULL, 0)
            else:
                payload = self._write(self._difference(x, key, last), key, _INNER, following(last.visit))
            self._sent(payload, x, key)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """P after this message. CodecError when the payload does not follow the message key's last one."""
        with self.parts_unchanged_on_error("decoder"):
            return self._advance(payload, key)

    def bound(self, tensor: Tensor) -> Tensor:
        """|decoded - x| of a message key's first message, value by value."""
        return bound_of(self._first or self.inner, tensor)

    def _write(self, tensor: Tensor, key: MessageKey, kind: int, visit: int) -> Payload:
        coder = self.inner if kind == _INNER or self._first is None else self._first
        return frame(self.code, coder.encode(tensor, key), kind=kind, visit=visit)

    def _difference(self, x: Tensor, key: MessageKey, last: Memory) -> Tensor:
        """What goes over: its subtrahend is what the receiver holds."""
        return x - last.value

    def _sent(self, payload: Payload, x: Tensor, key: MessageKey) -> None:
        """The sender moves on as the receiver will: from the bytes."""
        self._advance(payload, key)

    def _advance(self, payload: Payload, key: MessageKey) -> Tensor:
        """The one path by which a closed loop moves on, at either end. A copy of the new P."""
        kind, visit, body = open_frame(payload, self.code)
        last = self._history.follow(key, visit)
        if kind not in (_INNER, _FULL) or (kind == _FULL) != (visit == 0 and self._first is not None):
            raise CodecError(f"cannot decode {key}: kind {kind} with visit {visit}, which this encoder does not write")
        if last is None:
            value = (self._first or self._decoder).decode(body, key)
        else:
            value = decode_as(self._decoder, body, key, last.value.shape).add_(last.value)
        header.check_finite(value, key, "a difference", doing="decode")
        self._history.put(key, value, visit)
        return value


class OpenDelta(Delta):
    """The same without closing the loop: D = X - the previous X. A negative control.

    What is decoded is summed up at the receiver, so the errors add up too and grow without bound, as a random walk's.
    """

    code = header.OPEN_DELTA

    def __init__(self, context: Context, inner: Codec, first: First = "inner", **_: Any) -> None:
        """See `Delta`."""
        super().__init__(context, inner, first)
        self.law = "none"

    def shared(self) -> Mapping[str, Tensor]:
        """Nothing: the sender holds true tensors, the receiver sums of decoded ones. That is what is wrong with it."""
        return {}

    def _sent(self, payload: Payload, x: Tensor, key: MessageKey) -> None:
        _, visit, _ = open_frame(payload, self.code)
        self._history.put(key, x, visit)


def gradients(context: Context, *, backward: Codec, **_: Any) -> Codec:
    """What goes backward while activations go as differences: the codec named by `backward`, as it is.

    A gradient's difference from an earlier step's is larger than the gradient, early in training.
    """
    return backward

"""Differences from the previous step's tensor of the same micro-batch, in a closed loop; as a control, in an open one.

Both ends hold P, the micro-batch's last decoded tensor (zeros at first). D = X - P is sent, and P becomes P + decoded D
at both ends, so errors do not accumulate. A difference has as many values as the tensor, so it saves bytes only if it
is small enough for fewer bits, or for an entropy coder after it.

Sources: "activation delta" (Bedoya and Zhang), whose text does not say whether the loop is closed; AQ-SGD closes it per
example, and CompactFusion ("Accelerating Parallel Diffusion Model Serving with Residual Compression") between denoising
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.dense.cast import Bf16, Fp16, Fp32
from testbed.codecs.dense.integer import Int8
from testbed.codecs.memory.history import History, following
from testbed.codecs.wire.header import VISIT_AT, DevicePayload, Shape, check_finite, check_input
from testbed.codecs.wire.scratch import Scratch
from testbed.codecs.wrap import HEADER_BYTES, ClosedLoop, bound_of, decode_as, frame, law_of_bound, open_frame, size_of
from testbed.errors import CodecError

First = Literal["inner", "fp32", "bf16", "half", "byte"]
"""How a micro-batch's first message is sent, which has no earlier tensor to differ from."""

_INNER, _FULL = 0, 1
CASTS: dict[str, Callable[[Context], Fp32 | Bf16 | Fp16 | Int8]] = {
    "fp32": Fp32,
    "bf16": Bf16,
    "half": Fp16,
    "byte": lambda context: Int8(context, rounding="nearest"),
}
"""Casts for a first message. `byte` is not called int8, because in `delta(int8)` int8 encodes the differences."""


class Delta(ClosedLoop):
    """Sends the difference through any codec.

    Wire: 4 bytes (code, 1 for a first message in full, visit, 0), then the inner payload.
    Law: the error is always the inner codec's on the last difference (closed loop). State: at each end, one P of the
    tensor's size per (phase, micro-batch), and the inner codec's state. A tensor of a different shape starts over.
    """

    on_device = True
    code: ClassVar[int] = 60
    added_bytes: ClassVar[int] = HEADER_BYTES
    """Bytes added to the inner payload."""
    inner_refuses_nan: ClassVar[bool] = False
    """Whether the inner codec is known to reject NaN and infinity, so that the input need not be checked here."""
    payload_bytes: Callable[[Shape], int]
    """Length of a micro-batch's first message for a shape. Absent if the inner codec does not define its own."""

    def __init__(self, context: Context, inner: Codec, first: First = "inner", **_: Any) -> None:
        """`first`: a micro-batch's first message goes through the inner codec too, or through one of `CASTS`."""
        self._history = History()
        super().__init__(inner, memory=self._history)
        self._first = CASTS[first](context) if first in CASTS else None
        self._scratch = Scratch()
        self.law = law_of_bound(inner)
        if (of_first := size_of(self._first or inner)) is not None:
            self.payload_bytes = lambda shape: self.added_bytes + of_first(shape)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode the difference. CodecError names the message key when it is not finite."""
        x = check_input(tensor, on_device=True).to(torch.float32)
        if not self.inner_refuses_nan:
            check_finite(x, key, "a difference")
        last = self._history.last(key)
        with self.parts_unchanged_on_error():
            if last is None or last.value.shape != x.shape:
                kind, visit = (_INNER if self._first is None else _FULL), 0
                payload = (self._first or self.inner).encode(x, key)
            else:
                kind, visit = _INNER, following(last.visit)
                difference = torch.sub(x, last.value, out=self._scratch.of(x.shape, x.device))
                payload = self.inner.encode(difference, key)
            payload = self._put_visit(payload, kind, visit)
            self._sent(payload, x, key)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Return the new P. CodecError if the payload does not follow the micro-batch's last one."""
        with self.parts_unchanged_on_error("decoder"):
            return self._advance(payload, key)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of each value of a micro-batch's first message."""
        return bound_of(self._first or self.inner, tensor)

    def _put_visit(self, payload: Payload, kind: int, visit: int) -> Payload:
        """Return the inner payload, which may be changed in place, with its kind and visit number."""
        return frame(self.code, payload, kind=kind, visit=visit)

    def _take_visit(self, payload: Payload) -> tuple[int, int, Payload]:
        """Return (kind, visit, inner payload)."""
        return open_frame(payload, self.code)

    def _sent(self, payload: Payload, x: Tensor, key: MessageKey) -> None:
        """Advance the sender's state from the bytes, as the receiver will."""
        self._advance(payload, key)

    def _advance(self, payload: Payload, key: MessageKey) -> Tensor:
        """Advance a closed loop, at either end, from the bytes alone. Return a copy of the new P."""
        kind, visit, body = self._take_visit(payload)
        last = self._history.follow(key, visit)
        if kind not in (_INNER, _FULL) or (kind == _FULL) != (visit == 0 and self._first is not None):
            raise CodecError(f"cannot decode {key}: kind {kind} with visit {visit}, which this encoder does not write")
        if last is None:
            value = (self._first or self._decoder).decode(body, key)
        else:
            value = decode_as(self._decoder, body, key, last.value.shape).add_(last.value)
        check_finite(value, key, "a difference", doing="decode")  # it would never leave P
        self._history.put(key, value, visit)
        return value


def _head(payload: Payload) -> memoryview:
    return memoryview(payload.head if isinstance(payload, DevicePayload) else payload)


class _Int8(Int8):
    counts_visits = True


class DeltaInt8(Delta):
    """Sends the difference as int8, with the visit number in int8's header, so that a payload is as long as int8's.

    The error of a value is at most half the step of the difference's row.
    """

    added_bytes = 0
    inner_refuses_nan = True

    def __init__(self, context: Context) -> None:
        """The context has no effect: rounding to nearest draws no random numbers."""
        super().__init__(context, _Int8(context, rounding="nearest"))

    def _put_visit(self, payload: Payload, kind: int, visit: int) -> Payload:
        _head(payload)[VISIT_AT] = visit
        return payload

    def _take_visit(self, payload: Payload) -> tuple[int, int, Payload]:
        view = _head(payload)
        return _INNER, view.cast("B")[VISIT_AT] if view.contiguous and view.nbytes > VISIT_AT else 0, payload


class OpenDelta(Delta):
    """Differences without a closed loop, D = X - the previous X: a negative control.

    The receiver sums decoded differences, so their errors accumulate without bound, like a random walk.
    """

    code = 61

    def __init__(self, context: Context, inner: Codec, first: First = "inner", **_: Any) -> None:
        """See `Delta`."""
        super().__init__(context, inner, first)
        self.law = "none"

    def shared(self) -> Mapping[str, Tensor]:
        """Return nothing: the sender holds true tensors, the receiver sums of decoded differences; that is the flaw."""
        return {}

    def _sent(self, payload: Payload, x: Tensor, key: MessageKey) -> None:
        _, visit, _ = self._take_visit(payload)
        self._history.put(key, x, visit)


def gradients(context: Context, *, backward: Codec, **_: Any) -> Codec:
    """Return the codec for gradients, `backward`; only activations are sent as differences.

    Early in training, a gradient's difference from an earlier step's is larger than the gradient.
    """
    return backward

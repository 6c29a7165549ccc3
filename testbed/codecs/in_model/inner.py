"""What codecs that change the model put on the wire: what another codec makes of what their hook leaves, and now and then a
matrix that the hooks at both ends must hold alike.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, ModelCodec, Paired, Payload
from testbed.codecs.wire import header
from testbed.codecs.wrap import Wrapper, capability, frame, open_frame, walk
from testbed.errors import CodecError, SpecError
from testbed.message_key import Direction


class Inner:
    """Adds no byte: payloads, state and errors are the inner codec's. What is learned belongs to the stage's model, not here."""

    def __init__(self, context: Context, *, inner: Codec) -> None:
        """SpecError where `inner` changes the model itself: a hook would be left out."""
        self._context = context
        self.inner = inner
        self.forward: Inner | None = None
        """Of an instance for gradients: the one for the activations, whose hook is in the model."""
        for part in walk(inner):
            if isinstance(part, ModelCodec):
                raise SpecError(
                    f"{type(part).__name__} changes the model, and so does what is around it; use one of them"
                )

    def pair(self, forward: Codec) -> None:
        """See `base.Paired`. SpecError where the activations go through another codec: then nothing would be in the model."""
        same = next((part for part in walk(forward) if type(part) is type(self)), None)
        if not isinstance(same, Inner):
            raise SpecError(
                f"boundary {self._context.boundary}: gradients go through {type(self).__name__}, which changes the model, and "
                f"activations through {type(forward).__name__}; name it for both directions, or for the activations alone"
            )
        self.forward = same
        if (paired := capability(self.inner, Paired)) is not None:
            paired.pair(same.inner)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """As the inner codec."""
        return self.inner.encode(tensor, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """As the inner codec."""
        return self.inner.decode(payload, key)


class Load(Protocol):
    """A hook's end of what is carried."""

    def outgoing(self, key: MessageKey) -> Tensor | None:
        """A matrix that must go along with this message, bf16; None for most of them."""
        ...

    def sent(self, key: MessageKey, matrix: Tensor | None) -> None:
        """There is a payload, with that matrix or without one."""
        ...

    def visit(self, direction: Direction) -> int:
        """0..255: how many matrices there have been. A message that carries none must have the last one's, so that a lost matrix
        is noticed; 0 where that does not matter."""
        ...

    def expected(self, key: MessageKey) -> tuple[int, int] | None:
        """The shape of what may come; None: nothing may."""
        ...

    def reset(self) -> None:
        """What was sent may not have come: send it again."""
        ...

    def check(self, matrix: Tensor, key: MessageKey) -> str | None:
        """What is wrong with a finite bf16 matrix of that shape; None: nothing."""
        ...

    def incoming(self, matrix: Tensor, key: MessageKey, visit: int) -> None:
        """It has come, in a message of that visit number."""
        ...


class Carrying(Inner, Wrapper):
    """A wrapper's header of 4 bytes, in some messages a bf16 matrix, padded to a multiple of 4 bytes, then the inner payload.

    Without a hook there is never a matrix.
    """

    def __init__(self, context: Context, *, inner: Codec) -> None:
        Inner.__init__(self, context, inner=inner)
        Wrapper.__init__(self, inner=inner)
        self.own_load: Load | None = None
        """The hook's that belongs to this codec, once it is there."""

    @property
    def _load(self) -> Load | None:
        forward = self.forward
        return forward.own_load if isinstance(forward, Carrying) else self.own_load

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """The inner codec's payload, and what the hook has to send."""
        load = self._load
        matrix = None if load is None else load.outgoing(key)
        body = self.inner.encode(tensor, key)
        visit = 0 if load is None else load.visit(self._context.direction)
        if matrix is None:
            payload = frame(header.CARRYING, body, visit=visit)
        else:
            values = matrix.contiguous().view(torch.uint8).numpy().tobytes()
            payload = frame(header.CARRYING, values, bytes(-len(values) % 4), body, kind=1, visit=visit)
        if load is not None:
            load.sent(key, matrix)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """As the inner codec, after which the hook has what came along."""
        kind, visit, rest = open_frame(payload, header.CARRYING)
        load = self._load
        if kind > 1:
            raise CodecError(f"cannot decode {key}: a payload that carries {kind} matrices; one is the most")
        if not kind:
            if visit != (known := 0 if load is None else load.visit(self._context.direction)):
                raise CodecError(
                    f"cannot decode {key}: it goes by matrix {visit} and this end has matrix {known}: a message was lost. "
                    "Reset the encoder: its next message then carries the matrix again"
                )
            return self.inner.decode(rest, key)
        shape = None if load is None else load.expected(key)
        if shape is None or load is None:
            raise CodecError(
                f"cannot decode {key}: its payload carries a matrix, and nothing at this end waits for one"
            )
        size = 2 * shape[0] * shape[1]
        padded = size + -size % 4
        if len(rest) < padded or any(rest[size:padded]):
            raise CodecError(
                f"cannot decode {key}: {len(rest)} bytes where a matrix of shape {shape} and a payload must be"
            )
        matrix = torch.frombuffer(bytearray(rest[:size]), dtype=torch.bfloat16).view(shape)
        if not bool(torch.isfinite(matrix).all()):
            raise CodecError(f"cannot decode {key}: the matrix of shape {shape} that it carries holds NaN or infinity")
        if wrong := load.check(matrix, key):
            raise CodecError(f"cannot decode {key}: the matrix of shape {shape} that it carries {wrong}")
        values = self.inner.decode(rest[padded:], key)
        load.incoming(matrix, key, visit)
        return values

    def reset(self) -> None:
        """The inner codec forgets, and the next message carries the matrix again where there is one."""
        super().reset()
        if self.own_load is not None:
            self.own_load.reset()

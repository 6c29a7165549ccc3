"""Common part of codecs that change the model: what they need from a stage's model, and their wire format.

A payload holds the hook's output, encoded by another codec, and sometimes a matrix that must be identical in the hooks
at both ends. `workloads` has stages that can be changed; this module does not depend on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from testbed.codecs.contract import Codec, Context, MessageKey, ModelCodec, Paired, Payload
from testbed.codecs.wire.header import CPU, cut_head
from testbed.codecs.wrap import Wrapper, capability, frame, open_frame, walk
from testbed.errors import CodecError, SpecError
from testbed.message_key import Direction


class Replaceable(Protocol):
    """A module of a stage, at its place in the model."""

    @property
    def module(self) -> nn.Module: ...

    def replace(self, module: nn.Module) -> None: ...


class ChangeableStage(Protocol):
    """A stage's part of a model, with what a codec must know to change it."""

    first: bool
    last: bool
    width: int
    """The hidden size d."""
    context: int
    """The longest sequence, in tokens."""
    vocabulary: int
    """The rows of the token embedding, which only the first stage has."""
    learned_positions: bool
    kept: dict[str, Any]
    """Objects that codecs keep with the stage, by name, shared by its two boundaries."""

    def tables(self) -> Sequence[Replaceable]:
        """Return the embeddings: of tokens, and of positions where they are learned.

        Empty except at the first stage.
        """
        ...

    def writers(self) -> Sequence[Replaceable]:
        """Return the linear layers whose outputs are added to the hidden states, in order."""
        ...


_NEEDED = ("first", "last", "width", "context", "vocabulary", "learned_positions", "kept", "tables", "writers")


def changeable(model: nn.Module, codec: str) -> ChangeableStage:
    """Return the model, if it is a `ChangeableStage`. SpecError, naming the codec, if it is not."""
    if missing := [name for name in _NEEDED if not hasattr(model, name)]:
        raise SpecError(
            f"codec {codec} changes the model, but {type(model).__name__} lacks what that needs: "
            f"it has no {', no '.join(missing)}"
        )
    return cast("ChangeableStage", model)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a stage's parameters, where its hooks compute."""
    return next((parameter.device for parameter in model.parameters()), CPU)


class HookBase:
    """Those methods of `contract.Hook` that do nothing in a hook without parameters or work per step."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return none."""
        return ()

    def rowwise(self) -> Mapping[nn.Parameter, int]:
        """Return none."""
        return {}

    def begin(self, step: int, microbatches: int) -> None:
        """Do nothing."""

    def after_step(self, step: int, rate: float) -> None:
        """Do nothing."""


class InModel:
    """A codec whose hook does the work: payloads, state and errors are the inner codec's, and no bytes are added.

    Learned parameters belong to the stage's model. A subclass defines the method `hook`.
    """

    on_device = True

    def __init__(self, context: Context, *, inner: Codec) -> None:
        """Raise SpecError if `inner`, or a codec inside it, also changes the model: its hook would be ignored."""
        self._context = context
        self.inner = inner
        self.forward: InModel | None = None
        """The activations' instance, whose hook is in the model; None in an instance for activations."""
        for part in walk(inner):
            if isinstance(part, ModelCodec):
                raise SpecError(
                    f"{type(part).__name__} changes the model, and so does the codec around it; use one of them"
                )

    def pair(self, forward: Codec) -> None:
        """Find the same codec among those of the activations.

        SpecError if activations go through another one: the model then has no hook.
        """
        same = next((part for part in walk(forward) if type(part) is type(self)), None)
        if not isinstance(same, InModel):
            raise SpecError(
                f"boundary {self._context.boundary}: gradients go through {type(self).__name__}, which changes the "
                f"model, and activations through {type(forward).__name__}; name it for both directions, or for the "
                "activations alone"
            )
        self.forward = same
        if (paired := capability(self.inner, Paired)) is not None:
            paired.pair(same.inner)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode with the inner codec."""
        return self.inner.encode(tensor, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the inner codec."""
        return self.inner.decode(payload, key)


class CarriedMatrix(Protocol):
    """A hook's end of a matrix that must be identical at both ends, and that messages carry from one to the other."""

    def outgoing(self, key: MessageKey) -> Tensor | None:
        """Return the bf16 matrix to send with this message; None for most messages."""
        ...

    def sent(self, key: MessageKey, matrix: Tensor | None) -> None:
        """Note that a payload was made, with that matrix or without one."""
        ...

    def visit(self, direction: Direction) -> int:
        """Return the number of matrices so far, 0..255.

        A message without one has the last one's number, so that a lost matrix is detected; 0 if that does not matter.
        """
        ...

    def expected(self, key: MessageKey) -> tuple[int, int] | None:
        """Return the shape of a matrix that may arrive; None if none may."""
        ...

    def reset(self) -> None:
        """Send the matrix again: the last one may not have arrived."""
        ...

    def check(self, matrix: Tensor, key: MessageKey) -> str | None:
        """Describe the fault of a finite bf16 matrix of that shape; None if it has none."""
        ...

    def incoming(self, matrix: Tensor, key: MessageKey, visit: int) -> None:
        """Store a matrix that arrived in a message with that visit number."""
        ...


class Carrying(InModel, Wrapper):
    """A codec whose messages may carry a matrix; without a hook they never do.

    Wire: a wrapper's header of 4 bytes, the matrix if there is one (bf16, padded to 4 bytes), the inner payload.
    """

    code = 80

    def __init__(self, context: Context, *, inner: Codec) -> None:
        InModel.__init__(self, context, inner=inner)
        Wrapper.__init__(self, inner=inner)
        self.own_matrix: CarriedMatrix | None = None
        """This codec's hook, as an end of the matrix; None until there is one."""

    @property
    def _matrix(self) -> CarriedMatrix | None:
        forward = self.forward
        return forward.own_matrix if isinstance(forward, Carrying) else self.own_matrix

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode with the inner codec, and add the hook's matrix, if it has one to send."""
        end = self._matrix
        matrix = None if end is None else end.outgoing(key)
        body = self.inner.encode(tensor, key)
        visit = 0 if end is None else end.visit(self._context.direction)
        if matrix is None:
            payload = frame(self.code, body, visit=visit)
        else:
            values = matrix.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            payload = frame(self.code, values, bytes(-len(values) % 4), body, kind=1, visit=visit)
        if end is not None:
            end.sent(key, matrix)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the inner codec, and pass a matrix that came with it to the hook."""
        kind, visit, rest = open_frame(payload, self.code)
        end = self._matrix
        if kind > 1:
            raise CodecError(f"cannot decode {key}: its payload carries {kind} matrices; the most is one")
        if not kind:
            if visit != (known := 0 if end is None else end.visit(self._context.direction)):
                raise CodecError(
                    f"cannot decode {key}: it uses matrix {visit}, but this end has matrix {known}: a message was "
                    "lost. Reset the encoder: its next message then carries the matrix again"
                )
            return self.inner.decode(rest, key)
        shape = None if end is None else end.expected(key)
        if shape is None or end is None:
            raise CodecError(
                f"cannot decode {key}: its payload carries a matrix, but nothing at this end waits for one"
            )
        size = 2 * shape[0] * shape[1]
        padded = size + -size % 4
        carried, inside = cut_head(rest, padded)
        if len(carried) < padded or any(carried[size:]):
            raise CodecError(
                f"cannot decode {key}: {len(rest)} bytes do not hold a matrix of shape {shape} and a payload"
            )
        matrix = torch.frombuffer(bytearray(carried[:size]), dtype=torch.bfloat16).view(shape)
        if not bool(torch.isfinite(matrix).all()):
            raise CodecError(f"cannot decode {key}: the matrix of shape {shape} that it carries holds NaN or infinity")
        if wrong := end.check(matrix, key):
            raise CodecError(f"cannot decode {key}: the matrix of shape {shape} that it carries {wrong}")
        values = self.inner.decode(inside, key)
        end.incoming(matrix, key, visit)
        return values

    def reset(self) -> None:
        """Reset the inner codec. The next message carries the matrix again, if there is one."""
        super().reset()
        if self.own_matrix is not None:
            self.own_matrix.reset()

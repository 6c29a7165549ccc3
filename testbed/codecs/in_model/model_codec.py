"""What codecs that change the model share: what they ask of a stage's model, and what they put on the wire.

On the wire is what another codec makes of what their hook leaves, and now and then a matrix that the hooks at both ends
must hold alike. `workloads` has stages that can be changed; nothing here knows which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from testbed.codecs.contract import Codec, Context, MessageKey, ModelCodec, Paired, Payload
from testbed.codecs.wrap import Wrapper, capability, frame, open_frame, walk
from testbed.errors import CodecError, SpecError
from testbed.message_key import Direction


class Replaceable(Protocol):
    """A module of a stage, where it hangs."""

    @property
    def module(self) -> nn.Module: ...

    def replace(self, module: nn.Module) -> None: ...


class ChangeableStage(Protocol):
    """A stage's share of a model, with what a codec must know of it to change it."""

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
    """What codecs keep with the stage, by name: its two boundaries find the same."""

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
    """Return the model, if it says what there is to change. SpecError, naming the codec, if it does not."""
    if missing := [name for name in _NEEDED if not hasattr(model, name)]:
        raise SpecError(
            f"codec {codec} changes the model, and {type(model).__name__} does not say what there is to change: "
            f"it has no {', no '.join(missing)}"
        )
    return cast("ChangeableStage", model)


class HookBase:
    """What `contract.Hook` asks for of a hook that learns nothing and has nothing to do about a step."""

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
    """A codec whose work is done by its hook: payloads, state and errors are the inner codec's, and no byte is added.

    What is learned belongs to the stage's model, not here. A subclass has the method `hook`.
    """

    def __init__(self, context: Context, *, inner: Codec) -> None:
        """Raise SpecError where `inner`, or what it wraps, changes the model itself: its hook would be left out."""
        self._context = context
        self.inner = inner
        self.forward: InModel | None = None
        """The activations' instance, whose hook is in the model; None in an instance for activations."""
        for part in walk(inner):
            if isinstance(part, ModelCodec):
                raise SpecError(
                    f"{type(part).__name__} changes the model, and so does what is around it; use one of them"
                )

    def pair(self, forward: Codec) -> None:
        """Find the same codec in the activations'.

        SpecError where they go through another one: nothing is in the model then.
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
    """A hook's end of a matrix that both ends must hold alike, and that messages carry from one to the other."""

    def outgoing(self, key: MessageKey) -> Tensor | None:
        """Return the bf16 matrix that must go along with this message; None for most messages."""
        ...

    def sent(self, key: MessageKey, matrix: Tensor | None) -> None:
        """Note that a payload was made, with that matrix or without one."""
        ...

    def visit(self, direction: Direction) -> int:
        """Return how many matrices there have been, 0..255.

        A message without one has the last one's number, so that a lost matrix is noticed; 0 where that does not matter.
        """
        ...

    def expected(self, key: MessageKey) -> tuple[int, int] | None:
        """Return the shape of the matrix that may come; None where none may."""
        ...

    def reset(self) -> None:
        """Send the matrix again: what was sent may not have come."""
        ...

    def check(self, matrix: Tensor, key: MessageKey) -> str | None:
        """Say what is wrong with a finite bf16 matrix of that shape; None where nothing is."""
        ...

    def incoming(self, matrix: Tensor, key: MessageKey, visit: int) -> None:
        """Take a matrix that has come, in a message of that visit number."""
        ...


class Carrying(InModel, Wrapper):
    """Messages that may carry a matrix; without a hook they never do.

    Wire: a wrapper's header of 4 bytes, the matrix if there is one (bf16, padded to 4 bytes), the inner payload.
    """

    code = 80

    def __init__(self, context: Context, *, inner: Codec) -> None:
        InModel.__init__(self, context, inner=inner)
        Wrapper.__init__(self, inner=inner)
        self.own_matrix: CarriedMatrix | None = None
        """The end of the hook that belongs to this codec, once there is one."""

    @property
    def _matrix(self) -> CarriedMatrix | None:
        forward = self.forward
        return forward.own_matrix if isinstance(forward, Carrying) else self.own_matrix

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode with the inner codec, and add what the hook has to send."""
        end = self._matrix
        matrix = None if end is None else end.outgoing(key)
        body = self.inner.encode(tensor, key)
        visit = 0 if end is None else end.visit(self._context.direction)
        if matrix is None:
            payload = frame(self.code, body, visit=visit)
        else:
            values = matrix.contiguous().view(torch.uint8).numpy().tobytes()
            payload = frame(self.code, values, bytes(-len(values) % 4), body, kind=1, visit=visit)
        if end is not None:
            end.sent(key, matrix)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the inner codec, and give the hook what came along."""
        kind, visit, rest = open_frame(payload, self.code)
        end = self._matrix
        if kind > 1:
            raise CodecError(f"cannot decode {key}: a payload that carries {kind} matrices; one is the most")
        if not kind:
            if visit != (known := 0 if end is None else end.visit(self._context.direction)):
                raise CodecError(
                    f"cannot decode {key}: it goes by matrix {visit} and this end has matrix {known}: a message was "
                    "lost. Reset the encoder: its next message then carries the matrix again"
                )
            return self.inner.decode(rest, key)
        shape = None if end is None else end.expected(key)
        if shape is None or end is None:
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
        if wrong := end.check(matrix, key):
            raise CodecError(f"cannot decode {key}: the matrix of shape {shape} that it carries {wrong}")
        values = self.inner.decode(rest[padded:], key)
        end.incoming(matrix, key, visit)
        return values

    def reset(self) -> None:
        """Let the inner codec forget. The next message carries the matrix again, where there is one."""
        super().reset()
        if self.own_matrix is not None:
            self.own_matrix.reset()

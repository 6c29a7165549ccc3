"""The contract of a codec: two methods, self-contained payloads, and optional protocols.

Every codec implements `Codec`. `Stateful`, `Paired`, `ObservesLink`, `ReportsChoice` and `ModelCodec` are optional; a
class implements them by defining their methods, without importing anything. `wrap.capability` finds them on a codec or
inside it, so a wrapper that adds nothing to them can ignore them: it exposes its inner codec as `inner`, or several as
`parts`, a mapping of names to codecs. A wrapper that defines the methods itself is responsible for its inner codecs,
and forwards calls to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor
from torch.nn import Module, Parameter

from testbed.message_key import Direction, Side
from testbed.message_key import MessageKey as MessageKey


class Context(NamedTuple):
    """Constructor argument of an instance, the same at both ends of a boundary's direction."""

    seed: int
    boundary: int
    """Boundary 0 lies between the stages 0 and 1."""
    direction: Direction


Payload: TypeAlias = bytes | bytearray | memoryview
"""One contiguous buffer. Every byte of it is counted."""


class Codec(Protocol):
    """There is one instance per boundary, direction and end, called in the order of messages.

    The ends share only the payload and the message key. State advances from decoded values only, so it is bit-identical
    at both ends; a method that raises leaves it unchanged. Randomness comes from `wire.noise`, never from a global
    generator.

    A class of this package that states `on_device = True` also takes tensors on a GPU (`wrap.works_on_devices`): its
    payload is then a `wire.header.DevicePayload`, whose values stay there. Others get copies on the CPU.
    """

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Turn a CPU tensor, fp32 or bf16, of any shape and strides, into bytes. The tensor is not modified.

        The payload belongs to the caller: the codec does not touch it again, so it stays valid while it is being sent.
        CodecError for a tensor that cannot be encoded.
        """
        ...

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Return a new contiguous fp32 tensor of the encoded shape. The caller owns it, and it shares no memory.

        CodecError for bytes that no encoder made for this message key, before allocating memory based on them.
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """A codec with state from earlier messages. A stateless codec has none of these methods.

    After a lost frame, the decoder raises CodecError (the visit number does not follow); the encoder's `reset` repairs
    the stream.
    """

    def shared(self) -> Mapping[str, Tensor]:
        """Return the state that is bit-identical at both ends after the same messages, by name, read-only; possibly
        empty.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the complete state: tensors and plain values, for torch.save.

        It shares no memory with the codec.
        """
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state` of an instance of the same context. CodecError for anything else."""
        ...

    def reset(self) -> None:
        """Reset the state. A decoder in any state then accepts the next message of each message key, which has visit
        number 0.
        """
        ...


@runtime_checkable
class Paired(Protocol):
    """A gradient codec that depends on the activation codec at the same end, for example on its mask."""

    def pair(self, forward: Codec) -> None:
        """Receive, once and before any message, the forward instance of the same boundary and end.

        A gradient's message key is that of its activations. SpecError for an unsuitable instance.
        """
        ...


@runtime_checkable
class ObservesLink(Protocol):
    """An encoder that adapts to its link."""

    def observe(self, sent_bytes: int, seconds: float) -> None:
        """Receive, before `encode`, the bytes that have arrived since the last call and the link's time for them.

        `sent_bytes` counts measured traffic to the neighbour over this boundary, including frame headers. It may be 0,
        and so may `seconds`, for a link too fast to measure.
        """
        ...


@runtime_checkable
class ReportsChoice(Protocol):
    """An encoder that chooses one of several codecs for each message, and reports the choice for the records."""

    @property
    def choice(self) -> str | None:
        """The parameter whose codec made the last payload; None before the first, or where there is no choice."""
        ...


@runtime_checkable
class Hook(Protocol):
    """A model codec's part of one stage's model, at one boundary. `send` and `receive` are in autograd's graph.

    `coded` is sent, and the gradient of `coded` is sent back. `inputs` are token ids, int64 (b, n): every stage derives
    them from the order of the data, so they cost no bytes.
    """

    def parameters(self) -> Iterable[Parameter]:
        """Return the trained parameters, for the stage's optimiser."""
        ...

    def send(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Return the values to send for hidden states (b, n, d): at the boundary's upper end, before `encode`."""
        ...

    def receive(self, coded: Tensor, inputs: Tensor) -> Tensor:
        """Return hidden states (b, n, d): at the lower end, after `decode`."""
        ...

    def begin(self, step: int, microbatches: int) -> None:
        """Prepare for a training step of `microbatches` micro-batches."""
        ...

    def rowwise(self) -> Mapping[Parameter, int]:
        """Return the parameters of the stage's model whose second moment is one number along the given axis, if any.

        The optimiser then keeps updates within the span of the parameter's vectors.
        """
        ...

    def after_step(self, step: int, rate: float) -> None:
        """Act after an optimiser update at learning rate `rate`.

        Restore the codec's constraint on weights, and update parameters that the codec trains itself.
        """
        ...


@runtime_checkable
class ModelCodec(Protocol):
    """A codec that changes the model. The forward instance provides the hook."""

    def hook(self, model: Module, side: Side) -> Hook | None:
        """Return the codec's part of a stage's model, or None if it does not change this model.

        `side` is the boundary's side of the stage. For a stage between two boundaries it is called for both, but must
        change weights only once.
        """
        ...

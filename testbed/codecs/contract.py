"""The contract of a codec: two methods, and bytes that hold all that the receiver needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor
from torch.nn import Module, Parameter

from testbed.message_key import Direction, Side
from testbed.message_key import MessageKey as MessageKey


class Context(NamedTuple):
    """What an instance is told once. Both ends of a boundary's direction are told the same."""

    seed: int
    boundary: int
    """0 lies between the stages 0 and 1."""
    direction: Direction


Payload: TypeAlias = bytes | bytearray | memoryview
"""One contiguous buffer of bytes, everything counted."""


class Codec(Protocol):
    """One instance per boundary, direction and end, called in the order of the messages.

    The ends share the payload and the message key, nothing else. State advances from decoded values only, so it is bit-identical
    at both ends; a method that raises leaves it as it was. Randomness comes from `keyed`, never from a global generator.
    """

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """A CPU tensor, fp32 or bf16, any shape and strides, as bytes. The tensor is left as it is.

        The payload belongs to the caller: the codec does not touch it again, so it stays valid while it is being sent.
        CodecError for a tensor that cannot be encoded.
        """
        ...

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """A new contiguous fp32 tensor of the shape that was encoded; it belongs to the caller and shares no memory.

        CodecError for bytes that no encoder made for this message key, before memory is set aside on their word.
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """What a codec that remembers has besides; one that remembers nothing has none of it. A wrapper passes it on inwards.

    Where a frame was lost, the decoder raises CodecError (the visit number does not follow); the encoder's `reset` heals the
    stream.
    """

    def shared(self) -> Mapping[str, Tensor]:
        """What both ends hold bit-identically after the same messages, by name; to be read only. Empty where there is nothing."""
        ...

    def state(self) -> dict[str, Any]:
        """All that later messages depend on: tensors and plain values, for torch.save. Shares no memory with the codec."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, here or in another instance of the same context. CodecError for anything else."""
        ...

    def reset(self) -> None:
        """Forget. The next message of each message key is then one that a decoder in any state accepts: visit 0."""
        ...


@runtime_checkable
class Paired(Protocol):
    """What a codec of gradients has besides that goes by what the activations' codec at the same end knows, such as its mask.

    A wrapper passes it on inwards, and shows what it wraps as `inner`.
    """

    def pair(self, forward: Codec) -> None:
        """Told once, before any message, of the forward instance of the same boundary and end; a gradient's message key is that of its
        activations. SpecError where that instance has nothing to go by."""
        ...


@runtime_checkable
class Measured(Protocol):
    """What an encoder that goes by its link has besides; a wrapper passes it on inwards."""

    def observe(self, sent_bytes: int, seconds: float) -> None:
        """Called before `encode`: so many bytes more have arrived since the last call, and the link was at work on them so long.

        `sent_bytes` are of what goes to the neighbour over this boundary, frame headers too, and not all of it, but what was
        measured. It may be 0, and so may `seconds`, of a link that is faster than can be seen.
        """
        ...


@runtime_checkable
class Choosing(Protocol):
    """What an encoder that takes one of several codecs has besides, so that records say which."""

    @property
    def choice(self) -> str | None:
        """The name of the parameter whose codec made the last payload; None before the first, or where there is no choice."""
        ...


@runtime_checkable
class Hook(Protocol):
    """A model codec's part in one stage's model, at one boundary. `send` and `receive` are in autograd's graph.

    What crosses is `coded`, and the gradient that goes back is that of `coded`. `inputs` are token ids, int64 (b, n): every stage
    derives them from the order of the data, so they cost no bytes.
    """

    def parameters(self) -> Iterable[Parameter]:
        """What is learned here; it goes to the stage's optimiser."""
        ...

    def send(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """At the boundary's upper end, before `encode`: hidden states (b, n, d) as what is to cross."""
        ...

    def receive(self, coded: Tensor, inputs: Tensor) -> Tensor:
        """At the lower end, after `decode`: hidden states (b, n, d) again."""
        ...

    def begin(self, step: int, microbatches: int) -> None:
        """A training step of so many micro-batches begins."""
        ...

    def rowwise(self) -> Mapping[Parameter, int]:
        """Parameters of the stage's model whose second moment is one number along that axis, so that an update stays within
        the span of its vectors; the optimiser sees to it. Empty where there are none."""
        ...

    def after_step(self, step: int, rate: float) -> None:
        """After each update of the optimiser, at that learning rate: what keeps the weights within the codec's constraint, and
        what the codec learns in a way of its own."""
        ...


@runtime_checkable
class ModelCodec(Protocol):
    """What a codec that changes the model has besides; asked of the forward instance."""

    def hook(self, model: Module, side: Side) -> Hook | None:
        """Its part in a stage's model; `side` is where the boundary lies as seen from that stage. None: it leaves this one alone.

        A stage between two boundaries is asked for both, and what is done to its weights twice is done once.
        """
        ...

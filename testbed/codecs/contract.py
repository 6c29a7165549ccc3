"""The contract of a codec: two methods, bytes that hold all that the receiver needs, and what a codec may have besides.

`Codec` is what every codec has. `Stateful`, `Paired`, `ObservesLink`, `ReportsChoice` and `ModelCodec` are optional; a
class has them by having their methods, without importing anything. `wrap.capability` finds them, on a codec or on what
it wraps, so a wrapper that adds nothing to them need not mention them: it shows what it wraps as `inner`, or as
`parts`, a mapping of names to codecs. One that has the methods itself answers for what it wraps, and passes on what
concerns that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor
from torch.nn import Module, Parameter

from testbed.message_key import Direction, Side
from testbed.message_key import MessageKey as MessageKey


class Context(NamedTuple):
    """What an instance is told when it is made. Both ends of a boundary's direction are told the same."""

    seed: int
    boundary: int
    """Boundary 0 lies between the stages 0 and 1."""
    direction: Direction


Payload: TypeAlias = bytes | bytearray | memoryview
"""One contiguous buffer. Every byte of it is counted."""


class Codec(Protocol):
    """A codec has one instance per boundary, direction and end, called in the order of the messages.

    The ends share the payload and the message key, nothing else. State advances from decoded values only, so it is
    bit-identical at both ends; a method that raises leaves it as it was. Randomness comes from `wire.noise`, never from
    a global generator.
    """

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Turn a CPU tensor, fp32 or bf16, of any shape and strides, into bytes. The tensor is left as it is.

        The payload belongs to the caller: the codec does not touch it again, so it stays valid while it is being sent.
        CodecError for a tensor that cannot be encoded.
        """
        ...

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Return a new contiguous fp32 tensor of the shape that was encoded. It is the caller's and shares no memory.

        CodecError for bytes that no encoder made for this message key, before memory is set aside on their word.
        """
        ...


@runtime_checkable
class Stateful(Protocol):
    """A codec that remembers earlier messages. One that remembers nothing has none of these methods.

    Where a frame was lost, the decoder raises CodecError (the visit number does not follow); the encoder's `reset`
    heals the stream.
    """

    def shared(self) -> Mapping[str, Tensor]:
        """Return what both ends hold bit-identically after the same messages, by name, read-only; perhaps nothing."""
        ...

    def state(self) -> dict[str, Any]:
        """Return all that later messages depend on: tensors and plain values, for torch.save.

        It shares no memory with the codec.
        """
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` of an instance of the same context returned. CodecError for anything else."""
        ...

    def reset(self) -> None:
        """Forget. A decoder in any state then accepts the next message of each message key: it has visit number 0."""
        ...


@runtime_checkable
class Paired(Protocol):
    """A codec of gradients that goes by what the activations' codec at the same end knows, such as its mask."""

    def pair(self, forward: Codec) -> None:
        """Learn, once and before any message, of the forward instance of the same boundary and end.

        A gradient's message key is that of its activations. SpecError where the instance has nothing to go by.
        """
        ...


@runtime_checkable
class ObservesLink(Protocol):
    """An encoder that adapts to what its link carries."""

    def observe(self, sent_bytes: int, seconds: float) -> None:
        """Learn, before `encode`, how many bytes have arrived since the last call and how long the link took for them.

        `sent_bytes` counts what goes to the neighbour over this boundary, frame headers included, as far as it was
        measured. It may be 0, and so may `seconds`, where a link is faster than can be seen.
        """
        ...


@runtime_checkable
class ReportsChoice(Protocol):
    """An encoder that takes one of several codecs for each message, and says which for the records."""

    @property
    def choice(self) -> str | None:
        """The parameter whose codec made the last payload; None before the first, or where there is no choice."""
        ...


@runtime_checkable
class Hook(Protocol):
    """A model codec's part in one stage's model, at one boundary. `send` and `receive` are in autograd's graph.

    What crosses is `coded`, and the gradient that goes back is that of `coded`. `inputs` are token ids, int64 (b, n):
    every stage derives them from the order of the data, so they cost no bytes.
    """

    def parameters(self) -> Iterable[Parameter]:
        """Return what is learned here, for the stage's optimiser."""
        ...

    def send(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Return what is to cross for hidden states (b, n, d): at the boundary's upper end, before `encode`."""
        ...

    def receive(self, coded: Tensor, inputs: Tensor) -> Tensor:
        """Return hidden states (b, n, d) again: at the lower end, after `decode`."""
        ...

    def begin(self, step: int, microbatches: int) -> None:
        """Prepare for a training step of `microbatches` micro-batches."""
        ...

    def rowwise(self) -> Mapping[Parameter, int]:
        """Return the parameters of the stage's model whose second moment is one number along the given axis, if any.

        An update then stays within the span of the parameter's vectors; the optimiser sees to it.
        """
        ...

    def after_step(self, step: int, rate: float) -> None:
        """Follow an update of the optimiser, at learning rate `rate`.

        Bring the weights back to the codec's constraint, and update what the codec learns in its own way.
        """
        ...


@runtime_checkable
class ModelCodec(Protocol):
    """A codec that changes the model. The forward instance is asked for its hook."""

    def hook(self, model: Module, side: Side) -> Hook | None:
        """Return the codec's part in a stage's model, or None where it leaves this model alone.

        `side` is where the boundary lies as seen from the stage. A stage between two boundaries is asked for both, and
        what would change its weights twice is done once.
        """
        ...

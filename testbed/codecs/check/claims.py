"""What a codec's class may say of itself, beyond the two methods of the contract. The kit holds it to what it says.

All of it is optional, and for our own codecs the table's row says the rest. A class or an instance may besides name a
law, in an attribute `law`, and say in one called `exact` that hidden states lose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from testbed.codecs.contract import MessageKey


@runtime_checkable
class Bounded(Protocol):
    """A codec that says how wrong a value can be."""

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest |decoded - tensor| of a message key's first message, for each value: broadcastable to
        the shape of the tensor, which is fp32 and not empty.
        """
        ...


@runtime_checkable
class Keeping(Protocol):
    """A codec that keeps some values, makes the others zero, and says how wrong a kept value can be."""

    def kept_bound(self, tensor: Tensor) -> Tensor:
        """Return the largest |decoded - tensor| of a value that is kept: broadcastable to the tensor's shape."""
        ...


@runtime_checkable
class Sized(Protocol):
    """A codec that says how long its payloads are."""

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the length of a payload of a tensor of this shape, header included; of a message key's first where
        the codec remembers.
        """
        ...


@runtime_checkable
class Owing(Protocol):
    """A codec that says what it still owes: error feedback."""

    def residual(self, key: MessageKey) -> Tensor:
        """Return what of the message key's inputs so far has not crossed: sums of decoded + residual == inputs."""
        ...


@runtime_checkable
class Agreeing(Protocol):
    """A hook that says what the other end of its boundary must hold too."""

    def agreed(self) -> Mapping[str, Tensor]:
        """Return tensors by name, equal bit for bit at both ends once a message has crossed.

        Those named 'basis...' have orthonormal columns.
        """
        ...


@runtime_checkable
class Constraining(Protocol):
    """A hook that says how well its constraint on the stage's weights holds."""

    def outside(self) -> float | None:
        """Return the largest share of a weight's norm that lies outside what the codec needs; None where this end
        constrains nothing.
        """
        ...

"""What a codec's class may say of itself, beyond the two methods of the contract. The kit holds it to what it says.

All of it is optional, and for our own codecs the table's entry says the rest.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from testbed.codecs.base import Slot


@runtime_checkable
class Bounded(Protocol):
    """Says how wrong a value can be."""

    def bound(self, tensor: Tensor) -> Tensor:
        """The largest |decoded - tensor| of a slot's first message, for each value: broadcastable to the tensor's shape."""
        ...


@runtime_checkable
class Sized(Protocol):
    """Says how long its payloads are."""

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """The length of a payload of a tensor of this shape, header included."""
        ...


@runtime_checkable
class Owing(Protocol):
    """Says what it still owes: error feedback."""

    def residual(self, slot: Slot) -> Tensor:
        """What of the slot's inputs so far has not crossed: sum of decoded + residual == sum of inputs."""
        ...


def law_of(codec: Any) -> str | None:
    """A class may name its law in an attribute `law`, in the words of `entry.Law`."""
    found = getattr(codec, "law", None)
    return found if isinstance(found, str) else None

"""The contract of a codec: two methods, and bytes that hold all that the receiver needs."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from testbed.records import Phase
from testbed.spec import Direction


class Slot(NamedTuple):
    """What both ends know about a message without sending it."""

    phase: Phase
    step: int
    """Optimiser steps done before this one."""
    microbatch: int
    samples: tuple[int, ...]
    """Ids of the sequences in the micro-batch, in order: an id names the same text in every epoch."""


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

    The ends share the payload and the slot, nothing else. State advances from decoded values only, so it is bit-identical
    at both ends; a method that raises leaves it as it was. Randomness comes from `keyed`, never from a global generator.
    """

    def encode(self, tensor: Tensor, slot: Slot) -> Payload:
        """A CPU tensor, fp32 or bf16, any shape and strides, as bytes. The tensor is left as it is.

        The payload belongs to the caller: the codec does not touch it again, so it stays valid while it is being sent.
        CodecError for a tensor that cannot be encoded.
        """
        ...

    def decode(self, payload: Payload, slot: Slot) -> Tensor:
        """A new contiguous fp32 tensor of the shape that was encoded; it belongs to the caller and shares no memory.

        CodecError for bytes that no encoder made for this slot, before memory is set aside on their word.
        """
        ...

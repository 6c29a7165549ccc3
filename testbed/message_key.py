"""Names of messages, shared by the two ends of a boundary: a message's key, its direction, and its side.

Schedule, codec, frame and records use these names, so this module imports nothing of the project, and no torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal["train", "evaluation", "uncompressed"]
"""An evaluation runs with the codec in place; uncompressed repeats it with fp32 at the boundaries."""
Direction = Literal["forward", "backward"]
"""Activations go forward, gradients backward."""
Side = Literal["upstream", "downstream"]
"""Position of a stage's neighbour: upstream is the previous stage, downstream the next one."""


class MessageKey(NamedTuple):
    """Identifies a message, together with a direction. Both ends derive it, so it is not sent."""

    phase: Phase
    step: int
    """Number of optimiser steps before this message; in an evaluation, of batches evaluated before it."""
    microbatch: int
    """Number of the micro-batch within its batch, also in an evaluation.

    A codec's state of a micro-batch is thus as old in an evaluation as in training.
    """
    samples: tuple[int, ...]
    """Ids of the sequences in the micro-batch, in order. An id stands for the same text in every epoch."""

    def __str__(self) -> str:
        return f"{self.phase} step {self.step}, micro-batch {self.microbatch}"


def outgoing(side: Side) -> Direction:
    """Return the direction of messages to the neighbour on that side: activations downstream, gradients upstream."""
    return "forward" if side == "downstream" else "backward"


def incoming(side: Side) -> Direction:
    """Return the direction of messages from the neighbour on that side."""
    return "backward" if side == "downstream" else "forward"

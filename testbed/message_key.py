"""What the two ends of a boundary call a message: its key, its direction, and the side it crosses.

Schedule, codec, frame and records all use these words, so this module imports nothing of the project, and no torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal["train", "evaluation", "uncompressed"]
"""An evaluation is made with the codec in place; uncompressed is the same once more with fp32 at the boundaries."""
Direction = Literal["forward", "backward"]
"""Activations go forward, gradients backward."""
Side = Literal["upstream", "downstream"]
"""Where a stage's neighbour is: the stage before it, or the stage after it."""


class MessageKey(NamedTuple):
    """Which message this is. Both ends know it without sending it. With a direction it names one message of a run."""

    phase: Phase
    step: int
    """The optimiser steps done before this message; where nothing is learned, the batches evaluated before it."""
    microbatch: int
    """The micro-batch's number within its batch, in an evaluation too.

    So what a codec remembers of a micro-batch is as old in an evaluation as it is in training.
    """
    samples: tuple[int, ...]
    """Ids of the sequences in the micro-batch, in order. An id names the same text in every epoch."""

    def __str__(self) -> str:
        return f"{self.phase} step {self.step}, micro-batch {self.microbatch}"


def outgoing(side: Side) -> Direction:
    """Return the direction of what goes to the neighbour on that side: activations downstream, gradients upstream."""
    return "forward" if side == "downstream" else "backward"


def incoming(side: Side) -> Direction:
    """Return the direction of what comes from the neighbour on that side."""
    return "backward" if side == "downstream" else "forward"

"""State of a difference codec, at both ends: each micro-batch's last decoded tensor and visit number.

The first message of a micro-batch has visit number 0, later ones 1 to 255 and then 1 again. Visit 0 is accepted in any
state and restarts the micro-batch; any other must follow the last one, so a lost or repeated message is a CodecError
and never causes silent drift.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from testbed.codecs.contract import MessageKey
from testbed.codecs.remembered import Fp32, MicrobatchKey, Rows
from testbed.errors import CodecError


class Memory(NamedTuple):
    """State of one micro-batch."""

    visit: Annotated[int, Field(ge=0, le=255)]
    """The last message's visit number."""
    value: Fp32
    """P: the shape of the tensor."""


def following(visit: int) -> int:
    """Return the visit number after this one."""
    return visit % 255 + 1


def check_follows(key: MessageKey, visit: int, last: int | None, what: str) -> None:
    """Raise CodecError unless `visit` comes after `last`. `what` names the micro-batch or example."""
    if last is None or visit != following(last):
        known = "nothing" if last is None else f"visit {last}"
        raise CodecError(
            f"cannot decode {key}: visit {visit} of {what} does not follow {known}; a message was lost, repeated or "
            "made by another encoder. Reset the encoder: its next message then starts over"
        )


class History(Rows[MicrobatchKey, Memory]):
    """One tensor per (phase, micro-batch)."""

    name = "memory"

    def __init__(self) -> None:
        super().__init__(dict[MicrobatchKey, Memory])

    def last(self, key: MessageKey) -> Memory | None:
        """Return the state of a message's micro-batch."""
        return self.rows.get((key.phase, key.microbatch))

    def follow(self, key: MessageKey, visit: int) -> Memory | None:
        """Return the state that a message with this visit number builds on; None for visit 0.

        CodecError if it does not follow.
        """
        if visit == 0:
            return None
        last = self.last(key)
        check_follows(key, visit, None if last is None else last.visit, "the micro-batch")
        return last

    def put(self, key: MessageKey, value: Tensor, visit: int) -> None:
        """Store a copy of `value`."""
        # In place if the shape is the same: with a new tensor per message, the allocator kept returning its pages.
        last = self.last(key)
        if last is not None and last.value.shape == value.shape:
            last.value.copy_(value)
            held = last.value
        else:
            held = value.clone()
        self.rows[key.phase, key.microbatch] = Memory(visit, held)

    def shared(self) -> dict[str, Tensor]:
        """Return the tensors, and the visit numbers as tensors."""
        return {
            **{f"{phase}/{part}": held.value for (phase, part), held in self.rows.items()},
            **{f"{phase}/{part}/visit": torch.tensor(held.visit) for (phase, part), held in self.rows.items()},
        }

"""What both ends of a difference codec hold: for each micro-batch, the last decoded tensor and a count of messages.

A message's visit number is 0 for the first of its micro-batch, then 1..255 and round again without 0. Visit 0 is
accepted in any state and starts the micro-batch anew; any other must follow the last one, so a lost or repeated message
is a CodecError and never a silent drift.
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
    """What is held for one micro-batch."""

    visit: Annotated[int, Field(ge=0, le=255)]
    """The last message's visit number."""
    value: Fp32
    """P: the shape of the tensor."""


def following(visit: int) -> int:
    """Return the visit number after this one."""
    return visit % 255 + 1


def check_follows(key: MessageKey, visit: int, last: int | None, what: str) -> None:
    """Raise CodecError unless `visit` comes after `last`. `what` names what the message is of."""
    if last is None or visit != following(last):
        known = "nothing" if last is None else f"visit {last}"
        raise CodecError(
            f"cannot decode {key}: visit {visit} of {what} does not follow {known}; a message was lost, repeated or "
            "made by another encoder. Reset the encoder: its next message then starts anew"
        )


class History(Rows[MicrobatchKey, Memory]):
    """One tensor per (phase, micro-batch)."""

    name = "memory"

    def __init__(self) -> None:
        super().__init__(dict[MicrobatchKey, Memory])

    def last(self, key: MessageKey) -> Memory | None:
        """Return what is held for a message's micro-batch."""
        return self.rows.get((key.phase, key.microbatch))

    def follow(self, key: MessageKey, visit: int) -> Memory | None:
        """Return what a message of this visit number builds on; None for visit 0.

        CodecError when it does not follow.
        """
        if visit == 0:
            return None
        last = self.last(key)
        check_follows(key, visit, None if last is None else last.visit, "the micro-batch")
        return last

    def put(self, key: MessageKey, value: Tensor, visit: int) -> None:
        """Hold a copy of `value`."""
        # In place where the shape is the same: a fresh tensor per message made the allocator give its pages back.
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

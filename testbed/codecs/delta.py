"""delta-int8: the difference from the previous step's tensor of the same micro-batch, as int8, in a closed loop.

Both ends hold P, what the receiver last decoded for the slot (zeros at first). D = X - P goes over as int8, and P becomes
P + decoded D at both ends, so errors do not add up. The header's visit byte counts the messages of a slot; it is there
for every codec, so a payload is exactly as long as int8's: the difference saves bytes only if an entropy coder follows.
Source: "activation delta" (Bedoya and Zhang), whose text leaves the loop open to reading; this is the closed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from testbed.codecs import framing, quantise
from testbed.codecs.base import Context, Payload, Slot
from testbed.errors import CodecError
from testbed.records import Phase


class Memory(NamedTuple):
    """What both ends hold for one slot."""

    value: Tensor
    """P: fp32, the shape of the tensor."""
    visit: int
    """Of the last message: 0 for the first, then 1..255 and round again without 0."""


class DeltaInt8:
    """Forward only in `table`: gradients of different steps have no resemblance to exploit.

    One P of the tensor's size per (phase, micro-batch) is kept at each end. A tensor of another shape than the slot's last
    starts the slot anew: visit 0 in the payload tells the decoder. Any other visit number must follow the last one, so a
    lost or repeated message is a CodecError and never a silent drift.
    """

    def __init__(self, context: Context) -> None:
        """Nothing in the context matters: nearest rounding draws no numbers."""
        self._memory: dict[tuple[Phase, int], Memory] = {}

    @property
    def memory(self) -> Mapping[tuple[Phase, int], Memory]:
        """By (phase, micro-batch); to be read only."""
        return MappingProxyType(self._memory)

    def encode(self, tensor: Tensor, slot: Slot) -> Payload:
        """The difference as a payload. CodecError names the slot when it is not finite."""
        x = framing.check_input(tensor).to(torch.float32)
        last = self._memory.get((slot.phase, slot.microbatch))
        if last is None or last.value.shape != x.shape:
            payload = quantise.write(x, slot, visit=0)
        else:
            payload = quantise.write(x - last.value, slot, visit=_next(last.visit))
        self._advance(payload, slot)
        return payload

    def decode(self, payload: Payload, slot: Slot) -> Tensor:
        """P after this message. CodecError when the payload does not follow the slot's last one."""
        return self._advance(payload, slot)

    def _advance(self, payload: Payload, slot: Slot) -> Tensor:
        """The one path by which either end moves on: from the bytes. A copy of the new P."""
        visit, value = quantise.read(payload)
        key = (slot.phase, slot.microbatch)
        last = self._memory.get(key)
        if visit == 0:
            self._memory[key] = Memory(value.clone(), visit)
            return value
        if last is None or last.value.shape != value.shape or _next(last.visit) != visit:
            known = "nothing" if last is None else f"visit {last.visit} of shape {tuple(last.value.shape)}"
            raise CodecError(
                f"cannot decode {slot}: visit {visit} of shape {tuple(value.shape)} does not follow {known}; "
                "a message was lost, repeated or made by another encoder"
            )
        # In place: a fresh tensor a message made the allocator give pages back and fetch them again.
        last.value.copy_(value.add_(last.value))
        self._memory[key] = Memory(last.value, visit)
        return value


def _next(visit: int) -> int:
    return visit % 255 + 1

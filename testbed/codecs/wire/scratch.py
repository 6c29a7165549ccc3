"""Memory for temporary tensors of a call, reused from one message to the next.

An fp32 tensor that is freed after every message is mapped again page by page for the next: 1.5 ms for 1,024 tokens of
width 768, where arithmetic takes 0.1 ms per pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from testbed.codecs.wire.header import CPU


class Scratch:
    """A buffer as large as the largest request. It belongs to one codec, whose calls do not overlap."""

    def __init__(self) -> None:
        self._flat = torch.empty(0)

    def of(self, shape: Sequence[int], device: torch.device = CPU) -> Tensor:
        """Return uninitialised contiguous fp32 memory, the same each time: it is valid until the next call."""
        count = math.prod(shape)
        if self._flat.numel() < count or self._flat.device.type != device.type:
            self._flat = torch.empty(count, device=device)
        return self._flat[:count].view(tuple(shape))

    def __deepcopy__(self, memo: object) -> Scratch:
        """Return an empty one: the contents need not be copied."""
        return Scratch()

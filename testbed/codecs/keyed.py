"""Random numbers that depend on nothing but what they are for: Philox, keyed by a hash of seed, place and slot.

The raw stream of a bit generator is fixed by numpy's compatibility policy (NEP 19), unlike that of `Generator`'s methods,
so the same key gives the same noise on every machine and in every version. Philox: Salmon et al., SC 2011.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from testbed import keyed
from testbed.codecs.base import Context, Slot


def key(context: Context, slot: Slot, purpose: str) -> int:
    """128 bits that differ whenever seed, boundary, direction, phase, step, micro-batch or purpose do."""
    text = f"{context.seed} {context.boundary} {context.direction} {slot.phase} {slot.step} {slot.microbatch} {purpose}"
    return keyed.key(text)


def words(context: Context, slot: Slot, count: int, purpose: str) -> npt.NDArray[np.uint32]:
    """`count` uniform 32-bit words, a fresh array."""
    raw = np.random.Philox(key=key(context, slot, purpose)).random_raw(-(-count // 2))
    return np.asarray(raw, dtype="<u8").view("<u4")[:count]


def uniform(context: Context, slot: Slot, count: int, purpose: str) -> Tensor:
    """`count` fp32 numbers (k + 1/2) / 65536 with k uniform in 0..65535: inside (0, 1), of mean 1/2 exactly.

    16 bits a number, because the generator is the dearest part of stochastic rounding; a value is then rounded up with
    the right probability to within 2**-17, which is fp32's own resolution of a number near 127.
    """
    words = np.random.Philox(key=key(context, slot, purpose)).random_raw(-(-count // 4))
    numbers = np.asarray(words, dtype="<u8").view("<u2")[:count].astype(np.float32)
    numbers += np.float32(0.5)
    numbers *= np.float32(2**-16)
    return torch.from_numpy(numbers)

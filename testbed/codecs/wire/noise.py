"""Random numbers that depend only on their purpose: SFC64, seeded with a hash of seed, boundary and message key.

The raw stream of a bit generator is fixed by numpy's compatibility policy (NEP 19), unlike that of `Generator`'s
methods, so the same key gives the same noise on every machine and in every version. SFC64 is numpy's fastest generator,
at 0.46 of Philox's time per word, and the generator is the most expensive part of stochastic rounding. SFC64:
Doty-Humphrey, PractRand.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from testbed import keyed
from testbed.codecs.contract import Context, MessageKey

_ALIKE = 2**20
"""How many numbers share their lower bits. Changing it changes the noise."""
_SEVEN_BITS = np.uint64(127)


def seed_of(context: Context, key: MessageKey, purpose: str) -> int:
    """Return 128 bits that differ whenever seed, boundary, direction, phase, step, micro-batch or purpose do."""
    text = f"{context.seed} {context.boundary} {context.direction} {key.phase} {key.step} {key.microbatch} {purpose}"
    return keyed.key(text)


def words(context: Context, key: MessageKey, count: int, purpose: str) -> npt.NDArray[np.uint32]:
    """Return `count` uniform 32-bit words, a fresh array."""
    return _raw(_stream(context, key, purpose), -(-count // 2)).view("<u4")[:count]


def uniform(context: Context, key: MessageKey, count: int, purpose: str) -> Tensor:
    """Return `count` fp32 numbers inside (0, 1), of mean 1/2, a fresh tensor; see `fill`."""
    out = torch.empty(count)
    fill(out, context, key, purpose, middle=0.5)
    return out


def fill(out: Tensor, context: Context, key: MessageKey, purpose: str, *, middle: float = 0.0) -> None:
    """Fill a flat contiguous fp32 tensor with numbers `middle` + k / 65536, each k uniform over the odd -32767..32767.

    They lie within 1/2 of the middle, and their mean is exactly the middle: a value plus such a number, rounded to
    nearest, is rounded up with the right probability to within 2**-16. The upper 8 bits of k are drawn for each number;
    the lower ones once for _ALIKE numbers, because drawing is the most expensive part. The distribution of each number
    is unaffected, and what two numbers share is below 2**-8.
    """
    stream = _stream(context, key, purpose)
    for part in torch.split(out, _ALIKE):
        raw = _raw(stream, 1 + -(-len(part) // 8))
        low = 2 * int(raw[0] & _SEVEN_BITS) + 1
        part.copy_(torch.from_numpy(raw[1:].view(np.int8)[: len(part)]))
        torch.add(torch.tensor(middle + low * 2.0**-16), part, alpha=2**-8, out=part)


def _stream(context: Context, key: MessageKey, purpose: str) -> np.random.SFC64:
    return np.random.SFC64(seed_of(context, key, purpose))


def _raw(stream: np.random.SFC64, count: int) -> npt.NDArray[np.uint64]:
    return np.asarray(stream.random_raw(count), dtype="<u8")

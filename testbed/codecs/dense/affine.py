"""Groups between their least and their largest value: value = offset + step * code, both numbers bf16, codes 0..top.

The offset is rounded down and the step up, so that the codes reach over the group whatever bf16 does to the two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import MessageKey
from testbed.codecs.dense import groups


class Affine(NamedTuple):
    """bf16, (groups, 1) each."""

    step: Tensor
    offset: Tensor


def fit(x: Tensor, top: int | Tensor, key: MessageKey) -> Affine:
    """Of groups x, fp32 (groups, size); `top` may be each group's own, (groups, 1).

    CodecError names the message key for what no two bf16 numbers reach over.
    """
    lowest, highest = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    offset = groups.bf16_down(lowest)
    base = offset.to(torch.float32)
    step = groups.bf16_up(((highest - base) / top).clamp_(groups.SMALLEST_SCALE, groups.LARGEST_BF16))
    # The lowest itself, too: NaN has another bit pattern in bf16, and might come out finite.
    groups.check_ends(lowest + highest + (base + top * step.to(torch.float32)), key)
    return Affine(step, offset)


def scaled_(x: Tensor, found: Affine) -> Tensor:
    """Groups as steps above their offset, in place: 0..top, and fractions."""
    return x.sub_(found.offset.to(torch.float32)).mul_(found.step.to(torch.float32).reciprocal_())


def apply(codes: Tensor, found: Affine) -> Tensor:
    """The values of fp32 codes (groups, size), in place."""
    return codes.mul_(found.step.to(torch.float32)).add_(found.offset.to(torch.float32))


def is_sound(found: Affine, top: int | Tensor) -> bool:
    """Whether these are numbers that `fit` makes: every code has a finite value."""
    step, offset = found.step.to(torch.float32), found.offset.to(torch.float32)
    # A NaN fails the comparison, an infinite offset or step the other test.
    return bool((step >= groups.SMALLEST_SCALE).all()) and bool((offset + top * step).isfinite().all())

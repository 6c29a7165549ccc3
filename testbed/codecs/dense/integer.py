"""Whole-number codes of 1, 2, 3, 4, 6 or 8 bits with a bf16 step per token or per group of channels, packed.

A value is step * code + offset. The grids differ in the offset (b bits, a group g, L = 2**b - 1):

symmetric   codes 0..L-1 (L is unused), step = max|g| / (L // 2), offset = -step * (L // 2): zero is zero.
midrise     codes 0..L, step = max|g| / (L / 2), offset = -step * L / 2: 2**b levels, none at zero. Zeros have step 0.
asymmetric  codes 0..L, offset = min(g) as bf16 rounded down, step = (max(g) - offset) / L: the offset is sent too.

'suited' is symmetric, and midrise for fewer than 8 bits rounded stochastically: with 2 bits, symmetric leaves one of
four levels unused, and has twice the variance. One bit has no symmetric grid: it is midrise, with levels -+mean|g| for
rounding to nearest (the least squared error), and -+max|g| for stochastic rounding.

Law: bounded by half a step for rounding to nearest; by a step for stochastic rounding, then unbiased; by max|g| +
mean|g| for one bit rounded to nearest. The step is the one on the wire, at most 2**-7 above the formula's. Bits per
element: b + 16/g for groups of g values, asymmetric b + 32/g. For gradients: QSGD (Alistarh et al., NeurIPS 2017),
scaled by a bucket's largest magnitude, is the symmetric grid with stochastic rounding and the bucket as group;
EF-SignSGD (Karimireddy et al., ICML 2019) is `ef(int1(nearest))`. Sources: symmetric and asymmetric absmax
quantisation; stochastic rounding between 2**b levels: Gupta et al., ICML 2015; one bit: after 1-bit SGD (Seide et al.,
Interspeech 2014), with one mean|g| for both signs, without error feedback.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.dense import groups
from testbed.codecs.dense.groups import Affine, Grouping
from testbed.codecs.wire import bits, noise
from testbed.codecs.wire.header import Shape, rows_of
from testbed.codecs.wire.message import Body, BodyCodec, Field, check_written
from testbed.codecs.wire.scratch import Scratch

Grid = Literal["suited", "symmetric", "midrise", "asymmetric"]
Rounding = Literal["auto", "nearest", "stochastic"]
_GRIDS = ("symmetric", "midrise", "asymmetric")
WIDTHS = (1, 2, 3, 4, 6, 8)
_FIRST_CODE = 20
"""Body code of the first of 18 pairs of a width and a grid."""


class Levels(NamedTuple):
    """The levels of a grid at a width."""

    bits: int
    grid: Literal["symmetric", "midrise", "asymmetric"]

    @property
    def centre(self) -> float:
        """The code of zero, possibly between two codes; 0 if the offset is sent."""
        return 0.0 if self.grid == "asymmetric" else self.top / 2

    @property
    def top(self) -> int:
        """The highest code in use."""
        return (1 << self.bits) - (2 if self.grid == "symmetric" else 1)

    @property
    def reach(self) -> float:
        """Steps from the centre to the farthest level."""
        return self.top - self.centre

    @property
    def code(self) -> int:
        """The body code of the grid and width."""
        return _FIRST_CODE + 3 * WIDTHS.index(self.bits) + _GRIDS.index(self.grid)


_SIGNS = Levels(1, "midrise")


class Integer(BodyCodec):
    """Codes of `bits` bits, a width set by subclasses."""

    on_device = True
    bits: ClassVar[int]

    def __init__(
        self,
        context: Context,
        group: int = 0,
        rounding: Rounding = "auto",
        grid: Grid = "suited",
        bits: int | None = None,
    ) -> None:
        """`group` channels share a step; 0 means a whole token. `bits` is the width for a class without one.

        rounding='auto' rounds activations to nearest, and gradients, whose errors add up over steps, stochastically.
        ValueError for any other width.
        """
        width = self.bits if bits is None else bits
        if width not in WIDTHS:
            raise ValueError(f"{width} bits: the supported widths are {', '.join(map(str, WIDTHS))}")
        self._context, self._group = context, group
        self._stochastic = rounding == "stochastic" or (rounding == "auto" and context.direction == "backward")
        self.law = "unbiased" if self._stochastic else "bounded"
        if grid == "suited":
            grid = "midrise" if self._stochastic and width < 8 else "symmetric"
        self._levels = Levels(width, "midrise" if width == 1 and grid == "symmetric" else grid)
        self.code = self._levels.code
        self._scratch, self._above = Scratch(), Scratch()

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return the steps, the offsets if sent, and the packed codes."""
        of = Grouping.of(shape, self._group)
        codes = Field(torch.uint8, bits.packed_bytes(of.values, self._levels.bits))
        return *[Field(torch.bfloat16, of.groups)] * (2 if self._levels.grid == "asymmetric" else 1), codes

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Write the fields. CodecError that names the message key if x holds NaN or infinity, or its range exceeds
        fp32's largest number.
        """
        steps, *offsets, packed = body
        of = Grouping.of(x.shape, self._group)
        x = of.split(x, edge=bool(offsets))
        if offsets:
            step, offset = Affine.fit(x, self._levels.top, key)
            offsets[0].copy_(offset.view(-1))
            x = torch.sub(x, offset.to(torch.float32), out=self._above.of(x.shape, x.device))
        else:
            groups.check_ends(ranges := groups.largest_magnitude(x), key)
            step = self._step(x, ranges, of)
        steps.copy_(step.view(-1))
        bits.pack(of.trim(self._round(x, step, key)), self._levels.bits, packed)

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return offset + step * code. CodecError for steps, offsets and codes that `fill` does not write."""
        steps, *offsets, packed = body
        of, levels = Grouping.of(shape, self._group), self._levels
        codes = bits.unpack(packed, levels.bits, of.values)
        step = steps.view(-1, 1)
        if offsets:
            affine = Affine(step, offsets[0].view(-1, 1))
            sound = affine.is_sound(levels.top)
        else:
            sound = groups.scales_are_sound(step[step != 0] if levels.grid == "midrise" else step, levels.reach)
        sound = sound and (levels.grid != "symmetric" or int(codes.amax()) <= levels.top)
        check_written(sound, key, "this step, offset or code")
        values = of.spread(codes).to(torch.float32)
        if offsets:
            affine.values_(values)
        else:
            values.sub_(levels.centre).mul_(step.to(torch.float32))
        return of.trim(values)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error of each value."""
        of, levels = Grouping.of(tensor.shape, self._group), self._levels
        x = of.split(tensor, edge=levels.grid == "asymmetric")
        if levels.grid == "asymmetric":
            step = Affine.fit(x, levels.top, MessageKey("train", 0, 0, ())).step
        else:
            step = self._step(x, groups.largest_magnitude(x), of)
        step, size = step.to(torch.float64), x.abs().to(torch.float64)
        if levels == _SIGNS and not self._stochastic:
            share = size + step / 2
        else:
            share = step.expand(x.shape) * (1.0 if self._stochastic else 0.5)
        # fp32 rounds x / step, the product and the sum with the offset; the ends are clipped beyond the largest step.
        clipped = (size - levels.reach * step).clamp_min(0) if levels.grid != "asymmetric" else 0.0
        return of.trim(share * (1 + 2**-14) + size * 2**-20 + clipped).view(tensor.shape)

    def _step(self, x: Tensor, ranges: Tensor, of: Grouping) -> Tensor:
        """Return the steps, bf16 (groups, 1), of a grid around zero for groups x with these largest magnitudes."""
        if self._levels == _SIGNS and not self._stochastic:
            ranges = _mean_magnitude(x, of)
        step = groups.scales(ranges, self._levels.reach)
        # No level is zero here, so a group of zeros gets step 0.
        return step.masked_fill_(ranges == 0, 0.0) if self._levels.grid == "midrise" else step

    def _round(self, x: Tensor, step: Tensor, key: MessageKey) -> Tensor:
        """Return the codes, uint8 (groups, size), of values relative to zero, or to their offset."""
        levels, scaled = self._levels, self._scratch.of(x.shape, x.device)
        # Truncation follows, so adding 1/2 rounds.
        middle = levels.centre + 0.5
        if self._stochastic:
            noise.fill(scaled.view(-1), self._context, key, f"int{levels.bits} rounding", middle=middle)
        else:
            scaled.fill_(middle)
        # The step of a group of zeros may be 0, which must not be a divisor.
        scaled.addcmul_(x, step.to(torch.float32).reciprocal_().nan_to_num_(posinf=0.0))
        return groups.to_codes(scaled.clamp_(0, levels.top))


def _mean_magnitude(x: Tensor, of: Grouping) -> Tensor:
    """Return mean|x| of each group without its padding, (groups, 1)."""
    # Divided first, because the sum of large numbers overflows.
    means = x.abs().div_(of.size).sum(-1, keepdim=True)
    if of.padding:
        means.view(of.rows, of.per_row)[:, -1] *= of.size / (of.size - of.padding)
    return means.clamp_max_(torch.finfo(torch.float32).max)


class Int1(Integer):
    """One bit."""

    bits = 1


class Int2(Integer):
    """Two bits: three levels symmetric, four otherwise."""

    bits = 2


class Int3(Integer):
    """Three bits."""

    bits = 3


class Int4(Integer):
    """Four bits."""

    bits = 4


class Int6(Integer):
    """Six bits."""

    bits = 6


class Int8(Integer):
    """Eight bits. With a step per token and a symmetric grid, steps are fp32, codes are signed, and ties round to even.

    That is 8 + 32/d bits per element. All results of int8 so far use this format, so it is kept.
    """

    bits = 8

    def __init__(self, context: Context, group: int = 0, rounding: Rounding = "auto", grid: Grid = "suited") -> None:
        """See `Integer`."""
        super().__init__(context, group, rounding, grid)
        self._signed = group == 0 and self._levels.grid == "symmetric"
        if self._signed:
            self.code = 3

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return fp32 steps and signed codes, or the fields of `Integer`."""
        if not self._signed:
            return super().fields(shape)
        rows, width = rows_of(shape)
        return Field(torch.float32, rows), Field(torch.int8, rows * width)

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Write the fields. CodecError names the message key where x holds NaN or infinity."""
        if not self._signed:
            super().fill(x, body, key)
            return
        steps, codes = body
        x = x.view(rows_of(x.shape))
        groups.check_ends(largest := groups.largest_magnitude(x), key)
        top = self._levels.reach
        step = largest.div_(top).clamp_(groups.SMALLEST_SCALE, groups.largest_scale(top, torch.float32))
        steps.copy_(step.view(-1))
        q = self._scratch.of(x.shape, x.device)
        if self._stochastic:
            noise.fill(q.view(-1), self._context, key, "int8 rounding")
            q.addcmul_(x, step.reciprocal_()).round_().clamp_(-top, top)
        else:
            torch.mul(x, step.reciprocal_(), out=q).round_()  # at most 127 * (1 + 2**-22), so clipping is unnecessary
        codes.view(q.shape).copy_(q)

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return step * code. CodecError for steps and codes that `fill` does not write."""
        if not self._signed:
            return super().values(body, shape, key)
        steps, codes = body
        top = self._levels.reach
        check_written(groups.scales_are_sound(steps, top) and int(codes.amin()) >= -top, key, "this step or code")
        return codes.view(len(steps), -1).to(torch.float32).mul_(steps.view(-1, 1))

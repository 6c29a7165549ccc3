"""Whole-number codes of 1, 2, 3, 4, 6 or 8 bits with a bf16 step per token or per group of channels, packed.

A value is step * code + offset. The grids differ in where the offset comes from (b bits, g a group, L = 2**b - 1):

symmetric   codes 0..L-1 (the last is not used), step = max|g| / (L // 2), offset = -step * (L // 2): zero is zero.
midrise     codes 0..L, step = max|g| / (L / 2), offset = -step * L / 2: 2**b levels about zero, none on it; zeros have step 0.
asymmetric  codes 0..L, offset = min(g) as bf16 rounded down, step = (max(g) - offset) / L: the offset is sent too.

'suited' is symmetric, and midrise for fewer than 8 bits rounded stochastically: of 2 bits' levels symmetric leaves one in four
unused, and the variance is twice as large. One bit has no symmetric grid: it is midrise, and the two levels are -+mean|g| where
the rounding is to the nearest (which is where their squared error is least), -+max|g| where it is stochastic.

Law: bounded by half a step rounded to the nearest, by a step stochastically, and then unbiased; the step is the one on the
wire, at most 2**-7 above the formula's; by max|g| + mean|g| for the one nearest bit. Bits per element: b + 16/g, asymmetric b +
32/g.
Sources: symmetric and asymmetric absmax quantisation; stochastic rounding between 2**b levels: Gupta et al., ICML 2015; one bit:
after 1-bit SGD (Seide et al., Interspeech 2014), with one mean|g| for both signs and without its error feedback.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.dense import affine, groups, int8
from testbed.codecs.wire import bits, header, noise
from testbed.codecs.wire.scratch import Scratch
from testbed.errors import CodecError

Grid = Literal["suited", "symmetric", "midrise", "asymmetric"]
Rounding = Literal["auto", "nearest", "stochastic"]
_GRIDS = ("symmetric", "midrise", "asymmetric")
WIDTHS = (1, 2, 3, 4, 6, 8)


class Levels(NamedTuple):
    """A grid of a width."""

    bits: int
    grid: Literal["symmetric", "midrise", "asymmetric"]

    @property
    def centre(self) -> float:
        """The code of zero, perhaps between two; 0 where the offset is sent."""
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
        """Of the body, for `framing`."""
        return header.INTEGER + 3 * WIDTHS.index(self.bits) + _GRIDS.index(self.grid)


_SIGNS = Levels(1, "midrise")


def is_stochastic(rounding: Rounding, context: Context) -> bool:
    """'auto' rounds activations to the nearest and gradients, whose errors add up over steps, stochastically."""
    return rounding == "stochastic" or (rounding == "auto" and context.direction == "backward")


def check_group(group: int) -> int:
    """ValueError for fewer than no channels."""
    if group < 0:
        raise ValueError(f"a group of {group} channels: it has at least 1, or is 0 for the whole token")
    return group


class Integer:
    """Codes of `bits` bits. Subclasses give the width."""

    bits: ClassVar[int]

    def __init__(
        self,
        context: Context,
        group: int = 0,
        rounding: Rounding = "auto",
        grid: Grid = "suited",
        bits: int | None = None,
    ) -> None:
        """`group` channels share a step; 0: a token's. `bits` stands for the class's width where there is none."""
        width = self.bits if bits is None else bits
        if width not in WIDTHS:
            raise ValueError(f"{width} bits: there are codes of {', '.join(map(str, WIDTHS))}")
        self._group = check_group(group)
        self._context = context
        self._stochastic = is_stochastic(rounding, context)
        self.law = "unbiased" if self._stochastic else "bounded"
        if grid == "suited":
            grid = "midrise" if self._stochastic and width < 8 else "symmetric"
        self._levels = Levels(width, "midrise" if width == 1 and grid == "symmetric" else grid)
        self._scratch, self._above = Scratch(), Scratch()

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """CodecError names the message key where the tensor holds NaN or infinity, or reaches beyond fp32's largest number."""
        tensor = header.check_input(tensor)
        shape = tuple(tensor.shape)
        of = groups.layout(shape, self._group)
        payload, body = header.allocate(self._levels.code, shape, self._body_bytes(shape))
        if of.rows == 0:
            return payload
        x = groups.split(tensor.to(torch.float32), of, edge=self._levels.grid == "asymmetric")
        head = 2 * of.number
        if self._levels.grid == "asymmetric":
            step, offset = affine.fit(x, self._levels.top, key)
            body[head : 2 * head].view(torch.bfloat16).copy_(offset.view(-1))
            x = torch.sub(x, offset.to(torch.float32), out=self._above.of(x.shape))
        else:
            step = self._step(x, of, key)
        body[:head].view(torch.bfloat16).copy_(step.view(-1))
        codes = groups.trim(self._round(x, step, key), of)
        bits.pack(codes, self._levels.bits, body[self._numbers * head :])
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """CodecError for bytes that `encode` does not write."""
        levels = self._levels
        opened = header.open_payload(payload, levels.code, self._body_bytes)
        of = groups.layout(opened.shape, self._group)
        if of.rows == 0:
            return torch.empty(opened.shape, dtype=torch.float32)
        head = 2 * of.number
        step = header.as_tensor(opened.body, torch.bfloat16, of.number).view(-1, 1)
        size = bits.packed_bytes(of.values, levels.bits)
        packed = header.as_tensor(opened.body, torch.uint8, size, offset=self._numbers * head)
        codes = bits.unpack(packed, levels.bits, of.values)
        if levels.grid == "asymmetric":
            found = affine.Affine(
                step, header.as_tensor(opened.body, torch.bfloat16, of.number, offset=head).view(-1, 1)
            )
            sound = affine.is_sound(found, levels.top)
        else:
            used = step[step != 0] if levels.grid == "midrise" else step
            sound = groups.scales_are_sound(used, levels.reach)
        if opened.visit or not sound or (levels.grid == "symmetric" and int(codes.amax()) > levels.top):
            raise CodecError(
                f"cannot decode {key}: it holds a step, an offset, a code or a visit number that no encoder writes"
            )
        values = groups.spread(codes, of).to(torch.float32)
        if levels.grid == "asymmetric":
            affine.apply(values, found)
        else:
            values.sub_(levels.centre).mul_(step.to(torch.float32))
        return groups.trim(values, of).view(opened.shape)

    def bound(self, tensor: Tensor) -> Tensor:
        """The largest error of each value."""
        shape, levels = tuple(tensor.shape), self._levels
        of = groups.layout(shape, self._group)
        if of.rows == 0:
            return torch.zeros(shape)
        x = groups.split(tensor.detach().to(torch.float32), of, edge=levels.grid == "asymmetric")
        key = MessageKey("train", 0, 0, ())
        step = affine.fit(x, levels.top, key).step if levels.grid == "asymmetric" else self._step(x, of, key)
        step, size = step.to(torch.float64), x.abs().to(torch.float64)
        if levels == _SIGNS and not self._stochastic:
            share = size + step / 2
        else:
            share = step.expand(x.shape) * (1.0 if self._stochastic else 0.5)
        # fp32 rounds x / step, the product and the sum with the offset; beyond the largest step the ends are clipped.
        clipped = (size - levels.reach * step).clamp_min(0) if levels.grid != "asymmetric" else 0.0
        return groups.trim(share * (1 + 2**-14) + size * 2**-20 + clipped, of).view(shape)

    def payload_bytes(self, shape: header.Shape) -> int:
        """Header, steps, offsets, codes."""
        return header.header_bytes(len(shape)) + self._body_bytes(shape)

    def _body_bytes(self, shape: header.Shape) -> int:
        of = groups.layout(shape, self._group)
        return 2 * self._numbers * of.number + bits.packed_bytes(of.values, self._levels.bits)

    @property
    def _numbers(self) -> int:
        """bf16 numbers that go over with each group."""
        return 2 if self._levels.grid == "asymmetric" else 1

    def _step(self, x: Tensor, of: groups.Layout, key: MessageKey) -> Tensor:
        """bf16 (groups, 1), of a grid about zero."""
        ranges = groups.largest_magnitude(x)
        groups.check_ends(ranges, key)
        if self._levels == _SIGNS and not self._stochastic:
            ranges = _mean_magnitude(x, of)
        step = groups.scales(ranges, self._levels.reach)
        # No level is zero here, so a group of zeros gets no step at all.
        return step.masked_fill_(ranges == 0, 0.0) if self._levels.grid == "midrise" else step

    def _round(self, x: Tensor, step: Tensor, key: MessageKey) -> Tensor:
        """Codes, uint8 (groups, size), of values about zero, or above their offset."""
        levels, scaled = self._levels, self._scratch.of(x.shape)
        # What follows cuts off the fraction, so that 1/2 makes it round.
        middle = levels.centre + 0.5
        if self._stochastic:
            noise.fill(scaled.view(-1), self._context, key, f"int{levels.bits} rounding", middle=middle)
        else:
            scaled.fill_(middle)
        # The step of a group of zeros may be 0: then it is not divided by.
        scaled.addcmul_(x, step.to(torch.float32).reciprocal_().nan_to_num_(posinf=0.0))
        return groups.to_codes(scaled.clamp_(0, levels.top))


def _mean_magnitude(x: Tensor, of: groups.Layout) -> Tensor:
    """mean|x| of each group without its padding, (groups, 1)."""
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
    """Eight bits. A symmetric grid per token has fp32 steps and the bytes of `quantise`."""

    bits = 8

    def __init__(self, context: Context, group: int = 0, rounding: Rounding = "auto", grid: Grid = "suited") -> None:
        """See `Integer`."""
        super().__init__(context, group, rounding, grid)
        self._rows: int8.Int8Nearest | int8.Int8Stochastic | None = None
        if group == 0 and self._levels.grid == "symmetric":
            self._rows = int8.Int8Stochastic(context) if self._stochastic else int8.Int8Nearest(context)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """See `Integer` and `quantise`."""
        return super().encode(tensor, key) if self._rows is None else self._rows.encode(tensor, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """See `Integer` and `quantise`."""
        return super().decode(payload, key) if self._rows is None else self._rows.decode(payload, key)

    def _body_bytes(self, shape: header.Shape) -> int:
        return super()._body_bytes(shape) if self._rows is None else int8.body_bytes(shape)

"""Whole-number codes: packing, groups, the three grids, bytes, laws."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from ends import BACKWARD, FORWARD, KEY
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from testbed.codecs.check.tensors import normal
from testbed.codecs.contract import Codec, MessageKey
from testbed.codecs.dense import groups
from testbed.codecs.make import make
from testbed.codecs.wire import bits, noise
from testbed.errors import CodecError

WIDTHS = (1, 2, 3, 4, 6, 8)
GRIDS = ("symmetric", "midrise", "asymmetric")


def sent(codec: Codec, x: Tensor, key: MessageKey = KEY) -> Tensor:
    return codec.decode(bytes(codec.encode(x, key)), key)


# ------------------------------------------------------------------ packing
@given(width=st.integers(0, 8), count=st.integers(0, 300), seed=st.integers(0, 2**31))
@settings(max_examples=100, deadline=None)
def test_packing_keeps_every_code(width: int, count: int, seed: int) -> None:
    codes = torch.randint(0, 1 << width, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = torch.empty(bits.packed_bytes(count, width), dtype=torch.uint8)
    bits.pack(codes, width, packed)
    assert torch.equal(bits.unpack(packed, width, count), codes)


@given(width=st.integers(1, 8), count=st.integers(0, 10_000))
def test_packing_wastes_less_than_a_byte_a_plane(width: int, count: int) -> None:
    size = bits.packed_bytes(count, width)
    assert 0 <= size - count * width / 8 < width.bit_count()
    assert size == count * width // 8 if count % 8 == 0 else True


# ------------------------------------------------------------------ groups
@given(rows=st.integers(1, 6), width=st.integers(1, 70), size=st.integers(0, 80), edge=st.booleans())
@settings(deadline=None)
def test_groups_come_apart_and_together(rows: int, width: int, size: int, edge: bool) -> None:
    x = normal(rows, width)
    of = groups.Grouping.of((rows, width), size)
    grouped = of.split(x, edge=edge)
    assert grouped.shape == (of.groups, of.size)
    assert torch.equal(of.trim(grouped).view(rows, width), x)
    assert torch.equal(of.trim(of.spread(x.view(-1))).view(rows, width), x)
    if edge:
        assert torch.equal(grouped.amax(), x.amax())
        assert torch.equal(grouped.amin(), x.amin())


@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_bf16_is_rounded_to_the_side_asked_for(number: float) -> None:
    x = torch.tensor([number])
    away, down = groups.bf16_up(x).double().item(), groups.bf16_down(x).double().item()
    assert abs(away) >= abs(number)
    assert down <= number
    assert abs(away - number) <= max(abs(number) * 2**-7, 1e-40)
    assert number - down <= max(abs(number) * 2**-7, 1e-40)


def test_the_largest_fp32_scale_is_the_largest() -> None:
    largest = torch.tensor(groups.largest_scale(127, torch.float32))
    assert torch.isfinite(largest * 127)
    assert torch.isinf(torch.nextafter(largest, torch.tensor(float("inf"))) * 127)


@pytest.mark.parametrize("levels", [1, 3, 7, 31, 127, 0.5, 1.5, 448.0])
def test_the_largest_scale_is_the_largest_bf16_number_whose_reach_is_finite(levels: float) -> None:
    largest = groups.largest_scale(levels)
    assert torch.tensor(largest).to(torch.bfloat16).float().item() == largest
    assert math.isfinite(torch.tensor(largest).mul(levels).item())
    following = (torch.tensor([largest]).to(torch.bfloat16).view(torch.int16) + 1).view(torch.bfloat16).float()
    assert not torch.isfinite(following).all() or not torch.isfinite(following * levels).all()


# ------------------------------------------------------------------ bytes
# ------------------------------------------------------------------ laws
@pytest.mark.slow
@given(
    row=st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=20),
    number=st.sampled_from(WIDTHS),
    grid=st.sampled_from(GRIDS),
    group=st.sampled_from([0, 4, 8]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
)
@settings(max_examples=200, deadline=None)
def test_no_value_is_wrong_by_more_than_its_share_of_the_range(
    row: list[float], number: int, grid: str, group: int, rounding: str
) -> None:
    """From the definition, not from the codec's own `bound`: half a step or a step of a range that bf16 may widen."""
    x = torch.tensor([row])
    decoded = sent(make(f"int{number}({group}, {grid}, {rounding})", FORWARD), x)
    for part, wrong in zip(
        x[0].split(group or len(row)), (decoded - x)[0].double().abs().split(group or len(row)), strict=True
    ):
        wide = part.double()
        largest, spread = wide.abs().max(), wide.max() - wide.min()
        if grid == "asymmetric":
            step = (spread + wide.min().abs() * 2**-7) / (2**number - 1)
        elif grid == "midrise" or number == 1:
            step = 2 * largest / (2**number - 1)
        else:
            step = largest / (2 ** (number - 1) - 1)
        allowed = step * (1 + 2**-6) * (1.0 if rounding == "stochastic" else 0.5) + largest * 2**-19 + 1e-37
        if number == 1 and grid != "asymmetric" and rounding == "nearest":
            allowed = largest + wide.abs().mean() * (1 + 2**-6) + 1e-37
        assert (wrong <= allowed).all()


def test_few_bits_rounded_stochastically_use_all_their_levels() -> None:
    x = normal(256, 64)
    errors = {}
    for grid in ("suited", "symmetric"):
        codec = make(f"int2(64, grid={grid})", BACKWARD)
        decoded = sent(codec, x)
        errors[grid] = float((decoded - x).norm() / x.norm())
        levels = (decoded / decoded.abs().amax(-1, keepdim=True)).round(decimals=2).unique()
        assert len(levels) == (4 if grid == "suited" else 3)
    assert errors["suited"] < 0.8 * errors["symmetric"]
    for text in ("int2(64)", "int4", "int8(64)"):
        context = FORWARD if text != "int8(64)" else BACKWARD
        explicit = make(text[:-1] + ", symmetric)" if text.endswith(")") else f"{text}(symmetric)", context)
        assert bytes(make(text, context).encode(x, KEY)) == bytes(explicit.encode(x, KEY))


def test_gradients_are_rounded_stochastically_and_activations_are_not() -> None:
    x = normal(4, 64)
    for codec in ("int4(group=32)", "int8(group=32)", "int1"):
        later = MessageKey("train", 1, 0, ())
        assert torch.equal(sent(make(codec, FORWARD), x), sent(make(codec, FORWARD), x, later))
        assert not torch.equal(sent(make(codec, BACKWARD), x), sent(make(codec, BACKWARD), x, later))


@pytest.mark.parametrize("number", [2, 3, 4, 6, 8])
def test_levels_are_kept(number: int) -> None:
    top = 2 ** (number - 1) - 1
    x = torch.arange(-top, top + 1).float().view(1, -1) * 0.25
    assert torch.equal(sent(make(f"int{number}(group=1000)", FORWARD), x), x)
    shifted = torch.arange(2**number).float().view(1, -1) * 0.25 - 0.5
    assert torch.equal(sent(make(f"int{number}(asymmetric)", FORWARD), shifted), shifted)


def test_one_bit_sends_the_sign_and_the_mean_magnitude() -> None:
    x = normal(3, 50)
    decoded = sent(make("int1(group=32)", FORWARD), x)
    for part in (slice(0, 32), slice(32, 50)):
        mean = x[:, part].abs().mean(-1, keepdim=True)
        assert torch.equal(decoded[:, part].sign(), x[:, part].sign())
        assert ((decoded[:, part].abs() - mean).abs() <= mean * 2**-7).all()


@pytest.mark.parametrize(
    "text", ["int1(group=2)", "int1(2, stochastic)", "int3(2, midrise)", "int3(2, midrise, stochastic)"]
)
def test_zeros_stay_zeros_where_no_level_is_zero(text: str) -> None:
    decoded = sent(make(text, FORWARD), torch.tensor([[0.0, -0.0, 1.0, -1.0, 0.0, 0.0]]))
    assert (decoded != 0).tolist() == [[False, False, True, True, False, False]]


def test_plain_int8_has_the_bytes_it_always_had() -> None:
    x = normal(5, 37)
    step = x.abs().amax(-1, keepdim=True) / 127
    drawn = noise.uniform(BACKWARD, KEY, x.numel(), "int8 rounding").view(x.shape) - 0.5
    for context, added in ((FORWARD, 0.0), (BACKWARD, drawn)):
        codes = (x * step.reciprocal() + added).round().to(torch.int8)
        expected = struct.pack("<4B2I", 3, 2, 0, 0, 5, 37) + step.numpy().tobytes() + codes.numpy().tobytes()
        assert bytes(make("int8", context).encode(x, KEY)) == expected
        assert bytes(make("delta-int8", context).encode(x, KEY)) == expected
    assert bytes(make("int8(stochastic)", BACKWARD).encode(x, KEY)) == bytes(make("int8", BACKWARD).encode(x, KEY))


def test_a_code_that_no_encoder_writes_is_refused() -> None:
    codec = make("int4", FORWARD)
    payload = bytearray(codec.encode(torch.zeros(1, 4), KEY))
    payload[-1] |= 0x0F
    with pytest.raises(CodecError, match="step 0"):
        codec.decode(payload, KEY)


@pytest.mark.parametrize("scale", [0x0000, 0x7F80, 0x7FC0, 0xBF80])  # zero, infinity, NaN, -1
def test_a_step_that_no_encoder_writes_is_refused(scale: int) -> None:
    for text in (
        "int4",
        "int4(asymmetric)",
        "fp8",
        "acsgd",
        "tah",
        *(["int1"] if scale else []),
    ):  # 0: a group of zeros
        codec = make(text, FORWARD)
        payload = bytearray(codec.encode(normal(1, 64), KEY))
        payload[12:14] = scale.to_bytes(2, "little")
        with pytest.raises(CodecError):
            codec.decode(payload, KEY)


def test_a_group_beyond_the_largest_number_is_refused_by_name() -> None:
    x = torch.tensor([[3.4e38, -3.4e38]])
    with pytest.raises(CodecError, match="micro-batch 0"):
        make("int4(asymmetric)", FORWARD).encode(x, KEY)
    assert sent(make("int4", FORWARD), x).isfinite().all()

"""fp16, fp8, blockwise-8, acsgd, uniform, hadamard(...), dct(...) and haar(...): what is special about each."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import scipy.fft
import torch
from ends import BACKWARD, FORWARD, KEY
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from testbed.codecs.check.tensors import normal
from testbed.codecs.contract import Context, Stateful
from testbed.codecs.dense import blockwise, cosine, haar, hadamard
from testbed.codecs.make import make
from testbed.codecs.wrap import bound_of, capability
from testbed.errors import CodecError, SpecError


def sent(text: str, x: Tensor, context: Context = FORWARD) -> Tensor:
    return make(text, context).decode(bytes(make(text, context).encode(x, KEY)), KEY)


@pytest.mark.parametrize(
    "text",
    [
        "hadamard(int8)",
        "hadamard(bf16)",
        "hadamard(ef(int4))",
        "tah",
        "int1(asymmetric)",
        "int8(asymmetric)",
        "dct(int8)",
    ],
)
@pytest.mark.parametrize("row", [[3e38, *[0.0] * 63], [-3e38, 3e38], [2e38] * 64, [1.5e38, 2e38]], ids=str)
def test_what_an_encoder_takes_its_decoder_takes_and_keeps_within_the_bound(text: str, row: list[float]) -> None:
    x = torch.tensor([row] * 4)
    codec, other = make(text, FORWARD), make(text, FORWARD)
    payload = b""
    with contextlib.suppress(CodecError):
        payload = bytes(codec.encode(x, KEY))
    if not payload:
        assert row[0] != row[-1] or "asymmetric" not in text, "all equal: nothing overflows"
    else:
        assert bool(
            ((other.decode(payload, KEY).double() - x.double()).abs() <= bound_of(make(text, FORWARD), x)).all()
        )


# ------------------------------------------------------------------ floats
def test_fp16_and_bf16_are_the_cast_and_fp16_refuses_what_would_become_infinity() -> None:
    x = torch.cat(
        [normal(3, 9), torch.tensor([[65504.0, -65504.0, 1e-7, 6e-8, 1e-9, 0.0, -0.0, float("inf"), float("nan")]])]
    )
    for text, kind in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        assert torch.equal(sent(text, x).nan_to_num(7), x.to(kind).float().nan_to_num(7))
    with pytest.raises(CodecError, match=r"step 0.*65504"):
        make("fp16", FORWARD).encode(torch.tensor([float("inf"), 65520.0]), KEY)


def test_fp8_has_its_direction_s_format_unless_told_otherwise() -> None:
    x = normal(4, 64)
    assert torch.equal(sent("fp8", x), sent("fp8(e4m3)", x, BACKWARD))
    assert torch.equal(sent("fp8", x, BACKWARD), sent("fp8(e5m2)", x))
    finer, coarser = ((sent(f"fp8({f})", x) - x).norm() for f in ("e4m3", "e5m2"))
    assert finer < coarser


@pytest.mark.parametrize(("name", "kind"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_reads_every_code_as_torch_does(name: str, kind: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(kind).float()
    x = values[values.isfinite()].view(1, -1)
    # The largest is exactly a power of two times the format's largest, so the scale is exact and nothing is rounded.
    for power in (-100, 0, 20):
        assert torch.equal(sent(f"fp8({name})", x * 2.0**power), x * 2.0**power)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20), st.sampled_from(["e4m3", "e5m2"]))
@settings(max_examples=100, deadline=None)
def test_fp8_errors_are_relative(row: list[float], name: str) -> None:
    x = torch.tensor([row]).double()
    wrong = (sent(f"fp8({name})", x.float()).double() - x).abs()
    share, floor = (2**-4, 2**-10 / 448) if name == "e4m3" else (2**-3, 2**-17 / 57344)
    assert (wrong <= (1 + 2**-6) * torch.maximum(share * x.abs(), floor * x.abs().max()) + 1e-37).all()


# ------------------------------------------------------------------ blockwise
def test_the_dynamic_map() -> None:
    found = blockwise.dynamic_map()
    assert len(set(found.tolist())) == 256
    assert {0.0, 1.0} <= set(found.tolist())
    assert np.array_equal(np.sort(-found[(found != 0) & (found != 1)]), found[(found != 0) & (found != 1)])
    assert np.diff(found).max() == pytest.approx(2 * blockwise.HALF_GAP)
    # 2**i numbers of each sign in the decade that ends with 10**(i - 6)
    for i in range(7):
        assert ((found > 10.0 ** (i - 7)) & (found < 10.0 ** (i - 6))).sum() == 2**i


def test_every_value_goes_to_the_nearest_of_the_map() -> None:
    x = torch.cat(
        [normal(20_000).tanh(), 10.0 ** (-9 * torch.rand(20_000, generator=torch.Generator().manual_seed(1)))]
    )
    x[0] = 1.0  # the absmax, so that nothing is rescaled
    decoded = sent("blockwise-8(block=40000)", x).double().numpy()
    wide, found = x.double().numpy(), blockwise.dynamic_map()
    nearest = np.abs(wide[:, None] - found[None, :]).min(1)
    assert np.all(np.abs(decoded - wide) <= nearest + 1e-7 * np.abs(wide) + 1e-12)


def test_blocks_run_over_the_ends_of_rows() -> None:
    x = torch.ones(3, 5)
    x[1, 2] = 100.0  # value 7
    decoded = sent("blockwise-8(block=4)", x)
    assert ((decoded - 1).abs() > 1e-3).view(-1).nonzero().view(-1).tolist() == [4, 5, 6, 7]
    assert memoryview(make("blockwise-8(block=4)", FORWARD).encode(x, KEY)).nbytes == 12 + 4 * 4 + 15


# ------------------------------------------------------------------ fixed point
@given(rows=st.integers(1, 20), width=st.integers(1, 20), number=st.integers(2, 8), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_a_channel_has_its_own_scale(rows: int, width: int, number: int, seed: int) -> None:
    x = normal(rows, width, seed=seed) * 10.0 ** (torch.arange(width) % 11 - 8.0)
    payload = bytes(make(f"acsgd({number})", FORWARD).encode(x, KEY))
    planes = sum(-(-rows * width * part // 8) for part in (1, 2, 4, 8) if number & part)
    assert len(payload) == 12 + 2 * width + planes
    decoded = make(f"acsgd({number})", FORWARD).decode(payload, KEY)
    step = x.abs().amax(0) / 2 ** (number - 1)
    clipped = (x - step * (2 ** (number - 1) - 1)).clamp_min(0)
    assert ((decoded - x).abs() <= torch.maximum(step / 2 * (1 + 2**-7), clipped) * (1 + 1e-4) + 1e-30).all()


def test_fixed_point_clips_the_positive_extreme_only() -> None:
    x = torch.tensor([[1.0, -1.0], [0.0, 0.0]])
    assert sent("acsgd(4)", x).tolist() == [[0.875, -1.0], [0.0, 0.0]]


# ------------------------------------------------------------------ rotation
@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 200), st.sampled_from([1, 2, 64, 128]))
@settings(max_examples=60, deadline=None)
def test_rotating_twice_is_the_identity(shape: list[int], width: int, size: int) -> None:
    x = normal(*shape, width)
    before = x.clone()
    rotated = hadamard.rotate(x, size)
    assert torch.equal(x, before)
    assert torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert torch.allclose(hadamard.rotate(rotated, size), x, atol=1e-5)


def test_rotation_spreads_an_outlier_and_adds_no_bytes() -> None:
    x = normal(64, 256)
    x[:, 7::64] = 60.0
    plain, rotated = ((sent(text, x) - x).norm() for text in ("int4(group=64)", "hadamard(int4(group=64))"))
    assert rotated < plain / 2
    sizes = {
        memoryview(make(text, FORWARD).encode(x, KEY)).nbytes for text in ("int4(group=64)", "hadamard(int4(group=64))")
    }
    assert len(sizes) == 1


def test_a_rotation_that_overflows_leaves_what_the_inner_codec_remembers() -> None:
    receiver = make("hadamard(delta-int8)", FORWARD)
    memory = capability(receiver, Stateful)
    receiver.decode(bytes(make("delta-int8", FORWARD).encode(normal(2, 64), KEY)), KEY)
    before = {name: value.clone() for name, value in memory.shared().items()}
    with pytest.raises(CodecError, match="rotation"):
        receiver.decode(bytes(make("delta-int8", FORWARD).encode(torch.full((2, 64), 3e38), KEY)), KEY)
    assert before
    assert all(torch.equal(value, before[name]) for name, value in memory.shared().items())


@pytest.mark.parametrize(
    ("text", "context", "wrong"),
    [
        ("hadamard(int4, 48)", FORWARD, "power of two"),
        ("tah(tile=48)", FORWARD, "power of two"),
        ("tah(bits=5)", BACKWARD, "5 bits"),
        ("acsgd(1)", FORWARD, "2 to 8"),
    ],
)
def test_settings_within_their_range_that_make_no_sense(text: str, context: Context, wrong: str) -> None:
    with pytest.raises(SpecError, match=wrong):
        make(text, context)


# ------------------------------------------------------------------ cosines
@given(
    shape=st.lists(st.integers(1, 21), min_size=1, max_size=3),
    size=st.sampled_from([1, 4, 8, 16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_a_cosine_transform_keeps_lengths_and_comes_back(shape: list[int], size: int, seed: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    transform = cosine.Transform(size)
    coefficients = transform.of(x, torch.empty(shape))
    assert float(coefficients.norm()) == pytest.approx(float(x.norm()), rel=1e-4)
    assert torch.allclose(transform.inverse(coefficients.clone()), x, atol=1e-5)


def test_a_block_of_cosines_is_scipys() -> None:
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    blocks = cosine.Transform(8).of(x, torch.empty(x.shape)).view(2, 3, 8, 8)
    wanted = scipy.fft.dctn(x.numpy().reshape(2, 8, 3, 8).transpose(0, 2, 1, 3), axes=(2, 3), norm="ortho")
    assert torch.allclose(blocks, torch.from_numpy(wanted), atol=1e-5)


# ------------------------------------------------------------------ haar
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 13])
def test_haar_is_orthonormal_for_any_number_of_tokens(tokens: int) -> None:
    roots, details = haar.transform(torch.eye(tokens))
    rows = torch.cat([roots[:, None], details], dim=1)
    assert torch.allclose(rows.T @ rows, torch.eye(tokens), atol=1e-5)
    assert torch.allclose(haar.inverse(roots, details), torch.eye(tokens), atol=1e-5)
    # The root is the channel's sum, scaled, and of a constant channel nothing else is left.
    assert torch.allclose(roots, torch.full((tokens,), tokens**-0.5))
    assert torch.allclose(haar.transform(torch.ones(tokens, 2))[1], torch.zeros(2, tokens - 1), atol=1e-6)


def test_with_one_step_haar_saves_bytes_where_neighbours_are_alike_and_nowhere_else() -> None:
    white = normal(256, 64)
    step = "uniform(0.1, absolute)"
    for x, least, most in ((white.cumsum(0), 0.0, 0.8), (white, 0.98, 1.1)):
        lengths = [len(bytes(make(f"entropy({codec})", FORWARD).encode(x, KEY))) for codec in (step, f"haar({step})")]
        assert least < lengths[1] / lengths[0] < most
    assert float((sent(f"haar({step})", white) - white).norm()) <= 0.05 * white.numel() ** 0.5  # half a step at most


@pytest.mark.parametrize(("x", "bits"), [(torch.linspace(-127, 127, 255), 8), (torch.linspace(-3e4, 3e4, 601), 16)])
def test_uniform_takes_one_byte_for_each_code_up_to_127_steps(x: Tensor, bits: int) -> None:
    payload = make("uniform(1.0, absolute)", FORWARD).encode(x, KEY)
    assert memoryview(payload).nbytes == 16 + x.numel() * bits // 8
    assert torch.equal(sent("uniform(1.0, absolute)", x), x)  # whole numbers are whole steps

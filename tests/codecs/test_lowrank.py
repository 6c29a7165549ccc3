"""PowerSGD's approximation: exact where the rank suffices, a projection where not, near the best one once warm."""

from __future__ import annotations

import pytest
import torch
from ends import FORWARD, key_at
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from testbed.codecs.check.tensors import normal
from testbed.codecs.low_rank import PowerSGD
from testbed.codecs.make import make
from testbed.codecs.wire.header import header_bytes
from testbed.errors import CodecError


def decaying(rows: int, width: int, seed: int = 0) -> Tensor:
    """A matrix whose singular values fall off as 1, 1/2, 1/3 ..."""
    u, _, v = torch.linalg.svd(normal(rows, width, seed=seed), full_matrices=False)
    return (u / torch.arange(1, u.shape[1] + 1)) @ v


def relative(found: Tensor, x: Tensor) -> float:
    return float((found.double() - x.double()).norm() / x.double().norm())


@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 40),
    rank=st.integers(1, 6),
    power=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_a_matrix_of_no_higher_rank_comes_through(rows: int, width: int, rank: int, power: int, seed: int) -> None:
    x = normal(rows, rank, seed=seed) @ normal(rank, width, seed=seed + 1) * 10.0**power
    sender, receiver = PowerSGD(FORWARD, rank=rank, values="fp32"), PowerSGD(FORWARD, rank=rank, values="fp32")
    assert relative(receiver.decode(bytes(sender.encode(x, key_at(seed))), key_at(seed)), x) < 1e-3


def test_a_warm_start_comes_to_the_best_approximation() -> None:
    x = decaying(64, 48)
    best = float(torch.linalg.svdvals(x)[4:].square().sum().sqrt() / x.norm())
    warm, cold = make("powersgd(4, fp32)", FORWARD), make("powersgd(4, fp32, cold)", FORWARD)
    errors = {
        name: [relative(codec.decode(bytes(codec.encode(x, key_at(step))), key_at(step)), x) for step in range(20)]
        for name, codec in (("warm", warm), ("cold", cold))
    }
    assert errors["warm"][0] == errors["cold"][0] > 1.02 * best
    assert (1 - 1e-5) * best <= errors["warm"][-1] < 1.005 * best
    assert min(errors["cold"]) > errors["warm"][-1]


def test_zeros_leave_no_trace() -> None:
    x = decaying(16, 12)
    codec = make("powersgd(3)", FORWARD)
    for step in range(3):
        zeros = codec.decode(bytes(codec.encode(torch.zeros(16, 12), key_at(step))), key_at(step))
        assert torch.equal(zeros, torch.zeros(16, 12))
    assert bytes(codec.encode(x, key_at(3))) == bytes(make("powersgd(3)", FORWARD).encode(x, key_at(3)))


def test_a_rank_once_lost_is_found_again() -> None:
    codec = make("powersgd(3, fp32)", FORWARD)
    for step in range(3):
        codec.encode(normal(16, 1) @ normal(1, 12), key_at(step))
    x = normal(16, 3, seed=2) @ normal(3, 12, seed=3)
    assert relative(codec.decode(bytes(codec.encode(x, key_at(3))), key_at(3)), x) < 1e-3


def test_magnitudes_that_the_factors_could_not_hold_are_refused() -> None:
    with pytest.raises(CodecError, match="too large"):
        make("powersgd(2)", FORWARD).encode(torch.full((4, 4), 3e38), key_at(0))
    x = torch.full((4, 4), 1e35)
    codec = make("powersgd(2)", FORWARD)
    assert relative(codec.decode(bytes(codec.encode(x, key_at(0))), key_at(0)), x) < 0.01


def test_factors_whose_product_is_not_finite_are_refused() -> None:
    codec = make("powersgd(2, fp32)", FORWARD)
    for bad in (float("nan"), 3e38):
        payload = bytearray(codec.encode(normal(4, 4), key_at(0)))
        payload[header_bytes(2) :] = torch.full((16,), bad).view(torch.uint8).numpy().tobytes()
        with pytest.raises(CodecError, match="NaN or infinity"):
            codec.decode(payload, key_at(0))

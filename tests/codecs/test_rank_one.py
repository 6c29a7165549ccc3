"""One and two bits with rank-one scales, low rank with coded factors: sizes by the formula, errors by the theory."""

from __future__ import annotations

import math

import pytest
import torch
from ends import FORWARD, KEY
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from testbed.codecs.check.tensors import normal
from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.make import make


def through(text: str, x: Tensor) -> Tensor:
    return make(text, FORWARD).decode(make(text, FORWARD).encode(x, KEY), KEY)


@pytest.mark.parametrize(("text", "lost"), [("onebit", 1 - 2 / math.pi), ("twobit", 0.1175)])
def test_errors_on_scaled_normal_values_are_those_of_the_best_quantisers_of_so_many_levels(
    text: str, lost: float
) -> None:
    x = torch.exp(normal(256, 1, seed=1)) * torch.exp(normal(1, 384, seed=2)) * normal(256, 384, seed=3)
    # Each row and column has its own size, which the rank-one scale is there to follow; weigh them alike.
    size = torch.exp(normal(256, 1, seed=1)) * torch.exp(normal(1, 384, seed=2))
    found = float(((through(text, x) - x) / size).square().mean())
    assert lost * 0.98 < found < lost * 1.06


@given(power=st.integers(-30, 29), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_signs_are_kept(power: int, seed: int) -> None:
    x = normal(5, 9, seed=seed) * 10.0**power
    for text in ("onebit", "twobit"):
        decoded = through(text, x)
        assert torch.equal(decoded.sign(), x.sign())


def test_row_and_column_means_of_magnitudes_are_kept_by_one_bit() -> None:
    x = normal(64, 48)
    decoded = through("onebit", x)
    for axis in (0, 1):
        assert torch.allclose(decoded.abs().mean(axis), x.abs().mean(axis), rtol=2**-6)


def test_the_errors_of_both_factors_are_independent() -> None:
    """With the same noise for P and Q, where they meet in the product their rounding would have a mean."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))  # of full rank, so that only rounding is wrong
    codec = make("lowrank(rank=64, inner=int3(stochastic))", Context(0, 0, "backward"))
    wrong = torch.zeros(64, 64, dtype=torch.float64)
    count = 200
    for step in range(count):
        key = MessageKey("train", step, 0, ())
        codec.reset()  # type: ignore[attr-defined]
        wrong += (codec.decode(codec.encode(x, key), key) - x).double() / count
    spread = float(wrong.std())
    assert abs(float(wrong.diagonal().mean()) - float(wrong.mean())) < 5 * spread / 8


def test_a_matrix_of_low_rank_survives_to_the_error_of_its_coded_factors() -> None:
    x = normal(96, 3, seed=1) @ normal(3, 80, seed=2)
    exact = through("lowrank(3, fp32)", x)
    assert (exact - x).norm() < 1e-4 * x.norm()
    coded = through("lowrank(3, int8)", x)
    assert 1e-4 * x.norm() < (coded - x).norm() < 0.03 * x.norm()

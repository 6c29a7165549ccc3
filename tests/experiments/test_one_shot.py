"""one_shot: learned step sizes, the search's budget, and what the tables hold."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from testbed.report import publishing, style
from tests.commands import Command

FOLDER = Command.shipped / "one_shot"


@pytest.fixture(scope="module")
def figures() -> Iterator[ModuleType]:
    with publishing.figures_program(FOLDER) as module, style.applied():
        yield module


@pytest.mark.parametrize("bits", [2, 3, 6])
def test_a_step_size_s_gradient_is_that_of_finite_differences(figures: ModuleType, bits: int) -> None:
    lsq = figures.lsq
    values = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(bits))
    slopes = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    step = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    leaf = values.clone().requires_grad_()
    (lsq.rounded(leaf, step, bits) * slopes).sum().backward()
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    # The straight-through estimator takes what rounding adds, in steps, for constant.
    added = (values / 0.7).round() - values / 0.7

    def passed(size: float, of: torch.Tensor) -> torch.Tensor:
        scaled = of / size
        return size * torch.where((scaled >= low) & (scaled <= high), scaled + added, scaled.clamp(low, high))

    ends = [float((passed(0.7 + sign * 1e-7, values) * slopes).sum()) for sign in (1, -1)]
    share = 1 / (500 * 2 ** (bits - 1)) ** 0.5
    assert step.grad is not None
    assert leaf.grad is not None
    assert float(step.grad) == pytest.approx((ends[0] - ends[1]) / 2e-7 * share, rel=1e-4)
    assert torch.equal(leaf.grad, slopes * ((values / 0.7 >= low) & (values / 0.7 <= high)))


def test_rounded_values_lie_on_the_grid_and_many_bits_change_little(figures: ModuleType) -> None:
    lsq, values, step = figures.lsq, torch.linspace(-3, 3, 101), torch.tensor(0.5)
    assert set((lsq.rounded(values, step, 2) / 0.5).tolist()) == {-2.0, -1.0, 0.0, 1.0}
    assert (lsq.rounded(values, torch.tensor(0.05), 8) - values).abs().max() <= 0.0251


def test_only_set_bits_are_rounded_and_step_sizes_learn(figures: ModuleType) -> None:
    train = figures.train
    learner = train.Learner(train.Characters(0), 0)
    layers = len(learner.model.layers)
    plain = train.judged(learner.model, None)
    losses = [train.judged(learner.model, train.uniform(bits, layers)) for bits in (6, 2)]
    assert abs(losses[0] - plain) < abs(losses[1] - plain)
    before = {name: each.clone() for name, each in learner.model.named_parameters()}
    learner.learn(2, train.uniform(3, layers))
    moved = {name for name, each in learner.model.named_parameters() if not torch.equal(each, before[name])}
    assert {"layers.0.steps.weights3", "layers.0.steps.inputs3", "layers.0.weight"} <= moved
    assert not any(name.endswith(("weights2", "inputs4")) for name in moved)


def test_what_a_search_finds_is_within_its_budget_and_every_arm_has_every_seed(figures: ModuleType) -> None:
    found, losses = figures.tables(FOLDER)
    assert (found.mean_bits <= found.budget + 1e-6).all()
    shares = figures.train.shares(figures.train.Characters(0))
    assert sum(shares) == pytest.approx(1)
    for row in found.itertuples():
        bits = [bit for pair in figures.train.bits_of(row.bits) for bit in pair]
        assert sum(share * bit for share, bit in zip(shares, bits, strict=True)) == pytest.approx(
            row.mean_bits, rel=1e-5
        )
    counted = losses[losses.use == "result"].groupby(["arm", "setting", "budget"]).seed.nunique()
    assert set(counted) == {len(figures.train.SEEDS)}
    assert not set(figures.train.PILOT) & set(losses.seed[losses.use == "result"])
    assert len(figures.draw(FOLDER).axes) == 2

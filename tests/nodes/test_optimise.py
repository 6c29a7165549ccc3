"""The learning rate is torch's own; Muon's updates are nearly orthogonal, and only of matrices that are no tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from testbed.nodes.optimise import Optimiser, learning_rate, orthogonalised
from testbed.spec import OptimiserSpec

RATE = 0.002


def a_spec(warmup: int = 0, decay: str = "cosine", floor: float = 0.0) -> OptimiserSpec:
    return OptimiserSpec(
        learning_rate=RATE,
        weight_decay=0.1,
        beta1=0.9,
        beta2=0.95,
        clip_norm=1.0,
        learning_rate_warmup=warmup,
        learning_rate_decay=decay,
        learning_rate_floor=floor,
    )


def rates(spec: OptimiserSpec, steps: int) -> list[float]:
    return [learning_rate(spec, step, steps) for step in range(steps)]


@settings(deadline=None)  # torch imports its compiler at the first scheduler
@given(st.integers(0, 20), st.integers(2, 60), st.floats(0, 1))
def test_it_is_torch_s_own_schedule(warmup: int, more: int, floor: float) -> None:
    steps = warmup + more
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    schedulers: list[torch.optim.lr_scheduler.LRScheduler] = []
    if warmup:
        schedulers.append(torch.optim.lr_scheduler.LinearLR(adamw, start_factor=1 / (warmup + 1), total_iters=warmup))
    schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(adamw, T_max=more - 1, eta_min=RATE * floor))
    both = torch.optim.lr_scheduler.SequentialLR(adamw, schedulers, milestones=[warmup] if warmup else [])
    expected = []
    for _ in range(steps):
        expected.append(adamw.param_groups[0]["lr"])
        adamw.step()
        both.step()
    assert rates(a_spec(warmup, floor=floor), steps) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.integers(0, 30), st.integers(1, 30))
def test_without_decay_it_stays(warmup: int, steps: int) -> None:
    assume(steps > warmup)
    assert rates(a_spec(warmup, "none"), steps)[warmup:] == [RATE] * (steps - warmup)


def test_a_warm_up_that_is_longer_than_the_training_never_gets_there() -> None:
    assert max(rates(a_spec(10), 5)) < RATE


@pytest.mark.parametrize("shape", [(8, 8), (40, 8), (8, 40), (3, 64)])
def test_an_orthogonalised_matrix_has_the_same_singular_vectors_and_values_of_about_1(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    turned = left.T @ orthogonalised(matrix) @ right.T
    assert (values / values.max()).min() > 0.02, "it is not nearly singular"
    assert turned.diagonal().min() > 0.65
    assert turned.diagonal().max() < 1.25
    assert (turned - turned.diagonal().diag()).abs().max() < 1e-4


def test_muon_moves_matrices_and_adamw_all_others() -> None:
    spec = a_spec(decay="none").model_copy(update={"weight_decay": 0.0, "clip_norm": 1e9})
    draw = torch.Generator().manual_seed(2)
    shapes = [(6, 12), (6, 12), (12,)]
    values, gradients = ([torch.randn(shape, generator=draw) for shape in shapes] for _ in range(2))

    def updated(algorithm: str) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(value.clone()) for value in values]
        changed = spec.model_copy(update={"algorithm": algorithm})
        optimiser = Optimiser(parameters, changed, tables=parameters[1:2])
        for _ in range(2):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimiser.update(1.0, RATE)
        return [(p - value).detach() for p, value in zip(parameters, values, strict=True)]

    muon, adamw = updated("muon"), updated("adamw")
    assert torch.equal(muon[1], adamw[1])
    assert torch.equal(muon[2], adamw[2])
    singular = torch.linalg.svdvals(muon[0] / RATE) / (2 * 0.2 * 12**0.5)  # two equal steps
    assert singular.min() > 0.65
    assert singular.max() < 1.25


def test_muon_has_no_second_moment_to_freeze() -> None:
    with pytest.raises(ValueError, match="only adamw has a second moment to freeze"):
        OptimiserSpec.model_validate({**dict(a_spec()), "algorithm": "muon", "frozen_after": 3})

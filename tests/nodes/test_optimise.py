"""The learning rate is torch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from testbed.nodes.optimise import learning_rate
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

"""Products in bf16 are those of rounded operands in fp32, rounded: torch's, and ours where torch is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from testbed.workloads.precision import RoundedProducts, autocast

ROUNDING = 2**-8
"""The largest relative error of rounding to bf16."""


@contextmanager
def ours() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), RoundedProducts():
        yield


def torchs() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


def computed(layer: nn.Module, within: Callable[[], AbstractContextManager[object]]) -> list[Tensor]:
    """Return the output of a layer, and the gradients of its input and parameters."""
    inputs = torch.randn(5, 24, generator=torch.Generator().manual_seed(3)).requires_grad_()
    with within():
        output = layer(inputs)
    assert output.dtype == torch.bfloat16
    wanted = [inputs, *layer.parameters()]
    ones = torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    return [output, *torch.autograd.grad(output, wanted, ones)]


@pytest.fixture(params=["linear", "without bias", "conv1d"])
def layer(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(1)
    return Conv1D(16, 24) if request.param == "conv1d" else nn.Linear(24, 16, bias=request.param == "linear")


def test_products_and_their_gradients_are_torchs_up_to_the_order_of_summation(layer: nn.Module) -> None:
    for mine, torch_s in zip(computed(layer, ours), computed(layer, torchs), strict=True):
        assert mine.dtype == torch_s.dtype
        scale = float(torch_s.detach().float().abs().max())
        assert float((mine - torch_s).detach().float().abs().max()) <= 2 * ROUNDING * scale


def test_a_product_is_that_of_rounded_operands(layer: nn.Module) -> None:
    output, *gradients = computed(layer, ours)
    rounded = [parameter.detach().bfloat16().float() for parameter in layer.parameters()]
    exact = type(layer)(16, 24) if isinstance(layer, Conv1D) else nn.Linear(24, 16, bias=len(rounded) > 1)
    for parameter, value in zip(exact.parameters(), rounded, strict=True):
        parameter.data = value
    inputs = torch.randn(5, 24, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    assert torch.equal(output, exact(inputs).bfloat16())
    assert all(torch.equal(each, each.bfloat16().float()) for each in gradients)


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_only_cpus_whose_products_torch_computes_slowly_get_others(
    monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with autocast("cpu", bf16=True):
        modes = torch.overrides._get_current_function_mode_stack()
        assert any(isinstance(mode, RoundedProducts) for mode in modes) == (capability == "AVX2")
    with autocast("cpu", bf16=False):
        assert nn.functional.linear(torch.ones(1, 2), torch.ones(3, 2)).dtype == torch.float32

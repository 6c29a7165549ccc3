"""The precision of a model's layers: torch's autocast to bf16, with matrix products that every CPU computes fast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_SLOW = "AVX2"
"""torch's name of CPUs without AVX-512, whose bf16 products it computes in a loop over single values."""
_PRODUCTS = {nn.functional.linear, torch.addmm}
"""All functions by which the models' layers multiply with weights: those of torch's Linear and transformers' Conv1D."""


class RoundedProducts(TorchFunctionMode):
    """Computes products with weights in fp32 from operands rounded to bf16, and rounds the result.

    That is what bf16 instructions do, up to the order of summation, forward and backward: gradients are rounded where
    they pass a rounded tensor. A step of two layers of GPT-2 with 256 tokens took 3.3 s instead of 98 s on one core.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **named)
        with torch.autocast("cpu", enabled=False):
            return func(*map(_rounded, args), **{name: _rounded(value) for name, value in named.items()}).bfloat16()


def _rounded(value: Any) -> Any:
    return value.bfloat16().float() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def autocast(device: str, *, bf16: bool) -> Iterator[None]:
    """Compute what the models' layers compute in it in bf16, if asked to. `device`: torch's type, "cpu" or "cuda".

    Losses of CPUs without AVX-512 differ from others' in the last digits, as they do between any two kinds.
    """
    if not bf16:
        yield
        return
    slow = device == "cpu" and torch.backends.cpu.get_cpu_capability() == _SLOW
    with torch.autocast(device, torch.bfloat16), RoundedProducts() if slow else contextlib.nullcontext():
        yield

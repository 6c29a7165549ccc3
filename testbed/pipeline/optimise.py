"""AdamW with the gradient clipped to a global norm, in arithmetic that does not depend on how the model is cut."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from testbed.spec import OptimiserSpec

_EPSILON = 1e-6
"""Added to the norm, as torch.nn.utils.clip_grad_norm_ does."""


def learning_rate(spec: OptimiserSpec, step: int, steps: int) -> float:
    """Of one step (0-based) of so many.

    It rises in a line that would begin at 0 one step before the first, and has its full height at the first step after the
    warm-up; from there a half-wave of a cosine (Loshchilov and Hutter 2017, equation 5) leads to the floor, at the last step.
    """
    warmup = spec.learning_rate_warmup
    if step < warmup:
        return spec.learning_rate * (step + 1) / (warmup + 1)
    if spec.learning_rate_decay == "none":
        return spec.learning_rate
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    height = (1 + math.cos(math.pi * progress)) / 2
    return spec.learning_rate * (spec.learning_rate_floor + (1 - spec.learning_rate_floor) * height)


class Optimiser:
    """The optimiser of one stage's parameters. Every parameter decays."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], spec: OptimiserSpec) -> None:
        self._parameters = list(parameters)
        self._clip_norm = spec.clip_norm
        # foreach and fused batch over the parameters of a stage, so they could round differently in another cut
        self._adamw = torch.optim.AdamW(
            self._parameters,
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            weight_decay=spec.weight_decay,
            foreach=False,
            fused=False,
        )

    def squares(self) -> list[float]:
        """The squared norm of each parameter's gradient. Norms are fp32, as in clip_grad_norm_: fp64 is 15 times slower."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return [torch.linalg.vector_norm(gradient).item() ** 2 for gradient in gradients]

    def update(self, norm: float, rate: float) -> None:
        """Scale the gradients so that the model's `norm` is at most the limit, update at that rate, and forget the gradients."""
        scale = min(1.0, self._clip_norm / (norm + _EPSILON))
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

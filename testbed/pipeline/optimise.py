"""AdamW with the gradient clipped to a global norm, in arithmetic that does not depend on how the model is cut."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from testbed.spec import OptimiserSpec

_EPSILON = 1e-6
"""Added to the norm, as torch.nn.utils.clip_grad_norm_ does."""


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

    def update(self, norm: float) -> None:
        """Scale the gradients so that the model's `norm` is at most the limit, update, and forget the gradients."""
        scale = min(1.0, self._clip_norm / (norm + _EPSILON))
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

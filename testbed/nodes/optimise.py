"""AdamW, SGD or Muon with gradient clipping by global norm, in arithmetic independent of how the model is split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from testbed.runtime.gather import global_norm
from testbed.spec import OptimiserSpec, OuterSpec

_EPSILON = 1e-6
"""Added to the norm, as torch.nn.utils.clip_grad_norm_ does."""
_ADAM_EPSILON = 1e-8
"""Added to the root of the second moment, as torch.optim.AdamW does."""
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of a Newton-Schulz step, published with Muon: singular values approach 1 within 0.7 to 1.2."""
_QUINTIC_STEPS = 5
_ADAM_RMS = 0.2
"""Root mean square of AdamW's updates, to which Muon's are scaled, so that one learning rate suits both."""


def learning_rate(spec: OptimiserSpec, step: int, steps: int) -> float:
    """Return the learning rate of one step (0-based) out of `steps`.

    It rises linearly, from 0 one step before the first, to its peak at the first step after the warm-up, and then falls
    along half a cosine (Loshchilov and Hutter 2017, equation 5) to the floor at the last step.
    """
    warmup = spec.learning_rate_warmup
    if step < warmup:
        return spec.learning_rate * (step + 1) / (warmup + 1)
    if spec.learning_rate_decay == "none":
        return spec.learning_rate
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    height = (1 + math.cos(math.pi * progress)) / 2
    return spec.learning_rate * (spec.learning_rate_floor + (1 - spec.learning_rate_floor) * height)


class RowwiseAdamW:
    """AdamW whose second moment is one number for each vector along one axis of a parameter: the mean over the vector's
    squares.

    An update is then a linear combination of gradient vectors, so a parameter stays in a subspace if its vectors and
    its gradients' vectors lie there; weight decay only scales. Derived from the single published line on the optimiser
    of Ramasinghe et al. (arXiv 2506.01260): "row-wise constant second-moment scaling".
    """

    keeps = ("_steps", "_held")

    def __init__(self, parameters: Mapping[torch.nn.Parameter, int], spec: OptimiserSpec) -> None:
        """`parameters` gives the axis of each parameter."""
        self._spec, self._steps, self.parameters = spec, 0, tuple(parameters)
        self._held = [
            (p, axis, torch.zeros_like(p), torch.zeros_like(p.detach().amax(axis, keepdim=True)))
            for p, axis in parameters.items()
        ]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every parameter that has a gradient, then clear the gradients."""
        beta1, beta2 = self._spec.beta1, self._spec.beta2
        self._steps += 1
        first, second = 1 - beta1**self._steps, 1 - beta2**self._steps
        for parameter, axis, momentum, squares in self._held:
            gradient = parameter.grad
            if gradient is None:
                continue
            momentum.lerp_(gradient, 1 - beta1)
            squares.lerp_(gradient.square().mean(axis, keepdim=True), 1 - beta2)
            scale: Tensor = squares.div(second).sqrt_().add_(_ADAM_EPSILON).mul_(first)
            parameter.mul_(1 - rate * self._spec.weight_decay).addcdiv_(momentum, scale, value=-rate)
            parameter.grad = None


@torch.no_grad()
def orthogonalised(matrix: Tensor) -> Tensor:
    """Return a matrix with about the singular vectors of `matrix`, and singular values of about 1."""
    a, b, c = _QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.mT if tall else matrix
    x = x / (torch.linalg.matrix_norm(x) + _EPSILON)
    for _ in range(_QUINTIC_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Moves each matrix along its momentum, made nearly orthogonal, so that all directions change by as much.

    Sources: Jordan et al., "Muon" (2024), with Nesterov momentum; the scale of updates and the weight decay: Liu et
    al., arXiv 2502.16982. Here in fp32.
    """

    keeps = ("_held",)

    def __init__(self, matrices: Iterable[torch.nn.Parameter], spec: OptimiserSpec) -> None:
        self._spec = spec
        self._held = [(matrix, torch.zeros_like(matrix)) for matrix in matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every matrix that has a gradient, then clear the gradients."""
        beta = self._spec.beta1
        for matrix, momentum in self._held:
            if (gradient := matrix.grad) is None:
                continue
            momentum.mul_(beta).add_(gradient)
            update = orthogonalised(gradient.add(momentum, alpha=beta))
            scale = _ADAM_RMS * math.sqrt(max(matrix.shape))
            matrix.mul_(1 - rate * self._spec.weight_decay).add_(update, alpha=-rate * scale)
            matrix.grad = None


class Optimiser:
    """The optimiser of one stage's parameters. Weight decay applies to all of them."""

    keeps = ("_inner", "_updates", "_rowwise", "_muon")

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        spec: OptimiserSpec,
        rowwise: Mapping[torch.nn.Parameter, int] = MappingProxyType({}),
        tables: Iterable[torch.nn.Parameter] = (),
    ) -> None:
        """`rowwise`: the parameters that `RowwiseAdamW` updates, each with its axis. `tables`: matrices that Muon does
        not update: embeddings and the output layer.
        """
        self._parameters = list(parameters)
        self._spec, self._updates = spec, 0
        self._rowwise = RowwiseAdamW(rowwise, spec)
        others = [parameter for parameter in self._parameters if parameter not in rowwise]
        apart = set(tables)
        matrices = {each for each in others if spec.algorithm == "muon" and each.ndim == 2 and each not in apart}
        self._muon = Muon([each for each in others if each in matrices], spec)
        groups = [{"params": [each for each in others if each not in matrices]}]
        # foreach and fused batch over a stage's parameters, so rounding could depend on the split
        common: dict[str, Any] = {"weight_decay": spec.weight_decay, "foreach": False, "fused": False}
        self._inner: torch.optim.Optimizer
        if spec.algorithm == "sgd":
            self._inner = torch.optim.SGD(groups, lr=spec.learning_rate, momentum=spec.beta1, **common)
        else:
            self._inner = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=(spec.beta1, spec.beta2), **common)

    def squares(self) -> list[float]:
        """Return the squared norm of each parameter's gradient. Norms are fp32, as in clip_grad_norm_: fp64 is 15 times
        slower.
        """
        norms = [torch.linalg.vector_norm(p.grad) for p in self._parameters if p.grad is not None]
        return [norm**2 for norm in torch.stack(norms).cpu().tolist()] if norms else []  # a device is waited for once

    def message(self) -> list[Tensor]:
        """Remove the gradients and return the tensors that a worker sends, by parameter: the gradients; or, once the
        second moment is frozen, the first moments that the clipped gradients yield.
        """
        squares = self.squares() if self._frozen else []
        taken = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self._parameters
        ]
        if self._frozen:
            scale = self._scale(global_norm(squares))
            moments = [self._inner.state[parameter]["exp_avg"] for parameter in self._parameters]
            weight = 1 - self._spec.beta1
            taken = [moment.lerp(gradient.mul_(scale), weight) for moment, gradient in zip(moments, taken, strict=True)]
        for parameter in self._parameters:
            parameter.grad = None
        return taken

    def update(self, norm: float, rate: float) -> None:
        """Scale the gradients so that the model's `norm` is at most the limit, update at that rate, then clear the
        gradients. Once the second moment is frozen, gradients hold first moments (`message`) and are not scaled.
        """
        frozen = self._frozen
        self._updates += 1
        if frozen:
            self._update_frozen(rate)
            return
        scale = self._scale(norm)
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        for group in self._inner.param_groups:
            group["lr"] = rate
        self._rowwise.step(rate)
        self._muon.step(rate)
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)

    @property
    def _frozen(self) -> bool:
        """Whether the second moment is frozen."""
        after = self._spec.frozen_after
        return after is not None and self._updates >= after

    @torch.no_grad()
    def _update_frozen(self, rate: float) -> None:
        """Update from first moments. Both moments are corrected for their zero start, the second for the steps it has
        seen.
        """
        spec = self._spec
        assert spec.frozen_after is not None
        first, second = 1 - spec.beta1**self._updates, 1 - spec.beta2**spec.frozen_after
        for parameter in self._parameters:
            if (moment := parameter.grad) is None:
                continue
            held = self._inner.state[parameter]
            held["exp_avg"].copy_(moment)
            scale = held["exp_avg_sq"].div(second).sqrt_().add_(_ADAM_EPSILON).mul_(first)
            parameter.mul_(1 - rate * spec.weight_decay).addcdiv_(moment, scale, value=-rate)
            parameter.grad = None

    def _scale(self, norm: float) -> float:
        return min(1.0, self._spec.clip_norm / (norm + _EPSILON))


class Outer:
    """The outer optimiser of local steps: SGD on their change (DiLoCo, arXiv 2311.08105, algorithm 1)."""

    keeps = ("_sgd",)

    def __init__(self, parameters: Iterable[torch.nn.Parameter], spec: OuterSpec) -> None:
        self._sgd = torch.optim.SGD(
            parameters, lr=spec.learning_rate, momentum=spec.momentum, nesterov=spec.nesterov, foreach=False
        )

    def update(self) -> None:
        """Take a step along the parameters' gradients, then clear them."""
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)

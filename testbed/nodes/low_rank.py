"""Matrices that are trained in two small bases, which all workers share: TSR-Adam (arXiv 2602.08007).

A gradient G (m, n) becomes a core U^T G V (r, r), and workers sum cores. The optimiser's moments are those of the core,
and its update X changes the weights by U X V^T. Vectors, and matrices for which it saves nothing, are sent in full.
The update's r x r values are of a learning rate's size, so rates are larger than those of the whole matrix.

Written from the abstract. Published bases are found from one gradient now and then. Here every message also has a few
columns G w and G^T w for random w, the same at all workers, and new bases are the leading singular vectors of the last
such sums: as many bytes, without a peak. Moments stay; of all bases of a new subspace, the nearest to the old is used.

With local steps the cores of the weight changes are sent, which is exact, because the bases change only at exchanges;
decay of weights outside them is lost. LoRDO (arXiv 2602.04396) also trains in few dimensions and exchanges rarely, but
sends whole weights, because its quasi-hyperbolic momentum adds gradients outside the bases, which is not done here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from testbed.codecs.in_model import bases
from testbed.nodes.fragments import low_rank_shapes
from testbed.spec import LowRankSpec

_REMEMBERED = 2
"""Columns of the sketches that count for new bases, in multiples of the rank."""


class _Matrix:
    """One matrix, or a tensor of more axes as one of its rows."""

    keeps = ("_bases", "_columns")

    def __init__(self, whole: Parameter, core: Sequence[int], purpose: str, spec: LowRankSpec) -> None:
        self.whole, self.core = whole, Parameter(whole.new_zeros(tuple(core)))
        self._purpose, self._spec = purpose, spec
        self._sizes = len(whole), whole.numel() // len(whole)
        self.sides = [side for side, size in enumerate(self._sizes) if core[side] < size]
        """0: its columns have a basis; 1: its rows."""
        self._bases = {
            side: bases.drawn(f"{purpose} {side}", self._sizes[side], core[side]).to(whole.device)
            for side in self.sides
        }
        self._columns = {side: basis[:, :0] for side, basis in self._bases.items()}

    def inside(self, whole: Tensor) -> Tensor:
        """Return the core of a value of the matrix."""
        core = whole.reshape(self._sizes)
        core = self._bases[0].T @ core if 0 in self._bases else core
        return core @ self._bases[1] if 1 in self._bases else core

    def outside(self, core: Tensor) -> Tensor:
        """Return the value with that core, and nothing outside the bases."""
        core = self._bases[0] @ core if 0 in self._bases else core
        return (core @ self._bases[1].T if 1 in self._bases else core).view_as(self.whole)

    def sketches(self, whole: Tensor, step: int) -> list[Tensor]:
        """Return a few random combinations of its columns, and of its rows, for those that have a basis."""
        matrix, found = whole.reshape(self._sizes), []
        for side in self.sides:
            purpose = f"{self._purpose} {side} {step}"
            drawn = bases.normal(purpose, self._sizes[1 - side], self._spec.directions).to(whole.device)
            found.append((matrix.T if side else matrix) @ drawn)
        return found

    def remember(self, sketches: Sequence[Tensor]) -> None:
        """Keep the workers' summed sketches for new bases."""
        for side, sketch in zip(self.sides, sketches, strict=True):
            kept = _REMEMBERED * self._bases[side].shape[1]
            self._columns[side] = torch.cat([self._columns[side], sketch], 1)[:, -kept:]

    def renew(self) -> None:
        """Change the bases to those of the remembered sketches; where these are too few, old vectors remain."""
        for side, old in self._bases.items():
            leading = torch.linalg.svd(self._columns[side], full_matrices=False)[0]
            new = torch.linalg.qr(torch.cat([leading, old], 1)[:, : old.shape[1]])[0]
            left, _, right = torch.linalg.svd(new.T @ old)
            self._bases[side] = new @ (left @ right)


class Cores:
    """The cores of one worker's tensors, which its optimiser trains."""

    keeps = ("_matrices",)

    def __init__(self, parameters: Sequence[Parameter], spec: LowRankSpec, seed: int) -> None:
        shapes = [low_rank_shapes(parameter.shape, spec) for parameter in parameters]
        self._matrices = {
            number: _Matrix(parameter, core, f"low rank {seed} {number}", spec)
            for number, (parameter, (core, *sketches)) in enumerate(zip(parameters, shapes, strict=True))
            if sketches
        }
        self._refresh, self._sketches = spec.refresh, list[Tensor]()
        self.parameters = [
            self._matrices[number].core if number in self._matrices else parameter
            for number, parameter in enumerate(parameters)
        ]
        """What the optimiser trains, by parameter: cores, which are 0 between updates, and tensors themselves."""

    @torch.no_grad()
    def project(self, step: int) -> None:
        """Replace the gradients of matrices by those of their cores, and add up their sketches until the message."""
        found = []
        for matrix in self._matrices.values():
            gradient = torch.zeros_like(matrix.whole) if matrix.whole.grad is None else matrix.whole.grad
            matrix.core.grad, matrix.whole.grad = matrix.inside(gradient), None
            found += matrix.sketches(gradient, step)
        before = self._sketches or [torch.zeros_like(sketch) for sketch in found]
        self._sketches = [old + new for old, new in zip(before, found, strict=True)]

    @torch.no_grad()
    def lift(self, decay: float) -> None:
        """Add the cores' update to the weights of matrices, after their decay by a share of them."""
        for matrix in self._matrices.values():
            matrix.whole.mul_(1 - decay).add_(matrix.outside(matrix.core))
            matrix.core.zero_()

    def message(self, cores: Sequence[Tensor]) -> list[Tensor]:
        """Return what is sent: cores and other tensors, by parameter, and then the sketches."""
        sketches, self._sketches = self._sketches, []
        return [*cores, *sketches]

    def cores_of(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the cores of values of the parameters."""
        return [
            self._matrices[number].inside(value) if number in self._matrices else value
            for number, value in enumerate(values)
        ]

    def values_of(self, cores: Sequence[Tensor]) -> list[Tensor]:
        """Return values of the parameters that have these cores."""
        return [
            self._matrices[number].outside(core) if number in self._matrices else core
            for number, core in enumerate(cores)
        ]

    def receive(self, aggregate: Sequence[Tensor]) -> list[Tensor]:
        """Keep the sketches of an aggregate; returns the rest, by parameter."""
        sketches = iter(aggregate[len(self.parameters) :])
        for matrix in self._matrices.values():
            matrix.remember([next(sketches) for _ in matrix.sides])
        return list(aggregate[: len(self.parameters)])

    def applied(self, step: int) -> None:
        """Renew the bases, if they are due after a step."""
        if (step + 1) % self._refresh == 0:
            for matrix in self._matrices.values():
                matrix.renew()

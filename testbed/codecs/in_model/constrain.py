"""Layers and tables of a stage whose outputs lie in a subspace, and the projections that keep ordinary ones there."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def hidden_axis(layer: nn.Module) -> int:
    """Along which axis of a layer's weight the hidden size lies: the first of a Linear, the last of a Conv1D or a table."""
    return 0 if isinstance(layer, nn.Linear) else -1


def project_(values: Tensor, basis: Tensor, axis: int = -1) -> None:
    """Replace `values` by their projection onto the span of `basis` (d, k), orthonormal, along the axis of size d."""
    if axis == 0:
        values.copy_(basis @ (basis.T @ values))
    else:
        values.copy_((values @ basis) @ basis.T)


def outside(values: Tensor, basis: Tensor, axis: int = -1) -> float:
    """Which share of the norm of `values` lies outside the span: 0 within, 1 at right angles to it."""
    values = values.detach()
    inside = values.clone()
    project_(inside, basis, axis)
    return float((values - inside).norm() / values.norm().clamp_min(torch.finfo(torch.float32).tiny))


class SubspaceLinear(nn.Module):
    """y = (x Z + z) U^T with Z (f, k), z (k) learned: all that a linear layer with outputs in the span of U (d, k) can be."""

    def __init__(self, layer: nn.Module, basis: Tensor) -> None:
        """Begins as the projection of an ordinary layer."""
        super().__init__()
        weight, bias = layer.get_parameter("weight").detach(), getattr(layer, "bias", None)
        if hidden_axis(layer) == 0:
            weight = weight.T
        self.coordinates = nn.Parameter(weight @ basis)
        self.bias = None if bias is None else nn.Parameter(bias.detach() @ basis)
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., f) to (..., d)."""
        coordinates = inputs @ self.coordinates
        if self.bias is not None:
            coordinates = coordinates + self.bias
        return nn.functional.linear(coordinates, self.get_buffer("basis"))


class SubspaceTable(nn.Module):
    """An embedding: a fixed row, not learned, and a learned row, (v, d) or, where `reparametrised`, its coordinates (v, k)."""

    def __init__(self, table: nn.Module, fixed: Tensor, basis: Tensor, *, reparametrised: bool) -> None:
        """The learned part begins as the rows of an ordinary table, or their coordinates."""
        super().__init__()
        weight = table.get_parameter("weight").detach()
        self.reparametrised = reparametrised
        self.weight = nn.Parameter(weight @ basis if reparametrised else weight.clone())
        self.register_buffer("fixed", fixed, persistent=False)
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 of any shape, to (..., d)."""
        learned = nn.functional.embedding(ids, self.weight)
        if self.reparametrised:
            learned = nn.functional.linear(learned, self.get_buffer("basis"))
        return learned + nn.functional.embedding(ids, self.get_buffer("fixed"))

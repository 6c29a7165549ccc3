"""One stage of a subspace network: its basis, the fixed tables that every stage knows, and its constrained layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from testbed.codecs.in_model import bases
from testbed.codecs.in_model.model_codec import ChangeableStage
from testbed.codecs.wire.header import CPU
from testbed.errors import SpecError

Keep = Literal["projected", "reparametrised", "grassmann", "free"]


class SubspaceSettings(NamedTuple):
    """Settings that all boundaries of a model must share."""

    seed: int
    ratio: float
    keep: Keep
    every: int
    rate: float
    spread: float
    """Standard deviation of the fixed tables."""


class ConstrainedStage:
    """One stage's basis and fixed tables, and its constrained layers.

    The hooks at both its boundaries share one instance.
    """

    keeps = ("basis", "_projected", "coming", "passed_on")

    def __init__(self, model: ChangeableStage, settings: SubspaceSettings, device: torch.device = CPU) -> None:
        self.settings, self._model = settings, model
        rank = bases.rank_of(model.width, settings.ratio)
        self.basis = bases.drawn(f"subspace {settings.seed} basis {model.width} {rank}", model.width, rank).to(device)
        names = {"tokens": model.vocabulary, **({"positions": model.context} if model.learned_positions else {})}
        # Whole tables, because a row must not depend on which rows are used. Tens of MB, as in the paper.
        self.fixed = {
            name: bases.normal(f"subspace {settings.seed} {name} {model.width}", rows, model.width)
            .mul_(settings.spread)
            .to(device)
            for name, rows in names.items()
        }
        self._projected: dict[str, Tensor] = {}
        self._kept: list[tuple[nn.Parameter, int]] = []
        self._constrained = False
        self.coming: Tensor | None = None
        """The next basis, bf16: all stages receive it before the end of a step, and switch to it then."""
        self.passed_on = False
        self._turn()

    @property
    def rank(self) -> int:
        """k, the dimension of the subspace."""
        return self.basis.shape[1]

    def constrain(self) -> None:
        """Constrain the stage's layers and tables to the subspace. Further calls have no effect."""
        if self._constrained:
            return
        self._constrained = True
        keep, model = self.settings.keep, self._model
        for part, fixed in zip(model.tables(), self.fixed.values(), strict=bool(model.tables())):
            table = SubspaceTable(part.module, fixed, self.basis, reparametrised=keep == "reparametrised")
            part.replace(table)
            self._kept.append((table.weight, -1))
        for part in model.writers():
            if keep == "reparametrised":
                part.replace(SubspaceLinear(part.module, self.basis))
                continue
            axis = _hidden_axis(part.module)
            self._kept += [(p, axis if name == "weight" else -1) for name, p in part.module.named_parameters()]
        if keep in ("reparametrised", "free"):
            self._kept = []
        self.project()
        if keep == "grassmann":
            for parameter, axis in self._kept:
                hook = partial(self._project_gradient, axis)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def project(self) -> None:
        """Project the constrained parameters back into the subspace."""
        with torch.no_grad():
            for parameter, axis in self._kept:
                project_(parameter, self.basis, axis)

    def rowwise(self) -> Mapping[nn.Parameter, int]:
        """See `contract.Hook.rowwise`."""
        return dict(self._kept) if self.settings.keep == "grassmann" else {}

    def outside(self) -> float | None:
        """Return the largest `outside` of a constrained parameter; None if none is constrained by projection."""
        return max((outside(parameter, self.basis, axis) for parameter, axis in self._kept), default=None)

    def coordinates(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Turn hidden states (b, n, d) into coordinates (b, n, k)."""
        coded = hidden @ self.basis - self._projected["tokens"][ids]
        if "positions" in self._projected:
            coded = coded - self._projected["positions"][: ids.shape[1]]
        return coded

    def hidden(self, coded: Tensor, ids: Tensor) -> Tensor:
        """Turn coordinates (b, n, k) into hidden states (b, n, d)."""
        fixed = self.fixed["tokens"].index_select(0, ids.reshape(-1))
        if "positions" in self.fixed:
            fixed.view(*ids.shape, -1).add_(self.fixed["positions"][: ids.shape[1]])
        return torch.addmm(fixed, coded.reshape(-1, self.rank), self.basis.T).view(*ids.shape, -1)

    def change_over(self) -> None:
        """Switch to the next basis, which all stages have received. SpecError if it was not sent upstream."""
        if self.coming is None:
            return
        if not self.passed_on and not self._model.first:
            raise SpecError(
                "codec subspace(grassmann): its new basis did not cross the boundary upstream, because the gradients "
                "go through another codec; name it for both directions"
            )
        self.basis.copy_(bases.orthonormal(self.coming.float()))
        self.coming, self.passed_on = None, False
        self.project()
        self._turn()

    def _turn(self) -> None:
        self._projected = {name: table @ self.basis for name, table in self.fixed.items()}

    def _project_gradient(self, axis: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        project_(parameter.grad, self.basis, axis)


def project_(values: Tensor, basis: Tensor, axis: int = -1) -> None:
    """Replace `values` by their projection onto the span of `basis` (d, k), orthonormal, along the axis of size d."""
    if axis == 0:
        values.copy_(basis @ (basis.T @ values))
    else:
        values.copy_((values @ basis) @ basis.T)


def outside(values: Tensor, basis: Tensor, axis: int = -1) -> float:
    """Return the share of the norm of `values` that lies outside the span: 0 within it, 1 at right angles to it."""
    values = values.detach()
    inside = values.clone()
    project_(inside, basis, axis)
    return float((values - inside).norm() / values.norm().clamp_min(torch.finfo(torch.float32).tiny))


def _hidden_axis(layer: nn.Module) -> int:
    """Return the axis of a weight that has the hidden size: the first of a Linear, the last of a Conv1D or a table."""
    return 0 if isinstance(layer, nn.Linear) else -1


class SubspaceLinear(nn.Module):
    """y = (x Z + z) U^T with Z (f, k), z (k) learned: any linear layer with outputs in the span of U (d, k)."""

    def __init__(self, layer: nn.Module, basis: Tensor) -> None:
        """Initialise as the projection of an ordinary layer."""
        super().__init__()
        weight, bias = layer.get_parameter("weight").detach(), getattr(layer, "bias", None)
        if _hidden_axis(layer) == 0:
            weight = weight.T
        self.coordinates = nn.Parameter(weight @ basis)
        self.bias = None if bias is None else nn.Parameter(bias.detach() @ basis)
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (..., f) to (..., d)."""
        coordinates = inputs @ self.coordinates
        if self.bias is not None:
            coordinates = coordinates + self.bias
        return nn.functional.linear(coordinates, self.get_buffer("basis"))


class SubspaceTable(nn.Module):
    """An embedding: a fixed table plus a learned one, (v, d) or, where `reparametrised`, its coordinates (v, k)."""

    def __init__(self, table: nn.Module, fixed: Tensor, basis: Tensor, *, reparametrised: bool) -> None:
        """The learned part is initialised with the rows of an ordinary table, or their coordinates."""
        super().__init__()
        weight = table.get_parameter("weight").detach()
        self.reparametrised = reparametrised
        self.weight = nn.Parameter(weight @ basis if reparametrised else weight.clone())
        self.register_buffer("fixed", fixed, persistent=False)
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map int64 ids of any shape to rows (..., d)."""
        learned = nn.functional.embedding(ids, self.weight)
        if self.reparametrised:
            learned = nn.functional.linear(learned, self.get_buffer("basis"))
        return learned + nn.functional.embedding(ids, self.get_buffer("fixed"))

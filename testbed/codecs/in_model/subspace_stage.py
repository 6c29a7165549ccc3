"""One stage of a subspace network: its basis, the fixed tables that every stage knows, and the layers kept within the span."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from testbed.codecs.in_model import bases, constrain
from testbed.codecs.in_model.stage_model import StageModel
from testbed.errors import SpecError

Keep = Literal["projected", "reparametrised", "grassmann", "free"]


class Settings(NamedTuple):
    """What all boundaries of a model must agree on."""

    seed: int
    ratio: float
    keep: Keep
    every: int
    rate: float
    spread: float
    """Standard deviation of the fixed tables."""


class StageSubspace:
    """One stage's basis and fixed tables, and its constrained layers. The hooks at both its boundaries work with the same."""

    def __init__(self, model: StageModel, settings: Settings) -> None:
        self.settings, self._model = settings, model
        rank = bases.rank_of(model.width, settings.ratio)
        self.basis = bases.drawn(f"subspace {settings.seed} basis {model.width} {rank}", model.width, rank)
        names = {"tokens": model.vocabulary, **({"positions": model.context} if model.learned_positions else {})}
        # Whole tables, because a row must not depend on which are asked for. Tens of MB, as in the paper.
        self.fixed = {
            name: bases.normal(f"subspace {settings.seed} {name} {model.width}", rows, model.width).mul_(
                settings.spread
            )
            for name, rows in names.items()
        }
        self._projected: dict[str, Tensor] = {}
        self._kept: list[tuple[nn.Parameter, int]] = []
        self._constrained = False
        self.coming: Tensor | None = None
        """The next basis, bf16: all stages know it before the end of a step, and change over then."""
        self.passed_on = False
        self._turn()

    @property
    def rank(self) -> int:
        """k."""
        return self.basis.shape[1]

    def constrain(self) -> None:
        """Put the stage's layers and tables into the subspace. Done once, however often it is asked for."""
        if self._constrained:
            return
        self._constrained = True
        keep, model = self.settings.keep, self._model
        for part, fixed in zip(model.tables(), self.fixed.values(), strict=bool(model.tables())):
            table = constrain.SubspaceTable(part.module, fixed, self.basis, reparametrised=keep == "reparametrised")
            part.replace(table)
            self._kept.append((table.weight, -1))
        for part in model.writers():
            if keep == "reparametrised":
                part.replace(constrain.SubspaceLinear(part.module, self.basis))
                continue
            axis = constrain.hidden_axis(part.module)
            self._kept += [(p, axis if name == "weight" else -1) for name, p in part.module.named_parameters()]
        if keep in ("reparametrised", "free"):
            self._kept = []
        self.project()
        if keep == "grassmann":
            for parameter, axis in self._kept:
                hook = partial(self._project_gradient, axis)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def project(self) -> None:
        """Bring what must lie in the subspace back to it."""
        with torch.no_grad():
            for parameter, axis in self._kept:
                constrain.project_(parameter, self.basis, axis)

    def rowwise(self) -> Mapping[nn.Parameter, int]:
        """See `base.Hook`."""
        return dict(self._kept) if self.settings.keep == "grassmann" else {}

    def outside(self) -> float | None:
        """The largest share of a constrained parameter's norm outside the span; None where none is kept there by projection."""
        return max((constrain.outside(parameter, self.basis, axis) for parameter, axis in self._kept), default=None)

    def coordinates(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """(b, n, d) to (b, n, k)."""
        coded = hidden @ self.basis - self._projected["tokens"][ids]
        if "positions" in self._projected:
            coded = coded - self._projected["positions"][: ids.shape[1]]
        return coded

    def hidden(self, coded: Tensor, ids: Tensor) -> Tensor:
        """(b, n, k) to (b, n, d)."""
        fixed = self.fixed["tokens"].index_select(0, ids.reshape(-1))
        if "positions" in self.fixed:
            fixed.view(*ids.shape, -1).add_(self.fixed["positions"][: ids.shape[1]])
        return torch.addmm(fixed, coded.reshape(-1, self.rank), self.basis.T).view(*ids.shape, -1)

    def change_over(self) -> None:
        """Take the basis that all stages know by now. SpecError where nothing has taken it upstream."""
        if self.coming is None:
            return
        if not self.passed_on and not self._model.first:
            raise SpecError(
                "codec subspace(grassmann): its new basis did not cross the boundary upstream, because the gradients go through "
                "another codec; name it for both directions"
            )
        self.basis.copy_(bases.orthonormal(self.coming.float()))
        self.coming, self.passed_on = None, False
        self.project()
        self._turn()

    def _turn(self) -> None:
        self._projected = {name: table @ self.basis for name, table in self.fixed.items()}

    def _project_gradient(self, axis: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        constrain.project_(parameter.grad, self.basis, axis)

"""Subspace networks (Protocol Models): a model whose hidden states lie in a k-dimensional subspace but for a part that every
stage knows, so that k coordinates a token cross instead of d values, and nothing is lost.

With U (d, k) orthonormal and F a fixed table, the same at all stages: X = F[token] + P[position] + residual branches, and every
layer that writes into X writes within span(U). Then C = (X - F - P) U crosses, and C U^T + F + P is X again, to within rounding.
The gradient of C is G U, which is all of G that anything upstream of the boundary depends on. F, P and U are drawn from the seed
and token ids derived from the order of the data, so neither costs a byte. Bits per element: the inner codec's, times k/d.

How the weights are kept there (`keep`), the variants B, C, A and D of the reference:
  projected       ordinary AdamW, then W <- W U U^T after each step: the authors' released code
  reparametrised  W = Z U^T with Z learned, so nothing need be done; fewer parameters are learned
  grassmann       one second moment for each row (an update then stays in the span), and the basis itself moves: every `every`
                  steps U <- qr(U + rate * D / l) with D = (I - U U^T) G^T G U from gradients G sampled at the last boundary,
                  l the largest eigenvalue of U^T G^T G U. The paper's objective and step size are not published: this is
                  derived. The new U (2 d k bytes) goes upstream with the next step's first gradients; all change over at its end
  free            not kept at all: the negative control; a random projection that loses about 1 - k/d of the energy

Every stage before a boundary must be constrained, which is checked when the first hidden states are sent; the last stage is free.
Element-wise dropout of hidden states leaves the subspace, so it must be 0. Source: Ramasinghe et al., "Protocol Models" (arXiv
2506.01260), sections on subspace constraint; variants B and C as in the code released with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from testbed.codecs import bases, constrain
from testbed.codecs.base import Codec, Context, Payload, Slot
from testbed.codecs.inner import Carrying
from testbed.codecs.stage_model import StageModel, known
from testbed.errors import SpecError
from testbed.spec import Direction

SPREAD = 0.02
"""Standard deviation of the fixed tables: that of the initial embeddings of GPT-2 and Llama."""
_OUTSIDE = 0.1
"""The share of the hidden states' norm that may lie outside: bf16 arithmetic leaves a few thousandths."""
_SAMPLED_STEPS = 8
"""Before the basis moves: one micro-batch's gradient of each is looked at."""
_SKEW = 0.05
"""How far from orthonormal a basis may come out of bf16."""

Keep = Literal["projected", "reparametrised", "grassmann", "free"]


class Settings(NamedTuple):
    """What all boundaries of a model must agree on."""

    seed: int
    ratio: float
    keep: Keep
    every: int
    rate: float


class StageSubspace:
    """One stage's basis and fixed tables, and its constrained layers. The hooks at both its boundaries work with the same."""

    def __init__(self, model: StageModel, settings: Settings) -> None:
        self.settings, self._model = settings, model
        rank = bases.rank_of(model.width, settings.ratio)
        self.basis = bases.drawn(f"subspace {settings.seed} basis {model.width} {rank}", model.width, rank)
        names = {"tokens": model.vocabulary, **({"positions": model.context} if model.learned_positions else {})}
        # Whole tables, because a row must not depend on which are asked for. Tens of MB, as in the paper.
        self.fixed = {
            name: bases.normal(f"subspace {settings.seed} {name} {model.width}", rows, model.width).mul_(SPREAD)
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


class SubspaceHook:
    """One boundary's part in a stage's model; see `base.Hook`."""

    def __init__(self, stage: StageSubspace, model: StageModel, *, boundary: int, sends: bool) -> None:
        self._stage, self._model, self._boundary, self._sends = stage, model, boundary, sends
        self._moves = stage.settings.keep == "grassmann"
        self._unchecked = stage.settings.keep != "free"
        self._sampled: Tensor | None = None
        self._sampling = False

    def parameters(self) -> Iterable[nn.Parameter]:
        """None of its own: the constrained ones are the model's."""
        return ()

    def rowwise(self) -> Mapping[nn.Parameter, int]:
        """Those of the stage, where it is constrained and its basis moves."""
        return self._stage.rowwise() if self._sends else {}

    def send(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Coordinates (b, n, k). SpecError when the first hidden states do not lie in the subspace."""
        coded = self._stage.coordinates(hidden, inputs)
        if self._unchecked:
            self._unchecked = False
            self._check(hidden.detach(), self._stage.hidden(coded.detach(), inputs))
        return coded

    def receive(self, coded: Tensor, inputs: Tensor) -> Tensor:
        """Hidden states (b, n, d), exact to within rounding where the sender is constrained."""
        hidden = self._stage.hidden(coded, inputs)
        if self._sampling and hidden.requires_grad:
            hidden.register_hook(self._sample)  # type: ignore[no-untyped-call]
        return hidden

    def begin(self, step: int, microbatches: int) -> None:
        """Whether to look at this step's gradients."""
        every = self._stage.settings.every
        self._sampling = self._moves and not self._sends and self._model.last and step % every >= every - _SAMPLED_STEPS

    def after_step(self, step: int, rate: float) -> None:
        """Projection, and where it is time the way to another basis."""
        if self._sends or self._model.last:  # of two hooks of a stage one does it
            self._stage.change_over()
        if self._sends:
            # Where the basis moves as well: of an old basis the optimiser's momentum still knows something.
            self._stage.project()
        if self._sampled is not None and (step + 1) % self._stage.settings.every == 0:
            self._stage.coming = moved(self._stage.basis, self._sampled, self._stage.settings.rate).to(torch.bfloat16)
            self._sampled = None

    def agreed(self) -> Mapping[str, Tensor]:
        """What every stage must hold alike: see `check.claims`."""
        return {"basis": self._stage.basis, **{f"fixed {name}": table for name, table in self._stage.fixed.items()}}

    def outside(self) -> float | None:
        """Of the stage, at the end that is constrained: see `check.claims`."""
        return self._stage.outside() if self._sends else None

    # ---------------------------------------------------------------- what the gradients' codec carries
    def outgoing(self, slot: Slot) -> Tensor | None:
        """The basis that is coming, once, with the first gradients that go upstream."""
        return self._stage.coming if slot.phase == "train" and not self._stage.passed_on else None

    def sent(self, slot: Slot, matrix: Tensor | None) -> None:
        """It goes once."""
        self._stage.passed_on |= matrix is not None

    def visit(self, direction: Direction) -> int:
        """Bases are counted nowhere: a stage that lacks one ends the run."""
        return 0

    def reset(self) -> None:
        """Nothing: the hook's basis is not the stream's state."""

    def expected(self, slot: Slot) -> tuple[int, int] | None:
        """A basis, if it moves, and only from downstream."""
        basis = self._stage.basis
        return (basis.shape[0], basis.shape[1]) if self._moves and self._sends else None

    def check(self, matrix: Tensor, slot: Slot) -> str | None:
        """Orthonormal, but for bf16."""
        skew = (matrix.float().T @ matrix.float() - torch.eye(matrix.shape[1])).abs().max()
        return None if float(skew) <= _SKEW else "is no basis: its columns are not orthonormal"

    def incoming(self, matrix: Tensor, slot: Slot, visit: int) -> None:
        """For the end of this step."""
        self._stage.coming, self._stage.passed_on = matrix, False

    def _sample(self, gradient: Tensor) -> None:
        if not self._sampling:
            return
        self._sampling = False  # the step's first micro-batch, whatever the schedule has in flight by then
        rows, basis = gradient.reshape(-1, gradient.shape[-1]), self._stage.basis
        found = rows.T @ (rows @ basis)
        self._sampled = found if self._sampled is None else self._sampled + found

    def _check(self, hidden: Tensor, back: Tensor) -> None:
        share = float((hidden - back).norm() / hidden.norm().clamp_min(torch.finfo(torch.float32).tiny))
        if share > _OUTSIDE:
            raise SpecError(
                f"codec subspace: at boundary {self._boundary} a share of {share:.0%} of the hidden states lies outside the "
                "subspace and would be lost; all boundaries before it need the same subspace with a lossless inner codec (fp32, "
                "bf16), and workload.dropout must be 0"
            )


def moved(basis: Tensor, sampled: Tensor, rate: float) -> Tensor:
    """The basis (d, k) after one step of gradient descent on the Grassmann manifold for ||G (I - U U^T)||^2.

    `sampled` is G^T G U summed over the samples; a rate of 1 is about one step of subspace iteration.
    """
    within = basis.T @ sampled
    largest = float(torch.linalg.eigvalsh((within + within.T) / 2)[-1])
    if not largest > 0:
        return basis.clone()
    return bases.orthonormal(basis + rate / largest * (sampled - basis @ within))


class Subspace(Carrying):
    """Both directions: (b, n, k) coordinates through the inner codec.

    `ratio` is d/k; `every` and `rate` are for keep=grassmann, whose gradients alone carry a basis and have a header for it.
    """

    def __init__(
        self, context: Context, *, ratio: float, inner: Codec, keep: Keep = "projected", every: int = 500, rate: float = 0.1
    ) -> None:
        super().__init__(context, inner=inner)
        self._settings = Settings(context.seed, ratio, keep, every, rate)
        self._carries = keep == "grassmann" and context.direction == "backward"

    def hook(self, model: nn.Module, side: Literal["upstream", "downstream"]) -> SubspaceHook:
        """The stage that sends is constrained. SpecError for a model that cannot be, or with another subspace elsewhere."""
        stage_model = known(model, "subspace")
        stage = stage_model.kept.get("subspace")
        if stage is None:
            stage = stage_model.kept["subspace"] = StageSubspace(stage_model, self._settings)
        if stage.settings != self._settings:
            raise SpecError(
                f"codec subspace: two boundaries of one stage have {stage.settings} and {self._settings}; all boundaries of a "
                "model share one subspace"
            )
        if side == "downstream":
            stage.constrain()
        hook = SubspaceHook(stage, stage_model, boundary=self._context.boundary, sends=side == "downstream")
        self.own_load = hook
        return hook

    def encode(self, tensor: Tensor, slot: Slot) -> Payload:
        """The inner codec's payload; gradients with a header, and now and then a basis, where the basis moves."""
        return super().encode(tensor, slot) if self._carries else self.inner.encode(tensor, slot)

    def decode(self, payload: Payload, slot: Slot) -> Tensor:
        """As the inner codec."""
        return super().decode(payload, slot) if self._carries else self.inner.decode(payload, slot)


class FreeSubspace(Subspace):
    """The negative control: the projection of `Subspace` while nothing keeps the weights in the subspace."""

    def __init__(self, context: Context, *, ratio: float, inner: Codec) -> None:
        super().__init__(context, ratio=ratio, inner=inner, keep="free")

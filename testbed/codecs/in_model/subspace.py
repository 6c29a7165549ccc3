"""Subspace networks (Protocol Models): a model whose hidden states lie in a k-dimensional subspace, apart from a term
that every stage knows, so that k coordinates per token are sent instead of d values, without loss.

With U (d, k) orthonormal and fixed tables F and P, the same at all stages: X = F[token] + P[position] + residual
branches, and every layer that writes into X writes within span(U). Then C = (X - F - P) U is sent, and C U^T + F + P is
X again, up to rounding. The gradient of C is G U, the only part of G that anything upstream of the boundary depends on.
F, P and U are drawn from the seed and token ids follow from the order of the data, so none of them costs a byte. Bits
per element: the inner codec's, times k/d.

How weights are kept in the subspace (`keep`; variants B, C, A and D of the reference):
  projected       ordinary AdamW, then W <- W U U^T after each step: the authors' released code
  reparametrised  W = Z U^T with Z learned, so no projection is needed; there are fewer parameters
  grassmann       one second moment for each row (an update then stays in the span), and the basis itself moves: every
                  `every` steps U <- qr(U + rate * D / l) with D = (I - U U^T) G^T G U from gradients G sampled at the
                  last boundary, l the largest eigenvalue of U^T G^T G U. The paper's objective and step size are not
                  published: this is derived. The new U (2 d k bytes) is sent upstream with the next step's first
                  gradients; all stages switch to it at the end of that step
  free            not kept at all: the negative control, a random projection that loses about 1 - k/d of the energy. In
                  the reference's D the fixed table is the current embedding, so at least a token's embedding arrives
                  intact

F and P have standard deviation `spread`, 0.02 like the initial embeddings of GPT-2 and Llama. The released code uses 1
for these and for the learned embeddings. The initial ratio is the same, but if the learning rate fixes the size of a
step, as in Adam, learned embeddings then take longer to outgrow F, the only part of X that is not of rank k.

Every stage before a boundary must be constrained, which is checked when the first hidden states are sent; the last
stage need not be. Element-wise dropout of hidden states leaves the subspace, so it must be 0.

Source: Ramasinghe et al., "Protocol Models" (arXiv 2506.01260), sections on subspace constraint; variants B and C as in
the code released with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.in_model import bases
from testbed.codecs.in_model.constrained_stage import ConstrainedStage, Keep, SubspaceSettings
from testbed.codecs.in_model.model_codec import Carrying, ChangeableStage, HookBase, changeable, device_of
from testbed.errors import SpecError
from testbed.message_key import Direction, Side

_OUTSIDE = 0.1
"""Largest share of the hidden states' norm outside the subspace; bf16 arithmetic causes a few thousandths."""
_SAMPLED_STEPS = 8
"""In this many steps before the basis moves, the gradient of one micro-batch is sampled."""


class SubspaceHook(HookBase):
    """One boundary's part of a stage's model: see `contract.Hook`."""

    keeps = ("_stage", "_unchecked", "_sampled")

    def __init__(self, stage: ConstrainedStage, model: ChangeableStage, *, boundary: int, sends: bool) -> None:
        self._stage, self._model, self._boundary, self._sends = stage, model, boundary, sends
        self._moves = stage.settings.keep == "grassmann"
        self._unchecked = stage.settings.keep != "free"
        self._sampled: Tensor | None = None
        self._sampling = False

    def rowwise(self) -> Mapping[nn.Parameter, int]:
        """Return the stage's parameters, if it is constrained and its basis moves."""
        return self._stage.rowwise() if self._sends else {}

    def send(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Return coordinates (b, n, k). SpecError when the first hidden states do not lie in the subspace."""
        coded = self._stage.coordinates(hidden, inputs)
        if self._unchecked:
            self._unchecked = False
            self._check(hidden.detach(), self._stage.hidden(coded.detach(), inputs))
        return coded

    def receive(self, coded: Tensor, inputs: Tensor) -> Tensor:
        """Return hidden states (b, n, d), exact up to rounding if the sender is constrained."""
        hidden = self._stage.hidden(coded, inputs)
        if self._sampling and hidden.requires_grad:
            hidden.register_hook(self._sample)  # type: ignore[no-untyped-call]
        return hidden

    def begin(self, step: int, microbatches: int) -> None:
        """Decide whether to sample this step's gradients."""
        every = self._stage.settings.every
        self._sampling = self._moves and not self._sends and self._model.last and step % every >= every - _SAMPLED_STEPS

    def after_step(self, step: int, rate: float) -> None:
        """Project the weights, and start to move the basis if it is time."""
        if self._sends or self._model.last:  # only one of a stage's two hooks does it
            self._stage.change_over()
        if self._sends:
            # Also if the basis moves: the optimiser's momentum still has components outside the new one.
            self._stage.project()
        if self._sampled is not None and (step + 1) % self._stage.settings.every == 0:
            self._stage.coming = moved(self._stage.basis, self._sampled, self._stage.settings.rate).to(torch.bfloat16)
            self._sampled = None

    def agreed(self) -> Mapping[str, Tensor]:
        """Return what must be identical at every stage: see `check.row_claims`."""
        return {"basis": self._stage.basis, **{f"fixed {name}": table for name, table in self._stage.fixed.items()}}

    def outside(self) -> float | None:
        """Return the stage's `outside`, at the constrained end: see `check.row_claims`."""
        return self._stage.outside() if self._sends else None

    # ---------------------------------------------------------------- what the gradients' codec carries
    def outgoing(self, key: MessageKey) -> Tensor | None:
        """Return the next basis, once, with the first gradients sent upstream."""
        return self._stage.coming if key.phase == "train" and not self._stage.passed_on else None

    def sent(self, key: MessageKey, matrix: Tensor | None) -> None:
        """Note that the basis was sent."""
        self._stage.passed_on |= matrix is not None

    def visit(self, direction: Direction) -> int:
        """Return 0: bases are not counted, because a stage that lacks one ends the run."""
        return 0

    def reset(self) -> None:
        """Do nothing: the hook's basis is not the stream's state."""

    def expected(self, key: MessageKey) -> tuple[int, int] | None:
        """Return a basis's shape, if the basis moves, and only from downstream."""
        basis = self._stage.basis
        return (basis.shape[0], basis.shape[1]) if self._moves and self._sends else None

    def check(self, matrix: Tensor, key: MessageKey) -> str | None:
        """Accept only a basis."""
        return bases.fault_of(matrix)

    def incoming(self, matrix: Tensor, key: MessageKey, visit: int) -> None:
        """Keep the next basis for the end of this step."""
        self._stage.coming, self._stage.passed_on = matrix.to(self._stage.basis.device), False

    def _sample(self, gradient: Tensor) -> None:
        if not self._sampling:
            return
        self._sampling = False  # the step's first micro-batch, whatever the schedule has in flight by then
        rows, basis = gradient.reshape(-1, gradient.shape[-1]), self._stage.basis
        product = rows.T @ (rows @ basis)
        self._sampled = product if self._sampled is None else self._sampled + product

    def _check(self, hidden: Tensor, back: Tensor) -> None:
        share = float((hidden - back).norm() / hidden.norm().clamp_min(torch.finfo(torch.float32).tiny))
        if share > _OUTSIDE:
            raise SpecError(
                f"codec subspace: at boundary {self._boundary} a share of {share:.0%} of the hidden states lies "
                "outside the subspace and would be lost; all boundaries before it need the same subspace with a "
                "lossless inner codec (fp32, bf16), and workload.dropout must be 0"
            )


def moved(basis: Tensor, sampled: Tensor, rate: float) -> Tensor:
    """Return the basis (d, k) after one step of gradient descent on the Grassmann manifold for ||G (I - U U^T)||^2.

    `sampled` is G^T G U summed over the samples; a rate of 1 is about one step of subspace iteration.
    """
    within = basis.T @ sampled
    largest = float(torch.linalg.eigvalsh((within + within.T) / 2)[-1])
    if not largest > 0:
        return basis.clone()
    return bases.orthonormal(basis + rate / largest * (sampled - basis @ within))


class Subspace(Carrying):
    """The codec of both directions: coordinates (b, n, k) through the inner codec.

    `ratio` is d/k. `every` and `rate` are for keep=grassmann, whose gradients have a header and may carry a basis.
    """

    def __init__(
        self,
        context: Context,
        *,
        ratio: float,
        inner: Codec,
        keep: Keep = "projected",
        every: int = 500,
        rate: float = 0.1,
        spread: float = 0.02,
    ) -> None:
        super().__init__(context, inner=inner)
        self._settings = SubspaceSettings(context.seed, ratio, keep, every, rate, spread)
        self._carries = keep == "grassmann" and context.direction == "backward"

    def hook(self, model: nn.Module, side: Side) -> SubspaceHook:
        """Constrain the stage, if it sends.

        SpecError for a model that cannot be constrained, or one with another subspace at its other boundary.
        """
        stage_model = changeable(model, "subspace")
        stage = stage_model.kept.get("subspace")
        if stage is None:
            stage = stage_model.kept["subspace"] = ConstrainedStage(stage_model, self._settings, device_of(model))
        if stage.settings != self._settings:
            raise SpecError(
                f"codec subspace: two boundaries of one stage have {stage.settings} and {self._settings}; all "
                "boundaries of a model share one subspace"
            )
        if side == "downstream":
            stage.constrain()
        hook = SubspaceHook(stage, stage_model, boundary=self._context.boundary, sends=side == "downstream")
        self.own_matrix = hook
        return hook

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode with the inner codec; if the basis moves, gradients get a header, and sometimes carry a basis."""
        return super().encode(tensor, key) if self._carries else self.inner.encode(tensor, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the inner codec."""
        return super().decode(payload, key) if self._carries else self.inner.decode(payload, key)


class FreeSubspace(Subspace):
    """The negative control: the projection of `Subspace` without a constraint on the weights."""

    def __init__(self, context: Context, *, ratio: float, inner: Codec, spread: float = 0.02) -> None:
        super().__init__(context, ratio=ratio, inner=inner, keep="free", spread=spread)

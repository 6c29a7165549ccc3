"""MAPL: a learned basis for each boundary, on the Stiefel manifold, around a small token embedding at every stage.

Boundary p has A_p (d, r) with orthonormal columns, each stage E (v, r), learned, and all stages R (r, d), fixed, with
orthonormal rows. The first stage's token embedding is E R; the others learn copies of E with the same initial values,
so that at the first step a token's embedding is sent exactly (the sources do not state the first stage's embedding).
With Y = X - E[token] R at the sender:

  Z = Y A is sent;  X^ = Z A^T + E[token] R with the receiver's own E.

A's gradient has a part at each end, Y^T (dX^ A) and dX^^T Z, from the derivative of (Y A) A^T. Whether MAPL returns the
receiver's part is not stated. Here it is sent with the step's last gradients, r d numbers, and the new A with the next
forward message: 2 r d bytes each (bf16; both ends use the polar factor of the received matrix, so they are
bit-identical). A's update is SPEL:

  g_R = g - A sym(A^T g);  m <- beta m + (1 - beta) g_R;  A <- polar(A - alpha polar(m))

so A rotates by about alpha per step, however small the gradient is. alpha is `rate` times the model's learning rate.
The paper has a `rate` of 0.1 and Muon's learning rate of 0.01 to 0.02, so its alpha is 0.001 to 0.002; with a smaller
learning rate, such as Adam's, 0.1 gives smaller steps.

Bits per element: the inner codec's, times r/d.
Sources: Janson, Oyallon, Belilovsky, "MAPL" (arXiv 2606.05484), method, at second hand; Yang and Lai, "Manifold
constrained steepest descent" (arXiv 2601.21487), for SPEL. Derived, because not stated: beta = 0.9, and one R for all
stages (with one per stage, equal copies of E would not cancel). MAPL's vector quantisation is not implemented.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from testbed.codecs.contract import Codec, Context, MessageKey
from testbed.codecs.in_model import bases
from testbed.codecs.in_model.model_codec import Carrying, ChangeableStage, HookBase, changeable, device_of
from testbed.errors import SpecError
from testbed.message_key import Direction, Phase, Side

BETA = 0.9
SPREAD = 0.02
"""Standard deviation of each value of a token's initial embedding."""


class MaplSettings(NamedTuple):
    """Settings that all boundaries of a model must share."""

    seed: int
    ratio: float
    rate: float


class StageEmbedding(nn.Module):
    """E R: a low-rank token embedding, one per stage, shared by the hooks at both its boundaries."""

    def __init__(self, model: ChangeableStage, settings: MaplSettings, device: torch.device) -> None:
        super().__init__()
        self.settings = settings
        rank = bases.rank_of(model.width, settings.ratio)
        start = bases.normal(f"mapl {settings.seed} tokens {rank}", model.vocabulary, rank)
        # so that rows of E R have the norm of an ordinary embedding's initial rows
        self.weight = nn.Parameter(start.mul_(SPREAD * (model.width / rank) ** 0.5).to(device))
        columns = bases.drawn(f"mapl {settings.seed} rows {model.width} {rank}", model.width, rank)
        self.register_buffer("columns", columns.to(device), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (b, n) int64 to rows (b, n, d)."""
        small = nn.functional.embedding(ids, self.weight)
        rows: Tensor = nn.functional.linear(small, self.get_buffer("columns"))
        return rows


class MaplHook(HookBase):
    """One boundary's part of a stage's model: see `contract.Hook`."""

    keeps = ("_embedding", "_master", "_momentum", "_version", "_told", "basis")

    def __init__(self, embedding: StageEmbedding, width: int, *, boundary: int, sends: bool) -> None:
        settings = embedding.settings
        self._embedding, self._sends, self._settings = embedding, sends, settings
        rank = bases.rank_of(width, settings.ratio)
        self._master = bases.drawn(f"mapl {settings.seed} boundary {boundary} {width} {rank}", width, rank)
        self._master = self._master.to(embedding.weight.device)
        self._momentum = torch.zeros_like(self._master)
        self._version = 0
        self._told: dict[Phase, int] = {}
        self._microbatches = self._gradients = 0
        self._returned: Tensor | None = None
        self.basis = self._on_the_wire()

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the stage's E, which both its hooks return. A is updated here, not by the optimiser."""
        return (self._embedding.weight,)

    def send(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Map hidden states (b, n, d) to (b, n, r)."""
        # (E R) A as E (R A): r x r numbers in place of the rows of a whole table
        small = nn.functional.embedding(inputs, self._embedding.weight)
        coded: Tensor = hidden @ self.basis - small @ (self._embedding.get_buffer("columns").T @ self.basis)
        return coded

    def receive(self, coded: Tensor, inputs: Tensor) -> Tensor:
        """Map (b, n, r) to hidden states (b, n, d)."""
        hidden: Tensor = coded @ self.basis.T + self._embedding(inputs)
        return hidden

    def begin(self, step: int, microbatches: int) -> None:
        """Restart the count of the step's gradients, by which the last one is recognised."""
        self._microbatches, self._gradients, self._returned = microbatches, 0, None
        self.basis.grad = None

    def after_step(self, step: int, rate: float) -> None:
        """Update the sender's A. SpecError if the receiver's part of its gradient did not arrive."""
        if not self._sends:
            return
        if self._returned is None:
            raise SpecError(
                "codec mapl: the receiver's part of the basis's gradient did not come back, because the gradients go "
                "through another codec; name it for both directions"
            )
        gradient = self._returned.float()
        if self.basis.grad is not None:
            gradient = gradient + self.basis.grad
        product = self._master.T @ gradient
        tangent = gradient - self._master @ ((product + product.T) / 2)
        self._momentum.mul_(BETA).add_(tangent, alpha=1 - BETA)
        if bool(self._momentum.any()):
            self._master = bases.polar(self._master - self._settings.rate * rate * bases.polar(self._momentum))
        self._version += 1
        self.basis = self._on_the_wire()

    def agreed(self) -> Mapping[str, Tensor]:
        """Return what must be identical at both ends once a message has been received: see `check.row_claims`."""
        return {"basis": self.basis, "rows of the embedding": self._embedding.get_buffer("columns")}

    # ---------------------------------------------------------------- what the codecs carry
    def outgoing(self, key: MessageKey) -> Tensor | None:
        """Return A, if this phase has not sent it yet; backward, A's gradient with a step's last message."""
        if self._sends:
            return None if self._told.get(key.phase, 0) == self._version else self._master.to(torch.bfloat16)
        if self._gradients + 1 < self._microbatches:
            return None
        gradient = self.basis.grad
        return (torch.zeros_like(self._master) if gradient is None else gradient).to(torch.bfloat16)

    def sent(self, key: MessageKey, matrix: Tensor | None) -> None:
        """Note that this phase has sent A, or that another gradient was sent."""
        if self._sends:
            self._told[key.phase] = self._version
        else:
            self._gradients += 1

    def visit(self, direction: Direction) -> int:
        """Return A's number, which after 255 is 1 again. Gradients have none: a missing one ends the step."""
        if direction == "backward":
            return 0
        return (self._version - 1) % 255 + 1 if self._version else 0

    def reset(self) -> None:
        """Send A with the next message of each phase."""
        self._told = dict.fromkeys(self._told, -1)

    def expected(self, key: MessageKey) -> tuple[int, int] | None:
        """Return the shape of A and of its gradient."""
        return (self._master.shape[0], self._master.shape[1])

    def check(self, matrix: Tensor, key: MessageKey) -> str | None:
        """Accept only a basis for A; a gradient may be anything."""
        return None if self._sends else bases.fault_of(matrix)

    def incoming(self, matrix: Tensor, key: MessageKey, visit: int) -> None:
        """Store A from upstream, or its gradient from downstream."""
        if self._sends:
            self._returned = matrix.to(self._master.device)
        else:
            self._master, self._version = matrix.to(self._master.device).float(), visit
            self.basis = self._on_the_wire()

    def _on_the_wire(self) -> Tensor:
        """Return the basis that both ends derive from the bytes.

        The sender also keeps A in fp32, because small steps would be lost in bf16.
        """
        return bases.polar(self._master.to(torch.bfloat16).float()).requires_grad_()


class Mapl(Carrying):
    """The codec of both directions. `ratio` is d/r; `rate` is A's learning rate as a share of the model's."""

    def __init__(self, context: Context, *, ratio: float, inner: Codec, rate: float = 0.1) -> None:
        super().__init__(context, inner=inner)
        self._settings = MaplSettings(context.seed, ratio, rate)

    def hook(self, model: nn.Module, side: Side) -> MaplHook:
        """Make E R the first stage's token embedding.

        SpecError for a model that cannot be changed, or one with two ratios.
        """
        stage = changeable(model, "mapl")
        embedding = stage.kept.get("mapl")
        if embedding is None:
            embedding = stage.kept["mapl"] = StageEmbedding(stage, self._settings, device_of(model))
            for part in stage.tables()[:1]:
                part.replace(embedding)
        if embedding.settings != self._settings:
            raise SpecError(
                f"codec mapl: two boundaries of one stage have {embedding.settings} and {self._settings}; a stage has "
                "one embedding"
            )
        boundary = self._context.boundary
        hook = MaplHook(embedding, stage.width, boundary=boundary, sends=side == "downstream")
        self.own_matrix = hook
        return hook

"""One replica of the model: its computation in a step, and the application of aggregates.

Shared weights are identical at all workers, except where workers average in pairs. A worker's local steps start from
them; or, where fragments are exchanged in turn (`spec.StreamingSpec`), from its own weights, into which a fragment's
shared weights are mixed when they change.

With a look-ahead, a worker that `n` updates are missing to takes gradients at w + (beta + beta^2 + ... + beta^n) d,
where w are its weights and d their last change: where momentum beta leads without further gradients. AsyncMesh (arXiv
2601.22442, abstract) looks ahead in an asynchronous pipeline; here, it is for delayed aggregates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from testbed.nodes.fragments import divide_tensors, in_turn
from testbed.nodes.low_rank import Cores
from testbed.nodes.optimise import Optimiser, Outer, learning_rate
from testbed.runtime import failures
from testbed.runtime.gather import global_norm
from testbed.spec import LowRankSpec, OptimiserSpec, OuterSpec, Recipe, StreamingSpec


class Evaluated(NamedTuple):
    """The result of an evaluation."""

    loss: float
    """Mean over the validation data, in nats."""
    accuracy: float | None = None
    """Share of correctly classified validation images; None for text."""


class Learner(Protocol):
    """A model and one worker's part of the data."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Trained parameters, in the same order at all workers."""
        ...

    @property
    def tables(self) -> Sequence[Parameter]:
        """Those that are embeddings or the output layer."""
        ...

    @property
    def parts(self) -> int:
        """Number of equal parts of the worker's share of a batch."""
        ...

    def loss(self, batch: int, part: int) -> Tensor:
        """Return the mean loss over a part of the worker's share of a batch, a scalar in autograd's graph."""
        ...

    def evaluate(self) -> Evaluated:
        """Evaluate the model on the validation data, the same at all workers."""
        ...


class Computed(NamedTuple):
    """The result of a step's local steps."""

    tensors: list[Tensor]
    """Tensors to send, by parameter (those of the step's fragment where fragments take turns): the mean gradient over
    its part of the batch, the first moment that it yields (`Optimiser.message`), the shared weights minus those
    after its local steps, or, in pairs, the latter."""
    loss: float
    """Mean over its part of the batches, before training on them."""
    norm: float
    """Norm of all `tensors` together; in pairs, of the change."""


class Worker:
    """One replica. Aggregates are queued on arrival and applied when the program says so."""

    keeps = ("parameters", "shared", "_optimiser", "_outers", "_cores", "applied", "_batches", "_moved")

    def __init__(
        self,
        number: int,
        learner: Learner,
        *,
        optimiser: OptimiserSpec,
        outer: OuterSpec | None,
        steps: int,
        streaming: StreamingSpec | None = None,
        pairs: bool = False,
        low_rank: LowRankSpec | None = None,
        seed: int = 0,
        look_ahead: bool = False,
    ) -> None:
        """`steps` is the length of the training, which determines the learning rate. `pairs`: aggregates are means of
        two workers' weights. `seed`: of the first bases of `low_rank`, the same at all workers. `look_ahead`: see the
        module's docstring. SpecError for more fragments than the model has tensors.
        """
        self.name, self._learner, self._spec, self._steps = f"worker {number}", learner, optimiser, steps
        self.parameters = learner.parameters
        self._cores = None if low_rank is None else Cores(self.parameters, low_rank, seed)
        self._trained = self.parameters if self._cores is None else self._cores.parameters
        """What the optimiser updates, by parameter."""
        apart = set(learner.tables)
        tables = [own for own, whole in zip(self._trained, self.parameters, strict=True) if whole in apart]
        self._optimiser = Optimiser(self._trained, optimiser, tables=tables)
        self._mixing, self._pairs = None if streaming is None else streaming.mixing, pairs
        self.shared = self.parameters
        """Shared weights, by parameter."""
        if streaming is not None:
            self.shared = [Parameter(parameter.detach().clone()) for parameter in self.parameters]
        self._fragments = divide_tensors(
            [parameter.numel() for parameter in self.parameters], 1 if streaming is None else streaming.fragments
        )
        self._outers = [
            Outer([self.shared[tensor] for tensor in fragment], outer) for fragment in self._fragments if outer
        ]
        self._under_way: deque[list[Tensor]] = deque()
        self.applied = 0
        """Number of leading steps whose aggregates it has applied."""
        self._batches = 0
        self._moved = [torch.zeros_like(parameter) for parameter in self.parameters if look_ahead]
        """The last change of each parameter; empty without a look-ahead."""
        self._losses: list[float] = []
        """Losses of the step's local steps so far."""
        self._before: Sequence[Tensor] = ()

    @classmethod
    def of(cls, recipe: Recipe, number: int, learner: Learner) -> Worker:
        """Make a worker of a recipe. Raises SpecError like `__init__`."""
        data = recipe.data
        assert data is not None
        return cls(
            number,
            learner,
            optimiser=recipe.optimiser,
            outer=data.outer,
            steps=recipe.training.steps,
            streaming=data.streaming,
            pairs=data.exchange == "pairs",
            low_rank=data.low_rank,
            seed=recipe.training.seed,
            look_ahead=data.look_ahead,
        )

    # ------------------------------------------------------------------ computing
    def compute(self, step: int, *, staleness: int, local_steps: int) -> Computed:
        """Make all local steps of a step. StageError where a loss or gradient is NaN or infinite."""
        assert step - self.applied <= staleness, "a program applies due aggregates before a worker continues"
        self.begin()
        for _ in range(local_steps):
            self.local_step(step)
        return self.close(step)

    def begin(self) -> None:
        """Save the weights from which the step's local steps start."""
        self._losses.clear()
        if self._outers:
            self._before = self.shared if self._mixing is not None else _copies(self.parameters)

    def close(self, step: int) -> Computed:
        """Return the result of a step's local steps, which leave the shared weights unchanged. StageError if it is NaN
        or infinite.
        """
        loss = math.fsum(self._losses) / len(self._losses)
        if not self._outers:
            assert len(self._losses) == 1, "gradients are of one batch"
            tensors = self._optimiser.message()
            return Computed(self._message(tensors), loss, self._norm(tensors, step))
        with torch.no_grad():
            changed = [self._before[tensor] - self.parameters[tensor] for tensor in in_turn(self._fragments, step)]
        sent = changed if self._cores is None else self._cores.cores_of(changed)
        tensors = _copies(self.parameters) if self._pairs else self._message(sent)
        if self._mixing is None:
            _fill(self.parameters, self._before)
        return Computed(tensors, loss, self._norm(changed, step))

    def local_step(self, step: int) -> float:
        """Compute the gradient on its part of the next batch, and apply it where workers send changes of weights;
        returns the mean loss.
        """
        loss = self._backward(step)
        if self._cores is not None:
            self._cores.project(step)
        if self._outers:
            self._update(step)
        self._losses.append(loss)
        return loss

    def _update(self, step: int) -> None:
        rate = learning_rate(self._spec, step, self._steps)
        self._optimiser.update(global_norm(self._optimiser.squares()), rate)
        if self._cores is not None:
            self._cores.lift(rate * self._spec.weight_decay)

    def _message(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors if self._cores is None else self._cores.message(tensors)

    def _backward(self, step: int) -> float:
        """Accumulate the mean gradient over its part of the next batch; returns the mean loss."""
        losses = []
        own = _copies(self.parameters) if self._moved and step > self.applied else []
        if own:
            far = math.fsum(self._spec.beta1**number for number in range(1, step - self.applied + 1))
            _fill(self.parameters, [at.add(moved, alpha=far) for at, moved in zip(own, self._moved, strict=True)])
        for part in range(self._learner.parts):
            loss = self._learner.loss(self._batches, part)
            (loss / self._learner.parts).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise failures.diverged(self.name, "loss", losses[-1], f"at step {step}")
        if own:
            _fill(self.parameters, own)
        self._batches += 1
        return math.fsum(losses) / len(losses)

    def _norm(self, tensors: Sequence[Tensor], step: int) -> float:
        norm = global_norm([torch.linalg.vector_norm(tensor).item() ** 2 for tensor in tensors])
        if not math.isfinite(norm):
            raise failures.diverged(self.name, "norm of its message", norm, f"at step {step}")
        return norm

    # ------------------------------------------------------------------ applying
    def receive(self, aggregate: list[Tensor]) -> None:
        """Queue the next step's aggregate, and take ownership of it."""
        self._under_way.append(aggregate)

    def apply_until(self, step: int) -> list[int]:
        """Apply the aggregates of all steps before this one, in order; returns those steps."""
        done = list(range(self.applied, step))
        for number in done:
            fragment, values = in_turn(self._fragments, number), self._under_way.popleft()
            if self._cores is not None:
                values = self._cores.receive(values)
                values = self._cores.values_of(values) if self._outers else values
            moved = self.shared if self._outers else self._trained
            for tensor, value in zip(fragment, values, strict=True):
                moved[tensor].grad = moved[tensor].detach() - value if self._pairs else value
            if not self._outers:
                before = _copies(self.parameters) if self._moved else []
                self._update(number)
                self._moved = [now.detach() - then for then, now in zip(before, self.parameters, strict=False)]
            else:
                in_turn(self._outers, number).update()
            if self._cores is not None:
                self._cores.applied(number)
            if self._mixing is not None:
                with torch.no_grad():
                    for tensor in fragment:
                        own, shared = self.parameters[tensor], self.shared[tensor]
                        own.copy_(torch.lerp(shared, own, self._mixing))
            self.applied += 1
        return done

    def resume(self, step: int, weights: Sequence[Tensor] | None = None) -> None:
        """Set the weights, if given, and count the first `step` steps as applied, as the server has done."""
        assert not self._under_way
        if weights is not None:
            _fill(self.parameters, weights)
        self.applied = step

    def evaluate(self) -> Evaluated:
        """Evaluate the shared weights on the validation data."""
        if self._mixing is None:
            return self._learner.evaluate()
        own = _copies(self.parameters)
        try:
            _fill(self.parameters, self.shared)
            return self._learner.evaluate()
        finally:
            _fill(self.parameters, own)


def _copies(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


@torch.no_grad()
def _fill(parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)

"""One replica of the model: what it computes in a step, and what it does with an aggregate.

Shared weights are those that all workers have alike. A worker's local steps begin with them; or, where fragments are
exchanged in turn (`spec.StreamingSpec`), with weights of its own, and the shared ones of a fragment are mixed into them
when they change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from testbed.pipeline import faults
from testbed.pipeline.gather import global_norm
from testbed.pipeline.optimise import Optimiser, Outer, learning_rate
from testbed.replicas.fragments import divide_tensors, in_turn
from testbed.spec import OptimiserSpec, OuterSpec, Recipe, StreamingSpec


class Evaluated(NamedTuple):
    """What an evaluation found."""

    loss: float
    """Mean over the validation data, in nats."""
    accuracy: float | None = None
    """Share of the validation images that are named right; None: no images are learned."""


class Learner(Protocol):
    """A model and one worker's part of the data."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """What is learned, in an order that is the same at all workers."""
        ...

    @property
    def parts(self) -> int:
        """Into how many equal parts the worker's share of a batch is cut."""
        ...

    def loss(self, batch: int, part: int) -> Tensor:
        """Return the mean loss over a part of the worker's share of a batch, a scalar in autograd's graph."""
        ...

    def evaluate(self) -> Evaluated:
        """Return how well the model does on the validation data, which are the same at all workers."""
        ...


class Computed(NamedTuple):
    """What a worker has to say after a step's local steps."""

    tensors: list[Tensor]
    """What it sends, by parameter, where fragments take turns of the step's own: the mean gradient over its part of the
    batch, what that makes of the first moment (`Optimiser.message`), or the shared weights less those after its local
    steps."""
    loss: float
    """Mean over its part of the batches, before any of them was learned from."""
    norm: float
    """Of `tensors` together."""


class Worker:
    """One replica. Aggregates are handed over as they come, and applied when the program says so."""

    def __init__(
        self,
        number: int,
        learner: Learner,
        *,
        optimiser: OptimiserSpec,
        outer: OuterSpec | None,
        steps: int,
        streaming: StreamingSpec | None = None,
    ) -> None:
        """`steps` is how many the training has: the learning rate follows from it. SpecError for more fragments than
        the model has tensors.
        """
        self.name, self._learner, self._spec, self._steps = f"worker {number}", learner, optimiser, steps
        self.parameters = learner.parameters
        self._optimiser = Optimiser(self.parameters, optimiser)
        self._mixing = None if streaming is None else streaming.mixing
        self.shared = self.parameters
        """By parameter."""
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
        """Steps whose aggregate it has applied: the first so many."""
        self._batches = 0
        self._losses: list[float] = []
        """Of the step's local steps so far."""
        self._before: Sequence[Tensor] = ()

    @classmethod
    def of(cls, recipe: Recipe, number: int, learner: Learner) -> Worker:
        """Make a recipe's. SpecError as above."""
        data = recipe.data
        assert data is not None
        steps = recipe.training.steps
        return cls(number, learner, optimiser=recipe.optimiser, outer=data.outer, steps=steps, streaming=data.streaming)

    # ------------------------------------------------------------------ computing
    def compute(self, step: int, *, staleness: int, local_steps: int) -> Computed:
        """Make all local steps of a step. StageError where a loss or gradient is NaN or infinite."""
        assert step - self.applied <= staleness, "a program applies what is due before it lets a worker go on"
        self.begin()
        for _ in range(local_steps):
            self.local_step(step)
        return self.close(step)

    def begin(self) -> None:
        """Keep what the local steps of a step begin with."""
        self._losses.clear()
        if self._outers:
            self._before = self.shared if self._mixing is not None else _copies(self.parameters)

    def close(self, step: int) -> Computed:
        """Return what came of a step's local steps, which do not change the shared weights. StageError where it is NaN
        or infinite.
        """
        loss = math.fsum(self._losses) / len(self._losses)
        if not self._outers:
            assert len(self._losses) == 1, "gradients are of one batch"
            tensors = self._optimiser.message()
            return Computed(tensors, loss, self._norm(tensors, step))
        with torch.no_grad():
            changed = [self._before[tensor] - self.parameters[tensor] for tensor in in_turn(self._fragments, step)]
        if self._mixing is None:
            _fill(self.parameters, self._before)
        return Computed(changed, loss, self._norm(changed, step))

    def local_step(self, step: int) -> float:
        """Compute the gradient of its part of the next batch, and update with it where what that changes is sent;
        returns the mean loss.
        """
        loss = self._backward(step)
        if self._outers:
            rate = learning_rate(self._spec, step, self._steps)
            self._optimiser.update(global_norm(self._optimiser.squares()), rate)
        self._losses.append(loss)
        return loss

    def _backward(self, step: int) -> float:
        """Leave the mean gradient over its part of the next batch; returns the mean loss."""
        losses = []
        for part in range(self._learner.parts):
            loss = self._learner.loss(self._batches, part)
            (loss / self._learner.parts).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise faults.diverged(self.name, "loss", losses[-1], f"at step {step}")
        self._batches += 1
        return math.fsum(losses) / len(losses)

    def _norm(self, tensors: Sequence[Tensor], step: int) -> float:
        norm = global_norm([torch.linalg.vector_norm(tensor).item() ** 2 for tensor in tensors])
        if not math.isfinite(norm):
            raise faults.diverged(self.name, "norm of its message", norm, f"at step {step}")
        return norm

    # ------------------------------------------------------------------ applying
    def receive(self, aggregate: list[Tensor]) -> None:
        """Take the next step's aggregate; it is the worker's from now on."""
        self._under_way.append(aggregate)

    def apply_until(self, step: int) -> list[int]:
        """Apply the aggregates of all steps before this one, in order; returns which."""
        done = list(range(self.applied, step))
        for number in done:
            fragment = in_turn(self._fragments, number)
            for tensor, value in zip(fragment, self._under_way.popleft(), strict=True):
                self.shared[tensor].grad = value
            if not self._outers:
                rate = learning_rate(self._spec, number, self._steps)
                self._optimiser.update(global_norm(self._optimiser.squares()), rate)
            else:
                in_turn(self._outers, number).update()
            if self._mixing is not None:
                with torch.no_grad():
                    for tensor in fragment:
                        own, shared = self.parameters[tensor], self.shared[tensor]
                        own.copy_(torch.lerp(shared, own, self._mixing))
            self.applied += 1
        return done

    def resume(self, step: int, weights: Sequence[Tensor] | None = None) -> None:
        """Hold these weights, if any are given, and count so many steps as applied: a server has done that."""
        assert not self._under_way
        if weights is not None:
            _fill(self.parameters, weights)
        self.applied = step

    def evaluate(self) -> Evaluated:
        """Return how well the shared weights do on the validation data."""
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

"""Many short trainings of one small neural network side by side, without links between its workers.

Each is DD-EF-SGD on digits with workers that hold the same weights: top-k of all parameters as one tensor, with error
feedback and aggregates applied `staleness` steps late. It computes the same as `Worker` and `Bucket` with `topk(ratio,
tensor, fp32)` in `ef`, for a stack of learning rates and seeds at once; batched matrix products make it thirty times
faster. A test compares both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from testbed.workloads.images import build_network, images
from testbed.workloads.networks import DIGITS
from testbed.workloads.shards import ShardBatches, divide

MODEL = "digits-mlp"
INPUTS, INNER, CLASSES = DIGITS.side**2, 28, DIGITS.classes
_CUTS = (INNER * INPUTS, INNER, CLASSES * INNER, CLASSES)
VALUES = sum(_CUTS)
DIVERGED = 10.0
"""Loss limit in nats; guessing among ten classes costs 2.3."""


class Trial(NamedTuple):
    """One training of a stack."""

    learning_rate: float
    seed: int
    """Seed of initial weights, shards and the order of examples."""


class Method(NamedTuple):
    """Parameters common to all trainings of a stack."""

    ratio: float
    """Share of a message's values that is kept; 1: dense."""
    staleness: int
    workers: int
    batch_size: int
    """Batch size of each worker."""
    alpha: float
    """Parameter of the Dirichlet distribution of workers' class mixes."""


def steps_to(
    target: float, runs: Sequence[Trial], method: Method, *, steps: int, evaluate_every: int, patience: int
) -> list[int | None]:
    """Return, by run, the number of steps until the test loss first reaches the target.

    The loss is that of a worker's current weights, without pending aggregates. None: not reached within `steps`, or
    within `patience` times the steps that the first successful learning rate took for all its seeds; or diverged, with
    a loss above `DIVERGED`.
    """
    stack, reached = Stack(runs, method), dict[int, int]()
    for step in range(steps):
        stack.step(step)
        if (step + 1) % evaluate_every == 0:
            losses = stack.losses()
            reached.update({run: step + 1 for run, loss in losses.items() if loss <= target})
            stack.keep([run for run, loss in losses.items() if target < loss <= DIVERGED])
            if not stack.running or step + 1 >= patience * _first_rate(runs, reached, steps):
                break
    return [reached.get(run) for run in range(len(runs))]


def _first_rate(runs: Sequence[Trial], reached: Mapping[int, int], default: int) -> float:
    """Return the minimum number of steps in which a learning rate brought all its seeds to the target, or the
    default.
    """
    slowest: dict[float, float] = {}
    for run, each in enumerate(runs):
        slowest[each.learning_rate] = max(slowest.get(each.learning_rate, 0), reached.get(run, math.inf))
    return min(default, *slowest.values())


class Stack:
    """R trainings of n workers: unsent residuals are (R n, P), pending aggregates (R, P)."""

    def __init__(self, runs: Sequence[Trial], method: Method) -> None:
        self._method = method
        self.running = list(range(len(runs)))
        """Number of the run in each row of the stack."""
        first, labels = {}, images("digits").train.labels.numpy()
        self._batches: dict[int, list[ShardBatches]] = {}
        for seed in {run.seed for run in runs}:
            first[seed] = parameters_to_vector(build_network(MODEL, DIGITS, seed).parameters()).detach()
            shards = divide(labels, [1 / method.workers] * method.workers, alpha=method.alpha, seed=seed)
            self._batches[seed] = [
                ShardBatches(shard, method.batch_size, seed=seed, worker=worker) for worker, shard in enumerate(shards)
            ]
        self._seeds = [run.seed for run in runs]
        self._rates = torch.tensor([[run.learning_rate] for run in runs])
        self.weights = torch.stack([first[run.seed] for run in runs])
        """(R, P), the same at all workers of a run."""
        self._left_out = torch.zeros(len(runs) * method.workers, VALUES)
        self._under_way: deque[Tensor] = deque()

    def step(self, step: int) -> None:
        """Compute, send, and apply due aggregates."""
        method, train = self._method, images("digits").train
        chosen = {
            seed: torch.stack([torch.as_tensor(each.batch(step)) for each in self._batches[seed]])
            for seed in set(self._seeds)
        }
        examples = train.at(torch.cat([chosen[seed] for seed in self._seeds]))
        weights = self.weights.repeat_interleave(method.workers, 0)
        message = gradients(weights, examples.images, examples.labels)
        if method.ratio < 1:
            message += self._left_out
            sent = top(message, method.ratio)
            self._left_out, message = message - sent, sent
        self._under_way.append(message.view(-1, method.workers, VALUES).mean(1))
        if len(self._under_way) > method.staleness:
            self.weights -= self._rates * self._under_way.popleft()

    @torch.no_grad()
    def losses(self) -> dict[int, float]:
        """Return the loss on the test images, by active run."""
        test = images("digits").test
        outputs = _forward(self.weights, test.images.expand(len(self.running), -1, -1))[1]
        labels = test.labels.expand(len(self.running), -1)
        means = functional.cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(1)
        return dict(zip(self.running, means.tolist(), strict=True))

    def keep(self, runs: Sequence[int]) -> None:
        """Keep only these runs."""
        if len(runs) == len(self.running):
            return
        rows = torch.tensor([self.running.index(run) for run in runs], dtype=torch.int64)
        self._seeds = [self._seeds[row] for row in rows]
        self._rates, self.weights = self._rates[rows], self.weights[rows]
        self._left_out = self._left_out.view(-1, self._method.workers, VALUES)[rows].flatten(0, 1)
        self._under_way = deque(each[rows] for each in self._under_way)
        self.running = list(runs)


def top(values: Tensor, ratio: float) -> Tensor:
    """Return values (B, P) with all but the largest share `ratio` of each row set to 0, counted like codec `topk`."""
    magnitudes = values.abs()
    least = magnitudes.topk(max(1, round(ratio * values.shape[1])), sorted=False).values.amin(1, keepdim=True)
    return torch.where(magnitudes >= least, values, 0.0)


def _forward(weights: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return inner values (B, m, 28) and outputs (B, m, 10) of images (B, m, 64)."""
    into, into_bias, out, out_bias = torch.split(weights, list(_CUTS), 1)
    inner = torch.baddbmm(into_bias[:, None], images, into.view(-1, INNER, INPUTS).transpose(1, 2)).relu_()
    return inner, torch.baddbmm(out_bias[:, None], inner, out.view(-1, CLASSES, INNER).transpose(1, 2))


@torch.no_grad()
def gradients(weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradients of the mean cross-entropy, (B, P), of B networks, each on its own images (m, 64)."""
    inner, outputs = _forward(weights, images)
    errors = outputs.softmax(2)
    errors -= functional.one_hot(labels, CLASSES)
    errors /= labels.shape[1]
    out = weights[:, -sum(_CUTS[2:]) : -CLASSES].view(-1, CLASSES, INNER)
    before = errors @ out * (inner > 0)
    of_inner = (before.transpose(1, 2) @ images).flatten(1), before.sum(1)
    of_outputs = (errors.transpose(1, 2) @ inner).flatten(1), errors.sum(1)
    return torch.cat([*of_inner, *of_outputs], 1)

"""Many trainings of a small language model side by side, by any method of data parallel training.

It computes the same as `Worker`, `Outer` and `Bucket`: models run as one batch of matrices, three times faster than one
by one; messages go through the real codecs and are counted in bytes. A test compares both. All workers of a run apply
the same aggregates, so they share one copy of the weights between exchanges; where fragments are exchanged in turn,
each worker has its own weights besides the shared ones.

Workers may be absent from an exchange and the local steps before it (`TextMethod.absences`); the mean is then over the
workers present. A returning worker starts from the shared weights with a fresh optimiser and codec.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from testbed.codecs.contract import Context
from testbed.codecs.make import make
from testbed.errors import SpecError
from testbed.message_key import Direction, MessageKey
from testbed.nodes.bucket import Bucket
from testbed.nodes.fragments import divide_tensors, in_turn
from testbed.spec import OuterSpec, StreamingSpec
from testbed.studies.stacked import Trial
from testbed.workloads import characters
from testbed.workloads.characters import ROWS, VALUES, WIDTH

_EPSILON, _CLIP_EPSILON = 1e-8, 1e-6
"""Epsilons of AdamW and of the clipping in `Optimiser`."""
_WAYS: Final[tuple[Direction, ...]] = ("forward", "backward")
SHAPES: Final[Mapping[str, Sequence[tuple[int, ...]]]] = {
    "values": [(VALUES,)],
    "rows": [(sum(ROWS), WIDTH)],
    "matrices": [(rows, WIDTH) for rows in ROWS],
}
"""Shapes of a codec's input, by `TextMethod.sees`."""
DIVERGED = 10.0
"""Loss limit in nats; guessing among 64 symbols costs 4.2."""


Absences = Mapping[int, Sequence[tuple[Sequence[int], Sequence[int]]]]
"""By seed and exchange: absent workers, and returning workers."""


class TextMethod(NamedTuple):
    """Parameters common to all trainings of a stack."""

    codec: str
    """Codec of a worker's messages."""
    sees: Literal["values", "rows", "matrices"]
    """The codec's input: all parameters as one tensor (P,), as one matrix (`characters.ROWS`), or each matrix by
    itself."""
    staleness: int = 0
    local_steps: int = 1
    """Batches between exchanges."""
    outer: OuterSpec | None = None
    """None: workers send gradients, and the optimiser is applied to their mean. Otherwise the optimiser makes the local
    steps, and the outer optimiser is applied to the mean change."""
    streaming: StreamingSpec | None = None
    """Exchange fragments of matrices in turn; requires `outer` and a codec that sees matrices."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Betas of AdamW without decay. Both 0: the sign of the gradient (signSGD)."""
    clip_norm: float = 1.0
    frozen_after: int | None = None
    """Exchanges after which the second moment is frozen and first moments are sent; requires staleness 0 and no
    `outer`."""
    workers: int = 4
    batch_size: int = 4
    """Sequences per worker and batch."""
    batch_sizes: tuple[int, ...] = ()
    """Batch size of each worker, where workers differ; each divides `batch_size`."""
    split: tuple[int, ...] = ()
    """Workers whose model is split into four stages, see `characters.CUTS`."""
    boundary: str = "fp32"
    """Codec between their stages, applied per token: one call handles all tokens of a run's split workers."""
    absences: Absences | None = None
    """None: all workers take part in every exchange. Requires `outer`, where each worker has its own optimiser;
    excludes `streaming`, where each has its own weights."""


class Chosen(NamedTuple):
    """Parameters that may change from one exchange to the next."""

    codec: str
    staleness: int


Choices = Callable[[int], Chosen]
"""Maps an exchange to its parameters."""


class StackedRun(NamedTuple):
    """Results of one run."""

    run: int
    batches: int
    """Number of batches that every worker has trained on so far."""
    loss: float
    """Validation loss of the current weights, without pending aggregates."""
    payload_bytes: int
    """Payload bytes sent so far by one worker that was never absent."""


def train(
    runs: Sequence[Trial],
    method: TextMethod,
    *,
    batches: int,
    evaluate_every: int,
    choices: Choices | None = None,
    target: float | None = None,
) -> Iterator[StackedRun]:
    """Train all runs; yields each evaluation, after every `evaluate_every` batches or at the next exchange. A run ends
    when it diverges (a loss of NaN or above `DIVERGED`) or reaches the target. `choices` None: the method's parameters
    stay constant.
    """
    stack, seen = TextStack(runs, method, choices), 0
    for exchange in range(batches // method.local_steps):
        stack.step(exchange)
        done = (exchange + 1) * method.local_steps
        if done // evaluate_every > seen:
            seen = done // evaluate_every
            losses = stack.losses()
            for run, loss in losses.items():
                if loss <= DIVERGED:
                    yield StackedRun(run, done, loss, stack.sent_bytes[run])
            stack.keep([run for run, loss in losses.items() if (target or 0.0) < loss <= DIVERGED])
        if not stack.running:
            return


class TextStack:
    """R trainings of n workers. Rows of runs are (R, P), of workers (R n, P)."""

    def __init__(self, runs: Sequence[Trial], method: TextMethod, choices: Choices | None = None) -> None:
        if method.absences is not None and (method.outer is None or method.streaming is not None):
            raise SpecError(
                "absences need workers that exchange the whole change made by local steps: remove absences, or set "
                "outer and remove streaming"
            )
        if method.local_steps > 1 and method.outer is None:
            raise SpecError("local steps make weight changes: set outer, the optimiser applied to them")
        stated = Chosen(method.codec, method.staleness)
        self._method, self._choices = method, choices or (lambda exchange: stated)
        self.running = list(range(len(runs)))
        """By row of the stack: which run it is."""
        self.sent_bytes = [0] * len(runs)
        """Payload bytes of one worker so far, by run."""
        seeds = {run.seed for run in runs}
        self._batches = {
            seed: characters.Batches(workers=method.workers, batch_size=method.batch_size, seed=seed) for seed in seeds
        }
        self._seeds = [run.seed for run in runs]
        self.weights = torch.stack([characters.first_weights(seed) for seed in self._seeds])
        """(R, P), the same at all workers of a run."""
        self._own = None if method.streaming is None else self.weights.repeat_interleave(method.workers, 0)
        """(R n, P), where workers continue from their own weights."""
        self._fragments = _fragments(method)
        self._ends = [
            [[self._bucket(part, run.seed, worker) for worker in range(method.workers)] for part in self._fragments]
            for run in runs
        ]
        """By run, fragment and worker: its own end and the others' end."""
        self._boundaries = [_Boundaries(method.boundary, run.seed) for run in runs] if method.split else []
        rates = torch.tensor([[run.learning_rate] for run in runs])
        each = 1 if method.outer is None else method.workers
        self._adam = _Adam(rates.repeat_interleave(each, 0), method.betas, method.clip_norm, method.frozen_after)
        self._momenta: list[Tensor | None] = [None] * len(self._fragments)
        self._under_way: deque[tuple[int, Tensor]] = deque()
        """Number of the exchange, and the mean of its messages."""

    def step(self, exchange: int) -> None:
        """Compute, send, and apply what is due."""
        method = self._method
        self._begin_afresh(exchange)
        before = self.weights.repeat_interleave(method.workers, 0)
        if method.outer is None:
            message = self._adam.message(self._gradients(before, exchange))
        else:
            weights = before.clone() if self._own is None else self._own
            for batch in range(exchange * method.local_steps, (exchange + 1) * method.local_steps):
                self._adam.update(weights, self._gradients(weights, batch))
            message = before - weights
        for row, away in enumerate(self._away(exchange)):
            for worker in away:  # its results belong to no worker, and are not sent
                message[row * method.workers + worker] = 0.0
        finite = message.isfinite().all(1).view(-1, method.workers).all(1)
        if not bool(finite.all()):
            message = message[finite.repeat_interleave(method.workers)]
            self.keep([run for run, fine in zip(self.running, finite.tolist(), strict=True) if fine])
            if not self.running:
                return
        message = message[:, in_turn(self._fragments, exchange).columns]
        self._under_way.append((exchange, self._mean(message, exchange)))
        while len(self._under_way) > self._choices(exchange + 1).staleness:
            self._apply(*self._under_way.popleft())

    @torch.no_grad()
    def losses(self) -> dict[int, float]:
        """Return the loss on the validation sequences, by active run."""
        sequences = characters.validation().expand(len(self.running), -1, -1)
        return dict(zip(self.running, characters.losses(self.weights, sequences).tolist(), strict=True))

    def keep(self, runs: Sequence[int]) -> None:
        """Go on with these runs alone."""
        if len(runs) == len(self.running):
            return
        rows = torch.tensor([self.running.index(run) for run in runs], dtype=torch.int64)
        self._adam.keep(rows, len(self.running))
        if self._own is not None:
            self._own = self._own.view(len(self.running), -1, VALUES)[rows].flatten(0, 1)
        self._seeds, self._ends = [self._seeds[row] for row in rows], [self._ends[row] for row in rows]
        if self._boundaries:
            self._boundaries = [self._boundaries[row] for row in rows]
        self.weights = self.weights[rows]
        self._momenta = [None if each is None else each[rows] for each in self._momenta]
        self._under_way = deque((exchange, mean[rows]) for exchange, mean in self._under_way)
        self.running = list(runs)

    def _gradients(self, weights: Tensor, batch: int) -> Tensor:
        split = self._method.split
        if not split:
            return characters.gradients(weights, self._sequences(batch))

        def at_cut(stream: Tensor, cut: int) -> Tensor:
            streams = stream.view(len(self.running), -1, *stream.shape[1:])
            parts = list(streams.unbind(1))
            crossed = _AtCut.apply(  # type: ignore[no-untyped-call]
                streams[:, list(split)], cut, batch, self._boundaries
            )
            for place, worker in enumerate(split):
                parts[worker] = crossed[:, place]
            return torch.stack(parts, 1).flatten(0, 1)

        return characters.gradients(weights, self._sequences(batch), at_cut)

    def _sequences(self, batch: int) -> Tensor:
        chosen = {seed: self._batches[seed].batch(batch) for seed in set(self._seeds)}
        for worker, size in enumerate(self._method.batch_sizes):
            for sequences in chosen.values():  # the mean over a smaller batch equals that over its repetition
                sequences[worker] = sequences[worker, torch.arange(self._method.batch_size) % size]
        return torch.cat([chosen[seed] for seed in self._seeds])

    def _away(self, exchange: int) -> list[Sequence[int]]:
        """Return the absent workers of an exchange, by row of the stack."""
        absences = self._method.absences
        return [()] * len(self._seeds) if absences is None else [absences[seed][exchange][0] for seed in self._seeds]

    def _begin_afresh(self, exchange: int) -> None:
        """Reset the state of returning workers."""
        if self._method.absences is None:
            return
        for row, seed in enumerate(self._seeds):
            for worker in self._method.absences[seed][exchange][1]:
                self._adam.begin_afresh(row * self._method.workers + worker)
                for part, ends in zip(self._fragments, self._ends[row], strict=True):
                    ends[worker] = self._bucket(part, seed, worker)

    def _bucket(self, fragment: _Fragment, seed: int, worker: int) -> tuple[Bucket, Bucket]:
        codec = self._choices(0).codec
        sender, receiver = (Bucket(fragment.shapes, codec, seed=seed, sender=worker) for _ in range(2))
        return sender, receiver

    def _mean(self, message: Tensor, exchange: int) -> Tensor:
        """Return the mean of the decoded messages over each run's present workers, (R, P), for a fragment of P."""
        rows, workers, codec = iter(message), self._method.workers, self._choices(exchange).codec
        shapes, sums = in_turn(self._fragments, exchange).shapes, []
        for run, ends, away in zip(self.running, self._ends, self._away(exchange), strict=True):
            total = torch.zeros(message.shape[1])
            for worker, (sender, receiver) in enumerate(in_turn(ends, exchange)):
                row = next(rows)
                if worker in away:
                    continue
                sender.change(codec)
                receiver.change(codec)
                payload = sender.encode(_shaped(row, shapes), exchange)
                decoded = receiver.decode(payload, exchange)
                total.add_(torch.cat([value.reshape(-1) for value in decoded]), alpha=1 / (workers - len(away)))
            self.sent_bytes[run] += len(payload)
            sums.append(total)
        return torch.stack(sums)

    def _apply(self, exchange: int, mean: Tensor) -> None:
        if (outer := self._method.outer) is None:
            self._adam.update(self.weights, mean)
            return
        if outer.momentum:
            kept = in_turn(self._momenta, exchange)
            momentum = mean.clone() if kept is None else kept.mul_(outer.momentum).add_(mean)
            self._momenta[exchange % len(self._momenta)] = momentum
            mean = mean.add(momentum, alpha=outer.momentum) if outer.nesterov else momentum
        columns = in_turn(self._fragments, exchange).columns
        self.weights[:, columns] -= outer.learning_rate * mean
        if self._own is not None and self._method.streaming is not None:
            shared = self.weights[:, columns].repeat_interleave(self._method.workers, 0)
            self._own[:, columns] = torch.lerp(shared, self._own[:, columns], self._method.streaming.mixing)


class _Boundaries:
    """The codecs at all cuts of one run's split workers, both directions and both ends."""

    def __init__(self, codec: str, seed: int) -> None:
        self._ends = {
            (cut, way): [make(codec, Context(seed=seed, boundary=cut, direction=way)) for _ in range(2)]
            for cut in range(characters.CUTS)
            for way in _WAYS
        }

    def cross(self, values: Tensor, cut: int, way: Direction, batch: int) -> Tensor:
        """Return the tensor decoded at the other end; NaNs if the run has diverged, which its message shows too."""
        if not bool(values.isfinite().all()):
            return torch.full_like(values, math.nan)
        encoder, decoder = self._ends[cut, way]
        key = MessageKey("train", batch, 0, ())
        return decoder.decode(encoder.encode(values, key), key)


class _AtCut(torch.autograd.Function):
    """Passes activations through codecs in the forward pass and gradients in the backward pass, one run at a time."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, cut: int, batch: int, boundaries: Sequence[_Boundaries]) -> Tensor:
        """`stream`: (R, split workers, tokens, channels)."""
        ctx.place = cut, batch, boundaries
        return _cross(stream, "forward", *ctx.place)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _cross(gradient, "backward", *ctx.place), None, None, None


def _cross(values: Tensor, way: Direction, cut: int, batch: int, boundaries: Sequence[_Boundaries]) -> Tensor:
    rows = zip(boundaries, values.detach(), strict=True)
    return torch.stack([each.cross(row, cut, way, batch) for each, row in rows])


class _Fragment(NamedTuple):
    """The tensors of an exchange."""

    shapes: Sequence[tuple[int, ...]]
    """Shapes of its tensors."""
    columns: Tensor | slice
    """Their columns among the parameters, (P,), one tensor after another."""


def _fragments(method: TextMethod) -> list[_Fragment]:
    shapes = SHAPES[method.sees]
    if method.streaming is None:
        return [_Fragment(shapes, slice(None))]
    sizes = [math.prod(shape) for shape in shapes]
    columns = torch.split(torch.arange(VALUES), sizes)
    return [
        _Fragment([shapes[tensor] for tensor in part], torch.cat([columns[tensor] for tensor in part]))
        for part in divide_tensors(sizes, method.streaming.fragments)
    ]


def _shaped(values: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = torch.split(values, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class _Adam:
    """AdamW without decay, by row, after clipping the gradient to a norm."""

    def __init__(
        self, rates: Tensor, betas: tuple[float, float], clip_norm: float, frozen_after: int | None = None
    ) -> None:
        self._rates, self._betas, self._clip_norm, self._steps = rates, betas, clip_norm, 0
        self._frozen_after = sys.maxsize if frozen_after is None else frozen_after
        self._first, self._second = (torch.zeros(len(rates), VALUES) for _ in range(2))
        self._since = [0] * len(rates)
        """The step at which each row's moments were 0."""

    def begin_afresh(self, row: int) -> None:
        """Reset the moments of a row."""
        self._first[row], self._second[row], self._since[row] = 0.0, 0.0, self._steps

    def _unbiased(self, beta: float, step: int) -> float | Tensor:
        """Return the bias correction of an exponential mean after this step."""
        if not any(self._since):
            return 1 - beta**step
        return torch.tensor([[1 - beta ** (step - since)] for since in self._since])

    def message(self, gradients: Tensor) -> Tensor:
        """Return the workers' messages, one row per worker of each run: clipped gradients, or, once the second moment
        is frozen, the first moments that they yield.
        """
        if self._steps < self._frozen_after:
            return gradients
        moments = self._first.repeat_interleave(len(gradients) // len(self._first), 0)
        return moments.lerp_(self._clipped(gradients), 1 - self._betas[0])

    def update(self, weights: Tensor, message: Tensor) -> None:
        """Change the weights in place."""
        beta1, beta2 = self._betas
        self._steps += 1
        if self._steps > self._frozen_after:
            self._first = message
        else:
            gradient = self._clipped(message)
            self._first.lerp_(gradient, 1 - beta1)
            self._second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        seen = min(self._steps, self._frozen_after)
        scale = (self._second / self._unbiased(beta2, seen)).sqrt_().add_(_EPSILON)
        weights -= self._rates / self._unbiased(beta1, self._steps) * self._first / scale

    def _clipped(self, gradient: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        scale: Tensor = self._clip_norm / (norms + _CLIP_EPSILON)
        return gradient * scale.clamp_max(1.0)

    def keep(self, rows: Tensor, before: int) -> None:
        """Keep only these of the `before` runs."""
        each = len(self._rates) // before
        rows = (rows[:, None] * each + torch.arange(each)).flatten()
        self._rates, self._first, self._second = self._rates[rows], self._first[rows], self._second[rows]
        self._since = [self._since[row] for row in rows.tolist()]

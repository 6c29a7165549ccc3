"""Federated averaging of a small network on digits, with clients and server in one process, round by round.

Each client takes local SGD steps on its own shard and sends the resulting change; the server subtracts the mean,
weighted by shard size, and all clients continue from the result. Clients send bytes, which the server decodes with its
own codecs; the server's replies are not coded.

Rounds are synchronous, so links change when a round ends and not what it computes: `trace.synthetic.rounds_trace` plays
the lengths of the messages afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from testbed.errors import DivergedError
from testbed.frozen import Frozen
from testbed.nodes.bucket import Bucket
from testbed.nodes.fragments import SMALL
from testbed.nodes.learners import ImagesLearner
from testbed.nodes.optimise import learning_rate
from testbed.nodes.worker import Worker
from testbed.spec import OptimiserSpec, OuterSpec
from testbed.workloads.images import build_network, images, score
from testbed.workloads.networks import DIGITS
from testbed.workloads.shards import Indices, ShardBatches, data_shares, divide

_UNCLIPPED = 1e9
CodecsOfRound: TypeAlias = Callable[[int, float], Sequence[str]]
"""Maps a round and its stepsize to each client's codec."""


class FederatedSpec(Frozen):
    """Parameters of a training."""

    model: str
    """Name of a network of `workloads.images`, for digits."""
    clients: int = Field(ge=1)
    rounds: int = Field(ge=1)
    local_steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    """Batch size of each client."""
    learning_rate: float = Field(gt=0)
    """Learning rate of local steps in the first round."""
    learning_rate_floor: float = Field(ge=0, le=1)
    """Fraction of the learning rate left in the last round, along half a cosine; 1: constant."""
    alpha: float | None = Field(gt=0)
    """Parameter of the Dirichlet distribution of clients' class mixes; None: the same mix for all clients."""
    skew: float = Field(ge=1)
    """Ratio of the largest to the smallest shard size."""
    seed: int

    @property
    def optimiser(self) -> OptimiserSpec:
        """The local optimiser: SGD without momentum."""
        return OptimiserSpec(
            algorithm="sgd",
            learning_rate=self.learning_rate,
            weight_decay=0.0,
            beta1=0.0,
            beta2=0.0,
            clip_norm=_UNCLIPPED,
            learning_rate_decay="cosine",
            learning_rate_floor=self.learning_rate_floor,
        )

    def stepsize(self, number: int) -> float:
        """Return the learning rate of a round."""
        return learning_rate(self.optimiser, number, self.rounds)


class FederatedRound(NamedTuple):
    """Results of a round, after the server's reply."""

    number: int
    stepsize: float
    loss: float
    """Loss on the test images, in nats."""
    accuracy: float
    payload_bytes: int
    """Payload bytes of all clients in this round."""
    kept: float
    """Share of non-zero values in the decoded tensors, mean over clients."""
    by_client: tuple[int, ...]
    """Payload bytes of each client."""


class Federation:
    """The clients of one training, and their server."""

    def __init__(self, spec: FederatedSpec) -> None:
        """SpecError for shards that cannot be made, UnknownNameError for an unknown network."""
        self.spec = spec
        labels = images("digits").train.labels.numpy()
        self.shards = divide(labels, data_shares(spec.clients, spec.skew), alpha=spec.alpha, seed=spec.seed)
        """Shards by client, largest first."""
        self.shares = [len(shard) / len(labels) for shard in self.shards]

    @property
    def classes(self) -> list[list[int]]:
        """Number of images of each class, by client."""
        labels: Indices = images("digits").train.labels.numpy()
        return [[int((labels[shard] == each).sum()) for each in range(DIGITS.classes)] for shard in self.shards]

    def train(self, codecs: CodecsOfRound) -> Iterator[FederatedRound]:
        """Train; yields each round. DivergedError where it diverges."""
        spec, test = self.spec, images("digits").test
        learners, workers = self._clients()
        shapes = [tuple(parameter.shape) for parameter in learners[0].parameters]
        texts = codecs(0, spec.stepsize(0))
        ends = [
            [Bucket(shapes, text, seed=spec.seed, sender=client) for client, text in enumerate(texts)] for _ in range(2)
        ]
        for number in range(spec.rounds):
            if number:
                texts = codecs(number, spec.stepsize(number))
            for text, sender, receiver in zip(texts, *ends, strict=True):
                sender.change(text)
                receiver.change(text)
            payloads, mean, kept = [], [torch.zeros(shape) for shape in shapes], []
            for worker, sender, receiver, share in zip(workers, *ends, self.shares, strict=True):
                computed = worker.compute(number, staleness=0, local_steps=spec.local_steps)
                payloads.append(sender.encode(computed.tensors, number))
                decoded = receiver.decode(payloads[-1], number)
                kept.append(_kept(decoded))
                mean = [total.add_(value, alpha=share) for total, value in zip(mean, decoded, strict=True)]
            for worker in workers:
                worker.receive([value.clone() for value in mean])
                worker.apply_until(number + 1)
            loss, accuracy = score(learners[0].model, test)
            sent = tuple(map(len, payloads))
            shared = sum(kept) / len(kept)
            yield FederatedRound(number, spec.stepsize(number), loss, accuracy, sum(sent), shared, sent)

    def first_update(self) -> Tensor:
        """Return the coded tensors' updates of all clients in the first round, as one vector."""
        updates = [
            worker.compute(0, staleness=0, local_steps=self.spec.local_steps).tensors for worker in self._clients()[1]
        ]
        return torch.cat([value.flatten() for update in updates for value in update if value.numel() >= SMALL])

    def _clients(self) -> tuple[list[ImagesLearner], list[Worker]]:
        spec = self.spec
        batches = [
            ShardBatches(shard, spec.batch_size, seed=spec.seed, worker=client)
            for client, shard in enumerate(self.shards)
        ]
        learners = [
            ImagesLearner(build_network(spec.model, DIGITS, spec.seed), own, images("digits")) for own in batches
        ]
        outer = OuterSpec(learning_rate=1.0, momentum=0.0, nesterov=False)
        workers = [
            Worker(client, learner, optimiser=spec.optimiser, outer=outer, steps=spec.rounds)
            for client, learner in enumerate(learners)
        ]
        return learners, workers


def train_once(federation: Federation, codecs: CodecsOfRound) -> tuple[list[FederatedRound], float, float]:
    """Train; return the rounds, and the last one's loss and accuracy: both NaN where training diverged."""
    seen: list[FederatedRound] = []
    try:
        seen.extend(federation.train(codecs))
    except DivergedError:
        return seen, math.nan, math.nan
    return seen, seen[-1].loss, seen[-1].accuracy


def _kept(decoded: Sequence[Tensor]) -> float:
    coded = [value for value in decoded if value.numel() >= SMALL]
    return sum(int(value.count_nonzero()) for value in coded) / max(1, sum(value.numel() for value in coded))

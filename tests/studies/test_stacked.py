"""Trainings side by side compute what workers and buckets compute one by one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import Parameter, functional
from torch.nn.utils import parameters_to_vector

from testbed.nodes.bucket import Bucket
from testbed.nodes.worker import Worker
from testbed.spec import OptimiserSpec
from testbed.studies.stacked import MODEL, VALUES, Method, Stack, Trial, steps_to
from testbed.workloads.images import build_network, images
from testbed.workloads.networks import DIGITS
from testbed.workloads.shards import ShardBatches, divide

METHOD = Method(ratio=0.1, staleness=2, workers=2, batch_size=8, alpha=0.5)
STEPS = 6


class FlatLearner:
    """All parameters as one tensor, so that top-k is of all of them."""

    parts, tables = 1, ()

    def __init__(self, batches: ShardBatches, seed: int) -> None:
        self._model, self._batches = build_network(MODEL, DIGITS, seed), batches
        self._flat = Parameter(parameters_to_vector(self._model.parameters()).detach())
        self.parameters: Sequence[Parameter] = [self._flat]

    def loss(self, batch: int, part: int) -> Tensor:
        examples = images("digits").train.at(self._batches.batch(batch))
        names, values = zip(*self._model.named_parameters(), strict=True)
        cuts = torch.split(self._flat, [value.numel() for value in values])
        own = {name: cut.view_as(value) for name, cut, value in zip(names, cuts, values, strict=True)}
        return functional.cross_entropy(functional_call(self._model, own, (examples.images,)), examples.labels)

    def evaluate(self) -> float:
        raise NotImplementedError


def one_by_one(run: Trial, method: Method, codec: str) -> Tensor:
    shards = divide(images("digits").train.labels.numpy(), [1.0] * method.workers, alpha=method.alpha, seed=run.seed)
    sgd = OptimiserSpec(
        algorithm="sgd", learning_rate=run.learning_rate, weight_decay=0.0, beta1=0.0, beta2=0.0, clip_norm=1e9
    )
    workers = [
        Worker(
            number,
            FlatLearner(ShardBatches(shard, method.batch_size, seed=run.seed, worker=number), run.seed),
            optimiser=sgd,
            outer=None,
            steps=STEPS,
        )
        for number, shard in enumerate(shards)
    ]
    ends = [[Bucket([(VALUES,)], codec, seed=0, sender=number) for number in range(method.workers)] for _ in range(2)]
    for step in range(STEPS):
        decoded = []
        for worker, sender, receiver in zip(workers, *ends, strict=True):
            computed = worker.compute(step, staleness=method.staleness, local_steps=1)
            decoded.append(receiver.decode(sender.encode(computed.tensors, step), step)[0])
        for worker in workers:
            worker.receive([torch.stack(decoded).mean(0)])
            worker.apply_until(max(0, step + 1 - method.staleness))
    return workers[0].parameters[0].detach()


@pytest.mark.parametrize(("ratio", "codec"), [(0.1, "ef(topk(0.1, tensor, fp32))"), (1.0, "fp32")])
def test_a_stack_computes_what_workers_and_buckets_do(ratio: float, codec: str) -> None:
    method = METHOD._replace(ratio=ratio)
    runs = [Trial(rate, seed) for rate, seed in itertools.product((0.1, 0.4), (0, 1))]
    stack = Stack(runs, method)
    for step in range(STEPS):
        stack.step(step)
        if step == 2:
            stack.keep([1, 2])
    assert stack.running == [1, 2]
    for row, run in enumerate((1, 2)):
        alike = torch.isclose(stack.weights[row], one_by_one(runs[run], method, codec), rtol=1e-4, atol=1e-6)
        assert alike.float().mean() > 0.99  # rounding decides which of two values that are nearly as large is kept


def test_steps_to_a_target_are_those_of_each_run_alone() -> None:
    runs = [Trial(rate, 0) for rate in (0.4, 0.2, 0.001, 1e4)]

    def steps(runs: Sequence[Trial], patience: int) -> list[int | None]:
        return steps_to(2.1, runs, METHOD, steps=24, evaluate_every=2, patience=patience)

    together = steps(runs, 100)
    assert together == [steps([run], 100)[0] for run in runs]
    assert together[2:] == [None, None]
    assert steps(runs, 1)[1:] == [None, None, None]

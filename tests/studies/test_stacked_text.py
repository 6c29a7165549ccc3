"""Trainings side by side compute what workers, outer optimisers and buckets compute one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from testbed.errors import SpecError
from testbed.nodes.bucket import Bucket
from testbed.nodes.fragments import fragment_shapes, in_turn
from testbed.nodes.worker import Worker
from testbed.spec import OptimiserSpec, OuterSpec, StreamingSpec
from testbed.studies.stacked import Trial
from testbed.studies.stacked_text import SHAPES, Choices, Chosen, TextMethod, TextStack, train
from testbed.workloads import characters

NESTEROV = OuterSpec(learning_rate=0.7, momentum=0.9, nesterov=True)
FEW = {"workers": 2, "batch_size": 2}
METHODS = {
    "all-reduce": TextMethod("fp32", "values", **FEW),
    "DD-EF": TextMethod("ef(topk(0.05, tensor))", "values", staleness=2, **FEW),
    "PowerSGD": TextMethod("ef(powersgd(2))", "matrices", **FEW),
    "DeMo": TextMethod(
        "ef-decay(dct(topk-chunk(0.0156, 1024)), 0.999)", "rows", betas=(0.0, 0.0), clip_norm=1e9, **FEW
    ),
    "1-bit Adam": TextMethod("warmup(ef(onebit), 2)", "rows", frozen_after=2, **FEW),
    "DiLoCo": TextMethod("fp32", "values", local_steps=3, outer=NESTEROV, **FEW),
    "SparseLoCo": TextMethod(
        "ef-decay(topk-chunk(0.0156), 0.95)",
        "values",
        local_steps=3,
        outer=NESTEROV.model_copy(update={"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}),
        **FEW,
    ),
}
METHODS["Streaming DiLoCo"] = METHODS["DiLoCo"]._replace(
    codec="int4(group=32, rounding=nearest)",
    sees="matrices",
    local_steps=2,
    staleness=1,
    streaming=StreamingSpec(fragments=3, mixing=0.5),
)
EXCHANGES = 4


class CharacterLearner:
    """A `worker.Learner` of one model, its parameters shaped as a codec is to see them."""

    parts, tables = 1, ()

    def __init__(self, run: Trial, method: TextMethod, number: int) -> None:
        sizes = [torch.Size(shape).numel() for shape in SHAPES[method.sees]]
        first = torch.split(characters.first_weights(run.seed), sizes)
        self.parameters = [
            Parameter(part.view(shape).clone()) for part, shape in zip(first, SHAPES[method.sees], strict=True)
        ]
        self._batches = characters.Batches(workers=method.workers, batch_size=method.batch_size, seed=run.seed)
        self._number = number

    def loss(self, batch: int, part: int) -> Tensor:
        weights = torch.cat([parameter.reshape(-1) for parameter in self.parameters])
        return characters.losses(weights[None], self._batches.batch(batch)[self._number][None])[0]

    def evaluate(self) -> float:
        raise NotImplementedError


def one_by_one(run: Trial, method: TextMethod, choices: Choices | None = None) -> tuple[Tensor, int]:
    """Return the weights, and what one worker sent."""
    chosen = choices or (lambda step: Chosen(method.codec, method.staleness))
    beta1, beta2 = method.betas
    optimiser = OptimiserSpec(
        learning_rate=run.learning_rate,
        weight_decay=0.0,
        beta1=beta1,
        beta2=beta2,
        clip_norm=method.clip_norm,
        frozen_after=method.frozen_after,
    )
    absences = [((), ())] * EXCHANGES if method.absences is None else method.absences[run.seed]

    def worker_of(number: int) -> Worker:
        return Worker(
            number,
            CharacterLearner(run, method, number),
            optimiser=optimiser,
            outer=method.outer,
            steps=EXCHANGES,
            streaming=method.streaming,
        )

    workers = [worker_of(number) for number in range(method.workers)]
    fragments = 1 if method.streaming is None else method.streaming.fragments
    ends = [
        [
            [Bucket(shapes, method.codec, seed=run.seed, sender=number) for number in range(method.workers)]
            for _ in range(2)
        ]
        for shapes in fragment_shapes(SHAPES[method.sees], fragments)
    ]
    sent, weights = 0, list[Tensor]()
    for step in range(EXCHANGES):
        decoded, (away, returning) = [], absences[step]
        now, then = chosen(step), chosen(step + 1)
        for number in returning:
            workers[number] = worker_of(number)
            workers[number].resume(step, weights)
            workers[number]._batches = step * method.local_steps
            for side in in_turn(ends, step):
                side[number] = Bucket(SHAPES[method.sees], method.codec, seed=run.seed, sender=number)
        there = [number for number in range(method.workers) if number not in away]
        for number in there:
            worker, (sender, receiver) = workers[number], (side[number] for side in in_turn(ends, step))
            computed = worker.compute(step, staleness=now.staleness, local_steps=method.local_steps)
            sender.change(now.codec)
            receiver.change(now.codec)
            payload = sender.encode(computed.tensors, step)
            decoded.append(receiver.decode(payload, step))
        sent += len(payload)
        for worker in (workers[number] for number in there):
            worker.receive([torch.stack(parts).mean(0) for parts in zip(*decoded, strict=True)])
            worker.apply_until(max(worker.applied, step + 1 - then.staleness))
        weights = [parameter.detach().clone() for parameter in workers[there[0]].shared]
    return torch.cat([value.reshape(-1) for value in weights]), sent


def stepped(runs: Sequence[Trial], method: TextMethod, choices: Choices | None = None) -> TextStack:
    """Return a stack after all its exchanges."""
    stack = TextStack(runs, method, choices)
    for exchange in range(EXCHANGES):
        stack.step(exchange)
    return stack


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_stack_computes_what_workers_and_buckets_do(method: TextMethod) -> None:
    runs = [Trial(0.001, 0), Trial(0.004, 1)]
    stack = TextStack(runs, method)
    for exchange in range(EXCHANGES):
        stack.step(exchange)
        if exchange == 2:
            stack.keep([1])
    assert stack.running == [1]
    weights, sent = one_by_one(runs[1], method)
    # Rounding decides which of two values that are nearly as large is kept, and the sign of one that is nearly 0.
    assert torch.isclose(stack.weights[0], weights, rtol=1e-3, atol=1e-6).float().mean() > 0.98
    assert stack.sent_bytes[1] == sent


AWAY = {
    0: [((), ()), ((1,), ()), ((0,), (1,)), ((), (0,))],
    1: [((1,), ()), ((1,), ()), ((), (1,)), ((), ())],
}
"""By seed, of two workers."""


@pytest.mark.parametrize("codec", ["fp32", METHODS["SparseLoCo"].codec])
def test_workers_come_and_go_as_they_do_one_by_one(codec: str) -> None:
    method = METHODS["SparseLoCo"]._replace(codec=codec, absences=AWAY)
    runs = [Trial(0.001, 0), Trial(0.004, 1)]
    stack = stepped(runs, method)
    for row, run in enumerate(runs):
        weights, _ = one_by_one(run, method)
        assert torch.isclose(stack.weights[row], weights, rtol=1e-3, atol=1e-6).float().mean() > 0.98
        always, _ = one_by_one(run, method._replace(absences=None))
        assert torch.isclose(stack.weights[row], always, rtol=1e-3, atol=1e-6).float().mean() < 0.9


@pytest.mark.parametrize("name", ["DiLoCo", "SparseLoCo"])
def test_where_nobody_is_away_weights_are_the_same_bit_for_bit(name: str) -> None:
    nobody = {seed: [((), ())] * EXCHANGES for seed in (0, 1)}
    runs = [Trial(0.004, 0), Trial(0.004, 1)]
    stacks = [stepped(runs, METHODS[name]._replace(absences=each)) for each in (None, nobody)]
    assert torch.equal(stacks[0].weights, stacks[1].weights)
    assert stacks[0].sent_bytes == stacks[1].sent_bytes


def test_what_who_is_away_would_have_read_changes_nothing() -> None:
    alone = {0: [((1,), ())] * EXCHANGES}
    method = METHODS["DiLoCo"]._replace(absences=alone, codec="int8")
    stacks = [stepped([Trial(0.004, 0)], each) for each in (method, method._replace(batch_sizes=(2, 1)))]
    assert torch.equal(stacks[0].weights, stacks[1].weights), "what the other would have read is nobody's concern"


@pytest.mark.parametrize("name", ["Streaming DiLoCo", "all-reduce"])
def test_workers_come_and_go_where_they_exchange_all_that_changed(name: str) -> None:
    with pytest.raises(SpecError, match="remove absences"):
        TextStack([Trial(0.004, 0)], METHODS[name]._replace(absences=AWAY))


def test_pairs_of_ratio_and_staleness_may_change_on_the_way() -> None:
    def choices(step: int) -> Chosen:
        return Chosen("ef(topk(0.05, tensor))" if step % 3 else "ef(topk(0.1, tensor))", (0, 2, 1, 0)[step % 4])

    run, method = Trial(0.004, 0), METHODS["DD-EF"]
    stack = stepped([run], method, choices)
    weights, sent = one_by_one(run, method, choices)
    assert torch.isclose(stack.weights[0], weights, rtol=1e-3, atol=1e-6).float().mean() > 0.98
    assert stack.sent_bytes == [sent]


def test_a_run_that_diverges_ends_and_the_others_do_not_notice() -> None:
    def found(*rates: float) -> list[Any]:
        runs = [Trial(rate, 0) for rate in rates]
        return list(train(runs, METHODS["all-reduce"]._replace(clip_norm=1e9), batches=4, evaluate_every=2))

    both = found(1e30, 0.004)
    assert {each.run for each in both} == {1}
    assert [each._replace(run=0) for each in both] == found(0.004)
    assert [each.batches for each in both] == [2, 4]


def test_characters_know_their_batches() -> None:
    guess = characters.losses(torch.zeros(1, characters.VALUES), characters.validation()[None])
    assert guess.item() == pytest.approx(torch.tensor(64.0).log().item())
    batches = characters.Batches(workers=3, batch_size=2, seed=0)
    assert batches.batch(5).shape == (3, 2, characters.SEQUENCE + 1)
    assert torch.equal(batches.batch(5), batches.batch(5))
    assert not torch.equal(batches.batch(5), batches.batch(6))


SPLIT = METHODS["all-reduce"]._replace(split=(1,))


def gradients_of(method: TextMethod) -> Tensor:
    """Of a stack's first batch, (runs x workers, P)."""
    runs = [Trial(0.004, 0), Trial(0.004, 1)]
    stack = TextStack(runs, method)
    return stack._gradients(stack.weights.repeat_interleave(method.workers, 0), 0)


def test_a_model_that_is_cut_computes_the_same_where_nothing_is_lost_and_less_exactly_with_fewer_bits() -> None:
    whole = gradients_of(METHODS["all-reduce"])
    assert torch.equal(gradients_of(SPLIT), whole)
    errors = []
    for codec in ("int8", "int4", "int2"):
        cut = gradients_of(SPLIT._replace(boundary=codec))
        assert torch.equal(cut[::2], whole[::2]), "workers that are whole do not notice"
        errors.append(float((cut[1::2] - whole[1::2]).norm() / whole[1::2].norm()))
    assert 0 < 5 * errors[0] < errors[1] < errors[2] / 2


def test_gradients_cross_a_cut_too() -> None:
    """Where activations cross as they are, what lies before the cut gets other gradients, and what lies behind not."""
    whole = gradients_of(SPLIT)
    cut = gradients_of(SPLIT._replace(boundary="fwd=fp32, bwd=int2"))
    for place, (parts, others) in enumerate(zip(characters.matrices(cut), characters.matrices(whole), strict=True)):
        assert torch.equal(parts[1], others[1]) == (place == len(characters.ROWS) - 1)


def test_a_run_does_not_notice_which_others_are_cut_beside_it() -> None:
    method = METHODS["SparseLoCo"]._replace(split=(0, 1), boundary="int4")
    stacks = [TextStack([Trial(0.004, seed) for seed in seeds], method) for seeds in ((0, 1), (1,))]
    for stack in stacks:
        stack.step(0)
    stacks[0].keep([1])
    for stack in stacks:
        stack.step(1)
    assert torch.isclose(stacks[0].weights, stacks[1].weights, rtol=1e-3, atol=1e-6).float().mean() > 0.98


def test_a_worker_of_smaller_batches_reads_the_first_of_its_sequences() -> None:
    fewer = gradients_of(METHODS["all-reduce"]._replace(batch_sizes=(2, 1)))
    whole = gradients_of(METHODS["all-reduce"])
    assert torch.allclose(fewer[::2], whole[::2])
    sequences = characters.Batches(workers=2, batch_size=2, seed=0).batch(0)[1, :1]
    alone = characters.gradients(characters.first_weights(0)[None], sequences[None])
    assert torch.allclose(fewer[1], alone[0], atol=1e-6)

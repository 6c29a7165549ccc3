"""Data parallel training in one process: the laws that it rests on."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from testbed.errors import CodecError, SpecError, StageError
from testbed.jobs.decision import Decision, note_of, read_note
from testbed.jobs.kind import Setting
from testbed.message_key import MessageKey
from testbed.nodes.bucket import Bucket
from testbed.nodes.fragments import divide_tensors
from testbed.nodes.learners import ImagesLearner, learner_of
from testbed.nodes.worker import Worker
from testbed.records import StepRecord
from testbed.spec import Exchange, ImagesSpec, OptimiserSpec, OuterSpec, PipelineSpec, StreamingSpec, TextSpec
from testbed.training.alone import train_together
from testbed.training.stages import PipelineTraining
from testbed.workloads.images import build_network, images, score
from testbed.workloads.shards import ShardBatches, divide
from tests.small_replicas import (
    DIGITS,
    EXCHANGES,
    SPARSE,
    TEXT,
    Data,
    Examples,
    Learner,
    Net,
    SmallTraining,
    a_recipe,
    same,
    trained,
)

NESTEROV = OuterSpec(learning_rate=0.7, momentum=0.9, nesterov=True)
CODECS = ["fp32", "bf16", "int8", SPARSE, "ef(powersgd(2))", "ef(int1)", "delta-int8"]


# ---------------------------------------------------------------------- synchronous and uncoded
class ShardedData(Data):
    """The batches of four workers, each of its own shard of the digits, as parts of one batch."""

    def __init__(self, spec: ImagesSpec, seed: int) -> None:
        self._images = images(spec.images).train
        shards = divide(self._images.labels.numpy(), (1,) * 4, alpha=spec.alpha, seed=seed)
        self._batches = [
            ShardBatches(shard, spec.batch_size // 4, seed=seed, worker=number) for number, shard in enumerate(shards)
        ]

    def train(self, batch: int, part: int, parts: int) -> Examples:
        chosen = self._images.at(self._batches[part].batch(batch))
        return Examples(chosen.images, chosen.labels)


class OneStage(PipelineTraining):
    """The whole model as one stage."""

    net: Net
    read: Data

    def model(self, place: int) -> Any:
        return self.net

    def data(self, place: int) -> Any:
        return self.read


@pytest.mark.parametrize("workload", [TEXT, DIGITS])
@pytest.mark.parametrize("exchange", EXCHANGES[:3])
def test_synchronous_and_uncoded_it_is_one_worker_with_the_whole_batch_bit_for_bit(
    exchange: Exchange, workload: TextSpec | ImagesSpec
) -> None:
    """The one worker takes the parts as micro-batches, whose mean gradient is the same sum: the weight is 2**-2."""
    recipe = a_recipe(exchange, evaluate_every=2, workload=workload)
    one = PipelineSpec(stages=1, microbatches=4, schedule="gpipe", in_flight=4)
    alone = recipe.model_copy(update={"data": None, "pipeline": one, "workload": TEXT})
    output, nets, data = io.StringIO(), [Net()], Data()
    if isinstance(workload, ImagesSpec):
        seed = recipe.training.seed
        nets, data = [Net(build_network(workload.model, images("digits"), seed))], ShardedData(workload, seed)
    one_stage = OneStage(Setting(alone, 2, ""))
    one_stage.net, one_stage.read = nets[0], data
    train_together(one_stage, [output])
    theirs = [StepRecord.model_validate_json(line) for line in output.getvalue().splitlines()]
    ours = trained(recipe)
    train = [(record.step, record.loss, record.learning_rate) for record in theirs if record.phase == "train"]
    assert [loss for _, loss, _ in train] == [r.loss for r in ours.records[-1] if r.phase == "train"]
    assert same(ours.weights(), [parameter.detach() for parameter in nets[0].parameters()])


def test_a_ring_sums_in_another_order_and_rounds_no_worse() -> None:
    ring, plain = trained(a_recipe("all-reduce")), trained(a_recipe("all-to-all"))
    for ours, theirs in zip(ring.weights(), plain.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    two, pair = trained(a_recipe("all-reduce", workers=2)), trained(a_recipe("all-to-all", workers=2))
    assert same(two.weights(), pair.weights())  # a + b is b + a


def test_parts_of_a_batch_weigh_as_much_as_they_are() -> None:
    shared = trained(a_recipe(workers=2, shares=(3, 1)))
    even = trained(a_recipe(workers=4))
    assert [round(loss or 0, 5) for loss in shared.losses] == [round(loss or 0, 5) for loss in even.losses]
    for ours, theirs in zip(shared.weights(), even.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- replicas
@pytest.mark.parametrize(
    ("exchange", "codec", "workload"),
    [
        *itertools.product(EXCHANGES[:3], CODECS, [TEXT]),
        *itertools.product(["all-reduce"], ["fp32", "bf16"], [TEXT]),
        *((exchange, SPARSE if exchange != "all-reduce" else "bf16", DIGITS) for exchange in EXCHANGES),
    ],
)
def test_replicas_are_alike_at_every_step(exchange: Exchange, codec: str, workload: TextSpec | ImagesSpec) -> None:
    staleness = (0, 2, 1)
    seen: dict[int, list[Tensor]] = {}
    ahead = []

    def watch(workers: list[Worker]) -> None:
        for worker in workers:
            found = [parameter.detach().clone() for parameter in worker.parameters]
            assert same(seen.setdefault(worker.applied, found), found)
        ahead.extend(worker.applied for worker in workers)

    kind = {"workers": 3, "shares": (2, 1, 1), "staleness": staleness, "answer": "ef(topk(0.5))"}
    found = trained(a_recipe(exchange, codec, workload=workload, **kind), watch=watch)
    assert same(found.weights(0), found.weights(1))
    assert same(found.weights(0), found.weights(2))
    assert set(ahead) >= {1, 3}


def test_an_evaluation_of_images_says_how_many_of_the_test_images_are_named_right() -> None:
    found = trained(a_recipe("star", workload=DIGITS, evaluate_every=3))
    assert same(found.weights(0), found.weights(3))
    model = build_network(DIGITS.model, images("digits"), 0)
    torch.nn.utils.vector_to_parameters(torch.cat([each.flatten() for each in found.weights()]), model.parameters())
    evaluated = [record for record in found.records[-1] if record.phase == "evaluation"]
    assert (evaluated[-1].loss, evaluated[-1].accuracy) == score(model, images("digits").test)
    assert [record.tokens for record in evaluated] == [360, 360]
    assert evaluated[0].accuracy != evaluated[1].accuracy
    rest = [record for node in found.records[:-1] for record in node] + found.records[-1][:3]
    assert not any("accuracy" in record.model_dump() for record in rest)


def test_a_worker_s_batches_and_its_shard_of_images_are_as_large_as_its_share() -> None:
    recipe = a_recipe(workers=2, shares=(3, 1), workload=DIGITS.model_copy(update={"alpha": None}))
    shards = []
    for number, (parts, batch_size) in enumerate(((3, 12), (1, 4))):
        learner = learner_of(recipe, number, vocabulary=10, tokens="")
        assert isinstance(learner, ImagesLearner)
        batches = [learner.batches.batch(batch).tolist() for batch in range(1500 // batch_size)]
        assert (learner.parts, {*map(len, batches)}) == (parts, {batch_size})
        shards.append(set().union(*batches))
    large, small = shards
    assert large | small == set(range(1437))
    assert not large & small
    assert len(large) == pytest.approx(3 * len(small), abs=4)


@pytest.mark.parametrize("codec", [SPARSE, "ef(int1)", "ef(powersgd(2))"])
def test_what_was_sent_and_what_is_owed_are_what_was_computed(codec: str) -> None:
    sender, receiver = (Bucket([(64, 32), (7,)], codec, seed=1, sender=2) for _ in range(2))
    draw = torch.Generator().manual_seed(2)
    computed, sent = torch.zeros(64, 32), torch.zeros(64, 32)
    for step in range(4):
        if step == 2 and codec == SPARSE:
            for end in (sender, receiver):
                end.change("ef(topk(0.2, values=fp32))")
        tensors = [torch.randn(64, 32, generator=draw), torch.randn(7, generator=draw)]
        large, small = receiver.decode(sender.encode(tensors, step), step)
        assert torch.equal(small, tensors[1])
        computed, sent = computed + tensors[0], sent + large
        owed = sender._codecs[0].residual(MessageKey("train", step, 0, ()))  # type: ignore[attr-defined]
        torch.testing.assert_close(sent + owed, computed, rtol=1e-5, atol=1e-5)
        assert owed.abs().sum() > 0


def test_what_is_no_message_is_refused() -> None:
    bucket = Bucket([(64, 32), (7,)], "fp32", seed=1, sender=0)
    payload = bucket.encode([torch.ones(64, 32), torch.ones(7)], 0)
    for wrong in (payload[:-1], payload + b"0", payload[:3], b"\xff" * len(payload)):
        with pytest.raises(CodecError):
            bucket.decode(wrong, 0)
    other = Bucket([(32, 64), (7,)], "fp32", seed=1, sender=0).encode([torch.ones(32, 64), torch.ones(7)], 0)
    with pytest.raises(CodecError, match="tensor 0 has shape"):
        bucket.decode(other, 0)


# ---------------------------------------------------------------------- local steps
def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradient_at(weights: Tensor, learner: Learner, batch: int) -> Tensor:
    torch.nn.utils.vector_to_parameters(weights, learner.parameters)
    return flat(torch.autograd.grad(learner.loss(batch, 0), learner.parameters))


@pytest.mark.parametrize("exchange", ["star", "all-to-all"])
def test_local_steps_are_the_optimiser_s_on_the_worker_s_own_batches(exchange: Exchange) -> None:
    """DiLoCo, algorithm 1, written out."""
    steps_of_each = (3, 2)
    found = trained(a_recipe(exchange, workers=2, steps=3, local_steps=steps_of_each, outer=NESTEROV, sgd=True))
    learners = [Learner((1, 1), number) for number in range(2)]
    weights = flat(Net().parameters())
    velocity = torch.zeros_like(weights)
    for step in range(3):
        changes = []
        for learner, local_steps in zip(learners, steps_of_each, strict=True):
            own = weights
            for local_step in range(local_steps):
                own = own - 0.05 * gradient_at(own, learner, step * local_steps + local_step)
            changes.append(weights - own)
        change = (changes[0] + changes[1]) / 2
        velocity = 0.9 * velocity + change
        weights = weights - 0.7 * (change + 0.9 * velocity)
    torch.testing.assert_close(flat(found.weights()), weights, rtol=1e-4, atol=1e-6)
    for records, local_steps in zip(found.records, steps_of_each, strict=False):
        assert len([action for action in records[0].actions if action.kind == "L"]) == local_steps


# ---------------------------------------------------------------------- fragments in turn
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_one_fragment_without_overlap_is_diloco_bit_for_bit(exchange: Exchange) -> None:
    kind = {"workers": 2, "local_steps": 2, "outer": NESTEROV, "steps": 4, "evaluate_every": 2}
    streamed = trained(a_recipe(exchange, streaming=StreamingSpec(fragments=1), **kind))
    whole = trained(a_recipe(exchange, **kind))
    assert streamed.losses == whole.losses
    assert same(streamed.weights(), whole.weights())
    assert same(streamed.weights(), [parameter.detach() for parameter in streamed.workers[1].shared])


@pytest.mark.parametrize(("exchange", "codec"), [("star", "int4(group=16)"), ("all-to-all", SPARSE)])
def test_each_tensor_is_exchanged_once_in_as_many_steps_as_fragments_and_all_share_what_came(
    exchange: Exchange, codec: str
) -> None:
    fragments, steps = 3, 7
    shapes = [parameter.shape for parameter in Net().parameters()]
    parts = divide_tensors([shape.numel() for shape in shapes], fragments)
    seen: dict[int, list[Tensor]] = {0: [parameter.detach() for parameter in Net().parameters()]}
    own: list[list[Tensor]] = []

    def watch(workers: list[Worker]) -> None:
        for worker in workers:
            shared = [parameter.detach().clone() for parameter in worker.shared]
            assert same(seen.setdefault(worker.applied, shared), shared)
        own.append([parameter.detach().clone() for worker in workers for parameter in worker.parameters])

    recipe = a_recipe(
        exchange, codec, workers=3, shares=(2, 1, 1), staleness=(0, 2, 1), steps=steps, answer="ef(topk(0.5))",
        outer=NESTEROV, local_steps=2, streaming=StreamingSpec(fragments=fragments, mixing=0.5),
    )  # fmt: skip
    found = trained(recipe, watch=watch)
    for step in range(max(seen)):
        changed = [not torch.equal(a, b) for a, b in zip(seen[step], seen[step + 1], strict=True)]
        assert {tensor for tensor, did in enumerate(changed) if did} == set(parts[step % fragments])
    count = len(shapes)
    assert not same(own[-1][:count], own[-1][count : 2 * count]), "between exchanges workers go on from their own"
    for record in (r for r in found.records[1] if r.phase == "train"):
        values = sum(shapes[tensor].numel() for tensor in parts[record.step % fragments])
        assert {frame.raw_bytes for frame in record.sent} == {4 * values}


@pytest.mark.parametrize("fragments", [1, 3, 4, 9])
def test_fragments_are_all_tensors_once_and_as_large_as_these_allow(fragments: int) -> None:
    values = [4096, 64, 64, 1000, 900, 3, 3, 64, 500]
    parts = divide_tensors(values, fragments)
    assert sorted(tensor for part in parts for tensor in part) == list(range(len(values)))
    sizes = [sum(values[tensor] for tensor in part) for part in parts]
    for size, part in zip(sizes, parts, strict=True):  # the last that it got came to what was the smallest then
        assert size - min(values[tensor] for tensor in part) <= min(sizes)
    with pytest.raises(SpecError, match="9 tensors"):
        divide_tensors(values, 10)


# ---------------------------------------------------------------------- decisions
def test_first_moments_are_sent_once_the_second_is_frozen() -> None:
    plain = a_recipe("star")
    spec = plain.optimiser.model_copy(update={"frozen_after": 3})
    dense, coded = (
        trained(plain.model_copy(update={"optimiser": spec, "codec": codec}))
        for codec in ("fp32", "warmup(ef(onebit), 3)")
    )
    assert dense.losses[:4] == coded.losses[:4] == trained(plain).losses[:4]
    assert coded.losses[5] != dense.losses[5] != trained(plain).losses[5]
    for each in (dense, coded):
        assert all(same(each.weights(), each.weights(worker)) for worker in range(1, 4))
    torch.testing.assert_close(flat(dense.weights()), frozen_by_hand(spec, steps=6), rtol=1e-4, atol=1e-5)


def frozen_by_hand(spec: OptimiserSpec, steps: int) -> Tensor:
    """Return the weights that 1-bit Adam without a codec leads to, by its formula (arXiv 2102.02888, algorithm 1), with
    gradients clipped: their mean at first, then each worker's.
    """
    learners, frozen_after = [Learner((1,) * 4, number) for number in range(4)], spec.frozen_after or steps
    weights = flat(Net().parameters())
    first, second = torch.zeros_like(weights), torch.zeros_like(weights)

    def clipped(gradient: Tensor) -> Tensor:
        return gradient * min(1, spec.clip_norm / (gradient.norm().item() + 1e-6))

    for step in range(steps):
        each = [gradient_at(weights, learner, step) for learner in learners]
        if step < frozen_after:
            gradient = clipped(torch.stack(each).mean(0))
            second = spec.beta2 * second + (1 - spec.beta2) * gradient.square()
        else:
            gradient = torch.stack([clipped(own) for own in each]).mean(0)
        first = spec.beta1 * first + (1 - spec.beta1) * gradient
        moved = first / (1 - spec.beta1 ** (step + 1))
        scale = (second / (1 - spec.beta2 ** min(step + 1, frozen_after))).sqrt()
        weights = weights - spec.learning_rate * moved / (scale + 1e-8)
    return weights


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_look_ahead_takes_gradients_where_momentum_leads(staleness: int) -> None:
    recipe = a_recipe(staleness=staleness, look_ahead=True, sgd=True, steps=9)
    spec = recipe.optimiser.model_copy(update={"beta1": 0.8, "learning_rate": 0.5})
    ahead = trained(recipe.model_copy(update={"optimiser": spec}))
    assert all(same(ahead.weights(), ahead.weights(worker)) for worker in range(1, 4))
    torch.testing.assert_close(flat(ahead.weights()), ahead_by_hand(spec, 9, staleness), rtol=1e-4, atol=1e-5)
    plain = a_recipe(staleness=staleness, sgd=True, steps=9)
    assert same(trained(plain).weights(), trained(recipe).weights())  # without momentum it leads nowhere


def ahead_by_hand(spec: OptimiserSpec, steps: int, staleness: int) -> Tensor:
    """Return the weights after SGD with momentum, whose gradients are of weights that momentum alone has led on."""
    learners, weights = [Learner((1,) * 4, number) for number in range(4)], flat(Net().parameters())
    velocity, due = torch.zeros_like(weights), list[Tensor]()
    for step in range(steps):
        at, moved = weights.clone(), -spec.learning_rate * velocity
        for _ in due:
            moved = spec.beta1 * moved
            at += moved
        due.append(torch.stack([gradient_at(at, learner, step) for learner in learners]).mean(0))
        while due and (len(due) > staleness or step + 1 == steps):
            velocity = spec.beta1 * velocity + due.pop(0)
            weights = weights - spec.learning_rate * velocity
    return weights


def test_decisions_change_ratio_and_staleness_while_training_lasts() -> None:
    recipe = a_recipe("all-to-all", "ef(topk(0.5))", workers=2, steps=8, staleness=1)

    decisions = [
        Decision(step, (stale, stale), (1, 1), (codec, "ef(topk(0.5))"))
        for step, stale, codec in ((3, 3, "ef(topk(0.05))"), (6, 0, "ef(topk(0.2))"))
    ]
    found = trained(recipe, decisions)
    assert same(found.weights(0), found.weights(1))
    sizes = [record.sent[0].payload_bytes for record in found.records[0] if record.phase == "train"]
    assert sizes[2] > sizes[6] > sizes[3] == sizes[5]
    other = [record.sent[0].payload_bytes for record in found.records[1] if record.phase == "train"]
    assert len(set(other)) == 1
    train = [record for record in found.records[0] if record.phase == "train"]
    had = [[action.microbatch for action in record.actions if action.kind == "A"] for record in train]
    assert had == [[], [0], [], [], [1], [2, 3, 4, 5], [6], [7]]


def test_what_is_no_decision_is_refused() -> None:
    decision = Decision(7, (1, 2), (1, 1), ("ef(topk(0.1))", "fp32"))
    assert [read_note(note_of(each)) for each in (decision, None)] == [decision, None]
    for wrong in (b"", b"\x05\0\0\0{}", b"\x02\0\0\0[]", b"\xff" * 9):
        with pytest.raises(CodecError, match="cannot read the decision"):
            read_note(wrong)


# ---------------------------------------------------------------------- evaluations, and the end
def test_an_evaluation_sees_what_its_worker_has_applied_by_then() -> None:
    stale, prompt = (
        trained(a_recipe("star", staleness=staleness, evaluate_every=every)) for staleness, every in ((2, 3), (0, 1))
    )
    losses = [
        {record.step: record.loss for record in found.records[-1] if record.phase == "evaluation"}
        for found in (stale, prompt)
    ]
    assert losses[0][3] == losses[1][1]  # of three steps it has applied one


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_training_ends_everywhere_when_the_target_is_reached(exchange: Exchange) -> None:
    recipe = a_recipe(exchange, workers=3, shares=(2, 1, 1), steps=6, evaluate_every=1, workload=DIGITS)
    losses = [record.loss or 0.0 for record in trained(recipe).records[-1] if record.phase == "evaluation"]
    steps = 1 + next(number for number in range(1, 6) if losses[number] < min(losses[:number]))
    training = recipe.training.model_copy(update={"target_loss": losses[steps - 1]})
    sooner = recipe.model_copy(update={"training": training})
    found = trained(sooner)
    assert found.ended == "target"
    assert [len(records) for records in found.records] == [2 * steps] * recipe.nodes
    assert found.losses[-1] == losses[steps - 1]


@pytest.mark.parametrize("worker", range(3))
def test_a_training_that_diverges_names_the_worker(worker: int) -> None:
    recipe = a_recipe(workers=3)
    training = SmallTraining(recipe)
    torch.nn.init.constant_(training.learners[worker].parameters[0], math.nan)
    with pytest.raises(StageError, match=rf"worker {worker}: the loss is nan at step 0"):
        train_together(training, [io.StringIO() for _ in range(recipe.nodes)])

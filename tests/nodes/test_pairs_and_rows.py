"""Workers that average in pairs, and workers that agree on the rows that they sum: their laws."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from testbed.jobs.data_parallel import partner
from testbed.metrics.links import Pipes
from testbed.nodes.aligned import AlignedRows
from testbed.nodes.bucket import Bucket
from testbed.nodes.fragments import aligned_values
from testbed.records import MessageCosts, ReplicaCosts, WorkerMaths
from testbed.replay.recorded import records_of
from testbed.replay.workers import job_of, node_times
from testbed.spec import AlignedSpec, DataParallelSpec, OuterSpec, Recipe
from testbed.trace.check import check_trace
from testbed.trace.format import WORK
from testbed.training.alone import train_together
from testbed.training.workers import _PAIRS_APART
from tests.known import known
from tests.small_replicas import SmallTraining, a_recipe, cell_of, same, trained
from tests.synthetic import lasting, summed
from tests.trace.made_traces import played_over, sent_bytes

OUTER = OuterSpec(learning_rate=0.7, momentum=0.5, nesterov=False)
MEAN = OuterSpec(learning_rate=1.0, momentum=0.0, nesterov=False)
SHAPES = [(12, 5), (7,), (6, 2, 3)]
SPEC = AlignedSpec(share=0.25, directions=3)


# ---------------------------------------------------------------------- pairs
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_pairs_are_mutual_and_change(workers: int) -> None:
    drawn = [[partner(workers, worker, step) for worker in range(workers)] for step in range(30)]
    for mates in drawn:
        assert [mates[mate] for mate in mates] == list(range(workers))
        assert all(mate != worker for worker, mate in enumerate(mates))
    met = {mate for mates in drawn for mate in mates[:1]} - {0}
    assert met == set(range(1, workers))


@pytest.mark.parametrize("outer", [MEAN, OUTER])
def test_averaging_in_pairs_conserves_the_mean_and_brings_weights_together(outer: OuterSpec) -> None:
    """From weights that differ, with a learning rate so small that local steps change nothing."""
    recipe = a_recipe("pairs", workers=4, steps=12, outer=outer)
    training = SmallTraining(
        recipe.model_copy(update={"optimiser": recipe.optimiser.model_copy(update={"learning_rate": 1e-12})})
    )
    for number, learner in enumerate(training.learners):
        for parameter in learner.parameters:
            parameter.data += number
    begins = torch.stack([torch.cat([each.reshape(-1).clone() for each in training.weights(n)]) for n in range(4)])
    train_together(training, [io.StringIO() for _ in range(4)])
    ends = torch.stack([torch.cat([each.reshape(-1) for each in training.weights(n)]) for n in range(4)])
    torch.testing.assert_close(ends.mean(0), begins.mean(0), rtol=0, atol=1e-5)
    assert ends.std(0).max() < 0.2 * begins.std(0).min()


def test_two_workers_that_average_are_two_that_send_their_changes_to_each_other() -> None:
    pairs, whole = (trained(a_recipe(exchange, workers=2, outer=MEAN)) for exchange in ("pairs", "all-to-all"))
    for ours, theirs in zip(pairs.weights(), whole.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_pairs_keep_weights_of_their_own() -> None:
    done = trained(a_recipe("pairs", workers=4, outer=OUTER, local_steps=2))
    assert not same(done.weights(0), done.weights(1))
    assert done.losses[-1] is not None


@pytest.mark.parametrize(
    "changes",
    [{"outer": None}, {"staleness": 1}, {"workers": 3}, {"shares": (1, 2)}, {"streaming": {"fragments": 2}}],
    ids=lambda changes: next(iter(changes)),
)
def test_pairs_refuse_what_needs_common_weights(changes: dict[str, Any]) -> None:
    stated = {"workers": 2, "exchange": "pairs", "staleness": 0, "local_steps": 1, "outer": OUTER}
    with pytest.raises(ValidationError, match="weights of their own"):
        DataParallelSpec.model_validate({**stated, **changes})


# ---------------------------------------------------------------------- rows
def a_message(worker: int, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * worker + step)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def test_what_is_sent_and_what_is_left_out_are_the_input_and_all_send_the_same_rows() -> None:
    workers = [AlignedRows(SHAPES, SPEC, seed=1) for _ in range(3)]
    left: list[list[Tensor]] = [[torch.zeros(shape) for shape in SHAPES] for _ in workers]
    for step in range(4):
        inputs = [a_message(number, step) for number in range(3)]
        sketches = [worker.sketch(tensors, step) for worker, tensors in zip(workers, inputs, strict=True)]
        total = torch.stack(sketches).sum(0)
        sent = [worker.choose(total, step) for worker in workers]
        assert (len(total), len(sent[0])) == aligned_values(SHAPES, SPEC)
        spread = [worker.spread(each, step) for worker, each in zip(workers, sent, strict=True)]
        for worker, tensors, before, decoded in zip(workers, inputs, left, spread, strict=True):
            for tensor, old, value, new in zip(tensors, before, decoded, worker._left_out, strict=True):
                assert torch.equal(value + new, tensor + old)
        for first, second in zip(spread[0], spread[1], strict=True):
            assert torch.equal(first.reshape(len(first), -1).any(1), second.reshape(len(second), -1).any(1))
        left = [[each.clone() for each in worker._left_out] for worker in workers]


def test_the_sum_of_messages_is_the_message_of_the_sum() -> None:
    """On the agreed rows, because sketches are linear."""
    workers, alone = [AlignedRows(SHAPES, SPEC, seed=1) for _ in range(3)], AlignedRows(SHAPES, SPEC, seed=1)
    inputs = [a_message(number, 0) for number in range(3)]
    total = [torch.stack(parts).sum(0) for parts in zip(*inputs, strict=True)]
    sketches = torch.stack([worker.sketch(each, 0) for worker, each in zip(workers, inputs, strict=True)]).sum(0)
    own = alone.sketch(total, 0)
    torch.testing.assert_close(own, sketches)
    summed = torch.stack([worker.choose(sketches, 0) for worker in workers]).sum(0)
    torch.testing.assert_close(alone.choose(own, 0), summed)


def test_it_chooses_the_rows_that_are_large_in_the_sum() -> None:
    rows, spec = [AlignedRows([(8, 64)], AlignedSpec(share=0.25, directions=16), seed=1) for _ in range(2)], [2, 5]
    tensors = [torch.zeros(8, 64) for _ in rows]
    for tensor, sign in zip(tensors, (1, -1), strict=True):
        tensor[7] = 9 * sign  # large at both, and nothing in the sum
        tensor[spec] = 1.0
    total = torch.stack([each.sketch([tensor], 0) for each, tensor in zip(rows, tensors, strict=True)]).sum(0)
    sent = [each.choose(total, 0) for each in rows]
    (mean,) = rows[0].spread(torch.stack(sent).sum(0), 0)
    assert mean.any(1).nonzero().flatten().tolist() == spec


def test_with_all_rows_it_is_an_all_reduce() -> None:
    aligned, plain = trained(a_recipe("all-reduce", aligned=AlignedSpec(share=1.0))), trained(a_recipe("all-reduce"))
    for ours, theirs in zip(aligned.weights(), plain.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("staleness", [0, 1])
def test_with_few_rows_all_workers_stay_alike_and_send_less(staleness: int) -> None:
    few = trained(a_recipe("all-reduce", aligned=AlignedSpec(share=0.1), staleness=staleness))
    assert all(same(few.weights(0), few.weights(worker)) for worker in range(1, 4))
    sent = [
        sum(frame.payload_bytes for frame in done.records[0][2].sent) for done in (few, trained(a_recipe("all-reduce")))
    ]
    assert sent[0] < 0.4 * sent[1]


@pytest.mark.parametrize("share", [0, -0.1, 1.5, "all"])
def test_a_share_of_no_rows_is_refused(share: Any) -> None:
    with pytest.raises(ValidationError, match="share"):
        AlignedSpec(share=share)


@pytest.mark.parametrize("exchange", ["star", "all-to-all", "all-gather"])
def test_rows_are_only_agreed_on_for_sums(exchange: Any) -> None:
    with pytest.raises(ValidationError, match="all-reduce"):
        a_recipe(exchange, aligned=SPEC)


# ---------------------------------------------------------------------- all follow the one program
JOBS = {
    "pairs": a_recipe("pairs", outer=OUTER, local_steps=2),
    "rows": a_recipe("all-reduce", aligned=AlignedSpec(share=0.1)),
    "stale rows": a_recipe("all-reduce", aligned=AlignedSpec(share=0.1), staleness=1),
}


@pytest.mark.parametrize("recipe", JOBS.values(), ids=JOBS)
def test_a_trace_has_the_messages_of_the_training_and_codes_as_often(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked: Counter[str] = Counter()

    def counted(what: str) -> None:
        original = getattr(Bucket, what)

        def counting(*arguments: Any) -> Any:
            worked[what] += 1
            return original(*arguments)

        monkeypatch.setattr(Bucket, what, counting)

    for what in ("encode", "decode"):
        counted(what)
    training = trained(recipe).records
    cell, lasts_ns = cell_of(recipe, codec_cost="host"), (1, 999) if known(recipe.data).aligned else (1,)
    once = MessageCosts(encode=tuple(map(lasting, lasts_ns)), decode=tuple(map(lasting, lasts_ns)))
    maths = WorkerMaths(local_step=lasting(1000), close=lasting(30), update=lasting(500))
    costs = ReplicaCosts(workers=(maths,) * recipe.nodes, messages=(once,) * recipe.nodes)
    trace = job_of(cell, training, node_times(cell, costs)).trace()
    check_trace(trace, "it")
    coded: Counter[str] = Counter()
    for lane in trace.lanes:
        for work in (each for step in range(trace.steps) for each in lane.operations(step) if each.kind == WORK):
            coded[trace.labels[work.label]] += work.value
    # Of an agreement on rows half of the messages are sketches, and half are rows.
    assert {what: coded[what] * len(lasts_ns) for what in worked} == {
        what: count * sum(lasts_ns) for what, count in worked.items()
    }
    for node, records in enumerate(training):
        assert sent_bytes(trace, node) == [frame.frame_bytes for record in records for frame in record.sent]


@pytest.mark.parametrize("workers", [2, 4, 16, 64])
def test_no_worker_in_pairs_gets_further_ahead_than_a_stop_assumes(workers: int) -> None:
    for first in range(30):
        reached, steps = {0}, 0  # by what worker 0 sends in step `first`, and by what follows from it
        while len(reached) < workers:
            reached |= {partner(workers, worker, first + steps) for worker in reached}
            steps += 1
        assert steps < _PAIRS_APART


@pytest.mark.parametrize("recipe", JOBS.values(), ids=JOBS)
def test_its_ideal_is_what_is_played_over_ideal_links(recipe: Recipe) -> None:
    cell, training = cell_of(recipe), trained(recipe).records
    job = job_of(cell, training)
    trace = job.trace()
    played = played_over(trace, Pipes(cell.topology, cell.links, cell.nodes))
    summary = summed(cell, records_of(cell, job, trace, played, training), steady=(2, 1))
    assert summary.ideal_step_s == pytest.approx(summary.step_s, rel=1e-9)

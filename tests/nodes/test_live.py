"""Nodes that speak over loopback compute what they compute in one process, bit for bit; what is lost is named."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from testbed.errors import SpecError, TestbedError
from testbed.jobs.actions import Key, Message
from testbed.jobs.decision import Decision
from testbed.nodes.leader import Leader, ratio_of, with_ratio
from testbed.nodes.pace import as_stated
from testbed.policies.cycle import MessageSize
from testbed.policies.deco import choose
from testbed.policies.link_estimate import LinkEstimate
from testbed.records import StepRecord
from testbed.spec import CodecCost, DecoSpec, Exchange, Paced, Recipe
from tests.over_loopback import jobs_over_loopback, run_places
from tests.small_replicas import DIGITS, SPARSE, Learner, SmallTraining, a_recipe, live_cell, same, trained

pytestmark = pytest.mark.usefixtures("one_thread")

OUTER = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
STREAMING = {"outer": OUTER, "local_steps": 2, "streaming": {"fragments": 3, "mixing": 0.5}}
CHOICES = ((2, 1, 3, "ef(topk(0.2))"), (6, 3, 0, "ef(topk(0.4, values=fp32))"))
"""(step at which it is told, staleness until then, staleness, codec)"""


class OverLoopback(NamedTuple):
    records: list[list[StepRecord]]
    weights: list[list[Tensor]]
    errors: list[BaseException | None]


class Quitter(Learner):
    def loss(self, batch: int, part: int) -> Tensor:
        if batch == 2:
            raise TestbedError("it has had enough")
        return super().loss(batch, part)


def over_loopback(
    recipe: Recipe, *, lost: int | None = None, asked_in: int | None = None, codec_cost: CodecCost = "zero"
) -> OverLoopback:
    """Run all nodes, each in a thread; `lost` ends after its second step; a person asks for the end when a node has
    read that batch.
    """
    asked = threading.Event()

    class Asking(Learner):
        def loss(self, batch: int, part: int) -> Tensor:
            if batch == asked_in:
                asked.set()
            return super().loss(batch, part)

    workers = range(recipe.nodes)
    training = SmallTraining(recipe, kinds={node: Quitter if node == lost else Asking for node in workers})
    ran = run_places(
        live_cell(recipe, codec_cost=codec_cost), lambda setting: training, asked=lambda node: asked.is_set()
    )
    return OverLoopback(ran.records, list(map(training.weights, range(training.data.workers))), ran.errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "codec", "workers", "staleness", "more"),
    [
        ("star", SPARSE, 2, 0, {}),
        ("star", "fp32", 2, (2, 0), {}),
        ("all-to-all", SPARSE, 2, (0, 3), {}),
        ("all-to-all", "int8", 2, 0, {}),
        ("all-reduce", "fp32", 2, 1, {}),
        ("all-reduce", "bf16", 4, (2, 0, 1, 0), {}),
        ("all-gather", SPARSE, 3, (0, 3, 1), {"shares": (2, 1, 1)}),
        ("all-gather", "0: fp32; rest: int8", 4, 0, {}),
        ("star", "int4(group=16)", 2, (1, 0), STREAMING),
        ("all-to-all", SPARSE, 2, (0, 2), STREAMING),
        ("all-reduce", "bf16", 2, (0, 2), STREAMING),
        ("all-gather", SPARSE, 3, 1, {**STREAMING, "shares": (2, 1, 1)}),
        ("pairs", "bf16", 2, 0, {"local_steps": 2, "outer": STREAMING["outer"]}),
        ("pairs", "fp32", 4, 0, {"outer": STREAMING["outer"]}),
        ("all-reduce", "fp32", 3, (2, 0, 1), {"aligned": {"share": 0.1}, "shares": (2, 1, 1)}),
        ("all-reduce", "bf16", 3, 0, {"low_rank": {"rank": 4, "refresh": 2}, "shares": (2, 1, 1)}),
        ("star", "fp32", 2, 0, {"low_rank": {"rank": 4, "refresh": 1}, "local_steps": 2, "outer": STREAMING["outer"]}),
        ("star", SPARSE, 2, (1, 0), {"workload": DIGITS, "shares": (3, 1)}),
        ("all-reduce", "fp32", 2, 0, {"workload": DIGITS}),
    ],
)
def test_over_links_as_in_one_process(
    exchange: Exchange, codec: str, workers: int, staleness: Any, more: dict[str, Any]
) -> None:
    recipe = a_recipe(
        exchange, codec, workers=workers, staleness=staleness, steps=5, answer=SPARSE, evaluate_every=5, **more
    )
    live, alone = over_loopback(recipe), trained(recipe)
    assert live.errors == [None] * recipe.nodes
    for worker in range(workers):
        assert same(live.weights[worker], alone.weights(worker))
    found = [
        [(r.loss, r.accuracy) for node in each.records for r in node if r.phase == "evaluation" and r.loss is not None]
        for each in (live, alone)
    ]
    assert len(found[0]) == 1
    assert found[0] == found[1]
    for ours, theirs in zip(live.records, alone.records, strict=True):
        pair = (ours, theirs)
        steps = [[(r.step, r.phase, r.gradient_norm, r.learning_rate) for r in node] for node in pair]
        sent = [sorted((f.peer, f.microbatch, f.frame_bytes) for r in node for f in r.sent) for node in pair]
        had = [[sorted((f.peer, f.microbatch) for f in r.received) for r in node] for node in pair]
        assert steps[0] == steps[1]
        assert sent[0] == sent[1]
        assert had[0] == had[1]
        peers = {frame.peer for record in ours for frame in (*record.sent, *record.received)}
        tcp = [{socket.peer: socket.bytes_sent for socket in record.sockets} for record in ours]
        assert all(sample.keys() == peers or exchange == "pairs" for sample in tcp)  # not all have been a pair
        assert all(before[peer] <= after[peer] for before, after in itertools.pairwise(tcp) for peer in peers)


@pytest.mark.parametrize("exchange", ["star", "all-to-all"])
@pytest.mark.parametrize("codec_cost", ["zero", "host"])
def test_codecs_cost_nothing_or_what_they_cost_here(exchange: Exchange, codec_cost: CodecCost) -> None:
    recipe = a_recipe(exchange, SPARSE, workers=2, steps=4)
    live = over_loopback(recipe, codec_cost=codec_cost)
    assert live.errors == [None] * recipe.nodes
    assert same(live.weights[0], trained(recipe).weights(0))
    updates = [a for node in live.records[:2] for record in node for a in record.actions if a.kind == "A"]
    assert all((action.decoded_ns > action.input_ns) == (codec_cost == "host") for action in updates)


@pytest.mark.parametrize("exchange", ["star", "all-to-all"])
def test_what_a_leader_chooses_holds_everywhere_from_the_same_step_on(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {
        step: Decision(step + stale + 2, (later,) * 2, (1, 1), (codec,) * 2) for step, stale, later, codec in CHOICES
    }
    heard: list[tuple[int, int, tuple[str, ...]]] = []

    def hear(leader: Leader, worker: int, message: Message, decision: Decision) -> None:
        heard.append((worker, message.key.step, decision.codecs))

    monkeypatch.setattr(Leader, "decide", lambda leader, step: chosen.get(step))
    monkeypatch.setattr(Leader, "heard", hear)
    deco = DecoSpec(every=1, noise="exp", noise_weight=1.0)
    recipe = a_recipe(exchange, SPARSE, workers=2, staleness=1, steps=14, deco=deco)
    live = over_loopback(recipe)
    by_step = {decision.effective_from: decision for decision in chosen.values()}
    alone = trained(recipe, [by_step[step] for step in sorted(by_step)])
    assert live.errors == [None] * recipe.nodes
    assert same(live.weights[0], alone.weights(0))
    assert same(live.weights[1], alone.weights(1))
    had = [
        [[a.microbatch for a in r.actions if a.kind == "A"] for r in node]
        for node in (live.records[0], alone.records[0])
    ]
    assert had[0] == had[1]
    assert {worker for worker, *_ in heard} == ({0, 1} if exchange == "star" else {1})
    for step, decision in by_step.items():
        assert {codecs for _, number, codecs in heard if number == step} == {decision.codecs}


@pytest.mark.parametrize(
    ("exchange", "staleness", "more"),
    [
        ("star", 0, {}),
        ("all-to-all", (0, 2), {}),
        ("all-gather", (0, 2), {}),
        ("all-reduce", (0, 2), {}),
        ("star", 3, {"deco": DecoSpec(every=50, noise="exp", noise_weight=1.0)}),
        ("star", 9, {"outer": OUTER, "arrivals": {"buffer": 2}}),
    ],
)
def test_who_asks_for_the_end_gets_it_soon_and_after_the_same_step_everywhere(
    exchange: Exchange, staleness: Any, more: dict[str, Any]
) -> None:
    codec = "bf16" if exchange == "all-reduce" else SPARSE
    recipe = a_recipe(exchange, codec, workers=2, staleness=staleness, steps=40, **more)
    live = over_loopback(recipe, asked_in=2)
    assert live.errors == [None] * recipe.nodes
    done = {len(node) for node in live.records}
    if recipe.data is not None and recipe.data.arrivals is None:
        (steps,) = done
        shorter = recipe.training.model_copy(update={"steps": steps})
        assert same(live.weights[0], trained(recipe.model_copy(update={"training": shorter})).weights(0))
        assert same(live.weights[0], live.weights[1])
    assert max(done) < 40
    assert {record.phase for node in live.records for record in node} == {"train"}


def test_a_leader_goes_by_what_it_hears() -> None:
    """Two links of 80 and 40 Mbit/s, 20 ms each way, and a dense message of 1 MB: the slower one decides."""
    deco = DecoSpec(every=4, noise="exp", noise_weight=1.0)
    recipe = a_recipe("star", "ef(topk(0.5))", workers=2, staleness=1, deco=deco)
    paced = Paced(forward_ns=(30_000_000,), backward_ns=(60_000_000,), update_ns=10_000_000, source="stated")
    server = jobs_over_loopback(live_cell(recipe, compute=paced), Path())[2]
    leader = Leader.of(server, 1_000_000)
    assert leader.decide(3) is None  # nobody has been heard

    def hear(worker: int, rate_bps: float) -> None:
        took_ns = 20_000_000 + round(300_000 * 8e9 / rate_bps)
        times = {"first_byte_ns": 1000, "last_byte_ns": 1000 + took_ns, "round_trip_ns": 40_000_000}
        leader.heard(worker, Message(Key("gradient", 0, origin=worker), range(300_000), **times), as_stated(recipe))

    hear(0, 80e6)
    hear(1, 40e6)
    assert leader.decide(4) is None  # it is not the time
    decision = leader.decide(7)
    link = LinkEstimate(40e6, 20_000_000)
    wanted = choose(link, MessageSize(1_000_000, 0.6), 100_000_000, noise_weight=1.0)
    assert decision.staleness == (wanted.staleness,) * 2
    assert ratio_of(decision.codecs[0]) == pytest.approx(wanted.ratio, rel=1e-6)
    assert decision.effective_from == 7 + 1 + 2
    assert leader.decide(8) is None
    for _ in range(12):
        hear(1, 20e6)  # it has become slower, and a decision of before holds by now
    later = leader.decide(11)
    assert ratio_of(later.codecs[0]) == pytest.approx(wanted.ratio / 2, rel=0.05)


def test_a_codec_is_changed_in_its_ratio_alone() -> None:
    assert with_ratio("ef(topk(0.1, values=fp32))", 0.25) == "ef(topk(0.25, fp32))"
    with pytest.raises(SpecError, match="no parameter for the kept share"):
        ratio_of("ef(int8)")


def test_by_arrivals_it_goes_on_without_a_lost_worker() -> None:
    """A buffer of all workers is of all that are left, so what two of three compute does not depend on the time."""
    found = over_loopback(
        a_recipe(
            "star", SPARSE, workers=3, shares=(2, 1, 1), steps=6, evaluate_every=3, outer=OUTER, arrivals={"buffer": 3}
        ),
        lost=1,
    )
    assert [str(error) for error in found.errors if error] == ["it has had enough"]
    names = [[(record.phase, record.step) for record in node] for node in found.records]
    assert names[0] == names[2] == names[3]
    assert names[1] == names[0][:2]  # two rounds were answered
    assert [len(record.received) for record in found.records[3] if record.phase == "train"] == [3, 3, 2, 2, 2, 2]


@pytest.mark.parametrize("exchange", ["star", "all-reduce", "all-gather"])
def test_a_lost_worker_ends_all_and_none_waits_for_ever(exchange: Exchange) -> None:
    found = over_loopback(a_recipe(exchange, workers=3, shares=(2, 1, 1), steps=6), lost=1)
    assert str(found.errors.pop(1)) == "it has had enough"
    assert all("<->" in str(error) for error in found.errors)
    assert any("<-> worker 1" in str(error) for error in found.errors)
    left = [thread for thread in threading.enumerate() if "<->" in thread.name or "ring" in thread.name]
    for thread in left:  # a ring's own ends once its connections are closed
        thread.join(60)
        assert not thread.is_alive()

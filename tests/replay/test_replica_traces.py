"""Trained data parallel cells as traces: what was counted is what is sent, and a step takes what arithmetic says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from testbed.devices.codec_cost import DeviceRates, device_codec_ns
from testbed.errors import UserError
from testbed.jobs.loop import Links
from testbed.metrics.links import Pipes
from testbed.metrics.steps import align, over_cycles
from testbed.nodes.bucket import Bucket
from testbed.nodes.fragments import SMALL
from testbed.predict.data_parallel_shapes import DataParallelShape
from testbed.profiles import load_profile
from testbed.records import MessageCosts, ReplicaCosts, StepRecord, WorkerMaths
from testbed.replay import workers
from testbed.replay.recorded import records_of
from testbed.replay.workers import NodeTimes, node_times
from testbed.spec import Calibrated, Cell, CodecRates, Exchange, OuterSpec
from testbed.trace.check import check_trace
from testbed.trace.format import WORK, Operation, Trace
from testbed.trace.simulate import ideal_steps_ns
from testbed.workloads import models
from tests.small_replicas import BACKWARD_NS, EXCHANGES, FORWARD_NS, SPARSE, UPDATE_NS, a_recipe, cell_of, trained
from tests.synthetic import lasting, summed
from tests.trace.made_traces import played_over, sent_bytes

STREAMING = {
    "outer": {"learning_rate": 0.4, "momentum": 0.9, "nesterov": True},
    "local_steps": 2,
    "streaming": {"fragments": 3},
}


def a_cell(exchange: Exchange, codec: str = "fp32", **recipe: Any) -> tuple[Cell, list[list[StepRecord]]]:
    """A played cell, and a training of its recipe."""
    asked = a_recipe(exchange, codec, **recipe)
    return cell_of(asked), trained(asked).records


def played_records(
    cell: Cell,
    training: list[list[StepRecord]],
    links: Links | None = None,
    times: Sequence[NodeTimes] | None = None,
) -> list[list[StepRecord]]:
    """The records of a cell that was played over links that are formulas."""
    job = workers.job_of(cell, training, times)
    trace = job.trace()
    return records_of(cell, job, trace, played_over(trace, links), training)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("staleness", "more"), [(0, {}), ((0, 2, 1), {}), ((0, 2, 1), STREAMING)])
def test_what_was_counted_is_sent_and_received_once(exchange: Exchange, staleness: int, more: dict[str, Any]) -> None:
    codec = "bf16" if exchange == "all-reduce" else SPARSE
    cell, training = a_cell(exchange, codec, workers=3, shares=(2, 1, 1), staleness=staleness, evaluate_every=2, **more)
    trace = workers.job_of(cell, training).trace()
    check_trace(trace, "it")
    assert trace.nodes == cell.node_names
    played = played_records(cell, training)
    for node, (records, before) in enumerate(zip(played, training, strict=True)):
        counted = [frame.frame_bytes for record in before for frame in record.sent]
        assert sent_bytes(trace, node) == counted == [frame.frame_bytes for record in records for frame in record.sent]
        assert [(r.step, r.phase, r.loss) for r in records] == [(r.step, r.phase, r.loss) for r in before]
        for record in records:
            for action in record.actions:
                assert record.start_ns <= action.asked_ns <= action.input_ns <= action.computed_ns <= record.end_ns
            needed = [frame.last_byte_ns for frame in record.received]
            assert needed == sorted(needed)
            assert max(needed, default=0) <= record.end_ns


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_cycle_is_that_of_the_same_job_from_shapes(exchange: Exchange, staleness: int) -> None:
    steps = 24
    cell, training = a_cell(exchange, staleness=staleness, steps=steps)
    records = played_records(cell, training, Pipes(cell.topology, cell.links, cell.nodes))
    summary = summed(cell, records, steady=(6, 1))
    message = training[0][0].sent[0].frame_bytes * (cell.data.workers if exchange == "all-reduce" and cell.data else 1)
    shape = DataParallelShape(
        workers=4,
        exchange=exchange,
        staleness=staleness,
        compute_ns=FORWARD_NS + BACKWARD_NS + UPDATE_NS,
        message_bytes=(message, message),
        tokens=1,
    )
    formula_s = shape.formula_s("star", cell.profiles)
    assert summary.step_s == pytest.approx(formula_s, rel=0.25 if exchange == "all-to-all" else 0.05)
    assert summary.ideal_step_s == pytest.approx(summary.step_s, rel=1e-9)  # the links were the ideal's
    assert summary.split.compute_s > 0
    assert summary.payload_bytes_per_step == sum(f.payload_bytes for node in training for f in node[0].sent)


def test_local_steps_take_their_own_time() -> None:
    outer = OuterSpec(learning_rate=1.0, momentum=0.0, nesterov=False)
    cell, training = a_cell("star", workers=2, local_steps=(3, 1), outer=outer)
    steps = align(played_records(cell, training))
    local_ns = FORWARD_NS + BACKWARD_NS + UPDATE_NS
    assert {step.end_ns - step.begin_ns for step in steps if step.phase == "train"} == {3 * local_ns + UPDATE_NS}
    # Who is done early waits for the server's answer.
    early = [action for action in steps[0].records[1].actions if action.kind == "A"]
    assert [action.input_ns - action.asked_ns for action in early] == [2 * local_ns]


# ------------------------------------------------------------------ codecs that take time
RATES = DeviceRates(1e10, 1e11)
CODING = ("encode", "decode")
MATHS = WorkerMaths(local_step=lasting(1000), close=lasting(30), update=lasting(500))


def on_device(cell: Cell, dilation: int = 1) -> Cell:
    """The same cell whose codecs take what they take on a device."""
    rates = CodecRates(
        bandwidth_bytes_per_s=RATES.bandwidth_bytes_per_s, operations_per_s=RATES.operations_per_s, source="made up"
    )
    compute = cell.compute.model_copy(update={"dilation": dilation})
    return cell.model_copy(update={"codec_cost": "device", "codec_rates": rates, "compute": compute})


def formula(cell: Cell, codec: str) -> tuple[int, int]:
    """How long the device takes to encode and to decode all tensors of the model; in a ring that reduces a part."""
    shapes = models.parameter_shapes(cell.workload)
    if cell.data.exchange == "all-reduce":
        shapes = [(-(-sum(map(math.prod, shapes)) // cell.data.workers),)]
    values = [(math.prod(shape), shape) for shape in shapes]
    small = sum(value for value, _ in values if value < SMALL)
    times = [device_codec_ns(codec, "backward", shape, RATES) for value, shape in values if value >= SMALL]
    times.append(device_codec_ns("fp32", "backward", (small,), RATES))
    encode, decode = zip(*times, strict=True)
    return sum(encode), sum(decode)


def coded(trace: Trace, node: int, step: int) -> dict[str, int]:
    """How long codecs work at a node in a step, by what they do."""
    by_label = dict.fromkeys(CODING, 0)
    for lane in trace.lanes:
        for operation in lane.operations(step) if lane.node == node else ():
            if operation.kind == WORK and trace.labels[operation.label] in CODING:
                by_label[trace.labels[operation.label]] += operation.value
    return by_label


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("staleness", "more"), [(0, {}), ((0, 2, 1), STREAMING)])
def test_codecs_work_besides_what_is_done_without_them(
    exchange: Exchange, staleness: int, more: dict[str, Any]
) -> None:
    codec = "bf16" if exchange == "all-reduce" else SPARSE
    free, training = a_cell(exchange, codec, workers=3, shares=(2, 1, 1), staleness=staleness, **more)
    cell = on_device(free)
    trace, without = workers.job_of(cell, training).trace(), workers.job_of(free, training).trace()
    check_trace(trace, "it")
    assert trace.labels == (*without.labels, *CODING)

    def others(of: Trace) -> list[list[list[Operation]]]:
        return [
            [
                [o for o in lane.operations(step) if o.kind != WORK or of.labels[o.label] not in CODING]
                for step in range(of.steps)
            ]
            for lane in of.lanes
        ]

    assert others(trace) == others(without)
    if more and exchange != "all-reduce":
        # In three steps each of three fragments is exchanged once: together they are the model.
        encoded_ns = sum(coded(trace, 0, step)["encode"] for step in range(3, 6))
        assert encoded_ns == pytest.approx(formula(cell, codec)[0], rel=1e-3)
    slower = workers.job_of(on_device(free, dilation=3), training).trace()
    assert {work: ns * 3 for work, ns in coded(trace, 1, 4).items()} == coded(slower, 1, 4)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_synchronous_cycle_of_two_grows_by_what_codecs_take(exchange: Exchange) -> None:
    free, training = a_cell(exchange, "bf16", workers=2, answer="fp16")
    cell = on_device(free)
    trace = workers.job_of(cell, training).trace()
    encode_ns, decode_ns = formula(cell, "bf16")
    wanted = encode_ns + 2 * decode_ns
    if exchange == "star":  # the server decodes both messages, and encodes its answer, which is decoded
        wanted += sum(formula(cell, "fp16"))
    if exchange == "all-reduce":  # of half a message: to the other, and a sum to it, besides which its own is decoded
        wanted += encode_ns + decode_ns
    before, after = (ideal_steps_ns(each, None, 6) for each in (workers.job_of(free, training).trace(), trace))
    assert {late - early for early, late in zip(before, after, strict=True)} == {wanted}
    for node, records in enumerate(played_records(cell, training)):
        for record in records:
            spent = coded(trace, node, record.step) if record.phase == "train" else dict.fromkeys(CODING, 0)
            if exchange == "all-reduce" and record.phase == "train":  # the ring's are no worker's actions
                spent = {"encode": 0, "decode": 2 * decode_ns}
            assert sum(action.encoded_ns - action.computed_ns for action in record.actions) == spent["encode"]
            assert sum(action.decoded_ns - action.input_ns for action in record.actions) == spent["decode"]


@pytest.mark.parametrize("exchange", ["all-to-all", "star", "all-gather"])
def test_delayed_aggregation_hides_the_link_and_not_the_codec(exchange: Exchange) -> None:
    free, training = a_cell(exchange, "bf16", workers=2, staleness=2, steps=24)
    cell = on_device(free)
    encode_ns, decode_ns = formula(cell, "bf16")
    decode_ns = formula(cell, "fp32")[1] if exchange == "star" else 2 * decode_ns
    compute_ns = FORWARD_NS + BACKWARD_NS + UPDATE_NS

    def cycle(of: Cell, link: str) -> float:
        links = Pipes("star", [load_profile(link)], of.nodes)
        return sum(ideal_steps_ns(workers.job_of(of, training).trace(), links, 20)[-6:]) / 6

    fast, slow = "link(1Gbit, 1ms, buffer=60s)", "link(200Kbit, 1ms, buffer=60s)"
    assert cycle(free, fast) == compute_ns
    assert cycle(cell, fast) == compute_ns + encode_ns + decode_ns
    assert cycle(free, slow) > 5 * compute_ns
    assert cycle(cell, slow) == pytest.approx(cycle(free, slow), rel=1e-3)


def test_what_this_machine_takes_is_what_was_measured_on_it() -> None:
    free, training = a_cell(
        "star", "bf16", workers=2, local_steps=3, outer=STREAMING["outer"], streaming={"fragments": 2}
    )
    messages = [
        MessageCosts(encode=(lasting(node), lasting(10 * node)), decode=(lasting(node + 3), lasting(50)))
        for node in (1, 2, 3)
    ]
    costs = ReplicaCosts(workers=(MATHS, MATHS), messages=tuple(messages))
    host = free.model_copy(update={"codec_cost": "host"})
    trace = workers.job_of(host, training, node_times(host, costs)).trace()
    assert [coded(trace, 0, step) for step in (4, 5)] == [{"encode": 1, "decode": 6}, {"encode": 10, "decode": 50}]
    assert [coded(trace, 2, step) for step in (4, 5)] == [{"encode": 3, "decode": 9}, {"encode": 30, "decode": 100}]
    calibrated = free.model_copy(update={"compute": Calibrated()})
    trace = workers.job_of(calibrated, training, node_times(calibrated, costs)).trace()
    works = [[o.value for o in trace.lanes[0].operations(step) if o.kind == WORK] for step in range(trace.steps)]
    assert works == [[1000, 1000, 1030, 500]] * trace.steps
    for cell in (host, calibrated):
        with pytest.raises(UserError, match="needs the durations of its recipe"):
            node_times(cell)
        # The step that is expected of a cell has nothing of what the cell does not state.
        assert sum(coded(workers.job_of(cell, training).trace(), 0, 4).values()) == 0


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("more", [{}, STREAMING])
def test_codecs_work_as_often_as_in_training(
    exchange: Exchange, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worked: Counter[str] = Counter()

    def counted(what: str) -> None:
        original = getattr(Bucket, what)

        def counting(*arguments: Any) -> Any:
            worked[what] += 1
            return original(*arguments)

        monkeypatch.setattr(Bucket, what, counting)

    for what in CODING:
        counted(what)
    free, training = a_cell(exchange, "bf16", workers=3, shares=(2, 1, 1), **more)
    cell, fragments = free.model_copy(update={"codec_cost": "host"}), 3 if more else 1
    once = MessageCosts(encode=(lasting(1),) * fragments, decode=(lasting(1),) * fragments)
    costs = ReplicaCosts(workers=(MATHS,) * 3, messages=(once,) * cell.nodes)
    trace = workers.job_of(cell, training, node_times(cell, costs)).trace()
    steps = [coded(trace, node, step) for node in range(cell.nodes) for step in range(trace.steps)]
    assert {what: sum(step[what] for step in steps) for what in CODING} == worked


def test_values_that_come_in_cycles_count_by_their_cycle() -> None:
    assert over_cycles([1, 2, 3], 1) == [1, 2, 3]
    assert over_cycles([1, 1, 4, 1, 1, 4], 3) == [2.0] * 6
    assert over_cycles([1, 3, 2, 4, 9], 2) == [2.0, 2.0, 5.0, 5.0, 5.0]
    assert over_cycles([5, 7], 4) == [6.0, 6.0]
    assert over_cycles([], 4) == []

"""How testbed makes traces, torch-free: all that the battery's part A calls of it. Where it is told otherwise one day,
this is what changes, and the numbers that go in stay.

Sizes and durations are drawn by what they are of, not by when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from testbed.diffusion import experts, programs
from testbed.jobs.sampling import sent_parts
from testbed.jobs.schedule import actions
from testbed.metrics.links import Pipes
from testbed.predict.data_parallel_shapes import DataParallelShape, resolve_data_parallel
from testbed.predict.hybrid_shapes import resolve_hybrid
from testbed.profiles import load_profile
from testbed.records import (
    FRAME_HEADER_BYTES,
    ActionRecord,
    Duration,
    MessageCosts,
    ReplicaCosts,
    SentRecord,
    StageCosts,
    StepRecord,
    WorkerMaths,
)
from testbed.replay import pipelines
from testbed.replay.workers import node_times, stated_job
from testbed.spec import (
    Calibrated,
    Cell,
    CodecRates,
    DataParallelSpec,
    OptimiserSpec,
    OuterSpec,
    Paced,
    PipelineSpec,
    StreamingSpec,
    TrainingSpec,
)
from testbed.trace import synthetic
from testbed.trace.format import RECEIVE, SEND, SIGNAL, WAIT, Lane, Trace
from testbed.trace.simulate import ideal_steps_ns
from tests.battery.entries import drawn
from tests.specs import text_spec

RATES = CodecRates(bandwidth_bytes_per_s=1e10, operations_per_s=1e11, source="made up")
_TIMES = {"asked_ns": 0, "input_ns": 0, "decoded_ns": 0, "computed_ns": 0, "encoded_ns": 0}
_WAYS = ("forward", "backward")


def a_cell(
    *, cost: str, workers: int, batch: int, seed_steps: int, dilation: int = 1, calibrated: bool = False, **fields: Any
) -> Cell:
    """A played cell of gpt2-mini. `workers`: how many have durations of their own."""
    each = range(workers)
    paced = Paced(
        forward_ns=tuple(drawn(10**8, "forward", n) for n in each),
        backward_ns=tuple(drawn(10**8, "backward", n) for n in each),
        update_ns=drawn(10**7, "update"),
        source="stated",
        dilation=dilation,
    )
    stated = {
        "codec": "fp32",
        "profiles": (load_profile("link(10Mbit, 30ms, buffer=60s)"),),
        "topology": "star",
        "pipeline": PipelineSpec(stages=1, microbatches=1, schedule="gpipe", in_flight=1),
    }
    return Cell(
        **{**stated, **fields},
        engine="netem",
        compute=Calibrated() if calibrated else paced,
        timing="played",
        clock="virtual",
        codec_cost=cost,
        codec_rates=RATES if cost == "device" else None,
        workload=text_spec("gpt2-mini", sequence_length=8, batch_size=batch),
        optimiser=OptimiserSpec(learning_rate=1e-3, weight_decay=0, beta1=0.9, beta2=0.999, clip_norm=1),
        training=TrainingSpec(steps=seed_steps, warmup_steps=0, seed=0, evaluate_every=2),
    )


def took(below: int, *what: object) -> Duration:
    """Return how long something takes on a machine that was never there."""
    return Duration(ns=drawn(below, *what), spread=0.0, samples=12)


# ------------------------------------------------------------------ pipelines
def pipeline_shape(*, stages: int, coded: bool, **asked: Any) -> Trace:
    """A pipeline from stated durations and sizes."""
    both = [(drawn(10**6, "encode", way), drawn(10**6, "decode", way)) for way in _WAYS]
    return synthetic.pipeline_trace(
        stages=stages,
        steps=3,
        message_bytes=(drawn(10**6, "bytes", 0), drawn(10**6, "bytes", 1)),
        forward_ns=[drawn(10**8, "forward", stage) for stage in range(stages)],
        backward_ns=[drawn(10**8, "backward", stage) for stage in range(stages)],
        update_ns=[drawn(10**7, "update", stage) for stage in range(stages)],
        encode_ns=(both[0][0], both[1][0]) if coded else 0,
        decode_ns=(both[0][1], both[1][1]) if coded else 0,
        **asked,
    )


def transfer(count: int) -> Trace:
    """One message after another from a sender to a receiver."""
    return synthetic.transfer_trace(
        (drawn(10**7, "encode", n), drawn(10**6, "bytes", n), drawn(10**7, "decode", n)) for n in range(count)
    )


def played_pipeline(
    *, stages: int, microbatches: int, accumulation: int, schedule: Any, in_flight: int, **of: Any
) -> Trace:
    """A training of four steps, with an evaluation after the second and the last, as a played cell's trace."""
    cell = a_cell(
        workers=stages,
        batch=2 * microbatches * accumulation,
        seed_steps=4,
        codec="0: fwd=int8, bwd=bf16; rest: int4(group=16)" if stages > 1 else "fp32",
        topology="line",
        pipeline=PipelineSpec(
            stages=stages,
            microbatches=microbatches,
            schedule=schedule,
            in_flight=in_flight,
            accumulation=accumulation,
        ),
        **of,
    )
    training = [_stage_records(cell, stage) for stage in range(stages)]
    costs = [stage_costs(stage, stages) for stage in range(stages)]
    return pipelines.job_of(cell, pipelines.steps_to_play(cell, training), costs).trace()


def _stage_records(cell: Cell, stage: int) -> list[StepRecord]:
    pipe, made = cell.pipeline, list[StepRecord]()
    order = actions(
        pipe.schedule,
        stage=stage,
        stages=pipe.stages,
        microbatches=pipe.microbatches,
        in_flight=pipe.in_flight,
        accumulation=pipe.accumulation,
    )
    for step in range(cell.training.steps):
        sent = [
            _sent(way, number, drawn(10**6, stage, way, step, number))
            for kind, number in order
            for way, target in ((_WAYS[kind == "B"], stage + (1 if kind == "F" else -1)),)
            if 0 <= target < pipe.stages
        ]
        done = tuple(ActionRecord(kind=kind, microbatch=number, **_TIMES) for kind, number in order)
        made.append(_step(step, "train", done, sent))
        if step % 2:
            made.append(_step(step + 1, "evaluation", (), []))
    return made


def _step(step: int, phase: Any, done: tuple[ActionRecord, ...], sent: Sequence[SentRecord]) -> StepRecord:
    nothing = dict.fromkeys(("optimiser_start_ns", "synchronised_ns", "loss", "gradient_norm", "counters"))
    return StepRecord(
        **{"step": step, "phase": phase, "warmup": False, "start_ns": 0, "end_ns": 0, "tokens": 1, **nothing},
        actions=done,
        sent=tuple(sent),
        received=(),
        sockets=(),
    )


def _sent(way: Any, number: int, size: int) -> SentRecord:
    times = dict.fromkeys(("queued_ns", "first_byte_ns", "last_byte_ns"), 0)
    payload = size + 28 - FRAME_HEADER_BYTES
    return SentRecord(
        direction=way, microbatch=number, raw_bytes=size, payload_bytes=payload, frame_bytes=size + 28, **times
    )


def stage_costs(stage: int, stages: int) -> StageCosts:
    maths = {name: took(10**8, name, stage) for name in ("forward", "backward", "clip", "update")}
    out = [way for way, target in zip(_WAYS, (stage + 1, stage - 1), strict=True) if 0 <= target < stages]
    back = [way for way, source in zip(_WAYS, (stage - 1, stage + 1), strict=True) if 0 <= source < stages]
    return StageCosts(
        **maths,
        encode={way: took(10**6, "encode", stage, way) for way in out},
        decode={way: took(10**6, "decode", stage, way) for way in back},
        decode_woken={way: took(2 * 10**6, "woken", stage, way) for way in back},
    )


# ------------------------------------------------------------------ data parallel
def data_parallel(
    *,
    exchange: Any,
    workers: int,
    staleness: tuple[int, ...],
    local: tuple[int, ...],
    fragments: int,
    shares: tuple[int, ...] | None = None,
    first: int = 0,
    end: int = 7,
    changes: tuple[tuple[int, int], ...] = (),
    **cost: Any,
) -> Trace:
    """A training as a played cell's trace, of its steps from `first` on. `changes`: from which step on another
    staleness holds for all, as a policy chooses it.
    """
    outer = OuterSpec(learning_rate=0.7, momentum=0.9, nesterov=True) if max(local) > 1 or fragments > 1 else None
    data = DataParallelSpec(
        workers=workers,
        exchange=exchange,
        staleness=staleness,
        local_steps=local,
        outer=outer,
        streaming=StreamingSpec(fragments=fragments) if fragments > 1 else None,
        answer="fp16" if exchange == "star" else None,
        shares=shares,
    )
    codec = "bf16" if exchange == "all-reduce" else "0: bf16; rest: int8"
    cell = a_cell(workers=workers, batch=12 * workers, seed_steps=end, data=data, codec=codec, **cost)
    count = {"star": 1, "all-to-all": workers - 1, "all-gather": workers - 1, "all-reduce": 2 * (workers - 1)}[exchange]

    def frames(node: int, step: int) -> list[int]:
        if exchange == "all-gather":  # passed on as it came
            return [drawn(10**6, (node - hop) % workers, step) for hop in range(count)]
        if exchange == "all-reduce":
            parts = [drawn(10**6, node, step, (node - hop) % workers) for hop in range(workers - 1)]
            return parts + [drawn(10**6, "sum", step, (node + 1 - hop) % workers) for hop in range(workers - 1)]
        return [drawn(10**6, node, step)] * (workers if node == workers else count)

    def applied_by(worker: int, step: int) -> int:
        """Say how many steps a worker has applied when a step ends."""
        if step < 0:
            return 0
        stale = data.staleness_of(worker)
        for begins, other in changes:
            stale = other if step + 1 >= begins else stale
        return max(applied_by(worker, step - 1), step + 1 if step == end - 1 else step + 1 - stale)

    def applied(worker: int, step: int) -> list[int]:
        return list(range(applied_by(worker, step - 1), applied_by(worker, step)))

    parts = workers + (exchange == "star")
    costs = ReplicaCosts(
        workers=tuple(
            WorkerMaths(local_step=took(10**8, "local", n), close=took(10**7, "close", n), update=took(10**7, "up", n))
            for n in range(workers)
        ),
        messages=tuple(
            MessageCosts(
                **{what: tuple(took(10**6, what, n, f) for f in range(fragments)) for what in ("encode", "decode")}
            )
            for n in range(parts)
        ),
    )
    whole = stated_job(cell, end, frames, applied, node_times(cell, costs)).trace()
    return window(whole, range(first, end))


def window(trace: Trace, steps: range) -> Trace:
    """Return some steps of a trace, as if all before them had ended: what was sent before is there."""
    sent, before = set[tuple[int, int, int]](), dict[int, int]()
    for lane in trace.lanes:
        first, end = lane.starts[steps.start], lane.starts[steps.stop]
        for at in range(end):
            if lane.kind[at] == SEND and at >= first:
                sent.add((lane.node, lane.peer[at], lane.tag[at]))
            elif lane.kind[at] == SIGNAL and at < first:
                before[lane.tag[at]] = before.get(lane.tag[at], 0) + 1
    lanes = []
    for lane in trace.lanes:
        part = Lane(lane.node, lane.name)
        for step in steps:
            for operation in lane.operations(step):
                kind, label, peer, tag, value = operation
                if kind == RECEIVE and (peer, lane.node, tag) not in sent:
                    continue
                if kind == WAIT and (value := value - before.get(tag, 0)) <= 0:
                    continue
                part.add(kind, label=label, peer=peer, tag=tag, value=value)
            part.end_step()
        lanes.append(part)
    return Trace(trace.nodes, trace.labels, tuple(lanes), trace.about)


def data_parallel_shape(*, steps: int, scale: int, **asked: Any) -> Trace:
    """Data parallel training from stated numbers."""
    shape = DataParallelShape(
        compute_ns=drawn(10**9, "compute"), message_bytes=(drawn(10**7, "up"), drawn(10**7, "down")), tokens=1, **asked
    )
    return shape.trace(steps, scale)


def data_parallel_table(table: dict[str, Any], steps: int) -> Trace:
    """Data parallel training from a model's shapes."""
    return resolve_data_parallel(table, "the battery").trace(steps)


def hybrid(table: dict[str, Any], *, steps: int, scale: int) -> Trace:
    """A layout over a scenario's sites."""
    return resolve_hybrid(table, "the battery").trace(steps, scale)


# ------------------------------------------------------------------ sampling
def sampling(*, name: Any, workers: int, warmup: int, patches: int, coded: bool, steps: int = 3) -> Trace:
    """A program of image sampling."""
    program = programs.Program(name, workers, 4, steps, 16, 4, warmup=warmup, patches=patches)
    costs = programs.Costs(
        work_ns=lambda action: drawn(10**7, *action),
        frame_bytes=lambda part: drawn(10**5, *part),
        codec_ns=lambda part: (drawn(10**5, "encode", *part), drawn(10**5, "decode", *part)) if coded else (0, 0),
    )
    return programs.trace_of(program.actions(), costs, requests=2)


def expert_sampling(*, lag: int, synchronous: Any, skip: Any, workers: int) -> Trace:
    """Sampling by experts."""
    program = experts.ExpertProgram(experts.ExpertSchedule(lag, synchronous, skip), workers, 4, 4)
    sizes = {part: drawn(10**5, *part) for _, part in sent_parts(program.actions())}
    return experts.expert_trace(program, drawn(10**7, "own"), drawn(10**7, "experts"), sizes)


# ------------------------------------------------------------------ ideals
def ideal_ns(trace: Trace, topology: Any, link: str | None) -> list[int]:
    """Return how long each step takes over links of which each is that one; None: over none."""
    links = None if link is None else Pipes(topology, [load_profile(link)], len(trace.nodes))
    return ideal_steps_ns(trace, links, trace.steps)

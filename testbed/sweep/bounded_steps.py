"""Supplies the steps that certificates are judged by: a run's own steps, or before a run the step that a cell expects.

The expected step is the cell's schedule without compute. Compute hides link errors, so among steps with the same
messages this one has the largest relative error. Paced stages and workers keep the durations stated in the cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from testbed.codecs.catalogue.codec_spec import parse_codec
from testbed.codecs.catalogue.placement import parse_placement
from testbed.jobs.actions import Action, Sizes, Work
from testbed.jobs.pipeline import MATHS, PipelineJob, orders_of
from testbed.metrics.bound import BoundedStep, Deviations, kind_step, pipeline_step
from testbed.metrics.links import Queues
from testbed.metrics.wires import Wires
from testbed.nodes.fragments import sent_shapes
from testbed.profiles import LinkProfile
from testbed.records import StepRecord
from testbed.replay.worker_steps import replica_step, stated_replica_step
from testbed.spec import (
    Cell,
    DataParallelSpec,
    Engine,
    Measured,
    OptimiserSpec,
    Paced,
    PipelineSpec,
    TextSpec,
    TrainingSpec,
    text_of,
)
from testbed.trace.simulate import ideal_step_ns
from testbed.trace.tracing import TracedJob
from testbed.workloads import models

_SAME_SIZE = 1.1
"""Message sizes within this factor are measured once: each measurement idles for a second."""

_EXPECTED = "the step that the cell expects"


def expected_step(cell: Cell) -> BoundedStep:
    """Return a step of the cell, with messages of its codecs' nominal size."""
    if cell.data is not None:
        return stated_replica_step(cell, _replica_messages(cell), _EXPECTED)
    return _stated(cell, _EXPECTED, expected_messages(cell)[0])


def run_step(cell: Cell, nodes: Sequence[Sequence[StepRecord]], played_at_ns: int | None) -> BoundedStep | None:
    """Return the steps of a run that its links are judged by; None if it has none. `nodes`: records by node."""
    match cell.parallelism:
        case PipelineSpec():
            return pipeline_step(cell, nodes, played_at_ns)
        case _ if any(records and records[0].step for records in nodes):
            return None  # it resumed a checkpoint: its first steps have no records
        case DataParallelSpec():
            return replica_step(cell, nodes, played_at_ns)
        case _:
            return kind_step(cell, nodes, played_at_ns)


def expected_messages(cell: Cell) -> tuple[int, ...]:
    """Return the message sizes in bytes to certify with before a run: a micro-batch's tensor in the codec's nominal
    size, and as fp32; in data parallel training the messages of each node.

    If codecs differ by boundary or direction, the widest counts.
    """
    if cell.data is not None:
        parts = cell.data.workers if cell.data.exchange == "all-reduce" else 1
        return some_sizes([-(-size // parts) for size in _replica_messages(cell)])
    spec, pipeline = text_of(cell), cell.pipeline
    parts = pipeline.microbatches * pipeline.accumulation
    values = spec.batch_size // parts * spec.sequence_length * models.hidden_width(spec)
    return tuple(sorted({max(1, int(values * bits / 8)) for bits in (parse_placement(cell.codec).nominal_bits, 32)}))


def sent_messages(nodes: Iterable[Sequence[StepRecord]]) -> tuple[int, ...]:
    """Return the message sizes in bytes to certify with after a run: its smallest, median and largest frame, without
    near duplicates; empty if nothing was sent.
    """
    return some_sizes([sent.frame_bytes for records in nodes for record in records for sent in record.sent])


def some_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the smallest, the median and the largest size, without near duplicates."""
    ordered, chosen = sorted(sizes), list[int]()
    for size in (ordered[0], ordered[len(ordered) // 2], ordered[-1]) if ordered else ():
        if not chosen or size > _SAME_SIZE * chosen[-1]:
            chosen.append(size)
    return tuple(chosen)


def _replica_messages(cell: Cell) -> list[int]:
    """Return the nominal message size of each node, in bytes."""
    data = cell.data
    assert data is not None
    placed = parse_placement(cell.codec)
    codecs = [placed.at(worker, "backward") for worker in range(data.workers)]
    codecs += [] if data.answer is None else [parse_codec(data.answer)]
    values = sum(map(math.prod, sent_shapes(models.parameter_shapes(cell.workload), data))) / data.fragments
    return [max(1, int(values * codec.nominal_bits / 8)) for codec in codecs]


def reference_step(profile: LinkProfile, engine: Engine, message_bytes: int) -> BoundedStep:
    """Return the step that `testbed link` judges a link by: the default experiment's step in a star of three such
    links, with messages of this size.
    """
    cell = Cell(
        codec="fp32",
        profiles=(profile,),
        topology="star",
        engine=engine,
        compute=Measured(),
        workload=TextSpec(
            family="gpt2", model="gpt2-mini", text="bundled", sequence_length=64, batch_size=16, validation_batches=1
        ),
        pipeline=PipelineSpec(stages=3, microbatches=4, schedule="1f1b", in_flight=4),
        optimiser=OptimiserSpec(learning_rate=1e-3, weight_decay=0, beta1=0.9, beta2=0.999, clip_norm=1),
        training=TrainingSpec(steps=1, warmup_steps=0, seed=0, evaluate_every=0),
    )
    size = f"{message_bytes / 1024:.4g} KiB"
    said = f"3 stages in a star of such links, 4 micro-batches of {size} forward and backward, nothing computed"
    return _stated(cell, said, message_bytes, alike=True)


def _stated(cell: Cell, said: str, frame_bytes: int, *, alike: bool = False) -> BoundedStep:
    pipeline = cell.pipeline
    if cell.job is not None:  # its order is not known yet: send a message there and back over all links
        pipeline = PipelineSpec(stages=cell.nodes, microbatches=1, schedule="gpipe", in_flight=1)

    def cost(stage: int, action: Action) -> int | None:
        if not isinstance(cell.compute, Paced) or not isinstance(action, Work) or action.what not in MATHS.values():
            return None
        return cell.compute.takes_ns(stage)[action.what]

    sizes = [Sizes(lambda key: frame_bytes)] * pipeline.stages
    trace = TracedJob(PipelineJob(orders_of(pipeline), 1), sizes, cost).trace()

    def seconds(deviations: Deviations) -> list[float]:
        return [ideal_step_ns(trace, Queues(Wires(cell, None, deviations)), 1) / 1e9]

    return BoundedStep(cell, seconds, said, alike=alike)

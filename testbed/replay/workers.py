"""Turns data parallel training into a job for the player: the recorded bytes, and the durations of nodes.

A worker encodes its message after its local steps, and decodes a step's messages before it applies them: the server's
answer, or the message of each worker including its own, so that all apply the same aggregate. The server decodes every
worker's message and encodes its answer once for all. Both process the messages in the order of the workers, and decode
each on arrival, while the next is in flight. In a reducing ring, each part is decoded and encoded again at every hop,
while the workers continue to compute at full speed; all sums are decoded at the end. Summation is not codec work and
takes no time.

Durations of this machine are those of `sweep.calibrations`, for a worker that was busy before: the cold-cache cost
after a wait is not included. Evaluations are not played: they keep their losses and take no time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from testbed.codecs.catalogue import placement
from testbed.codecs.catalogue.codec_spec import CodecSpec, parse_codec
from testbed.devices.codec_cost import DeviceRates, device_codec_ns
from testbed.jobs.actions import Action, Decode, Encode, Key, Sizes, Work
from testbed.jobs.data_parallel import MESSAGES, RING, DataParallelJob
from testbed.jobs.loop import Cost
from testbed.jobs.recorder import Named
from testbed.metrics.ideal import trained_steps
from testbed.nodes.fragments import SMALL, Shapes, message_shapes
from testbed.nodes.pace import coding_ns, worker_times
from testbed.records import ReplicaCosts, StepRecord
from testbed.replay.pipelines import check_costs
from testbed.runtime.pacing import CodecTimes, Coding
from testbed.spec import Cell, DataParallelSpec, Paced
from testbed.trace.tracing import TracedJob
from testbed.workloads import models

LABELS = ("local step", "update", *MESSAGES, RING)
_CODING = ("encode", "decode")


class NodeTimes(NamedTuple):
    """Durations of one node in a step, in nanoseconds of the lab."""

    local_ns: tuple[int, ...]
    """Durations of its local steps; empty for a server."""
    update_ns: int
    """Duration to apply an aggregate."""
    coding: Coding | None
    """Codec durations of the messages that it sends and receives; None: codecs take no time."""


# ------------------------------------------------------------------ the job
def job_of(cell: Cell, training: Sequence[Sequence[StepRecord]], times: Sequence[NodeTimes] | None = None) -> TracedJob:
    """Return a cell's job. `training`: the records of its recipe's training, or of a live run, by node.

    `times`: by node; None: the durations stated in the cell.
    """
    trained = trained_steps(training)

    def frames(node: int, step: int) -> list[int]:
        return [frame.frame_bytes for frame in trained[node][step].sent]

    def applied(worker: int, step: int) -> list[int]:
        return [action.microbatch for action in trained[worker][step].actions if action.kind == "A"]

    return stated_job(cell, len(trained[0]), frames, applied, times or stated_times(cell))


def stated_job(
    cell: Cell,
    steps: int,
    frames: Callable[[int, int], Sequence[int]],
    applied: Callable[[int, int], Sequence[int]],
    times: Sequence[NodeTimes],
) -> TracedJob:
    """Return a job of `steps` steps. Given a node and a step, `frames` returns the sizes of the messages it sends, in
    order, and `applied` the steps whose aggregates a worker applies. `times`: by node.
    """
    data = cell.data
    assert data is not None
    staleness = [data.staleness_of(worker) for worker in range(data.workers)]
    local_steps = [len(each.local_ns) for each in times[: data.workers]]
    job = DataParallelJob(
        data.workers, data.exchange, staleness, local_steps, steps, applied, aligned=data.aligned is not None
    )

    def size(node: int, key: Key) -> int:
        return frames(node, key.step)[job.hop(node, key)]

    return TracedJob(
        job,
        [Sizes(functools.partial(size, node)) for node in range(cell.nodes)],
        _cost(data, times),
        LABELS if times[0].coding is None else LABELS + _CODING,
        {"codec": cell.codec, "model": cell.workload.model, "exchange": data.exchange},
        named=lambda key: Named("backward", key.step),
    )


def _cost(data: DataParallelSpec, times: Sequence[NodeTimes]) -> Cost:
    def cost(node: int, action: Action) -> int | None:
        own = times[node]
        match action:
            case Work("local step", key):
                return own.local_ns[key.part]
            case Work("update"):
                return own.update_ns
            case Encode() | Decode() if own.coding is not None:
                return coding_ns(data, own.coding, action)
        return None

    return cost


# ------------------------------------------------------------------ durations
def node_times(cell: Cell, costs: ReplicaCosts | None = None) -> list[NodeTimes]:
    """Return the durations of a played cell, by node; `costs`: those of its recipe, if `pipelines.needs_calibration`.

    SpecError for codecs whose cost on a device is unknown.
    """
    check_costs(cell, costs)
    return stated_times(cell, costs)


def stated_times(cell: Cell, costs: ReplicaCosts | None = None) -> list[NodeTimes]:
    """Return the durations stated in the cell; those of this machine come from `costs`, or are 0 without it."""
    data = cell.data
    assert data is not None
    coding = _coding(cell, data, costs)
    return [
        NodeTimes(*(_works(cell, data, node, costs) if node < data.workers else ((), 0)), coding)
        for node in range(cell.nodes)
    ]


def _coding(cell: Cell, data: DataParallelSpec, costs: ReplicaCosts | None) -> Coding | None:
    """Return the codec durations under the cell's rule; None: codecs take no time."""
    if cell.codec_rates is not None:
        rates = DeviceRates(cell.codec_rates.bandwidth_bytes_per_s, cell.codec_rates.operations_per_s)
        placed = placement.parse_placement(cell.codec)
        codecs = [placed.at(worker, "backward") for worker in range(data.workers)]
        codecs += [] if data.answer is None else [parse_codec(data.answer)]
        coding = device_coding(data, codecs, models.parameter_shapes(cell.workload), rates)
    elif cell.codec_cost == "zero" or costs is None:
        return None
    else:
        timed = [zip(sender.encode, sender.decode, strict=True) for sender in costs.messages]
        by_sender = [[CodecTimes(encode.ns, decode.ns) for encode, decode in each] for each in timed]
        coding = tuple(zip(*by_sender, strict=True))
        coding = coding if data.aligned is None else (tuple(itertools.chain(*coding)),)
    factor = cell.compute.dilation
    return tuple(tuple(CodecTimes(one[0] * factor, one[1] * factor) for one in messages) for messages in coding)


def _works(cell: Cell, data: DataParallelSpec, worker: int, costs: ReplicaCosts | None) -> tuple[tuple[int, ...], int]:
    """Return the durations of a worker's local steps, and of an update."""
    count = data.local_steps_of(worker)
    if isinstance(cell.compute, Paced):
        times = worker_times(cell.compute, data, cell.pipeline, worker)
        return (times.local_ns,) * count, times.update_ns
    if costs is None:
        return (0,) * count, 0
    own, factor = costs.workers[worker], cell.compute.dilation
    local_ns, close_ns = own.local_step.ns * factor, own.close.ns * factor
    return (*(local_ns,) * (count - 1), local_ns + close_ns), own.update.ns * factor


def device_coding(
    data: DataParallelSpec, codecs: Sequence[CodecSpec], shapes: Sequence[Sequence[int]], rates: DeviceRates
) -> Coding:
    """Return the codec durations for the messages of a step on a device with these rates.

    `codecs`: of the workers' messages, and of the answer in a star; `shapes`: of all parameters. SpecError for codecs
    whose cost is unknown.
    """
    return tuple(
        tuple(_device_message(*each, rates) for each in zip(itertools.cycle(codecs), senders, strict=False))
        for senders in message_shapes(data, shapes)
    )


def worker_coding_ns(data: DataParallelSpec, messages: Sequence[CodecTimes]) -> int:
    """Return the time of the first worker's codecs in a step that exchanges these messages or parts."""
    encoded, decoded = messages[:1], messages[: data.workers]
    if data.exchange == "star":
        decoded = messages[data.workers :]
    if data.exchange == "pairs":
        decoded = messages[:2]
    if data.exchange == "all-reduce":  # each part at every hop except the first, and every sum
        hops = [each for part, each in enumerate(messages) if part % data.workers]
        encoded, decoded = messages, (*hops, *messages)
    return sum(one.encode_ns for one in encoded) + sum(one.decode_ns for one in decoded)


@functools.cache
def _device_message(codec: CodecSpec, shapes: Shapes, rates: DeviceRates) -> CodecTimes:
    """Return a device's codec durations for a message, in which small tensors are copied, all at once."""
    small = sum(math.prod(shape) for shape in shapes if math.prod(shape) < SMALL)
    times = [device_codec_ns(codec, "backward", shape, rates) for shape in shapes if math.prod(shape) >= SMALL]
    times.append(device_codec_ns("fp32", "backward", (small,), rates))
    return CodecTimes(sum(encode for encode, _ in times), sum(decode for _, decode in times))

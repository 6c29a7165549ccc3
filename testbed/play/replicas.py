"""Data parallel training as a job that is played: the bytes that a training counted, and how long nodes work.

A worker encodes its message when its local steps are done, and decodes what it has of a step before it applies it: a
server's answer, or the message of each worker, its own among them, so that all apply the same. The server decodes every
worker's message and encodes its answer, once for all. Both take the messages in the order of the workers and decode
each as it comes, while the next is on its way. Round a ring that reduces, each part is decoded and encoded anew at
every hop while the workers compute on, as fast as if they did not; all sums are decoded at the end. Adding up is no
work of a codec and takes no time.

Durations of this machine are those of `sweep.calibration`, of a worker that was busy before: what caches lose while it
waits for a link is not counted. Evaluations are not played: they keep their losses and take no time.
"""

from __future__ import annotations

import functools
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
from testbed.pipeline.pacing import CodecTimes, Coding
from testbed.play.pipelines import check_costs
from testbed.play.tracing import TracedJob
from testbed.records import ReplicaCosts, StepRecord
from testbed.replicas.fragments import SMALL, Shapes, message_shapes
from testbed.replicas.pace import coding_ns, worker_times
from testbed.spec import Cell, DataParallelSpec, Paced
from testbed.workloads import models

LABELS = ("local step", "update", *MESSAGES, RING)
_CODING = ("encode", "decode")


class NodeTimes(NamedTuple):
    """What one node does in a step, in nanoseconds of the lab."""

    local_ns: tuple[int, ...]
    """Its local steps; empty: a server."""
    update_ns: int
    """It applies an aggregate."""
    coding: Coding | None
    """Of the messages that it makes and takes; None: codecs take no time."""


# ------------------------------------------------------------------ the job
def job_of(cell: Cell, training: Sequence[Sequence[StepRecord]], times: Sequence[NodeTimes] | None = None) -> TracedJob:
    """Return a cell's job: `training` holds the records of its recipe's training, or of a live run, by node.

    `times`: by node; None: those that the cell itself states.
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
    """Return a job of so many steps. By node and step: `frames` says the bytes of the messages that it sends, in order,
    `applied` which steps' aggregates a worker applies. `times`: by node.
    """
    data = cell.data
    assert data is not None
    staleness = [data.staleness_of(worker) for worker in range(data.workers)]
    local_steps = [len(each.local_ns) for each in times[: data.workers]]
    job = DataParallelJob(data.workers, data.exchange, staleness, local_steps, steps, applied)

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


# ------------------------------------------------------------------ how long nodes work on what
def node_times(cell: Cell, costs: ReplicaCosts | None = None) -> list[NodeTimes]:
    """Return the durations of a played cell, by node; `costs` are its recipe's, where `pipelines.needs_calibration`.

    SpecError for codecs of which nobody can say what they cost on a device.
    """
    check_costs(cell, costs)
    return stated_times(cell, costs)


def stated_times(cell: Cell, costs: ReplicaCosts | None = None) -> list[NodeTimes]:
    """Return the durations that the cell itself states; what is this machine's takes no time without `costs`."""
    data = cell.data
    assert data is not None
    coding = _coding(cell, data, costs)
    return [
        NodeTimes(*(_works(cell, data, node, costs) if node < data.workers else ((), 0)), coding)
        for node in range(cell.nodes)
    ]


def _coding(cell: Cell, data: DataParallelSpec, costs: ReplicaCosts | None) -> Coding | None:
    """Return what codecs do by the cell's rule; None: nothing that takes time."""
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
    factor = cell.compute.dilation
    return tuple(tuple(CodecTimes(one[0] * factor, one[1] * factor) for one in messages) for messages in coding)


def _works(cell: Cell, data: DataParallelSpec, worker: int, costs: ReplicaCosts | None) -> tuple[tuple[int, ...], int]:
    """Return how long each of a worker's local steps takes, and an update."""
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
    """Return what codecs do with the messages of a step on a device of these rates.

    `codecs`: of the workers' messages, and of a star's answer; `shapes`: of all parameters. SpecError for codecs of
    which nobody can say it.
    """
    return tuple(
        tuple(_device_message(*each, rates) for each in zip(codecs, senders, strict=True))
        for senders in message_shapes(data, shapes)
    )


def worker_coding_ns(data: DataParallelSpec, messages: Sequence[CodecTimes]) -> int:
    """Return how long the first worker's codecs work in a step in which these messages, or parts, are exchanged."""
    encoded, decoded = messages[:1], messages[: data.workers]
    if data.exchange == "star":
        decoded = messages[data.workers :]
    if data.exchange == "all-reduce":  # every part once on its way, but for the first one's, and every sum
        encoded, decoded = messages, (*messages[1:], *messages)
    return sum(one.encode_ns for one in encoded) + sum(one.decode_ns for one in decoded)


@functools.cache
def _device_message(codec: CodecSpec, shapes: Shapes, rates: DeviceRates) -> CodecTimes:
    """Return how long a device would take for a message: small tensors are copied, all of them at once."""
    small = sum(math.prod(shape) for shape in shapes if math.prod(shape) < SMALL)
    times = [device_codec_ns(codec, "backward", shape, rates) for shape in shapes if math.prod(shape) >= SMALL]
    times.append(device_codec_ns("fp32", "backward", (small,), rates))
    return CodecTimes(sum(encode for encode, _ in times), sum(decode for _, decode in times))

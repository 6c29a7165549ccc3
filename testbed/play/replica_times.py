"""How long the nodes of data parallel training work on what: local steps, updates, and what codecs do with messages.

A worker encodes its message when its local steps are done, and decodes what it has of a step before it applies it: a
server's answer, or the message of each worker, its own among them, so that all apply the same. The server decodes every
worker's message and encodes its answer, once for all. Both take the messages in the order of the workers and decode
each as it comes, while the next is on its way. Round a ring that reduces, each part is
decoded and encoded anew at every hop while the workers compute on, as fast as if they did not; all sums are decoded at
the end. Adding up is no work of a codec and takes no time.

Durations of this machine are those of `sweep.calibration`, of a worker that was busy before: what caches lose while it
waits for a link is not counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from testbed.codecs.catalogue import placement
from testbed.codecs.catalogue.codec_spec import CodecSpec, parse_codec
from testbed.devices.codec_cost import DeviceRates, device_codec_ns
from testbed.errors import UserError
from testbed.play.pipelines import needs_calibration
from testbed.records import Calibration, ReplicaCosts
from testbed.replicas.fragments import SMALL, Shapes, message_shapes
from testbed.replicas.pace import worker_times
from testbed.spec import Cell, DataParallelSpec, Paced, recipe_of
from testbed.workloads import models


class CodecTimes(NamedTuple):
    """How long a codec works on a message, in nanoseconds."""

    encode_ns: int
    decode_ns: int


Coding = tuple[tuple[CodecTimes, ...], ...]
"""By fragment that is exchanged: of the message of each worker and of a star's server; in a ring that reduces, of each
part of a message."""


class NodeTimes(NamedTuple):
    """What one node does in a step, in nanoseconds of the lab."""

    local_ns: tuple[int, ...]
    """Its local steps; empty: a server."""
    update_ns: int
    """It applies an aggregate."""
    coding: Coding | None
    """Of the messages that it makes and takes; None: codecs take no time."""


def node_times(cell: Cell, costs: ReplicaCosts | None = None) -> list[NodeTimes]:
    """Return the durations of a played cell, by node; `costs` are its recipe's, where `pipelines.needs_calibration`.

    SpecError for codecs of which nobody can say what they cost on a device.
    """
    if needs_calibration(cell) and costs is None:
        raise UserError(f"cell {cell.id} needs the durations of its recipe, and the calibration has none of it")
    return _node_times(cell, costs)


def worked_times(cell: Cell, costs: Calibration) -> list[NodeTimes] | None:
    """Return how long the nodes work, see `node_times`; None where local steps and updates are all of it, and the cell
    states them, and where no worker trains data parallel.
    """
    if cell.data is None or (not needs_calibration(cell) and cell.codec_cost == "zero"):
        return None
    return node_times(cell, costs.replicas.get(recipe_of(cell).id))


def stated_times(cell: Cell) -> list[NodeTimes]:
    """Return the durations that the cell itself states; what is this machine's takes no time."""
    return _node_times(cell, None)


def _node_times(cell: Cell, costs: ReplicaCosts | None) -> list[NodeTimes]:
    data = cell.data
    assert data is not None
    coding = _coding(cell, data, costs)
    works = [_works(cell, data, node, costs) if node < data.workers else ((), 0) for node in range(cell.nodes)]
    return [NodeTimes(local_ns, update_ns, coding) for local_ns, update_ns in works]


def _coding(cell: Cell, data: DataParallelSpec, costs: ReplicaCosts | None) -> Coding | None:
    """Return what codecs do by the cell's rule; None: nothing that takes time."""
    if cell.codec_rates is not None:
        rates = DeviceRates(cell.codec_rates.bandwidth_bytes_per_s, cell.codec_rates.operations_per_s)
        coding = device_coding(data, _sent_codecs(cell, data), models.parameter_shapes(cell.workload), rates)
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


def _sent_codecs(cell: Cell, data: DataParallelSpec) -> list[CodecSpec]:
    """Return the codecs of the workers' messages, and of a server's answer."""
    placed = placement.parse_placement(cell.codec)
    answer = [] if data.answer is None else [parse_codec(data.answer)]
    return [placed.at(worker, "backward") for worker in range(data.workers)] + answer


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

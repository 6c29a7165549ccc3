"""Data parallel training as a job that is played: the bytes that a training counted, and how long nodes work.

Codecs work where `replica_times` says. Evaluations are not played: they keep their losses and take no time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from testbed.jobs.actions import Action, Decode, Encode, Key, Sizes, Work
from testbed.jobs.data_parallel import MESSAGES, RING, DataParallelJob
from testbed.jobs.loop import Cost
from testbed.jobs.recorder import Named
from testbed.play.replica_times import CodecTimes, Coding, NodeTimes, stated_times
from testbed.play.trace import Trace
from testbed.play.tracing import TracedJob
from testbed.records import StepRecord
from testbed.replicas.fragments import in_turn
from testbed.spec import Cell, DataParallelSpec

LABELS = ("local step", "update", *MESSAGES, RING)
_CODING = ("encode", "decode")


def job_of(cell: Cell, training: Sequence[Sequence[StepRecord]], times: Sequence[NodeTimes] | None = None) -> TracedJob:
    """Return a cell's job: `training` holds the records of its recipe's training, or of a live run, by node.

    `times`: of `replica_times`, by node; None: those that the cell itself states.
    """
    trained = [[record for record in records if record.phase == "train"] for records in training]

    def frames(node: int, step: int) -> list[int]:
        return [frame.frame_bytes for frame in trained[node][step].sent]

    def applied(worker: int, step: int) -> list[int]:
        return [action.microbatch for action in trained[worker][step].actions if action.kind == "A"]

    return stated_job(cell, len(trained[0]), frames, applied, times or stated_times(cell))


def trace_of(cell: Cell, training: Sequence[Sequence[StepRecord]], times: Sequence[NodeTimes] | None = None) -> Trace:
    """Return the trace of a cell; arguments as in `job_of`."""
    return job_of(cell, training, times).trace()


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
    data = _data(cell)
    workers = range(data.workers)
    job = DataParallelJob(
        data.workers,
        data.exchange,
        [data.staleness_of(worker) for worker in workers],
        [len(times[worker].local_ns) for worker in workers],
        steps,
        applied,
    )

    def size(node: int, key: Key) -> int:
        return frames(node, key.step)[_round_of(data, node, key)]

    return TracedJob(
        job,
        [Sizes(functools.partial(size, node)) for node in range(cell.nodes)],
        _cost(data, times),
        LABELS if times[0].coding is None else LABELS + _CODING,
        {"codec": cell.codec, "model": cell.workload.model, "exchange": data.exchange},
        named=lambda key: Named("backward", key.step),
    )


def _round_of(data: DataParallelSpec, node: int, key: Key) -> int:
    """Return in which round of an exchange a node first sends what it encodes."""
    if data.exchange != "all-reduce":
        return 0
    return (node - key.part) % data.workers if key.what == "gradient" else data.workers - 1


def _cost(data: DataParallelSpec, times: Sequence[NodeTimes]) -> Cost:
    def cost(node: int, action: Action) -> int | None:
        own = times[node]
        match action:
            case Work("local step", key):
                return own.local_ns[key.part]
            case Work("update"):
                return own.update_ns
            case Encode(key) if own.coding is not None:
                return of(own.coding, key).encode_ns
            case Decode(messages) if own.coding is not None:
                coding = own.coding
                return sum(of(coding, message.key).decode_ns for message in messages)
        return None

    def of(coding: Coding, key: Key) -> CodecTimes:
        return in_turn(coding, key.step)[key.part if data.exchange == "all-reduce" else key.origin]

    return cost


def _data(cell: Cell) -> DataParallelSpec:
    assert cell.data is not None
    return cell.data

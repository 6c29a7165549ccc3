"""Turns played times into the records of a run: those of its training, with the player's times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from testbed.jobs.recorder import Recorded, StepRecorder
from testbed.records import CountersRecord, ReceivedRecord, SentRecord, SocketRecord, StepRecord
from testbed.spec import Cell, PipelineSpec
from testbed.trace.format import Trace
from testbed.trace.played import Played, SocketState
from testbed.trace.tracing import TracedJob, retell

Frame = TypeVar("Frame", SentRecord, ReceivedRecord)
_STEP = ("start_ns", "end_ns", "optimiser_start_ns", "synchronised_ns")


def records_of(
    cell: Cell, traced: TracedJob, trace: Trace, played: Played, training: Sequence[Sequence[StepRecord]]
) -> list[list[StepRecord]]:
    """Return the records of a played run, by node: those of the training, with the player's times.

    `traced` is the cell's job and `trace` its trace, with all steps played. If the cell has a time budget, everything
    after the step that reaches it is omitted, except the evaluation made there in training.
    """
    assert traced.named is not None
    assert played.steps == trace.steps
    steps: list[list[Recorded]] = [[] for _ in training]
    retell(traced, trace, played.lanes, StepRecorder(lambda node, step: steps[node].append(step), traced.named))
    nodes = [_node_records(cell, node, played, steps[node], records) for node, records in enumerate(training)]
    budget_s = cell.training.budget_s
    if budget_s is None:
        return nodes
    budget_ns = budget_s * 1e9 * cell.compute.dilation
    kept, ended = 0, False
    for together in zip(*nodes, strict=True):
        trains = together[0].phase == "train"
        if ended and trains:
            break
        kept += 1
        ended = ended or (trains and max(r.synchronised_ns or 0 for r in together) >= budget_ns)
    return [records[:kept] for records in nodes]


def _node_records(
    cell: Cell, node: int, played: Played, steps: Iterable[Recorded], training: Sequence[StepRecord]
) -> list[StepRecord]:
    now, coming = 0, enumerate(steps)
    crossed: dict[str, Any] = {"counters": None, "sockets": ()}
    made: list[StepRecord] = []
    for record in training:
        if record.phase != "train":
            still = {"start_ns": now, "end_ns": now, "actions": (), "sent": (), "received": ()}
            made.append(record.model_copy(update=still | crossed))
            continue
        number, step = next(coming)
        now = step.end_ns
        crossed = {
            "counters": CountersRecord(**vars(played.counters[number][node])),
            "sockets": tuple(_socket(cell, state) for state in played.sockets[number] if state.node == node),
        }
        received = _at_times(record.received, step.received)
        if not isinstance(cell.parallelism, PipelineSpec):  # in the order of arrival
            places = {id(frame): place for place, frame in enumerate(record.received)}
            received.sort(key=lambda pair: (pair[1].last_byte_ns, places[id(pair[0])]))
        changes = {
            **{name: getattr(step, name) for name in _STEP},
            "actions": tuple(step.actions),
            "sent": tuple(frame for _, frame in _at_times(record.sent, step.sent)),
            "received": tuple(frame for _, frame in received),
        }
        made.append(record.model_copy(update=changes | crossed))
    return made


def _at_times(frames: Sequence[Frame], played: Iterable[Frame]) -> list[tuple[Frame, Frame]]:
    """Return the frames of a training with the times of the played frames, in played order."""
    counted: dict[tuple[object, ...], list[Frame]] = defaultdict(list)
    for frame in reversed(frames):
        counted[frame.direction, frame.microbatch, frame.peer].append(frame)
    pairs = []
    for frame in played:
        own = counted[frame.direction, frame.microbatch, frame.peer].pop()
        times = {name: ns for name, ns in vars(frame).items() if name.endswith("_ns")}
        pairs.append((own, own.model_copy(update=times)))
    return pairs


def _socket(cell: Cell, state: SocketState) -> SocketRecord:
    about = {name: value for name, value in vars(state).items() if name != "node"}
    if isinstance(cell.parallelism, PipelineSpec):
        about["peer"] = "downstream" if state.peer > state.node else "upstream"
    return SocketRecord(**about)

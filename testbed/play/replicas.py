"""Data parallel training becomes a trace, and what a player wrote becomes the records of a run.

In a step a worker makes its local steps, hands its messages over, and then waits for what is due, step by step, and
updates: as `replicas.alone` wrote it down, with the bytes that it counted, and codecs work where `replica_times` says.
A step of a star's server is to have all messages of that step and to answer. Evaluations are not played: they keep
their losses and take no time. One sees the weights with all applied that is under way, so where workers are ahead it is
early by what of one exchange they do not wait for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from testbed.play.data_parallel import LaneLabels, make_lanes, server_lane
from testbed.play.ideal import Pipes, ideal_steps_ns
from testbed.play.played import Played, PlayedLane, SocketState
from testbed.play.replica_times import NodeTimes, stated_times
from testbed.play.trace import RECEIVE, SEND, WORK, Lane, Trace
from testbed.records import ActionRecord, CountersRecord, ReceivedRecord, SentRecord, SocketRecord, StepRecord
from testbed.replicas.fragments import in_turn
from testbed.spec import Cell, DataParallelSpec

LABELS = ("local step", "update", "gradient", "aggregate")
_CODING = ("encode", "decode")
_LOCAL, _UPDATE, *_, _ENCODE, _DECODE = range(len(LABELS + _CODING))
_LABELS = LaneLabels(LABELS.index("gradient"), LABELS.index("aggregate"), _ENCODE, _DECODE)


def trace_of(
    cell: Cell,
    training: Sequence[Sequence[StepRecord]],
    times: Sequence[NodeTimes] | None = None,
    steps: range | None = None,
) -> Trace:
    """Return the trace of a cell: `training` holds the records of its recipe's training, or of a live run, by node.

    `times`: of `replica_times`, by node; None: those that the cell itself states. `steps`: those that the trace is of,
    as if all before them had ended; None: all.
    """
    trained = [_trained(records) for records in training]

    def frames(node: int, step: int) -> list[int]:
        return [frame.frame_bytes for frame in trained[node][step].sent]

    def applied(worker: int, step: int) -> list[int]:
        return [action.microbatch for action in trained[worker][step].actions if action.kind == "A"]

    return make_trace(
        cell, range(len(trained[0])) if steps is None else steps, frames, applied, times or stated_times(cell)
    )


def make_trace(
    cell: Cell,
    steps: range,
    frames: Callable[[int, int], Sequence[int]],
    applied: Callable[[int, int], Sequence[int]],
    times: Sequence[NodeTimes],
) -> Trace:
    """Return the trace of some steps. By node and step: `frames` says the bytes of each message, `applied` which steps'
    aggregates a worker applies; those of steps before the first are there. `times`: by node.
    """
    data = _data(cell)
    lanes: list[Lane] = []
    for number in range(data.workers):
        worker = make_lanes(data.exchange, number, data.workers, _LABELS, frames=functools.partial(frames, number))
        own, coding = times[number], times[number].coding
        for step in steps:
            for local_ns in own.local_ns:
                worker.lane.add(WORK, label=_LOCAL, value=local_ns)
            if coding is not None:
                worker.lane.add(WORK, label=_ENCODE, value=in_turn(coding, step).pack_ns)
            worker.give(step, () if coding is None else in_turn(coding, step).rounds)
            for due in applied(number, step):
                if due in steps:
                    worker.have(due)
                if coding is not None:
                    worker.lane.add(WORK, label=_DECODE, value=in_turn(coding, due).unpack_ns)
                worker.lane.add(WORK, label=_UPDATE, value=own.update_ns)
            worker.end_step()
        lanes += worker.lanes()
    if data.exchange == "star":
        server = functools.partial(_work_of_server, times[data.workers])
        sizes = functools.partial(frames, data.workers)
        lanes.append(server_lane(data.workers, steps, _LABELS, frames=sizes, work=server))
    about = {"codec": cell.codec, "model": cell.workload.model, "exchange": data.exchange}
    labels = LABELS if times[0].coding is None else LABELS + _CODING
    return Trace(cell.node_names, labels, tuple(lanes), about)


def _work_of_server(times: NodeTimes, lane: Lane, step: int) -> None:
    if times.coding is not None:
        lane.add(WORK, label=_DECODE, value=in_turn(times.coding, step).unpack_ns)
        lane.add(WORK, label=_ENCODE, value=in_turn(times.coding, step).pack_ns)


def ideals_s(cell: Cell, trace: Trace) -> list[float] | None:
    """Return each step's ideal duration in seconds of the lab: over links that are a formula.

    None where links vary, and where more than two workers send to all others: the formula has a receiver's messages
    follow each other, while over links they share its downlink, which may be faster.
    """
    data = _data(cell)
    if data.exchange == "all-to-all" and data.workers > 2:
        return None
    if any(pipe is not None and pipe.varies for profile in cell.links for pipe in (profile.up, profile.down)):
        return None
    links = Pipes(cell.topology, cell.links, cell.nodes)
    return [ns / 1e9 for ns in ideal_steps_ns(trace, links, trace.steps)]


# ---------------------------------------------------------------------- from what was played
def records_of(
    cell: Cell, trace: Trace, played: Played, training: Sequence[Sequence[StepRecord]]
) -> list[list[StepRecord]]:
    """Return the records of a played run, by node: the training's, at the times of the player."""
    made = []
    for node, records in enumerate(training):
        lanes = [
            _TimedLane(lane, times) for lane, times in zip(trace.lanes, played.lanes, strict=True) if lane.node == node
        ]
        made.append(_node_records(node, lanes, played, records))
    return made


class _TimedLane:
    """A lane's operations with their times."""

    def __init__(self, lane: Lane, times: PlayedLane) -> None:
        self._lane, self._times = lane, times

    def span(self, step: int) -> tuple[int, int]:
        """Return when a step's first operation began and its last ended."""
        first, last = self._lane.starts[step], self._lane.starts[step + 1] - 1
        return self._times.begin_ns[first], self._times.end_ns[last]

    def works(self, step: int, label: int) -> Iterator[tuple[int, int]]:
        """Yield when the works of a label began and ended."""
        for i in self._of(step, WORK):
            if self._lane.label[i] == label:
                yield self._times.begin_ns[i], self._times.end_ns[i]

    def messages(self, step: int, kind: int) -> Iterator[tuple[int, int, dict[str, int]]]:
        """Yield the peer, the tag and the times of what was sent or received."""
        for i in self._of(step, kind):
            times = {"first_byte_ns": self._times.first_byte_ns[i], "last_byte_ns": self._times.last_byte_ns[i]}
            if kind == SEND:
                times["queued_ns"] = self._times.begin_ns[i]
            yield self._lane.peer[i], self._lane.tag[i], times

    def _of(self, step: int, kind: int) -> Iterator[int]:
        for i in range(self._lane.starts[step], self._lane.starts[step + 1]):
            if self._lane.kind[i] == kind:
                yield i


def _node_records(
    node: int, lanes: Sequence[_TimedLane], played: Played, training: Sequence[StepRecord]
) -> list[StepRecord]:
    now, number = 0, 0
    crossed: dict[str, Any] = {"counters": None, "sockets": ()}
    made: list[StepRecord] = []
    for record in training:
        if record.phase != "train":
            made.append(record.model_copy(update={"start_ns": now, "end_ns": now, **crossed}))
            continue
        start_ns, now = lanes[0].span(number)
        crossed = {
            "counters": CountersRecord(**vars(played.counters[number][node])),
            "sockets": tuple(_socket(state) for state in played.sockets[number] if state.node == node),
        }
        sent = [
            frame.model_copy(update=times)
            for frame, (_, _, times) in zip(record.sent, lanes[-1].messages(number, SEND), strict=True)
        ]
        received = _received(lanes, number, record)
        changes = {
            "start_ns": start_ns,
            "end_ns": now,
            "actions": tuple(_actions(lanes[0], number, record, sent, received, now)),
            "sent": tuple(sent),
            "received": tuple(received),
        }
        made.append(record.model_copy(update=changes | crossed))
        number += 1
    return made


def _socket(state: SocketState) -> SocketRecord:
    return SocketRecord(**{name: value for name, value in vars(state).items() if name != "node"})


def _received(lanes: Sequence[_TimedLane], step: int, record: StepRecord) -> list[ReceivedRecord]:
    """Return what a node had in a step, in the order of arrival; a ring's lane may have had it in an earlier one."""
    rounds = [step] if len(lanes) == 1 else list(dict.fromkeys(frame.microbatch for frame in record.received))
    came: dict[tuple[int, int], list[dict[str, int]]] = {}
    for number in rounds:
        for peer, tag, times in lanes[-1].messages(number, RECEIVE):
            came.setdefault((tag if len(lanes) == 1 else number, peer), []).append(times)
    found = []
    for frame in record.received:
        assert frame.peer is not None
        found.append(frame.model_copy(update=came[frame.microbatch, frame.peer].pop(0)))
    return sorted(found, key=lambda frame: frame.last_byte_ns)


def _actions(
    lane: _TimedLane,
    step: int,
    record: StepRecord,
    sent: Sequence[SentRecord],
    received: Sequence[ReceivedRecord],
    end_ns: int,
) -> Iterator[ActionRecord]:
    """Yield a step's actions: each is asked for when the one before has ended. A worker's message is encoded after the
    last of its local steps, and what it has of another step decoded before it is applied.
    """
    local, updates = lane.works(step, _LOCAL), lane.works(step, _UPDATE)
    encoded, decoded = lane.works(step, _ENCODE), lane.works(step, _DECODE)
    locals_left = sum(action.kind == "L" for action in record.actions)
    now_ns = lane.span(step)[0]
    for action in record.actions:
        asked_ns = now_ns
        if action.kind == "L":
            input_ns, computed_ns = next(local)
            decoded_ns, locals_left = input_ns, locals_left - 1
            now_ns = computed_ns if locals_left else next(encoded, (0, computed_ns))[1]
        elif (update := next(updates, None)) is not None:
            decoded_ns, computed_ns = update
            input_ns, now_ns = next(decoded, update)[0], computed_ns
        else:  # a server's: it answers when it has the last message
            there_ns = max((frame.last_byte_ns for frame in received), default=asked_ns)
            answers_ns = min((frame.queued_ns for frame in sent), default=end_ns)
            input_ns, decoded_ns = next(decoded, (there_ns, there_ns))
            computed_ns, now_ns = next(encoded, (answers_ns, answers_ns))
        yield action.model_copy(
            update={
                "asked_ns": asked_ns,
                "input_ns": input_ns,
                "decoded_ns": decoded_ns,
                "computed_ns": computed_ns,
                "encoded_ns": now_ns,
            }
        )


def _data(cell: Cell) -> DataParallelSpec:
    assert cell.data is not None
    return cell.data


def _trained(records: Sequence[StepRecord]) -> list[StepRecord]:
    return [record for record in records if record.phase == "train"]

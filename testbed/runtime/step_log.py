"""Record what a place did: one JSON line per step or evaluation in steps-<place>.jsonl, and a message to the
controller.

An observer of the place's program: `jobs.recorder` provides actions and messages, `transport` the times at which frames
left. A record is written once all its frames have left. No torch.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NamedTuple, cast

from testbed import tcp_info
from testbed.counters import DeviceCounters
from testbed.jobs.actions import EndStep, Key, Meet, Node
from testbed.jobs.loop import MAIN, NodeLane, Observer
from testbed.jobs.recorder import Named, Recorded, Said, StepRecorder
from testbed.message_key import Direction, Phase, Side
from testbed.records import CountersRecord, ReceivedRecord, SentRecord, SocketRecord, StepRecord
from testbed.runtime.control_plane import EvaluationDone, StepDone
from testbed.runtime.frame import HEADER_BYTES
from testbed.runtime.transport import Connection, SentFrame

_SENT_NS = ("queued_ns", "first_byte_ns", "last_byte_ns")
Report = Callable[[StepDone | EvaluationDone], None]
Settle = Callable[[Sequence[tuple[Recorded, Said]]], Said]
"""Computes the loss for the last place's record, from the records of all places of a step or evaluation and from their
nodes' `Said`."""


class _Crossed(NamedTuple):
    """Traffic counters of the links at one moment."""

    counters: CountersRecord | None
    sockets: tuple[SocketRecord, ...]


class OnHostClock:
    """Passes actions on to another observer with real end times, for a loop without time."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.set_back(0)

    def set_back(self, elapsed_ns: int) -> None:
        """Continue from a time, counted from the start of the first action."""
        self._start_ns, self.last_ns = time.monotonic_ns() - elapsed_ns, elapsed_ns

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Pass on an ended action; it started at the end of the previous one."""
        begin_ns, self.last_ns = self.last_ns, time.monotonic_ns() - self._start_ns
        self._observer.did(lane, action, value, begin_ns, self.last_ns)


class Records:
    """Writes what places did: a line of JSON for each step or evaluation, including what their nodes say of it."""

    def __init__(
        self, nodes: Sequence[Node], outputs: Sequence[IO[str]], warmup_steps: int, report: Report, settle: Settle
    ) -> None:
        """`outputs` are by place. A node may have a method `said(step, phase) -> Said`; `settle` combines these for the
        last place; `report` receives the last place's records with a loss.
        """
        self._nodes, self._outputs, self._warmup_steps, self._report = nodes, outputs, warmup_steps, report
        self._settle = settle
        self._held: list[deque[tuple[Recorded, Said]]] = [deque() for _ in nodes]
        """Unwritten records, by place: the last one's record of a step may depend on all."""

    def write(self, place: int, done: Recorded) -> None:
        """Write the steps that all places have finished."""
        self._held[place].append((done, _said(self._nodes[place], done.step, done.phase)))
        while all(self._held):
            every = [held.popleft() for held in self._held]
            every[-1] = every[-1][0], self._settle(every)
            for node, (recorded, said) in enumerate(every):
                self._write(node, recorded, said)

    @property
    def written(self) -> bool:
        """Whether every record so far is in its file."""
        return not any(self._held)

    def finish(self) -> None:
        """Write the remaining records of places that make more steps than others."""
        for place, held in enumerate(self._held):
            for done, said in held:
                self._write(place, done, said)

    def _write(self, place: int, done: Recorded, said: Said) -> None:
        """Write a whole line, so that a crash can truncate only the last; only the last place's has a loss."""
        if place != len(self._nodes) - 1:
            said = said._replace(loss=None, accuracy=None)
        done.sent.sort(key=lambda frame: _is_downstream(frame, "forward"))
        record = _record(done, said, self._warmup_steps, _Crossed(None, ()))
        self._outputs[place].write(record.model_dump_json() + "\n")
        self._outputs[place].flush()
        if record.loss is not None:
            self._report(step_message(record))


def _is_downstream(frame: SentRecord | ReceivedRecord, direction: Direction) -> bool:
    """Return whether a frame crossed the boundary to the later neighbour; frames of the earlier one are listed
    first.
    """
    return frame.peer is None and frame.direction == direction


def step_message(record: StepRecord) -> StepDone | EvaluationDone:
    """Return the message to the controller for a record that has a loss."""
    assert record.loss is not None
    step, loss, seconds = record.step, record.loss, (record.end_ns - record.start_ns) / 1e9
    if record.phase == "train":
        return StepDone(step=step, loss=loss, seconds=seconds, tokens=record.tokens)
    return EvaluationDone(phase=record.phase, step=step, loss=loss, accuracy=record.accuracy, seconds=seconds)


class StepLog:
    """The records of one place, in the order of its steps. Owns no resources."""

    def __init__(
        self,
        node: Node,
        steps: IO[str],
        *,
        named: Callable[[Key], Named],
        warmup_steps: int,
        connections: Mapping[int, Connection],
        side: Callable[[int], Side | int],
        counters: DeviceCounters | None,
        report: Report,
        says_loss: bool = True,
    ) -> None:
        """`node` may have a method `said(step, phase) -> Said`; without `says_loss`, its loss and accuracy are omitted.
        `connections` are by peer, and `side` returns a peer's name in records. `report` receives records with a loss.
        """
        self._says_loss = says_loss
        self._node, self._steps, self._warmup_steps, self._report = node, steps, warmup_steps, report
        self._connections, self._side, self._counters = connections, side, counters
        self._recorder = StepRecorder(self._write, named, HEADER_BYTES)
        self._crossed: _Crossed | None = None
        self._ended: deque[tuple[Said, _Crossed]] = deque()
        self._left: dict[tuple[int, Key], SentFrame] = {}
        """Sent frames that are in no record yet, by peer."""
        self._unwritten: deque[tuple[StepRecord, list[tuple[int, Key]]]] = deque()

    def resume(self, place: int, forks: Sequence[Key]) -> None:
        """Continue from a checkpoint, with forks that no program has waited for yet."""
        self._recorder.load({place: [(key, ()) for key in forks]})

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note an ended action. Traffic counters are read when the places meet (before the others' next step loads the
        links), or, without a meeting, at the end of the step.
        """
        if lane.name == MAIN and isinstance(action, Meet):
            self._crossed = self._read()
        elif isinstance(action, EndStep):
            crossed, self._crossed = self._crossed or self._read(), None
            self._ended.append((_said(self._node, action.number, action.phase), crossed))
        self._recorder.did(lane, action, value, begin_ns, end_ns)

    def finish(self, timeout_s: float) -> None:
        """Write the last records once all messages have left. TransportError after `timeout_s`."""
        for peer, connection in self._connections.items():
            self._note(peer, connection.sent_frames(timeout_s))
        self._write_out()

    def _read(self) -> _Crossed:
        return _Crossed(
            None if self._counters is None else self._counters.read(),
            tuple(socket_record(connection.socket, self._side(peer)) for peer, connection in self._connections.items()),
        )

    def _write(self, place: int, step: Recorded) -> None:
        """Write a step or evaluation, now or once all its messages have left."""
        said, crossed = self._ended.popleft()
        if not self._says_loss:
            said = said._replace(loss=None, accuracy=None)
        record = _record(step, said, self._warmup_steps, crossed)
        self._unwritten.append((record, step.messages))
        self._write_out()
        if record.loss is not None:
            self._report(step_message(record))

    def _write_out(self) -> None:
        """Write the records whose messages have left, a whole line at a time, so that a crash can truncate only the
        last.
        """
        for peer, connection in self._connections.items():
            self._note(peer, connection.sent_so_far())
        while self._unwritten:
            record, messages = self._unwritten[0]
            if not all(message in self._left or message[0] not in self._connections for message in messages):
                break
            # Frames for a lost peer have not left, and never will.
            frames = [self._left.pop(message, None) for message in messages]
            sent = [
                each.model_copy(update={name: getattr(frame, name) for name in _SENT_NS})
                for each, frame in zip(record.sent, frames, strict=True)
                if frame is not None
            ]
            sent.sort(key=lambda frame: _is_downstream(frame, "forward"))
            self._steps.write(record.model_copy(update={"sent": tuple(sent)}).model_dump_json() + "\n")
            self._steps.flush()
            self._unwritten.popleft()

    def _note(self, peer: int, frames: list[SentFrame]) -> None:
        self._left |= {(peer, frame.key): frame for frame in frames}


def _said(node: Node, step: int, phase: Phase) -> Said:
    say = getattr(node, "said", None)
    return Said() if say is None else cast(Said, say(step, phase))


def _record(done: Recorded, said: Said, warmup_steps: int, crossed: _Crossed) -> StepRecord:
    training = done.phase == "train"
    return StepRecord(
        step=done.step,
        phase=done.phase,
        warmup=training and done.step < warmup_steps,
        start_ns=done.start_ns,
        end_ns=done.end_ns,
        optimiser_start_ns=done.optimiser_start_ns if training else None,
        synchronised_ns=done.synchronised_ns if training else None,
        **said._asdict(),
        actions=tuple(done.actions),
        sent=tuple(done.sent),
        received=tuple(sorted(done.received, key=lambda frame: _is_downstream(frame, "backward"))),
        decided=tuple(done.decided),
        **crossed._asdict(),
    )


def socket_record(sock: socket.socket, peer: Side | int) -> SocketRecord:
    """Read TCP_INFO of a connection, in a microsecond and without a packet. CapabilityError on a kernel before 4.19."""
    info = tcp_info.read_tcp_info(sock)
    algorithm = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return SocketRecord(
        peer=peer,
        congestion_control=algorithm.split(b"\0", 1)[0].decode(),
        **info.fields_of(SocketRecord),
    )

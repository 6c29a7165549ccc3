"""Write down what a stage did: one JSON line per step or evaluation in steps-<stage>.jsonl, and a message to the
controller.

It runs between steps. While a step lasts, `pacing` takes the times of actions and `transport` those of frames. No
torch.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from testbed import tcp_info
from testbed.counters import DeviceCounters
from testbed.jobs.actions import Node
from testbed.jobs.loop import Lane, Observer
from testbed.jobs.recorder import Recorded, Said
from testbed.message_key import Direction, Phase, Side, incoming, outgoing
from testbed.pipeline.control import EvaluationDone, StepDone
from testbed.pipeline.frame import HEADER_BYTES
from testbed.pipeline.job import StageWork
from testbed.pipeline.transport import Connection, SentFrame, TakenFrame
from testbed.records import ActionRecord, CountersRecord, ReceivedRecord, SentRecord, SocketRecord, StepRecord

Report = Callable[[StepDone | EvaluationDone], None]


class OnHostClock:
    """Tells another observer when things really ended, from its making on: in a loop without time no time passes."""

    def __init__(self, observer: Observer) -> None:
        self._observer, self._start_ns, self._last_ns = observer, time.monotonic_ns(), 0

    def did(self, lane: Lane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Pass on what has ended; it began when what ended before it did."""
        begin_ns, self._last_ns = self._last_ns, time.monotonic_ns() - self._start_ns
        self._observer.did(lane, action, value, begin_ns, self._last_ns)


class Records:
    """Writes what places did, a line of JSON for each step or evaluation, with what their nodes say of it."""

    def __init__(self, nodes: Sequence[Node], outputs: Sequence[IO[str]], warmup_steps: int, report: Report) -> None:
        """`outputs` are by place. A node may have a method `said(step, phase) -> Said`; `report` is told of what has a
        loss, at the last place.
        """
        self._nodes, self._outputs, self._warmup_steps, self._report = nodes, outputs, warmup_steps, report

    def write(self, place: int, done: Recorded) -> None:
        """Write a line, whole, so that a crash can only cut off the last."""
        say = getattr(self._nodes[place], "said", None)
        said: Said = Said() if say is None else say(done.step, done.phase)
        last, training = place == len(self._nodes) - 1, done.phase == "train"
        record = StepRecord(
            step=done.step,
            phase=done.phase,
            warmup=training and done.step < self._warmup_steps,
            start_ns=done.start_ns,
            end_ns=done.end_ns,
            optimiser_start_ns=done.optimiser_start_ns if training else None,
            synchronised_ns=done.synchronised_ns if training else None,
            loss=said.loss if last else None,
            accuracy=said.accuracy if last else None,
            gradient_norm=said.gradient_norm,
            learning_rate=said.learning_rate,
            tokens=said.tokens,
            actions=tuple(done.actions),
            sent=tuple(sorted(done.sent, key=lambda frame: _is_downstream(frame, "forward"))),
            received=tuple(sorted(done.received, key=lambda frame: _is_downstream(frame, "backward"))),
            counters=None,
            sockets=(),
        )
        self._outputs[place].write(record.model_dump_json() + "\n")
        self._outputs[place].flush()
        if record.loss is not None:
            self._report(step_message(record))


def _is_downstream(frame: SentRecord | ReceivedRecord, direction: Direction) -> bool:
    """Say whether a frame crossed the boundary to the later neighbour; those of the earlier one come first."""
    return frame.peer is None and frame.direction == direction


def step_message(record: StepRecord) -> StepDone | EvaluationDone:
    """Return what the controller is told of a record that has a loss."""
    assert record.loss is not None
    step, loss, seconds = record.step, record.loss, (record.end_ns - record.start_ns) / 1e9
    if record.phase == "train":
        return StepDone(step=step, loss=loss, seconds=seconds, tokens=record.tokens)
    return EvaluationDone(phase=record.phase, step=step, loss=loss, accuracy=record.accuracy, seconds=seconds)


class StepLog:
    """The stage's records, in the order of its steps. Owns nothing that must be closed."""

    def __init__(
        self,
        job: StageWork,
        steps: IO[str],
        *,
        connections: Sequence[Connection],
        counters: DeviceCounters | None,
        report: Report,
    ) -> None:
        """`report` is told of what has a loss, which is the last stage's."""
        self._job, self._steps, self._connections = job, steps, connections
        self._counters, self._report = counters, report
        self._actions_end_ns = self._synchronised_ns = 0
        self._crossed: tuple[CountersRecord | None, tuple[SocketRecord, ...]] = None, ()

    def met(self, actions_end_ns: int, synchronised_ns: int) -> None:
        """Note that the stages have met, and count what has crossed the links until now.

        To be called at once: the other stages' next step will be on the links soon. `actions_end_ns` is when this
        stage's last action ended, `synchronised_ns` when it knew that all had.
        """
        self._actions_end_ns, self._synchronised_ns = actions_end_ns, synchronised_ns
        counters = self._counters.read() if self._counters is not None else None
        self._crossed = (
            counters,
            tuple(socket_record(connection.socket, connection.side) for connection in self._connections),
        )

    def write(
        self,
        step: int,
        phase: Phase,
        *,
        start_ns: int,
        end_ns: int,
        actions: Sequence[ActionRecord],
        said: Said,
    ) -> None:
        """Record a step or evaluation, a whole line at a time, so that a crash can only cut off the last."""
        training = phase == "train"
        counters, sockets = self._crossed
        record = StepRecord(
            step=step,
            phase=phase,
            warmup=training and step < self._job.training.warmup_steps,
            start_ns=start_ns,
            end_ns=end_ns,
            optimiser_start_ns=self._actions_end_ns if training else None,
            synchronised_ns=self._synchronised_ns if training else None,
            loss=said.loss,
            gradient_norm=said.gradient_norm,
            learning_rate=said.learning_rate,
            tokens=said.tokens,
            actions=tuple(actions),
            sent=tuple(record for connection in self._connections for record in self._sent(connection)),
            received=tuple(record for connection in self._connections for record in self._received(connection)),
            counters=counters,
            sockets=sockets,
        )
        self._steps.write(record.model_dump_json() + "\n")
        self._steps.flush()
        if record.loss is not None:
            self._report(step_message(record))

    def _sent(self, connection: Connection) -> list[SentRecord]:
        return [
            sent_record(frame, outgoing(connection.side), self._job.number_in_record(*frame.key[:3]))
            for frame in connection.sent_frames(self._job.limits.message_s)
        ]

    def _received(self, connection: Connection) -> list[ReceivedRecord]:
        return [
            received_record(frame, incoming(connection.side), self._job.number_in_record(*frame.key[:3]))
            for frame in connection.taken_frames()
        ]


def sent_record(frame: SentFrame, direction: Direction, microbatch: int, peer: int | None = None) -> SentRecord:
    """Return the record of a frame that has left; `microbatch` and `peer` as in the record."""
    return SentRecord(
        direction=direction,
        microbatch=microbatch,
        peer=peer,
        raw_bytes=frame.raw_bytes,
        payload_bytes=frame.payload_bytes,
        frame_bytes=frame.payload_bytes + HEADER_BYTES,
        queued_ns=frame.queued_ns,
        first_byte_ns=frame.first_byte_ns,
        last_byte_ns=frame.last_byte_ns,
        choice=frame.choice,
    )


def received_record(
    frame: TakenFrame, direction: Direction, microbatch: int, peer: int | None = None
) -> ReceivedRecord:
    """Return the record of a frame that has come; `microbatch` and `peer` as in the record."""
    return ReceivedRecord(
        direction=direction,
        microbatch=microbatch,
        peer=peer,
        payload_bytes=frame.payload_bytes,
        first_byte_ns=frame.first_byte_ns,
        last_byte_ns=frame.last_byte_ns,
    )


def socket_record(sock: socket.socket, peer: Side | int) -> SocketRecord:
    """Read TCP_INFO of a connection, in a microsecond and without a packet. CapabilityError on a kernel before 4.19."""
    info = tcp_info.read_tcp_info(sock)
    algorithm = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return SocketRecord(
        peer=peer,
        congestion_control=algorithm.split(b"\0", 1)[0].decode(),
        rtt_us=info.rtt_us,
        min_rtt_us=info.min_rtt_us,
        cwnd_packets=info.cwnd_packets,
        bytes_sent=info.bytes_sent,
        bytes_retransmitted=info.bytes_retransmitted,
        segments_out=info.segments_out,
        segments_in=info.segments_in,
        retransmits=info.retransmits,
    )

"""What nodes of data parallel training over links share: connections, the emulated device's time, records.

Connections are the pipelines' (`pipeline.transport`), one to each node that a node exchanges messages with. What is
computed is held to the emulated device's durations; messages leave when the device would have made them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO

from testbed.codecs.contract import Payload
from testbed.counters import DeviceCounters
from testbed.jobs.actions import Key
from testbed.pipeline.control import EvaluationDone, StepDone
from testbed.pipeline.frame import HEADER_BYTES
from testbed.pipeline.job import NodeJob
from testbed.pipeline.optimise import learning_rate
from testbed.pipeline.step_log import socket_record
from testbed.pipeline.transport import Arrival, Connection, SentFrame
from testbed.records import ActionRecord, ReceivedRecord, SentRecord, StepRecord
from testbed.replicas.ending import Ending
from testbed.replicas.pace import Line
from testbed.replicas.worker import Evaluated
from testbed.workloads import models

_OF_FRAMES = ("payload_bytes", "queued_ns", "first_byte_ns", "last_byte_ns")


class ReplicaNode:
    """A worker or a server: connections by peer, time, and the records of its steps."""

    def __init__(
        self,
        job: NodeJob,
        connections: Mapping[int, Connection],
        steps: IO[str],
        report: Callable[[StepDone | EvaluationDone], None],
        ending: Ending,
        counters: DeviceCounters | None = None,
    ) -> None:
        self.job, self._steps, self._report, self.ending = job, steps, report, ending
        self.connections = dict(connections)
        """By peer: those that are not lost."""
        self._counters, self.line = counters, Line()
        self._began_ns = self.line.at_ns
        self._unwritten: deque[tuple[StepRecord, Collection[tuple[int, int]]]] = deque()
        """Records, each with the messages to be sent that belong to it: (peer, number)."""
        self._left: dict[tuple[int, int], SentRecord] = {}
        """What has been sent, by peer and number."""
        self._come: list[ReceivedRecord] = []
        """What the next record is to have of what has come."""
        self._raw_bytes: dict[tuple[int, int], int] = {}

    def take(self, peer: int, number: int) -> Arrival:
        """Wait for a peer's message of that number. TransportError where it does not come."""
        arrival = self.connections[peer].take(key_of(number), self.job.limits.message_s)
        self.use(peer, number, arrival)
        return arrival

    def use(self, peer: int, number: int, arrival: Arrival) -> None:
        """Note that the next record is to have a peer's message of that number."""
        self._come.append(
            ReceivedRecord(
                direction="backward",
                microbatch=number,
                peer=peer,
                payload_bytes=len(arrival.payload),
                first_byte_ns=arrival.first_byte_ns,
                last_byte_ns=arrival.last_byte_ns,
            )
        )

    def send(self, peer: int, number: int, payload: Payload, raw_bytes: int) -> None:
        """Hand a message over, to leave when the device has made it; its number is that of a round."""
        self._raw_bytes[peer, number] = raw_bytes
        self.connections[peer].send(key_of(number), payload, not_before_ns=self.line.at_ns)

    def evaluates_after(self, step: int) -> bool:
        """Say whether an evaluation follows a step: none does where a person asked for the end."""
        training, last = self.job.training, step + 1 == self.ending.steps
        due = training.evaluate_every > 0 and (step + 1) % training.evaluate_every == 0
        return not self.ending.early if last else due

    def write(
        self,
        step: int,
        actions: Sequence[ActionRecord],
        *,
        sent: Collection[tuple[int, int]] = (),
        tokens: int | None = None,
        end_ns: int | None = None,
        loss: float | None = None,
        norm: float | None = None,
        evaluated: bool = False,
        found: Evaluated | None = None,
    ) -> None:
        """Record a step, or an evaluation, which is here or elsewhere. `sent`: its messages, by peer and number;
        `tokens`: None, one batch per local step; `end_ns`: None, now; `found`: what an evaluation found, where it is
        here.
        """
        job, spec, start_ns = self.job, self.job.workload, self._began_ns
        self._began_ns = self.line.at_ns if end_ns is None else end_ns
        if tokens is None:
            batches = max(job.data.local_steps)
            tokens = models.validation_tokens(spec) if evaluated else batches * spec.batch_tokens
        loss, accuracy = (loss, None) if found is None else found
        record = StepRecord(
            step=step,
            phase="evaluation" if evaluated else "train",
            warmup=not evaluated and step < job.training.warmup_steps,
            start_ns=start_ns,
            end_ns=self._began_ns,
            optimiser_start_ns=None,
            synchronised_ns=None,
            loss=loss,
            accuracy=accuracy,
            gradient_norm=norm,
            learning_rate=None if evaluated else learning_rate(job.optimiser, step, job.training.steps),
            tokens=tokens,
            actions=tuple(actions),
            sent=(),
            received=() if evaluated else self._received(),
            counters=None if self._counters is None else self._counters.read(),
            sockets=tuple(socket_record(connection.socket, peer) for peer, connection in self.connections.items()),
        )
        self._unwritten.append((record, sent))
        self._write_out(finished=False)
        if loss is not None:
            seconds = (record.end_ns - record.start_ns) / 1e9
            done = EvaluationDone(step=step, loss=loss, accuracy=accuracy, seconds=seconds)
            self._report(done if evaluated else StepDone(step=step, loss=loss, seconds=seconds, tokens=tokens))

    def finish(self) -> None:
        """Write the last records, when all messages have left."""
        self._write_out(finished=True)

    def _write_out(self, *, finished: bool) -> None:
        """Write the records whose messages have left, in order."""
        for peer in tuple(self.connections):
            frames = self._frames_sent(peer, finished=finished)
            for frame in frames:
                self._left[peer, frame.key.step] = SentRecord(
                    direction="backward",
                    microbatch=frame.key.step,
                    peer=peer,
                    raw_bytes=self._raw_bytes.pop((peer, frame.key.step)),
                    frame_bytes=frame.payload_bytes + HEADER_BYTES,
                    **{name: getattr(frame, name) for name in _OF_FRAMES},
                )
        while self._unwritten:
            record, keys = self._unwritten[0]
            # What was for a peer that is gone has not left, and will not.
            keys = [key for key in keys if key[0] in self.connections]
            if not all(key in self._left for key in keys):
                break
            sent = tuple(self._left.pop(key) for key in keys)
            self._steps.write(record.model_copy(update={"sent": sent}).model_dump_json() + "\n")
            self._steps.flush()
            self._unwritten.popleft()

    def _frames_sent(self, peer: int, *, finished: bool) -> Sequence[SentFrame]:
        """Return what has left towards a peer since the last call; `finished`: wait until all has."""
        connection = self.connections[peer]
        return connection.sent_frames(self.job.limits.message_s) if finished else connection.sent_so_far()

    def _received(self) -> tuple[ReceivedRecord, ...]:
        """Return what this record is to have, in the order of arrival."""
        found, self._come = self._come, []
        return tuple(sorted(found, key=lambda frame: frame.last_byte_ns))


def key_of(number: int) -> Key:
    """Return the key of a message of that number."""
    return Key("gradient", number)

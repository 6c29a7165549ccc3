"""What nodes of data parallel training over links share: connections, the emulated device's time, records.

Connections are the pipelines' (`pipeline.transport`), one to each node that a node exchanges messages with. What is
computed is held to the emulated device's durations; messages leave when the device would have made them.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import IO

from testbed.codecs.contract import Payload
from testbed.counters import DeviceCounters
from testbed.devices import flops
from testbed.errors import TransportError
from testbed.message_key import MessageKey, Side
from testbed.pipeline.control import EvaluationDone, StepDone
from testbed.pipeline.gather import Gather
from testbed.pipeline.job import NodeJob
from testbed.pipeline.optimise import learning_rate
from testbed.pipeline.pacing import be_prompt, step_back
from testbed.pipeline.step_log import received_record, sent_record, socket_record
from testbed.pipeline.transport import Arrival, Connection, SentFrame, TakenFrame
from testbed.pipeline.wiring import SWITCH_INTERVAL_S, connect_to_later, listen
from testbed.records import ActionRecord, ReceivedRecord, SentRecord, StepRecord
from testbed.replicas.ending import Ending
from testbed.replicas.pace import Line
from testbed.replicas.worker import Evaluated
from testbed.spec import RINGS
from testbed.workloads import models

_NUMBER = struct.Struct("=I")
_FRAMES = 4
"""Messages beyond its staleness that may wait unsent, or untaken, on one connection."""
_MOST = 4
"""How many times as long as fp32 a payload may be."""


def peers_of(job: NodeJob) -> list[int]:
    """Return the nodes that a node exchanges messages with: its server, all workers, all other workers, or in a ring
    those beside it.
    """
    workers = job.data.workers
    if job.data.exchange == "star":
        return list(range(workers)) if job.stage == workers else [workers]
    if job.data.exchange in RINGS:
        return sorted({(job.stage - 1) % workers, (job.stage + 1) % workers})
    return [peer for peer in range(job.data.workers) if peer != job.stage]


class ReplicaNode:
    """A worker or a server: connections by peer, time, and the records of its steps."""

    rounds = 1
    """Messages that one peer gets for a step; their numbers go on from step to step."""

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
        self._come: dict[tuple[int, int], ReceivedRecord] = {}
        """What has come and stands in no record yet, by peer and number."""
        self.used: list[tuple[int, int]] = []
        """Of what has come, by peer and number: what the next record is to have."""

    def take(self, peer: int, number: int) -> Arrival:
        """Wait for a peer's message of that number. TransportError where it does not come."""
        arrival = self.connections[peer].take(key_of(number), self.job.limits.message_s)
        self.used.append((peer, number))
        return arrival

    def send(self, peer: int, number: int, payload: Payload, raw_bytes: int, made_ns: int | None = None) -> None:
        """Hand a message over, to leave when the device has made it; its number is the step's, or a round's.
        `made_ns`: when that is; None: when its work so far is done.
        """
        made_ns = self.line.at_ns if made_ns is None else made_ns
        self.connections[peer].send(key_of(number), payload, raw_bytes=raw_bytes, not_before_ns=made_ns)

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
                self._left[peer, frame.key.step] = sent_record(frame, "backward", self._step_of(frame), peer)
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
        """Return what this record is to have, in the order of arrival; other messages may have come meanwhile."""
        for peer, connection in self.connections.items():
            for frame in connection.taken_frames():
                self._come[peer, frame.key.step] = received_record(frame, "backward", self._step_of(frame), peer)
        # Of a peer that is lost it is not known any more.
        found = [self._come.pop(key) for key in self.used if key in self._come]
        self.used.clear()
        return tuple(sorted(found, key=lambda frame: frame.last_byte_ns))

    def _step_of(self, frame: SentFrame | TakenFrame) -> int:
        """Return the step whose message it is, perhaps in one of several rounds."""
        return frame.key.step // self.rounds


class PeerLinks:
    """A node's connections, while they last; a context manager. It listens from the start."""

    def __init__(self, job: NodeJob, sockets: Sequence[socket.socket]) -> None:
        """`sockets` are those of the job's `Gather`; both they and what is opened here are closed at the end."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._job = job
        self._earlier = [peer for peer in peers_of(job) if peer < job.stage]
        self.by_peer: dict[int, Connection] = {}
        self._stack = ExitStack()
        self._gather = Gather(job.stage, sockets, job.limits.message_s)
        self._stack.callback(self._gather.close)
        self._listener = (
            self._stack.enter_context(listen(job.endpoints[job.stage], job.name, len(self._earlier)))
            if self._earlier
            else None
        )

    def connect(self) -> None:
        """Reach all peers, and wait until every node has. TransportError where one cannot be reached.

        Of two nodes the later listens, and the earlier one says its number.
        """
        job = self._job
        if job.prompt:
            be_prompt()
        for peer in peers_of(job):
            if peer > job.stage:
                where = f"{job.name} <-> node {peer} ({job.endpoints[peer]})"
                sock = connect_to_later(job.endpoints[peer], where, job.limits.connect_s)
                sock.sendall(_NUMBER.pack(job.stage))
                self._add(peer, "downstream", sock)
        for _ in self._earlier:
            assert self._listener is not None
            self._listener.settimeout(job.limits.connect_s)
            try:
                sock = self._listener.accept()[0]
                sock.settimeout(job.limits.connect_s)
                peer = _NUMBER.unpack(sock.recv(_NUMBER.size, socket.MSG_WAITALL))[0]
            except (TimeoutError, struct.error):
                raise TransportError(
                    f"{job.name}: not all earlier nodes connected within {job.limits.connect_s:g} s"
                ) from None
            self._add(peer, "upstream", sock)
        if job.prompt:
            sys.stdout.write(f"{job.name} works with {step_back()}\n")
        self._gather.exchange([])  # the first step starts when every node is there

    def ending(self, asked: Callable[[], bool] = lambda: False) -> Ending:
        """Return by what the node knows when training ends; `asked` says whether a person wants it to."""
        return Ending(self._job, self._gather, asked)

    def leave(self) -> None:
        """Say the end to all peers and wait for theirs: pair by pair in an order that all nodes keep."""
        for peer in sorted(self.by_peer, key=lambda peer: sorted((peer, self._job.stage))):
            self.by_peer[peer].close(self._job.limits.message_s)

    def _add(self, peer: int, side: Side, sock: socket.socket) -> None:
        job = self._job
        connection = Connection(
            sock,
            name=f"{job.name} <-> node {peer}",
            token=bytes.fromhex(job.token),
            side=side,
            max_payload_bytes=_MOST * 4 * flops.whole_model(job.workload) + (1 << 20),
            max_frames=max(job.data.staleness) + _FRAMES,
        )
        self.by_peer[peer] = self._stack.enter_context(connection)

    def __enter__(self) -> PeerLinks:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def key_of(number: int) -> MessageKey:
    """Return the key of a message of that number."""
    return MessageKey("train", number, 0, ())

"""One node of data parallel training over links: a worker, or a star's server. `pipeline.host` starts it.

Its connections are the pipelines' (`pipeline.transport`), one to each node that it exchanges messages with. What is
computed is held to the emulated device's durations; messages leave when the device would have made them.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

from testbed.counters import DeviceCounters
from testbed.devices import flops
from testbed.errors import TransportError
from testbed.message_key import MessageKey, Side
from testbed.pipeline.carried import least_round_trip_ns
from testbed.pipeline.control import Ended, EvaluationDone, StepDone
from testbed.pipeline.frame import HEADER_BYTES
from testbed.pipeline.gather import Gather
from testbed.pipeline.job import NodeJob
from testbed.pipeline.optimise import learning_rate
from testbed.pipeline.pacing import be_prompt, step_back
from testbed.pipeline.train import set_up_torch
from testbed.pipeline.transport import Arrival, Connection, SentFrame
from testbed.pipeline.wiring import SWITCH_INTERVAL_S, connect_to_later, listen
from testbed.records import ActionRecord, ReceivedRecord, SentRecord, StepRecord
from testbed.replicas.bucket import Bucket
from testbed.replicas.decision import as_stated
from testbed.replicas.exchange import Sums
from testbed.replicas.leader import Decisions, Leader, ratio_of, with_head, without_head
from testbed.replicas.learners import text_learner
from testbed.replicas.pace import Line, worker_times
from testbed.replicas.worker import Learner, Worker
from testbed.spec import Paced
from testbed.workloads import models

_NUMBER = struct.Struct("=I")
_FRAMES = 4
"""Messages beyond its staleness that may wait unsent, or untaken, on one connection."""
_MOST = 4
"""How many times as long as fp32 a payload may be."""


def peers_of(job: NodeJob) -> list[int]:
    """Return the nodes that a node exchanges messages with: its server, all workers, or all other workers."""
    if job.data.exchange == "star":
        return list(range(job.data.workers)) if job.stage == job.data.workers else [job.data.workers]
    return [peer for peer in range(job.data.workers) if peer != job.stage]


class Node:
    """What workers and servers share: connections by peer, time, and the records of their steps."""

    def __init__(
        self,
        job: NodeJob,
        connections: Mapping[int, Connection],
        steps: IO[str],
        report: Callable[[StepDone | EvaluationDone], None],
        counters: DeviceCounters | None = None,
    ) -> None:
        self.job, self.connections, self._steps, self._report = job, connections, steps, report
        self._counters, self.line = counters, Line()
        self.decisions = Decisions(as_stated(job.recipe))
        shown = job.data.workers if job.data.exchange == "star" else 0
        self.leader_is = None if job.data.deco is None else shown
        """The node that chooses; None: nobody does."""
        self._began_ns = self.line.at_ns
        self._leader: Leader | None = None
        self._unwritten: deque[StepRecord] = deque()
        self._left: dict[int, list[SentRecord]] = {}
        """What has been sent, by step."""

    def take(self, peer: int, step: int) -> Arrival:
        """Wait for a peer's message of a step, and learn what its head says. TransportError where it does not come."""
        arrival = self.connections[peer].take(_key(step), self.job.limits.message_s)
        if peer == self.leader_is:
            decision, payload = without_head(arrival.payload)
            self.decisions.add(decision)
            return arrival._replace(payload=payload)
        if self._leader is not None:
            self._leader.heard(
                peer,
                arrival.payload.nbytes,
                first_ns=arrival.first_byte_ns,
                last_ns=arrival.last_byte_ns,
                round_trip_ns=least_round_trip_ns(self.connections[peer].socket),
                ratio=ratio_of(self.decisions.at(step).codecs[peer]),
            )
        return arrival

    def lead(self, raw_bytes: int) -> None:
        """Choose for all from now on, where this node is the leader; `raw_bytes` are of all tensors as fp32."""
        if self.leader_is == self.job.stage:
            self._leader = Leader.of(self.job, raw_bytes)

    def headed(self, step: int, payload: bytes) -> bytes:
        """Return a step's message as it goes out: a leader's with what it has chosen."""
        if self._leader is None:
            return payload
        decision = self._leader.decide(step)
        self.decisions.add(decision)
        return with_head(decision, payload)

    def send(self, peer: int, step: int, payload: bytes, raw_bytes: int) -> None:
        """Hand a message over, to leave when the device has made it."""
        self.connections[peer].send(_key(step), payload, raw_bytes=raw_bytes, not_before_ns=self.line.at_ns)

    def evaluates_after(self, step: int) -> bool:
        """Say whether an evaluation follows a step."""
        training = self.job.training
        due = training.evaluate_every > 0 and (step + 1) % training.evaluate_every == 0
        return due or step + 1 == training.steps

    def write(
        self,
        step: int,
        actions: Sequence[ActionRecord],
        *,
        loss: float | None = None,
        norm: float | None = None,
        evaluated: bool = False,
    ) -> None:
        """Record a step, or an evaluation, which is here or elsewhere."""
        job, spec, start_ns = self.job, self.job.workload, self._began_ns
        self._began_ns = self.line.at_ns
        batches = spec.validation_batches if evaluated else max(job.data.local_steps)
        tokens = batches * spec.batch_size * spec.sequence_length
        record = StepRecord(
            step=step,
            phase="evaluation" if evaluated else "train",
            warmup=not evaluated and step < job.training.warmup_steps,
            start_ns=start_ns,
            end_ns=self.line.at_ns,
            optimiser_start_ns=None,
            synchronised_ns=None,
            loss=loss,
            gradient_norm=norm,
            learning_rate=None if evaluated else learning_rate(job.optimiser, step, job.training.steps),
            tokens=tokens,
            actions=tuple(actions),
            sent=(),
            received=() if evaluated else self._received(),
            counters=None if self._counters is None else self._counters.read(),
            sockets=(),
        )
        self._unwritten.append(record)
        self._write_out(finished=False)
        if loss is not None:
            seconds = (record.end_ns - record.start_ns) / 1e9
            done = EvaluationDone(step=step, loss=loss, seconds=seconds)
            self._report(done if evaluated else StepDone(step=step, loss=loss, seconds=seconds, tokens=tokens))

    def finish(self) -> None:
        """Write the last records, when all messages have left."""
        self._write_out(finished=True)

    def _write_out(self, *, finished: bool) -> None:
        """Write the records whose messages have left, in order."""
        for peer, connection in self.connections.items():
            frames = connection.sent_frames(self.job.limits.message_s) if finished else connection.sent_so_far()
            for frame in frames:
                self._left.setdefault(frame.key.step, []).append(_sent(frame, peer))
        while self._unwritten:
            record = self._unwritten[0]
            trains = record.phase == "train"
            if trains and len(self._left.get(record.step, ())) < len(self.connections):
                break
            sent = tuple(self._left.pop(record.step)) if trains else ()
            self._steps.write(record.model_copy(update={"sent": sent}).model_dump_json() + "\n")
            self._steps.flush()
            self._unwritten.popleft()

    def _received(self) -> tuple[ReceivedRecord, ...]:
        found = [
            ReceivedRecord(
                direction="backward",
                microbatch=frame.key.step,
                peer=peer,
                payload_bytes=frame.payload_bytes,
                first_byte_ns=frame.first_byte_ns,
                last_byte_ns=frame.last_byte_ns,
            )
            for peer, connection in self.connections.items()
            for frame in connection.taken_frames()
        ]
        return tuple(sorted(found, key=lambda frame: frame.last_byte_ns))


class WorkerNode(Node):
    """A worker: it computes, hands its message over, and applies what is due."""

    def train(self, learner: Learner) -> None:
        """Train as the job says. StageError, TransportError, CodecError as they come."""
        job, number = self.job, self.job.stage
        worker = Worker(number, learner, optimiser=job.optimiser, outer=job.data.outer, steps=job.training.steps)
        shapes = [tuple(parameter.shape) for parameter in worker.parameters]
        codecs, seed = self.decisions.at(0).codecs, job.training.seed
        bucket = Bucket(shapes, codecs[number], seed=seed, sender=number)
        self.lead(bucket.raw_bytes)
        star = job.data.exchange == "star"
        answer = Bucket(shapes, job.data.answer or "fp32", seed=seed, sender=job.data.workers)
        sums = Sums(shapes, codecs, job.data.weights, seed)
        own: dict[int, bytes] = {}
        assert isinstance(job.compute, Paced)
        times = worker_times(job.compute, job.data, job.pipeline, number)

        def apply(step: int, payloads: Mapping[int, Arrival]) -> None:
            if star:
                worker.receive(answer.decode(payloads[job.data.workers].payload, step))
            else:
                sums.change(self.decisions.at(step).codecs)
                every = [own.pop(step) if w == number else payloads[w].payload for w in range(job.data.workers)]
                worker.receive(sums.of(every, step))
            worker.apply_until(step + 1)

        for step in range(job.training.steps):
            now = self.decisions.at(step)
            stale, batches = now.staleness[number], now.local_steps[number]
            computed, action = self.line.work(
                "L",
                step,
                times.local_ns * batches,
                partial(worker.compute, step, staleness=stale, local_steps=batches),
            )
            bucket.change(now.codecs[number])
            own[step] = bucket.encode(computed.tensors, step)
            message = self.headed(step, own[step])
            for peer in self.connections:
                self.send(peer, step, message, bucket.raw_bytes)
            actions, last = [action], step + 1 == job.training.steps
            stale = self.decisions.at(step + 1).staleness[number]
            while worker.applied < (step + 1 if last else step + 1 - stale):
                due = worker.applied
                came = {peer: self.take(peer, due) for peer in self.connections}
                arrived_ns = max(arrival.last_byte_ns for arrival in came.values())
                _, action = self.line.work("A", due, times.update_ns, partial(apply, due, came), arrived_ns)
                actions.append(action)
            self.write(step, actions, loss=computed.loss, norm=computed.norm)
            if self.evaluates_after(step):
                chosen = number == job.data.workers - 1
                self.write(step + 1, (), loss=worker.evaluate() if chosen else None, evaluated=True)
        self.finish()


class ServerNode(Node):
    """A star's server: it answers a step's messages when it has all of them."""

    def serve(self, shapes: Sequence[Sequence[int]]) -> None:
        """Answer every step's messages. TransportError, CodecError as they come."""
        job, workers = self.job, self.job.data.workers
        assert job.data.answer is not None
        sums = Sums(shapes, self.decisions.at(0).codecs, job.data.weights, job.training.seed)
        answer = Bucket(shapes, job.data.answer, seed=job.training.seed, sender=workers)

        self.lead(answer.raw_bytes)

        def made(step: int, came: Sequence[Arrival]) -> bytes:
            sums.change(self.decisions.at(step).codecs)
            return answer.encode(sums.of([arrival.payload for arrival in came], step), step)

        for step in range(job.training.steps):
            came = [self.take(worker, step) for worker in range(workers)]
            arrived_ns = max(arrival.last_byte_ns for arrival in came)
            payload, action = self.line.work("A", step, 0, partial(made, step, came), arrived_ns)
            message = self.headed(step, payload)
            for worker in range(workers):
                self.send(worker, step, message, answer.raw_bytes)
            self.write(step, [action])
            if self.evaluates_after(step):
                self.write(step + 1, (), evaluated=True)
        self.finish()


def _sent(frame: SentFrame, peer: int) -> SentRecord:
    return SentRecord(
        direction="backward",
        microbatch=frame.key.step,
        peer=peer,
        raw_bytes=frame.raw_bytes,
        payload_bytes=frame.payload_bytes,
        frame_bytes=frame.payload_bytes + HEADER_BYTES,
        queued_ns=frame.queued_ns,
        first_byte_ns=frame.first_byte_ns,
        last_byte_ns=frame.last_byte_ns,
    )


def _key(step: int) -> MessageKey:
    return MessageKey("train", step, 0, ())


# ---------------------------------------------------------------------- a job from end to end
class Links:
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

    def leave(self) -> None:
        """Say the end to all peers and wait for theirs: pair by pair in an order that all nodes keep."""
        for peer in sorted(self.by_peer, key=lambda peer: sorted((peer, self._job.stage))):
            self.by_peer[peer].close(self._job.limits.message_s)

    def _add(self, peer: int, side: Side, sock: socket.socket) -> None:
        job = self._job
        size = models.workload_size(job.workload)
        connection = Connection(
            sock,
            name=f"{job.name} <-> node {peer}",
            token=bytes.fromhex(job.token),
            side=side,
            max_payload_bytes=_MOST * 4 * flops.parameters(size, range(size.layers)) + (1 << 20),
            max_frames=max(job.data.staleness) + _FRAMES,
        )
        self.by_peer[peer] = self._stack.enter_context(connection)

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def train_node(
    job: NodeJob,
    sockets: Sequence[socket.socket],
    report: Callable[[StepDone | EvaluationDone], None],
    asked: Callable[[], bool],
) -> Ended:
    """Build what the node needs, connect it, do its part, and take leave; returns why training ended: all steps done.

    `asked` is not heard: workers do not meet, so none can end without the others; who wants an end at once kills them.
    """
    set_up_torch()
    with Links(job, sockets) as links, ExitStack() as stack:
        number = min(job.stage, job.data.workers - 1)  # a server needs the tensors' shapes only
        learner = text_learner(job.recipe, number, vocabulary=job.vocabulary, tokens=job.tokens)
        counters = stack.enter_context(DeviceCounters(job.devices, job.overhead_bytes)) if job.devices else None
        links.connect()
        with (Path(job.folder) / f"steps-{job.stage}.jsonl").open("x", encoding="utf8") as steps:
            ordered = {peer: links.by_peer[peer] for peer in peers_of(job)}
            if job.stage < job.data.workers:
                WorkerNode(job, ordered, steps, report, counters).train(learner)
            else:
                shapes = [tuple(parameter.shape) for parameter in learner.parameters]
                ServerNode(job, ordered, steps, report, counters).serve(shapes)
        links.leave()
    return "steps"

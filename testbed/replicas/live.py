"""One node of data parallel training over links: a worker, or a star's server. `pipeline.host` starts it.

`node` has what both share; where a server applies what has arrived, `asynchronous` has others in their place.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import IO

from testbed.counters import DeviceCounters
from testbed.jobs.actions import Key, Message
from testbed.jobs.decision import Decisions
from testbed.pipeline.carried import least_round_trip_ns
from testbed.pipeline.control import Ended, EvaluationDone, StepDone
from testbed.pipeline.job import NodeJob
from testbed.pipeline.train import set_up_torch
from testbed.pipeline.transport import Arrival, Connection
from testbed.replicas.asynchronous import AsynchronousServer, AsynchronousWorker
from testbed.replicas.bucket import Bucket
from testbed.replicas.decision import as_stated
from testbed.replicas.ending import Ending
from testbed.replicas.exchange import Sums, Tensors
from testbed.replicas.fragments import fragment_shapes, in_turn
from testbed.replicas.leader import Leader, with_head, without_head
from testbed.replicas.learners import learner_of
from testbed.replicas.node import PeerLinks, ReplicaNode, peers_of
from testbed.replicas.pace import worker_times
from testbed.replicas.ring import Came, Ring
from testbed.replicas.worker import Computed, Learner, Worker
from testbed.spec import RINGS, Paced


class Lockstep(ReplicaNode):
    """A node of which each step has a message of every worker; one of them may choose for all (`leader`)."""

    def __init__(
        self,
        job: NodeJob,
        connections: Mapping[int, Connection],
        steps: IO[str],
        report: Callable[[StepDone | EvaluationDone], None],
        ending: Ending,
        counters: DeviceCounters | None = None,
    ) -> None:
        super().__init__(job, connections, steps, report, ending, counters)
        self.decisions = Decisions(as_stated(job.recipe))
        shown = job.data.workers if job.data.exchange == "star" else 0
        self.leader_is = None if job.data.deco is None else shown
        """The node that chooses; None: nobody does."""
        self._leader: Leader | None = None

    def take(self, peer: int, number: int) -> Arrival:
        """Wait for a peer's message of a step, and learn what its head says. TransportError where it does not come."""
        arrival = super().take(peer, number)
        if peer == self.leader_is:
            decision, payload = without_head(arrival.payload)
            if decision is not None:
                self.decisions.add(decision)
            return arrival._replace(payload=payload)
        if self._leader is not None:
            message = Message(
                Key("gradient", number, origin=peer),
                arrival.payload,
                peer,
                first_byte_ns=arrival.first_byte_ns,
                last_byte_ns=arrival.last_byte_ns,
                round_trip_ns=least_round_trip_ns(self.connections[peer].socket),
            )
            self._leader.heard(peer, message, self.decisions.at(number))
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
        if decision is not None:
            self.decisions.add(decision)
        return with_head(decision, payload)

    def steps(self) -> Iterator[int]:
        """Yield the steps of the training, each when it is to begin."""
        step = 0
        while self.ending.goes_on(step):
            yield step
            step += 1


class _Direct:
    """A worker's messages to its server, or to all other workers, and what it has of theirs: as a `Ring`."""

    def __init__(self, node: Lockstep, fragments: Sequence[Sequence[Sequence[int]]]) -> None:
        """`fragments`: the shapes of each one's tensors."""
        job, number = node.job, node.job.stage
        codecs, seed, self._number = node.decisions.at(0).codecs, job.training.seed, number
        self._node, self._star = node, job.data.exchange == "star"
        self._buckets = [Bucket(shapes, codecs[number], seed=seed, sender=number) for shapes in fragments]
        answer = job.data.answer or "fp32"
        self._answers = [Bucket(shapes, answer, seed=seed, sender=job.data.workers) for shapes in fragments]
        self._sums = [Sums(shapes, codecs, job.data.weights, seed) for shapes in fragments]
        self._own: dict[int, bytes] = {}
        node.lead(self._buckets[0].raw_bytes)

    def pack(self, step: int, tensors: Tensors) -> None:
        """Make a step's message."""
        bucket = in_turn(self._buckets, step)
        bucket.change(self._node.decisions.at(step).codecs[self._number])
        self._own[step] = bucket.encode(tensors, step)

    def give(self, step: int) -> None:
        """Hand a step's message over."""
        message = self._node.headed(step, self._own[step])
        for peer in self._node.connections:
            self._node.send(peer, step, message, in_turn(self._buckets, step).raw_bytes)

    def have(self, step: int) -> Came:
        """Wait for the others' messages of a step. TransportError where one does not come."""
        came = {peer: self._node.take(peer, step) for peer in self._node.connections}
        return Came(max(arrival.last_byte_ns for arrival in came.values()), partial(self._aggregate, step, came))

    def numbers(self, step: int) -> list[tuple[int, int]]:
        """Return which messages are sent for a step: peers and numbers."""
        return [(peer, step) for peer in self._node.connections]

    def close(self) -> None:
        """Do nothing: no thread is its own."""

    def _aggregate(self, step: int, came: Mapping[int, Arrival]) -> Tensors:
        workers = self._node.job.data.workers
        if self._star:
            del self._own[step]
            return in_turn(self._answers, step).decode(came[workers].payload, step)
        sums = in_turn(self._sums, step)
        sums.change(self._node.decisions.at(step).codecs)
        every = [self._own.pop(step) if w == self._number else came[w].payload for w in range(workers)]
        return sums.of(every, step)


class WorkerNode(Lockstep):
    """A worker: it computes, hands its message over, and applies what is due."""

    def train(self, learner: Learner) -> None:
        """Train as the job says. StageError, TransportError, CodecError as they come."""
        job, number = self.job, self.job.stage
        worker = Worker(
            number,
            learner,
            optimiser=job.optimiser,
            outer=job.data.outer,
            steps=job.training.steps,
            streaming=job.data.streaming,
        )
        parts = fragment_shapes([tuple(parameter.shape) for parameter in worker.parameters], job.data.fragments)
        with closing((Ring if job.data.exchange in RINGS else _Direct)(self, parts)) as messages:
            self._train(worker, messages)
        self.finish()

    def _train(self, worker: Worker, messages: Ring | _Direct) -> None:
        job, number = self.job, self.job.stage
        assert isinstance(job.compute, Paced)
        times = worker_times(job.compute, job.data, job.pipeline, number)

        def make(step: int) -> Computed:
            # The message is made within the local steps' time: codecs cost nothing, on either clock.
            now = self.decisions.at(step)
            computed = worker.compute(step, staleness=now.staleness[number], local_steps=now.local_steps[number])
            messages.pack(step, computed.tensors)
            return computed

        def apply(step: int, aggregate: Callable[[], Tensors]) -> None:
            worker.receive(aggregate())
            worker.apply_until(step + 1)

        for step in self.steps():
            local_ns = times.local_ns * self.decisions.at(step).local_steps[number]
            computed, action = self.line.work("L", step, local_ns, partial(make, step))
            messages.give(step)
            actions, last = [action], step + 1 == self.ending.steps
            stale = self.decisions.at(step + 1).staleness[number]
            while worker.applied < (step + 1 if last else step + 1 - stale):
                due = worker.applied
                came = messages.have(due)
                maths = partial(apply, due, came.aggregate)
                _, action = self.line.work("A", due, times.update_ns, maths, came.arrived_ns)
                actions.append(action)
            self.write(step, actions, sent=messages.numbers(step), loss=computed.loss, norm=computed.norm)
            if self.evaluates_after(step):
                chosen = number == job.data.workers - 1
                self.write(step + 1, (), evaluated=True, found=worker.evaluate() if chosen else None)


class ServerNode(Lockstep):
    """A star's server: it answers a step's messages when it has all of them."""

    def serve(self, shapes: Sequence[Sequence[int]]) -> None:
        """Answer every step's messages. TransportError, CodecError as they come."""
        job, workers = self.job, self.job.data.workers
        assert job.data.answer is not None
        parts = fragment_shapes(shapes, job.data.fragments)
        codecs, seed = self.decisions.at(0).codecs, job.training.seed
        all_sums = [Sums(part, codecs, job.data.weights, seed) for part in parts]
        answers = [Bucket(part, job.data.answer, seed=seed, sender=workers) for part in parts]

        self.lead(answers[0].raw_bytes)

        def made(step: int, came: Sequence[Arrival]) -> bytes:
            sums = in_turn(all_sums, step)
            sums.change(self.decisions.at(step).codecs)
            return in_turn(answers, step).encode(sums.of([arrival.payload for arrival in came], step), step)

        for step in self.steps():
            came = [self.take(worker, step) for worker in range(workers)]
            arrived_ns = max(arrival.last_byte_ns for arrival in came)
            payload, action = self.line.work("A", step, 0, partial(made, step, came), arrived_ns)
            message = self.headed(step, payload)
            for worker in range(workers):
                self.send(worker, step, message, in_turn(answers, step).raw_bytes)
            self.write(step, [action], sent=[(worker, step) for worker in self.connections])
            if self.evaluates_after(step):
                self.write(step + 1, (), evaluated=True)
        self.finish()


def take_part(
    job: NodeJob,
    connections: Mapping[int, Connection],
    steps: IO[str],
    report: Callable[[StepDone | EvaluationDone], None],
    ending: Ending,
    counters: DeviceCounters | None,
    learner: Learner,
) -> bool:
    """Do the node's part; returns whether it is still to take leave of its peers."""
    works = job.stage < job.data.workers
    if job.data.arrivals is not None:
        if works:
            AsynchronousWorker(job, connections, steps, report, ending, counters).train(learner)
        else:
            AsynchronousServer(job, connections, steps, report, ending, counters).serve(learner)
        return works
    if works:
        WorkerNode(job, connections, steps, report, ending, counters).train(learner)
    else:
        shapes = [tuple(parameter.shape) for parameter in learner.parameters]
        ServerNode(job, connections, steps, report, ending, counters).serve(shapes)
    return True


def train_node(
    job: NodeJob,
    sockets: Sequence[socket.socket],
    report: Callable[[StepDone | EvaluationDone], None],
    asked: Callable[[], bool],
) -> Ended:
    """Build what the node needs, connect it, do its part, and take leave; returns why training ended.

    `asked` says whether a person wants it to end before its last step: all nodes do, after the same step (`ending`).
    """
    set_up_torch()
    with PeerLinks(job, sockets) as links, ExitStack() as stack:
        number = min(job.stage, job.data.workers - 1)  # a server needs the tensors' shapes, and perhaps an evaluation
        learner = learner_of(job.recipe, number, vocabulary=job.vocabulary, tokens=job.tokens)
        counters = stack.enter_context(DeviceCounters(job.devices, job.overhead_bytes)) if job.devices else None
        links.connect()
        with (Path(job.folder) / f"steps-{job.stage}.jsonl").open("x", encoding="utf8") as steps:
            ordered = {peer: links.by_peer[peer] for peer in peers_of(job)}
            ending = links.ending(asked)
            if take_part(job, ordered, steps, report, ending, counters, learner):
                links.leave()
    return ending.ended

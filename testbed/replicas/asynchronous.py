"""Asynchronous federated rounds over links: a worker, and the server that applies what has arrived (`arrivals`).

A message bears the number of its worker's round, and so does its answer. When the server has made all its steps, or a
person wants it to end, it says goodbye to everyone; who is in the middle of a round then ends it first, and nobody
applies it.

The server goes on without a worker that is lost, be it that it crashed or that its connection broke; with a buffer, as
soon as all that are left have been heard. A worker that loses its server ends.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import IO, NamedTuple

from testbed.counters import DeviceCounters
from testbed.errors import TransportError
from testbed.pipeline.control import EvaluationDone, StepDone
from testbed.pipeline.job import NodeJob
from testbed.pipeline.transport import Arrival, Connection, SentFrame
from testbed.records import ActionRecord
from testbed.replicas.arrivals import Rounds, Server, training_of
from testbed.replicas.decision import as_stated
from testbed.replicas.ending import Ending
from testbed.replicas.node import ReplicaNode, key_of
from testbed.replicas.pace import worker_times
from testbed.replicas.worker import Learner
from testbed.spec import Paced

_LOOK_NS = 10**9
"""How often a server that waits for a buffer to fill looks whether it has waited too long."""


class AsynchronousWorker(ReplicaNode):
    """A worker: round after round, each from the weights that the server sent last.

    Its record of a step of the server's has the round that was applied, or refused, in that step; others are empty.
    """

    def train(self, learner: Learner) -> None:
        """Train until the server says goodbye. StageError, TransportError, CodecError as they come."""
        job, number, server = self.job, self.job.stage, self.job.data.workers
        rounds = Rounds(training_of(job.recipe), number, learner, as_stated(job.recipe).codecs[number])
        assert isinstance(job.compute, Paced)
        local_ns = worker_times(job.compute, job.data, job.pipeline, number).local_ns * rounds.local_steps
        goes_on, arrived_ns = True, 0
        while goes_on:
            made, began_with = rounds.made, rounds.begins_with
            (computed, payload), action = self.line.work("L", made, local_ns, rounds.make, arrived_ns)
            self.send(server, made, payload, rounds.raw_bytes)
            answer = self.take(server, made)
            goes_on, arrived_ns = rounds.answered(answer.payload), answer.last_byte_ns
            applied = rounds.begins_with
            for step in range(began_with, applied - goes_on):
                self._record(step, (), end_ns=self._began_ns)
            if goes_on:
                self._record(applied - 1, [action], sent=[(server, made)], loss=computed.loss, norm=computed.norm)
        self.finish()

    def _record(
        self,
        step: int,
        actions: Sequence[ActionRecord],
        *,
        end_ns: int | None = None,
        sent: Collection[tuple[int, int]] = (),
        loss: float | None = None,
        norm: float | None = None,
    ) -> None:
        self.write(step, actions, sent=sent, end_ns=end_ns, loss=loss, norm=norm)
        if self.evaluates_after(step):
            self.write(step + 1, (), end_ns=self._began_ns, evaluated=True)


class _Heard(NamedTuple):
    """What came of waiting for a worker's message."""

    worker: int
    what: Arrival | TransportError


class AsynchronousServer(ReplicaNode):
    """The server: it applies what has arrived, and answers those whom it has heard."""

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
        self.lost: dict[int, TransportError] = {}
        self._heard: SimpleQueue[_Heard] = SimpleQueue()
        self._came: dict[int, Arrival] = {}
        """By worker: what has come and waits to be applied."""
        self._last_heard_ns = self.line.at_ns
        self._numbers = [0] * job.data.workers
        """Of each worker's round that is to be answered next."""

    def serve(self, learner: Learner) -> None:
        """Make all steps, and take leave of the workers. CodecError as it comes; TransportError when all workers are
        lost, or none is heard for longer than a message may take.
        """
        job, data = self.job, self.job.data
        assert isinstance(job.compute, Paced)
        server = Server(training_of(job.recipe), learner, as_stated(job.recipe).codecs)
        update_ns = job.compute.update_ns * job.compute.dilation
        for worker in range(data.workers):
            threading.Thread(target=self._listen, args=(worker,), name=f"hears worker {worker}", daemon=True).start()
        began_ns = self.line.at_ns
        tokens = [part * job.workload.batch_tokens for part in data.parts]
        for step in range(job.training.steps):
            due_ns = self._wait(step, began_ns)
            came = {worker: self._came[worker] for worker in sorted(self._came) if self._in_time(worker, due_ns)}
            for worker, arrival in came.items():
                self.use(worker, self._numbers[worker], arrival)
                server.arrived(worker, self._numbers[worker], arrival.payload)
                del self._came[worker]
            applied, action = self.line.work("A", step, update_ns, server.apply, due_ns)
            last = self.ending.end_now(step)
            sent = [] if last else [(worker, self._numbers[worker]) for worker in applied.answered]
            for worker, number in sent:
                self._numbers[worker] += 1
                self._try_to_send(worker, number, server.answer(), server.raw_bytes)
            learned = sum(
                data.local_steps_of(update.worker) * tokens[update.worker] // sum(data.parts) for update in applied.used
            )
            self.write(step, [action], sent=sent, tokens=learned)
            if self.evaluates_after(step):
                self.write(step + 1, (), evaluated=True, found=server.replica.evaluate())
            if last:
                break
        for worker in range(data.workers):
            self._try_to_send(worker, self._numbers[worker], server.goodbye(), 0)
        self.finish()
        for worker in tuple(self.connections):
            try:
                self.connections[worker].close(job.limits.message_s)
            except TransportError as error:
                self._lose(worker, error)

    def _in_time(self, worker: int, due_ns: int) -> bool:
        """Say whether what came from a worker was there by then; who woke up first decides nothing."""
        return self._came[worker].last_byte_ns <= due_ns

    def _wait(self, step: int, began_ns: int) -> int:
        """Wait until it is time for a step; returns when that was."""
        arrivals = self.job.data.arrivals
        assert arrivals is not None
        if arrivals.period_ns is not None:
            due_ns = began_ns + (step + 1) * arrivals.period_ns * self.job.compute.dilation
            while (now_ns := time.monotonic_ns()) < due_ns:
                self._hear(due_ns - now_ns)
            self._hear_all()
            return due_ns
        assert arrivals.buffer is not None
        while len(self._came) < (wanted := min(arrivals.buffer, self.job.data.workers - len(self.lost))):
            self._hear(_LOOK_NS)
        self._hear_all()
        return max(self.line.at_ns, sorted(arrival.last_byte_ns for arrival in self._came.values())[wanted - 1])

    def _hear_all(self) -> None:
        """Note what has been heard already."""
        while not self._heard.empty():
            self._hear(0)

    def _hear(self, within_ns: int) -> None:
        """Note what is heard next, if anything is within that time. TransportError when all workers are lost, or all
        are silent for too long.
        """
        try:
            heard = self._heard.get(timeout=within_ns / 1e9)
        except Empty:
            if time.monotonic_ns() - self._last_heard_ns > self.job.limits.message_s * 1e9:
                raise TransportError(
                    f"{self.job.name}: none of the {len(self.connections)} workers that are left was heard for "
                    f"{self.job.limits.message_s:g} s"
                ) from None
            return
        self._last_heard_ns = time.monotonic_ns()
        if isinstance(heard.what, Arrival):
            self._came[heard.worker] = heard.what
        elif heard.worker not in self.lost:
            self._lose(heard.worker, heard.what)

    def _listen(self, worker: int) -> None:
        """Pass on what a worker sends, until it is lost; a thread of its own, because nobody knows who comes next."""
        connection = self.connections[worker]
        try:
            for number in itertools.count():
                self._heard.put(_Heard(worker, connection.take(key_of(number), threading.TIMEOUT_MAX)))
        except TransportError as error:
            self._heard.put(_Heard(worker, error))

    def _try_to_send(self, worker: int, number: int, message: bytes, raw_bytes: int) -> None:
        if worker in self.lost:
            return
        try:
            self.send(worker, number, message, raw_bytes)
        except TransportError as error:
            self._lose(worker, error)

    def _frames_sent(self, peer: int, *, finished: bool) -> Sequence[SentFrame]:
        try:
            return super()._frames_sent(peer, finished=finished)
        except TransportError as error:
            self._lose(peer, error)
            return ()

    def _lose(self, worker: int, error: TransportError) -> None:
        """Go on without a worker. TransportError when none is left."""
        self.lost[worker] = error
        del self.connections[worker]
        sys.stdout.write(f"{self.job.name} goes on without worker {worker}: {error}\n")
        if not self.connections:
            raise TransportError(f"{self.job.name}: all workers are lost; the last one: {error}")

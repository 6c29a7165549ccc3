"""Data parallel training: workers that each hold the whole model and exchange updates once per step.

A worker makes its local steps, sends its message, and applies the aggregates that are due: with staleness 0 the current
step's, with staleness tau the one of tau steps ago; in its last step, all remaining ones. The exchanges:

star        every worker sends its message to the server, the last place, which returns the aggregate to each
all-to-all every worker sends its message to every other, and each computes the sum itself
all-reduce a ring sums parts of the messages and forwards the sums, on a lane of its own during computation
all-gather a ring forwards every message unchanged, likewise
pairs       two workers send their messages to each other; which two changes from step to step

The last worker evaluates its current weights. Staleness, local steps and codecs may change: some decisions are known
from the start, others are made by a leader, which announces them in the notes of its messages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from testbed.jobs.actions import (
    Begin,
    Decode,
    Encode,
    EndStep,
    Fork,
    Key,
    Meet,
    Message,
    Program,
    Receive,
    Send,
    Wait,
    Work,
)
from testbed.jobs.decision import Chooser, Decision, Decisions, note_of, read_note
from testbed.spec import RINGS, Exchange

MESSAGES = ("gradient", "aggregate")
"""Names of a worker's message and of the server's reply; in a ring, of partial sums and of sums."""
RING = "ring"
"""The lane that runs the ring exchange while the worker computes."""


def partner(workers: int, worker: int, step: int) -> int:
    """Return the worker with which one of an even number is paired in a step. All draw the same pairs."""
    order = random.Random(f"pairs {step}").sample(range(workers), workers)
    return order[order.index(worker) ^ 1]


@dataclass(frozen=True)
class DataParallelJob:
    """Workers that train together. Sequences have one entry per worker."""

    workers: int
    exchange: Exchange
    staleness: Sequence[int]
    local_steps: Sequence[int]
    steps: int
    applies: Callable[[int, int], Sequence[int]] | None = None
    """By worker and step: the steps whose aggregates it applied, if recorded; None: `staleness` decides."""
    waits_first: bool = False
    """Every step but the last ends before the worker waits for aggregates that are due; that wait belongs to the next
    step."""
    aligned: bool = False
    """In an all-reduce, workers first agree on what to send: the ring sums sketches, then what they choose by these."""
    evaluate_every: int | None = None
    """Evaluate after every this many steps and after the last; 0: only after the last; None: never."""
    target_loss: float | None = None
    """Training ends once an evaluation reaches this loss; all places then meet after each evaluation."""
    decisions: Sequence[Decision] = ()
    """Changes known from the start, in order."""
    leader: int | None = None
    """The place that decides during training, if any."""
    chooser: Chooser | None = None
    """Makes the decisions; needed where the leader runs."""

    @property
    def places(self) -> Sequence[str]:
        """Names of the workers, then of a star's server."""
        workers = tuple(f"worker {worker}" for worker in range(self.workers))
        return (*workers, "server") if self.exchange == "star" else workers

    def hop(self, place: int, key: Key) -> int:
        """Return the round of an exchange in which a place first sends the message that it encodes."""
        if self.exchange != "all-reduce":
            return 0
        again, part = divmod(key.part, self.workers)
        first = (place - part) % self.workers if key.what == "gradient" else self.workers - 1
        return first + 2 * (self.workers - 1) * again

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return the program of a worker or the server, from right after the end of the step before that one, so with
        its evaluation. It returns why training ended: 'steps', 'target' or 'asked'.
        """
        return _Place(self, place).run(first_step)


class _Place:
    """One place of a running job."""

    def __init__(self, job: DataParallelJob, me: int) -> None:
        self._job, self._me, self._workers, self._ring = job, me, job.workers, job.exchange in RINGS
        first = Decision(0, tuple(job.staleness), tuple(job.local_steps), ())
        self._decisions = Decisions(first, job.decisions)
        self._applied = 0
        """All steps before this one have been applied."""
        self._given: dict[int, Message] = {}
        """Its own messages that have not been applied, by step."""

    def run(self, first_step: int) -> Program:
        """Run all steps; returns why training ended."""
        job, works = self._job, self._me < self._workers
        if works:
            due = (step - self._decisions.at(step).staleness[self._me] for step in range(first_step + 1))
            self._applied = max(0, *due)
        for decision in job.decisions:
            yield Work("decide", Key("decide", decision.effective_from), decision)
        if first_step and (yield from self._reaches(first_step - 1)):
            return "target"
        for step in range(first_step, job.steps):
            yield from (self._step(step) if works else self._answer(step))
            last = step + 1 == job.steps
            ends_early = job.waits_first and not last
            if works and not ends_early:
                yield from self._apply_what_is_due(step)
            goes_on = yield EndStep(step)
            if works and ends_early:
                yield from self._apply_what_is_due(step)
            if goes_on is False and not last:
                if works:  # apply pending aggregates, so that all end with the same weights
                    yield from self._apply_until(step + 1)
                return "asked"
            if (yield from self._reaches(step)):
                return "target"
        return "steps"

    def _reaches(self, step: int) -> Program:
        """Evaluate, if it is due and this place does so; returns whether the target loss is reached."""
        every, last = self._job.evaluate_every, step + 1 == self._job.steps
        if every is None or not (last or (every and (step + 1) % every == 0)):
            return False
        evaluation, key = None, Key("evaluate", step + 1, phase="evaluation")
        if self._me == self._workers - 1:
            evaluation = yield Work("evaluate", key)
        reached = False
        if self._job.target_loss is not None:
            met = yield Meet(None if evaluation is None else evaluation.loss)
            reached = any(loss is not None and loss <= self._job.target_loss for loss in met)
        yield EndStep(step + 1, "evaluation")
        return reached

    # ------------------------------------------------------------------ a worker's step
    def _step(self, step: int) -> Program:
        value = None
        for number in range(self._decisions.at(step).local_steps[self._me]):
            yield Begin("L", step)
            value = yield Work("local step", Key("local step", step, number), value)
        if self._ring:
            yield Fork(RING, Key(RING, step), (yield from self._round(step, value)))
        else:
            yield from self._give(step, value)

    def _apply_what_is_due(self, step: int) -> Program:
        if self._job.applies is not None:
            yield from self._apply(self._job.applies(self._me, step))
        elif step + 1 == self._job.steps:
            yield from self._apply_until(step + 1)
        else:
            yield from self._apply_until(step + 1 - self._decisions.at(step + 1).staleness[self._me])

    def _apply_until(self, step: int) -> Program:
        yield from self._apply(range(self._applied, step))

    def _apply(self, steps: Sequence[int]) -> Program:
        """Wait for the aggregates of steps, or for the messages to sum, and update."""
        for step in steps:
            yield Begin("A", step)
            values = yield from self._values(step)
            yield Work("update", Key("update", step), values)
            self._applied = step + 1

    def _values(self, step: int) -> Program:
        """Return the values of a step's messages, decoding each as it arrives, while others are in flight."""
        if self._ring:
            return (yield Decode(tuple((yield Wait(Key(RING, step))))))
        if self._job.exchange == "star":
            answer = yield from self._receive(Key("aggregate", step, origin=self._workers), self._workers)
            return (yield Decode((answer,)))
        # A message of before a restart is kept by the node alone.
        own = self._given.pop(step, Message(Key("gradient", step, origin=self._me), b""))
        by_worker = {self._me: (yield Decode((own,)))}
        for peer in self._others(step):
            message = yield from self._receive(Key("gradient", step, origin=peer), peer)
            by_worker[peer] = yield Decode((message,))
        return [value for worker in sorted(by_worker) for value in by_worker[worker]]

    def _others(self, step: int) -> Sequence[int]:
        """Return the places that a worker sends to and receives from in a step, in order."""
        if self._job.exchange == "star":
            return (self._workers,)
        if self._job.exchange == "pairs":
            return (partner(self._workers, self._me, step),)
        return [(self._me + further) % self._workers for further in range(1, self._workers)]

    def _give(self, step: int, value: object) -> Program:
        """Send a step's message."""
        message = yield Encode(Key("gradient", step, origin=self._me), value)
        if self._job.exchange != "star":
            self._given[step] = message
        yield from self._send(message, self._others(step))

    # ------------------------------------------------------------------ a server's step
    def _answer(self, step: int) -> Program:
        yield Begin("A", step)
        values = []
        for worker in range(self._workers):
            message = yield from self._receive(Key("gradient", step, origin=worker), worker)
            values += yield Decode((message,))
        total = yield Work("sum", Key("sum", step), values)
        message = yield Encode(Key("aggregate", step, origin=self._me), total)
        yield from self._send(message, range(self._workers))

    # ------------------------------------------------------------------ messages, which may announce decisions
    def _send(self, message: Message, peers: Sequence[int]) -> Program:
        note = b""
        if self._me == self._job.leader:
            assert self._job.chooser is not None
            decision = self._job.chooser.decide(message.key.step)
            yield from self._learn(decision)
            note = note_of(decision)
        for peer in peers:
            yield Send(message, peer, note)

    def _receive(self, key: Key, peer: int) -> Program:
        message: Message = yield Receive(key, peer)
        if peer == self._job.leader:
            yield from self._learn(read_note(message.note))
        elif self._me == self._job.leader:
            assert self._job.chooser is not None
            self._job.chooser.heard(peer, message, self._decisions.at(key.step))
        return message

    def _learn(self, decision: Decision | None) -> Program:
        if decision is not None:
            self._decisions.add(decision)
            yield Work("decide", Key("decide", decision.effective_from), decision)

    # ------------------------------------------------------------------ rings
    def _round(self, step: int, value: object) -> Program:
        """Return the program of a step's ring exchange; a message that travels whole is encoded first."""
        if self._job.aligned:
            return self._agree(step, value)
        if self._job.exchange == "all-reduce":
            return self._reduce(step, (yield Work("cut", Key("cut", step, self._me), value)))
        return self._gather(step, (yield Encode(Key("gradient", step, origin=self._me), value)))

    def _gather(self, step: int, message: Message) -> Program:
        """Forward every worker's message unchanged; returns all of them, by worker."""
        me, n = self._me, self._workers
        after, before = (me + 1) % n, (me - 1) % n
        came = {me: message}
        for hop in range(n - 1):
            origin = (me - hop - 1) % n
            yield Send(message, after)
            message = came[origin] = yield Receive(Key("gradient", step, origin=origin), before)
        return [came[worker] for worker in range(n)]

    def _agree(self, step: int, value: object) -> Program:
        """Sum the sketches, then what the workers choose by their sums; returns the messages of the latter sums."""
        sums = yield from self._reduce(step, (yield Work("cut", Key("cut", step, self._me), value)))
        agreed = yield Decode(tuple(sums))
        chosen = yield Work("choose", Key("choose", step, self._me), agreed)
        return (yield from self._reduce(step, chosen, first=self._workers))

    def _reduce(self, step: int, total: object, first: int = 0) -> Program:
        """Sum the parts along the ring, part p from worker p on (Patarasuk and Yuan, 2009), and forward the sums
        unchanged; returns the messages of all sums, by part. Parts are numbered from `first`.
        """
        me, n = self._me, self._workers
        after, before = (me + 1) % n, (me - 1) % n
        for hop in range(n - 1):
            goes, comes = first + (me - hop) % n, first + (me - hop - 1) % n
            yield Send((yield Encode(Key("gradient", step, goes, origin=me), total)), after)
            message = yield Receive(Key("gradient", step, comes, origin=before), before)
            (summed,) = yield Decode((message,))
            total = yield Work("add", Key("add", step, comes), summed)
        own = first + (me + 1) % n
        message = yield Encode(Key("aggregate", step, own), total)
        sums = {own: message}
        for hop in range(n - 1):
            part = first + (own - first - hop - 1) % n
            yield Send(message, after)
            message = sums[part] = yield Receive(Key("aggregate", step, part), before)
        return [sums[first + part] for part in range(n)]

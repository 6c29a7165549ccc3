"""Data parallel training: workers that each hold the whole model, and exchange what they learned once in a step.

A worker makes its local steps, hands its message over, and applies the aggregates that are due: with staleness 0 that
of this step, with staleness tau that of tau steps ago; in its last step, all that is left. What is exchanged, by kind:

star        every worker sends its message to the server, the last place, which sends each the aggregate of all
all-to-all  every worker sends its message to every other, and each adds up for itself
all-reduce  a ring adds up parts of the messages and passes the sums on, beside computing, on a lane of its own
all-gather  a ring passes every message on as it came, likewise

The last worker evaluates its weights as they are, with what it has applied by then. Staleness, local steps and codecs
may change: some decisions are known from the start, others are made by one place, which tells them with its messages.
"""

from __future__ import annotations

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
"""What a worker sends, and what a server answers; round a ring, partial sums and sums."""
RING = "ring"
"""The lane that goes round a ring while its worker computes."""


@dataclass(frozen=True)
class DataParallelJob:
    """Workers that train together. Sequences are by worker."""

    workers: int
    exchange: Exchange
    staleness: Sequence[int]
    local_steps: Sequence[int]
    steps: int
    applies: Callable[[int, int], Sequence[int]] | None = None
    """By worker and step: the steps whose aggregates it applied, where that is known; None: by `staleness`."""
    waits_first: bool = False
    """A step but the last ends before the worker waits for what is due: that belongs to the next."""
    evaluate_every: int | None = None
    """It evaluates after so many steps, and after the last; 0: only after the last; None: it only trains."""
    target_loss: float | None = None
    """Training ends with an evaluation that is not above it; then all places meet after each."""
    decisions: Sequence[Decision] = ()
    """What is known from the start to change, in order."""
    leader: int | None = None
    """The place that decides while training lasts; None: none does."""
    chooser: Chooser | None = None
    """What decides: needed where the leader runs."""

    @property
    def places(self) -> Sequence[str]:
        """The workers' names, and that of a star's server."""
        workers = tuple(f"worker {worker}" for worker in range(self.workers))
        return (*workers, "server") if self.exchange == "star" else workers

    def hop(self, place: int, key: Key) -> int:
        """Return in which round of an exchange a place first sends what it encodes."""
        if self.exchange != "all-reduce":
            return 0
        return (place - key.part) % self.workers if key.what == "gradient" else self.workers - 1

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return what a worker or the server does, from that step on. It returns why training ended: 'steps',
        'target' or 'asked'.
        """
        return _Place(self, place).run(first_step)


class _Place:
    """One place of a job, while it runs."""

    def __init__(self, job: DataParallelJob, me: int) -> None:
        self._job, self._me, self._workers, self._ring = job, me, job.workers, job.exchange in RINGS
        first = Decision(0, tuple(job.staleness), tuple(job.local_steps), ())
        self._decisions = Decisions(first, job.decisions)
        self._applied = 0
        """The steps before this one have been applied."""
        self._given: dict[int, Message] = {}
        """Its own messages, by step: those that have not been applied."""

    def run(self, first_step: int) -> Program:
        """Make all steps; returns why training ended."""
        job, works = self._job, self._me < self._workers
        self._applied = max(0, first_step - self._decisions.at(first_step).staleness[self._me]) if works else 0
        for decision in job.decisions:
            yield Work("decide", Key("decide", decision.effective_from), decision)
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
                if works:  # what is under way is applied, so that all end with the same weights
                    yield from self._apply_until(step + 1)
                return "asked"
            every = job.evaluate_every
            if every is not None and (last or (every and (step + 1) % every == 0)) and (yield from self._reaches(step)):
                return "target"
        return "steps"

    def _reaches(self, step: int) -> Program:
        """Evaluate, where this is the place that does; returns whether the target is reached."""
        found, key = None, Key("evaluate", step + 1, phase="evaluation")
        if self._me == self._workers - 1:
            found = yield Work("evaluate", key)
        reached = False
        if self._job.target_loss is not None:
            met = yield Meet(None if found is None else found.loss)
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
        """Wait for the aggregates of steps, or for what they are the sums of, and update."""
        for step in steps:
            yield Begin("A", step)
            values = yield from self._values(step)
            yield Work("update", Key("update", step), values)
            self._applied = step + 1

    def _values(self, step: int) -> Program:
        """Return what the messages of a step say: each is decoded as it comes, while others are on their way."""
        if self._ring:
            return (yield Decode(tuple((yield Wait(Key(RING, step))))))
        if self._job.exchange == "star":
            answer = yield from self._receive(Key("aggregate", step, origin=self._workers), self._workers)
            return (yield Decode((answer,)))
        by_worker = {self._me: (yield Decode((self._given.pop(step),)))}
        for peer in self._others():
            message = yield from self._receive(Key("gradient", step, origin=peer), peer)
            by_worker[peer] = yield Decode((message,))
        return [value for worker in range(self._workers) for value in by_worker[worker]]

    def _others(self) -> Sequence[int]:
        """Return the places that have a worker's message, whose messages it waits for, in order."""
        if self._job.exchange == "star":
            return (self._workers,)
        return [(self._me + further) % self._workers for further in range(1, self._workers)]

    def _give(self, step: int, value: object) -> Program:
        """Hand a step's message over."""
        message = yield Encode(Key("gradient", step, origin=self._me), value)
        if self._job.exchange != "star":
            self._given[step] = message
        yield from self._send(message, self._others())

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

    # ------------------------------------------------------------------ messages, which may tell of decisions
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
        """Return the program that takes a step's messages round; a message that goes round whole is made first."""
        if self._job.exchange == "all-reduce":
            return self._reduce(step, (yield Work("cut", Key("cut", step, self._me), value)))
        return self._gather(step, (yield Encode(Key("gradient", step, origin=self._me), value)))

    def _gather(self, step: int, message: Message) -> Program:
        """Pass every worker's message on as it came; returns all of them, by worker."""
        me, n = self._me, self._workers
        after, before = (me + 1) % n, (me - 1) % n
        came = {me: message}
        for hop in range(n - 1):
            origin = (me - hop - 1) % n
            yield Send(message, after)
            message = came[origin] = yield Receive(Key("gradient", step, origin=origin), before)
        return [came[worker] for worker in range(n)]

    def _reduce(self, step: int, total: object) -> Program:
        """Sum the parts on their way round, part p from worker p on (Patarasuk and Yuan, 2009), and pass the sums on as
        they came; returns the messages of all sums, by part.
        """
        me, n = self._me, self._workers
        after, before = (me + 1) % n, (me - 1) % n
        for hop in range(n - 1):
            goes, comes = (me - hop) % n, (me - hop - 1) % n
            yield Send((yield Encode(Key("gradient", step, goes, origin=me), total)), after)
            message = yield Receive(Key("gradient", step, comes, origin=before), before)
            (summed,) = yield Decode((message,))
            total = yield Work("add", Key("add", step, comes), summed)
        own = (me + 1) % n
        message = yield Encode(Key("aggregate", step, own), total)
        sums = {own: message}
        for hop in range(n - 1):
            part = (own - hop - 1) % n
            yield Send(message, after)
            message = sums[part] = yield Receive(Key("aggregate", step, part), before)
        return [sums[part] for part in range(n)]

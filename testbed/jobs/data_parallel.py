"""Data parallel training: workers that each hold the whole model, and exchange what they learned once in a step.

A worker makes its local steps, hands its message over, and applies the aggregates that are due: with staleness 0 that
of this step, with staleness tau that of tau steps ago; in its last step, all that is left. What is exchanged, by kind:

star        every worker sends its message to the server, the last place, which sends each the aggregate of all
all-to-all  every worker sends its message to every other, and each adds up for itself
all-reduce  a ring adds up parts of the messages and passes the sums on, beside computing, on a lane of its own
all-gather  a ring passes every message on as it came, likewise
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
    Message,
    Program,
    Receive,
    Send,
    Wait,
    Work,
)
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

    @property
    def places(self) -> Sequence[str]:
        """The workers' names, and that of a star's server."""
        workers = tuple(f"worker {worker}" for worker in range(self.workers))
        return (*workers, "server") if self.exchange == "star" else workers

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return what a worker or the server does, from that step on."""
        return self._serve(place, first_step) if place == self.workers else self._work(place, first_step)

    def _work(self, me: int, first_step: int) -> Program:
        applied, given = max(0, first_step - self.staleness[me]), dict[int, Message]()
        for step in range(first_step, self.steps):
            value = None
            for number in range(self.local_steps[me]):
                yield Begin("L", step)
                value = yield Work("local step", Key("local step", step, number), value)
            if self.exchange in RINGS:
                yield Fork(RING, Key(RING, step), (yield from self._round(me, step, value)))
            else:
                given[step] = yield from self._give(me, step, value)
            ends_early = self.waits_first and step + 1 < self.steps
            if ends_early:
                yield EndStep(step)
            for due in self._due(me, step, applied):
                yield Begin("A", due)
                yield from self._apply(me, due, given)
                applied = due + 1
            if not ends_early:
                yield EndStep(step)

    def _due(self, me: int, step: int, applied: int) -> Sequence[int]:
        """Return the steps whose aggregates a worker applies at the end of a step, `applied` of which it has."""
        if self.applies is not None:
            return self.applies(me, step)
        last = step + 1 == self.steps
        return range(applied, step + 1 if last else step + 1 - self.staleness[me])

    def _others(self, me: int) -> Sequence[int]:
        """Return the places that have a worker's message, whose messages it waits for, in order."""
        if self.exchange == "star":
            return (self.workers,)
        return [(me + further) % self.workers for further in range(1, self.workers)]

    def _give(self, me: int, step: int, value: object) -> Program:
        """Hand a step's message over."""
        message = yield Encode(Key("gradient", step, origin=me), value)
        for peer in self._others(me):
            yield Send(message, peer)
        return message

    def _apply(self, me: int, step: int, given: dict[int, Message]) -> Program:
        """Wait for a step's aggregate, or for what it is the sum of, and update."""
        if self.exchange in RINGS:
            came = yield Wait(Key(RING, step))
        elif self.exchange == "star":
            came = [(yield Receive(Key("aggregate", step, origin=self.workers), self.workers))]
        else:
            by_worker = {me: given.pop(step)}
            for peer in self._others(me):
                by_worker[peer] = yield Receive(Key("gradient", step, origin=peer), peer)
            came = [by_worker[worker] for worker in range(self.workers)]
        given.pop(step, None)
        values = yield Decode(tuple(came))
        yield Work("update", Key("update", step), values)

    def _serve(self, me: int, first_step: int) -> Program:
        for step in range(first_step, self.steps):
            yield Begin("A", step)
            came = []
            for worker in range(self.workers):
                came.append((yield Receive(Key("gradient", step, origin=worker), worker)))
            values = yield Decode(tuple(came))
            total = yield Work("sum", Key("sum", step), values)
            message = yield Encode(Key("aggregate", step, origin=me), total)
            for worker in range(self.workers):
                yield Send(message, worker)
            yield EndStep(step)

    # ------------------------------------------------------------------ rings
    def _round(self, me: int, step: int, value: object) -> Program:
        """Return the program that takes a step's messages round; a message that goes round whole is made first."""
        if self.exchange == "all-reduce":
            return self._reduce(me, step, value)
        message = yield Encode(Key("gradient", step, origin=me), value)
        return self._gather(me, step, message)

    def _gather(self, me: int, step: int, message: Message) -> Program:
        """Pass every worker's message on as it came; returns all of them, by worker."""
        after, before = (me + 1) % self.workers, (me - 1) % self.workers
        came = {me: message}
        for hop in range(self.workers - 1):
            origin = (me - hop - 1) % self.workers
            yield Send(message, after)
            message = came[origin] = yield Receive(Key("gradient", step, origin=origin), before)
        return [came[worker] for worker in range(self.workers)]

    def _reduce(self, me: int, step: int, value: object) -> Program:
        """Sum the parts on their way round, part p from worker p on (Patarasuk and Yuan, 2009), and pass the sums on as
        they came; returns the messages of all sums, by part.
        """
        after, before, n = (me + 1) % self.workers, (me - 1) % self.workers, self.workers
        total = yield Work("cut", Key("cut", step, me), value)
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

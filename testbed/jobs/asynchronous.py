"""Asynchronous rounds: a server holds the weights and applies whatever has arrived, without waiting for a particular
worker.

Each worker runs at its own pace: it makes its local steps, sends the resulting change, and starts its next round from
the server's reply. A step is one update by the server, triggered by a period or by a number of arrived messages. The
server sends the new weights to the sender of each of those messages. The note of a reply holds the number of server
steps; an empty payload means that training has ended.

The server continues without a lost worker; with a buffer, it then updates once every remaining worker has reported.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.errors import CodecError, TransportError
from testbed.jobs.actions import Begin, Collect, Decode, Encode, EndStep, Key, Message, Program, Send, Work

GOODBYE = "goodbye"
"""Name of the server's last message."""
_STEP = struct.Struct("<I")


@dataclass(frozen=True)
class AsynchronousJob:
    """Workers and a server; the server is the last place."""

    local_steps: Sequence[int]
    """Per worker."""
    steps: int
    """Steps of the server."""
    period_ns: int | None = None
    """Update once per period; one of `period_ns` and `buffer` is None."""
    buffer: int | None = None
    """Update as soon as this many messages have arrived."""
    grace_ns: int = 0
    """With a buffer: for this long, later messages are still applied in the same step."""
    evaluate_every: int | None = None
    """The server evaluates after every this many steps and after the last; 0: only after the last; None: never."""

    @property
    def places(self) -> Sequence[str]:
        """The workers' names, and the server's."""
        return (*(f"worker {worker}" for worker in range(len(self.local_steps))), "server")

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return the program of a worker or of the server. It cannot resume at a later step, because rounds in progress
        belong to no step.
        """
        assert not first_step
        return self._serve(place) if place == len(self.local_steps) else self._work(place)

    # ------------------------------------------------------------------ a worker
    def _work(self, me: int) -> Program:
        server, number, began_with = len(self.local_steps), 0, 0
        while True:
            value = None
            for part in range(self.local_steps[me]):
                if not number or part:  # otherwise waiting for weights has begun the action
                    yield Begin("L", number)
                value = yield Work("local step", Key("local step", number, part), value)
            yield Send((yield Encode(Key("gradient", number, origin=me), value)), server)
            number += 1
            yield Begin("L", number)
            answer: Message = (yield Collect((server,), at_least=1))[-1]
            applied, goes_on = read_step(answer.note), bool(len(answer.payload))
            for step in range(began_with, applied - goes_on):
                yield from self._end_step(step, idle=True)
            if not goes_on:
                return "steps" if applied == self.steps else "asked"
            weights = yield Decode((answer,))
            yield Work("resume", Key("resume", applied), weights)
            yield from self._end_step(applied - 1)
            began_with = applied

    def _end_step(self, step: int, *, idle: bool = False) -> Program:
        """End one of the server's steps. A round belongs to the step that applied or refused it; the wait for the reply
        belongs to the next round.
        """
        yield EndStep(step, idle=idle, at_action=True)
        if self._evaluates_after(step):
            yield EndStep(step + 1, "evaluation", idle=True)

    def _evaluates_after(self, step: int) -> bool:
        every = self.evaluate_every
        return every is not None and (step + 1 == self.steps or (every > 0 and (step + 1) % every == 0))

    # ------------------------------------------------------------------ the server
    def _serve(self, me: int) -> Program:
        left = list(range(me))
        """Workers that are still connected."""
        step, goes_on = 0, True
        while goes_on:
            yield Begin("A", step)
            came = sorted((yield from self._collect(step, left)), key=lambda message: message.source)
            values = yield Decode(tuple(came))
            yield Work("apply", Key("apply", step), values)
            if came and step + 1 < self.steps:
                message = yield Encode(Key("aggregate", step + 1, origin=me))
                for each in came:
                    yield from _send(message, each.source, step + 1, left)
            goes_on = (yield EndStep(step)) is not False and step + 1 < self.steps
            if self._evaluates_after(step) and (goes_on or step + 1 == self.steps):
                yield Work("evaluate", Key("evaluate", step + 1, phase="evaluation"))
                yield EndStep(step + 1, "evaluation")
            step += 1
        for worker in tuple(left):
            yield from _send(Message(Key(GOODBYE, step, origin=me), b""), worker, step, left)
        return "steps" if step == self.steps else "asked"

    def _collect(self, step: int, left: list[int]) -> Program:
        until_ns = 0 if self.period_ns is None else (step + 1) * self.period_ns
        while True:
            try:
                return (yield Collect(tuple(left), min(self.buffer or 0, len(left)), until_ns, self.grace_ns))
            except TransportError as error:
                _lose(error, left)


def _send(message: Message, worker: int, step: int, left: list[int]) -> Program:
    if worker in left:
        try:
            yield Send(message, worker, _STEP.pack(step))
        except TransportError as error:
            _lose(error, left)


def _lose(error: TransportError, left: list[int]) -> None:
    """Continue without a lost worker. TransportError when none is left, or when the error is not about a lost
    worker.
    """
    if error.peer not in left:
        raise error
    left.remove(error.peer)
    if not left:
        raise TransportError(f"all workers are lost; the last one: {error}") from error


def read_step(note: bytes) -> int:
    """Return the number of server steps from a note. CodecError for a malformed note."""
    if len(note) != _STEP.size:
        raise CodecError(f"the note of a server's reply has {len(note)} bytes, expected {_STEP.size}")
    step: int = _STEP.unpack(note)[0]
    return step

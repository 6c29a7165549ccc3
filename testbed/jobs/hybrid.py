"""Pipelines within replicas, and data parallel training across them. Device numbers run through all replicas.

A step is some batches of every replica, then an exchange whose messages the job specifies: those to the server, its
replies once it has received all of them, and the forwarding of replies; or those between devices of different replicas.
Before step t a device has the aggregate of step t - 1 - staleness. Replicas may be absent for a step; a returning
replica receives the weights first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from testbed.jobs.actions import Begin, Decode, Encode, EndStep, Fork, Key, Message, Program, Receive, Send, Wait, Work
from testbed.jobs.pipeline import PipelineJob
from testbed.jobs.schedule import Action

Pairs = Sequence[tuple[int, int]]
"""Pairs of sender and receiver. The server is the place after the last device."""


class HybridRound(NamedTuple):
    """The participants and messages of one step."""

    away: Sequence[int] = ()
    """Absent replicas."""
    restored: Pairs = ()
    """Transfers of weights to devices of returning replicas, before they compute."""
    exchanged: Pairs = ()
    passed_on: Pairs = ()
    """Transfers in which devices forward the server's reply."""


@dataclass(frozen=True)
class HybridJob:
    """Replicas that train together."""

    orders: Sequence[Sequence[Sequence[Action]]]
    """By replica and stage: the actions of a batch."""
    local_steps: int
    """Batches per step."""
    rounds: Sequence[HybridRound]
    """Rounds of consecutive steps, repeated cyclically."""
    server: bool
    staleness: int
    """Number of steps by which a device may run ahead of the aggregate."""
    steps: int

    @property
    def places(self) -> Sequence[str]:
        """Names of the devices, then of the server."""
        return (*(f"device {device}" for device in range(self._devices)), *("server",) * self.server)

    @property
    def _devices(self) -> int:
        return sum(map(len, self.orders))

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return the program of a device or of the server, from that step on."""
        return self._serve(place, first_step) if place == self._devices else self._train(place, first_step)

    def _train(self, me: int, first_step: int) -> Program:
        ends = list(accumulate(map(len, self.orders)))
        replica = next(number for number, end in enumerate(ends) if me < end)
        pipeline = PipelineJob(self.orders[replica], self.steps, first=ends[replica] - len(self.orders[replica]))
        parts = max((part for order in pipeline.orders for _, part in order), default=-1) + 1
        applied = max(0, first_step - 1 - self.staleness)
        for step in range(first_step, self.steps):
            who = self.rounds[step % len(self.rounds)]
            while self.staleness and applied < step - self.staleness:
                yield from self._apply((yield Wait(Key("aggregate", applied))), applied)
                applied += 1
            yield from self._restore(me, step, who)
            if replica not in who.away:
                for batch in range(self.local_steps):
                    yield from pipeline.batch(me, step, batch * parts)
            yield Begin("A", step)
            yield from self._send(me, step, who)
            if self.staleness:
                yield Fork(f"to device {me}", Key("aggregate", step), self._gather(me, step, who))
            else:
                yield from self._apply((yield from self._gather(me, step, who)), step)
            while self.staleness and step + 1 == self.steps and applied <= step:
                yield from self._apply((yield Wait(Key("aggregate", applied))), applied)
                applied += 1
            yield EndStep(step)

    def _restore(self, me: int, step: int, who: HybridRound) -> Program:
        """Send weights to returning replicas, or receive them."""
        for sender, receiver in who.restored:
            key = _key("weights", step, sender, receiver)
            if sender == me:
                yield Send((yield Encode(key)), receiver)
            elif receiver == me:
                (weights,) = yield Decode(((yield Receive(key, sender)),))
                yield Work("restore", key, weights)

    def _send(self, me: int, step: int, who: HybridRound, value: object = None) -> Program:
        """Send a value to all receivers of a place in an exchange."""
        for sender, receiver in who.exchanged:
            if sender == me:
                yield Send((yield Encode(_key("exchange", step, sender, receiver), value)), receiver)

    def _gather(self, me: int, step: int, who: HybridRound) -> Program:
        """Receive all messages of an exchange and forward them; returns the messages."""
        came = list[Message]()
        for sender, receiver in who.exchanged:
            if receiver == me:
                came.append((yield Receive(_key("exchange", step, sender, receiver), sender)))
        for sender, receiver in who.passed_on:
            if sender == me:
                yield Send(came[0], receiver)
            elif receiver == me:
                came.append((yield Receive(_key("exchange", step, self._devices, sender), sender)))
        return came

    def _apply(self, came: Sequence[Message], step: int) -> Program:
        if came:
            values = yield Decode(tuple(came))
            yield Work("apply", Key("apply", step), values)

    def _serve(self, me: int, first_step: int) -> Program:
        for step in range(first_step, self.steps):
            who = self.rounds[step % len(self.rounds)]
            yield from self._restore(me, step, who)
            yield Begin("A", step)
            came = yield from self._gather(me, step, who)
            total = yield Work("sum", Key("sum", step), (yield Decode(tuple(came))))
            yield from self._send(me, step, who, total)
            yield EndStep(step)


def _key(what: str, step: int, sender: int, receiver: int) -> Key:
    """Return a message's key, which differs for each receiver."""
    return Key(what, step, receiver, origin=sender)

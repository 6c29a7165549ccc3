"""Asynchronous federated rounds in one process, an event at a time: messages take as long as formulas for links say.

What a network does with the same program, in the order that these times give. Where no two events lie so close together
that headers and acknowledgements decide between them, that is the network's order, and the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from testbed.jobs.actions import Action, Collect, Send, Work
from testbed.jobs.asynchronous import AsynchronousJob
from testbed.jobs.loop import Clock, Loop, NodeLane, NoLinks
from testbed.pipeline.frame import HEADER_BYTES
from testbed.replicas.arrivals import Applied, Rounds, Server

_FOR_EVER = 1 << 30


class ServerStep(NamedTuple):
    """A step of the server."""

    at_ns: int
    """When the new weights were there, from the beginning of training."""
    applied: Applied
    received_bytes: int
    """Payloads of all workers that had arrived by then, from the beginning."""
    answered_bytes: int
    """Payloads of all answers before this step's."""


class _Stop(Exception):
    """Nobody wants more steps."""


class Formula(NoLinks):
    """Links on which a message takes as long as a function says."""

    def __init__(self, sent: Callable[[int, int, int, int], int]) -> None:
        """`sent`: of a sender, a receiver, a frame's bytes and when (ns) it is handed over: when its last byte is
        there. It is called in the order of these times.
        """
        self._sent = sent

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Deliver a message then."""
        clock.at(self._sent(source, target, size + HEADER_BYTES, clock.now_ns), deliver)


class _Steps:
    """Observes the server."""

    def __init__(self, server: int, watch: Callable[[ServerStep], bool]) -> None:
        self._server, self._watch = server, watch
        self._received = self._answered = 0
        self._last: ServerStep | None = None

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        if lane.node != self._server:
            return
        match action:
            case Collect():
                self._received += sum(len(message.payload) for message in value)
            case Work("apply"):
                self._last = ServerStep(end_ns, value, self._received, self._answered)
            case Send(message, _, note):
                self._answered += len(message.payload) + len(note)

    def goes_on(self, place: int, step: int) -> bool:
        if place == self._server:
            assert self._last is not None
            if not self._watch(self._last):
                raise _Stop
        return True


def run_rounds(
    job: AsynchronousJob,
    server: Server,
    workers: Sequence[Rounds],
    links: Formula,
    watch: Callable[[ServerStep], bool],
    *,
    local_ns: Sequence[int],
) -> None:
    """Train until `watch`, which is told of each step when its answers have been sent, wants no more. StageError,
    CodecError as they come.

    `local_ns`: how long a local step takes, by worker; a step of the server takes no time.
    """
    steps = _Steps(len(workers), watch)

    def cost(node: int, action: Action) -> int | None:
        return local_ns[node] if isinstance(action, Work) and action.what == "local step" else None

    # Steps are as many as are wanted, so the last one is answered as all are.
    endless = replace(job, steps=_FOR_EVER, evaluate_every=None)
    programs = [endless.program(place) for place in range(len(workers) + 1)]
    loop = Loop(programs, [*workers, server], cost=cost, links=links, observers=[steps], goes_on=steps.goes_on)
    try:
        loop.run()
    except _Stop:
        return

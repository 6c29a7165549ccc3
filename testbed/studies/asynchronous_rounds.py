"""Asynchronous federated rounds in one process, event by event, with message times from link formulas.

Runs the same program as a network, in the order of these times. Unless events lie so close together that headers and
acknowledgements decide their order, the order and the results equal those of a network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from testbed.jobs.actions import Action, Collect, Send, Work
from testbed.jobs.asynchronous import AsynchronousJob
from testbed.jobs.loop import Clock, Loop, NodeLane, NoLinks
from testbed.nodes.arrivals import Applied, Rounds, Server
from testbed.runtime.frame import HEADER_BYTES

_FOR_EVER = 1 << 30


class ServerStep(NamedTuple):
    """One step of the server."""

    at_ns: int
    """Time of the new weights, from the start of training."""
    applied: Applied
    received_bytes: int
    """Total payload bytes that had arrived from all workers by then."""
    answered_bytes: int
    """Total payload bytes of all replies before this step's."""


class _Stop(Exception):
    """Raised to end training."""


class Formula(NoLinks):
    """Links whose message times come from a function."""

    def __init__(self, sent: Callable[[int, int, int, int], int]) -> None:
        """`sent` maps sender, receiver, frame size in bytes and time of sending (ns) to the arrival time of the last
        byte. It is called in order of sending.
        """
        self._sent = sent

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Deliver a message at that time."""
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
    """Train until `watch`, called after each step's replies are sent, asks to stop. Raises StageError and CodecError.

    `local_ns`: duration of a local step, by worker; a server step takes no time.
    """
    steps = _Steps(len(workers), watch)

    def cost(node: int, action: Action) -> int | None:
        return local_ns[node] if isinstance(action, Work) and action.what == "local step" else None

    # The number of steps is open, so the last one is answered like any other.
    endless = replace(job, steps=_FOR_EVER, evaluate_every=None)
    programs = [endless.program(place) for place in range(len(workers) + 1)]
    loop = Loop(programs, [*workers, server], cost=cost, links=links, observers=[steps], goes_on=steps.goes_on)
    with contextlib.suppress(_Stop):
        loop.run()

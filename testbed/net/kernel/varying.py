"""Play the links that vary under engine netem: one thread changes each qdisc when the next step of its schedule or trace is due.

timeline.py says what holds when; netem.py changes it. The relay plays its own pipes and needs none of this.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Literal, NamedTuple

from testbed.directions import LinkDirection
from testbed.net.kernel import netem, qdisc
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Netlink
from testbed.net.kernel.qdisc import NetemPlan
from testbed.profiles import Pipe
from testbed.profiles.timeline import TimelineStep, timeline

_PRIORITY = 40
"""SCHED_FIFO: before all programs, behind the kernel's packet thread and the relay."""


class Move(NamedTuple):
    """One direction of a link, and the device that netem shapes it on. It holds the pipe's own constant numbers already."""

    link: str
    direction: LinkDirection
    namespace: Namespace
    device: str
    pipe: Pipe
    mtu: int
    layer: Literal["ip", "ethernet"]


class Applied(NamedTuple):
    """A change that the kernel has taken. Times are in nanoseconds of CLOCK_MONOTONIC."""

    link: str
    direction: LinkDirection
    asked_ns: int
    """When it was due; of several that were due at once only the last is made, and this is when the first was."""
    done_ns: int
    """When it had been made and read back. What was queued by then still leaves as it was due before."""


class _Play(NamedTuple):
    start_ns: int


class _Hold(NamedTuple):
    done: Future[None]


class _Stop(NamedTuple):
    pass


class _Track:
    """One move, and what its device holds."""

    def __init__(self, move: Move) -> None:
        self.move = move
        self.timeline = timeline(move.pipe)
        self.held: NetemPlan | None = self.plan(None)

    def plan(self, step: TimelineStep | None) -> NetemPlan:
        return qdisc.plan(self.move.pipe, mtu=self.move.mtu, layer=self.move.layer, step=step)


class Player:
    """Plays moves until it is closed. Its thread sleeps but for the changes; a change takes less than a millisecond.

    A step that comes due while another is being made is made right after it.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        """SpecError, now and not in the middle of a run, where netem cannot carry out one of the pipes at some time."""
        self._tracks = [_Track(move) for move in moves if move.pipe.varies]
        self._orders: queue.SimpleQueue[_Play | _Hold | _Stop] = queue.SimpleQueue()
        self._start_ns = 0
        self._due: list[tuple[int, int]] = []  # a heap of (when, which track)
        self._log: list[Applied] = []
        self._fault: str | None = None
        with ExitStack() as stack:
            namespaces = {track.move.namespace for track in self._tracks}
            self._netlinks = {namespace: stack.enter_context(Netlink(namespace)) for namespace in namespaces}
            self._sockets = stack.pop_all()
        self._thread = threading.Thread(target=self._run, name="netem player", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> str | None:
        """Why nothing is played any more, or None."""
        return self._fault

    @property
    def log(self) -> tuple[Applied, ...]:
        """Every change that was made, in order."""
        return tuple(self._log)

    def play(self, start_ns: int) -> None:
        """Schedules and traces begin at this moment of CLOCK_MONOTONIC, which may lie ahead. Returns at once."""
        self._orders.put(_Play(start_ns))

    def hold(self) -> None:
        """Back to every pipe's own constant numbers. Returns when the kernel holds them; errors as of `netem.change`."""
        assert self._thread.is_alive()
        done: Future[None] = Future()
        self._orders.put(_Hold(done))
        done.result()

    def close(self) -> None:
        """End the thread. The devices keep what they hold."""
        self._orders.put(_Stop())
        self._thread.join()
        self._sockets.close()

    def _run(self) -> None:
        # Not permitted without root; then the changes come as late as other programs make them.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_FIFO, os.sched_param(_PRIORITY))
        while not isinstance(order := self._next_order(), _Stop):
            try:
                self._obey(order)
            except Exception as error:
                self._due.clear()
                self._fault = str(error) or repr(error)
                if isinstance(order, _Hold):
                    order.done.set_exception(error)

    def _next_order(self) -> _Play | _Hold | _Stop | None:
        """What the owner wants; None when a step is due first."""
        wait_s = max(0, self._due[0][0] - time.monotonic_ns()) / 1e9 if self._due else None
        try:
            return self._orders.get(timeout=wait_s)
        except queue.Empty:
            return None

    def _obey(self, order: _Play | _Hold | None) -> None:
        if isinstance(order, _Play):
            self._start_ns = order.start_ns
            self._due = [(order.start_ns, number) for number in range(len(self._tracks))]
        elif isinstance(order, _Hold):
            self._due.clear()
            for track in self._tracks:
                self._set(track, None, time.monotonic_ns())
            order.done.set_result(None)
        else:
            when_ns, number = heapq.heappop(self._due)
            track = self._tracks[number]
            elapsed_ns = max(when_ns, time.monotonic_ns()) - self._start_ns
            if (next_ns := track.timeline.next_after(elapsed_ns)) is not None:
                heapq.heappush(self._due, (self._start_ns + next_ns, number))
            self._set(track, track.timeline.at(elapsed_ns), when_ns)

    def _set(self, track: _Track, step: TimelineStep | None, asked_ns: int) -> None:
        move, wanted = track.move, track.plan(step)
        if wanted == track.held:
            return
        track.held = None  # unknown, should the change fail half-way
        netem.change(self._netlinks[move.namespace], move.device, wanted, link=f"{move.link} {move.direction}")
        track.held = wanted
        self._log.append(Applied(move.link, move.direction, asked_ns, time.monotonic_ns()))

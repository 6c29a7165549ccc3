"""Follow the schedules of links that vary under engine netem: each qdisc is changed when its next step is due.

profiles/timeline.py says what holds when, for a schedule and for a trace; netem.py changes it. The relay follows its
own pipes and needs none of this.

Schedules       says when the next change is due and makes it: for a program that waits for other things too
ScheduleDriver  does so in a thread of its own
"""

from __future__ import annotations

import contextlib
import heapq
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial

from testbed.net.kernel import netem
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netem_plan import NetemPlan
from testbed.net.kernel.netlink import Netlink
from testbed.net.plan import ShapedDevice
from testbed.profiles.timeline import TimelineStep, timeline

_PRIORITY = 40
"""SCHED_FIFO: before all programs, behind the kernel's packet thread and the relay."""


class _Track:
    """One device, what it is to hold when, and what it holds: at first the pipe's own constant numbers."""

    def __init__(self, shaped: ShapedDevice, namespace: Namespace) -> None:
        self.shaped, self.namespace = shaped, namespace
        self.timeline = timeline(shaped.pipe)
        self.held: NetemPlan | None = shaped.plan()


class Schedules:
    """What varying links hold when. It waits for nothing: whoever has it calls `follow` when the next change is due."""

    def __init__(self, devices: Sequence[ShapedDevice], namespaces: Mapping[str, Namespace]) -> None:
        """SpecError, already now, where netem cannot carry out a pipe at some time."""
        self._tracks = [_Track(shaped, namespaces[shaped.namespace]) for shaped in devices if shaped.pipe.varies]
        self._start_ns = 0
        self._due: list[tuple[int, int]] = []  # a heap of (when, which track)
        with ExitStack() as stack:
            spaces = {track.namespace for track in self._tracks}
            self._netlinks = {namespace: stack.enter_context(Netlink(namespace)) for namespace in spaces}
            self._sockets = stack.pop_all()

    @property
    def next_due_ns(self) -> int | None:
        """When the next change is due, in nanoseconds of CLOCK_MONOTONIC; None: never."""
        return self._due[0][0] if self._due else None

    def play(self, start_ns: int) -> None:
        """Begin schedules and traces at this moment of CLOCK_MONOTONIC, which may lie ahead."""
        self._start_ns = start_ns
        self._due = [(start_ns, number) for number in range(len(self._tracks))]

    def stop(self) -> None:
        """Make no more changes. The devices keep what they hold."""
        self._due.clear()

    def hold(self) -> None:
        """Go back to every pipe's own constant numbers. Errors as in `netem.change_plan`."""
        self.stop()
        for track in self._tracks:
            self._set(track, None)

    def follow(self) -> None:
        """Make the next change. Errors as in `netem.change_plan`."""
        when_ns, number = heapq.heappop(self._due)
        track = self._tracks[number]
        elapsed_ns = max(when_ns, time.monotonic_ns()) - self._start_ns
        if (next_ns := track.timeline.next_after(elapsed_ns)) is not None:
            heapq.heappush(self._due, (self._start_ns + next_ns, number))
        self._set(track, track.timeline.at(elapsed_ns))

    def close(self) -> None:
        """Let go of the sockets. The devices keep what they hold."""
        self._sockets.close()

    def _set(self, track: _Track, step: TimelineStep | None) -> None:
        shaped, wanted = track.shaped, track.shaped.plan(step)
        if wanted == track.held:
            return
        track.held = None  # unknown, should the change fail half-way
        netem.change_plan(self._netlinks[track.namespace], shaped.device, wanted, link=shaped.label)
        track.held = wanted


class ScheduleDriver:
    """Follows schedules until it is closed. Its thread sleeps but for the changes, which take less than a millisecond.

    A step that comes due while another is being made is made right after it.
    """

    def __init__(self, devices: Sequence[ShapedDevice], namespaces: Mapping[str, Namespace]) -> None:
        """Begin to wait for orders. SpecError as from `Schedules`."""
        self._schedules = Schedules(devices, namespaces)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.fault: str | None = None
        """Why no schedule is followed any more, or None."""
        self._thread = threading.Thread(target=self._run, name="netem schedules", daemon=True)
        self._thread.start()

    def play(self, start_ns: int) -> None:
        """Begin schedules and traces at this moment of CLOCK_MONOTONIC, which may lie ahead. Returns at once."""
        self._orders.put(partial(self._schedules.play, start_ns))

    def hold(self) -> None:
        """Go back to every pipe's own constant numbers.

        Returns when the kernel holds them; errors as in `netem.change_plan`.
        """
        assert self._thread.is_alive()
        done: Future[None] = Future()

        def hold() -> None:
            try:
                self._schedules.hold()
            except Exception as error:
                done.set_exception(error)
                raise
            done.set_result(None)

        self._orders.put(hold)
        done.result()

    def close(self) -> None:
        """End the thread. The devices keep what they hold."""
        self._orders.put(None)
        self._thread.join()
        self._schedules.close()

    def _run(self) -> None:
        # Not permitted without root; then the changes come as late as other programs make them.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_FIFO, os.sched_param(_PRIORITY))
        while (order := self._next_order()) is not None:
            try:
                order()
            except Exception as error:
                self._schedules.stop()
                self.fault = str(error) or repr(error)

    def _next_order(self) -> Callable[[], None] | None:
        """Wait for what the owner wants (None: the end), or until a step is due."""
        due_ns = self._schedules.next_due_ns
        wait_s = None if due_ns is None else max(0, due_ns - time.monotonic_ns()) / 1e9
        try:
            return self._orders.get(timeout=wait_s)
        except queue.Empty:
            return self._schedules.follow

"""Follow the schedules of varying links under engine netem: change each qdisc when its next step is due.

profiles/timeline.py has the values over time, for a schedule or a trace; shaping.py applies them. A packet meets the
rate behind its delay, so a rate changes one delay after the other values. The relay follows its own pipes and does not
use this.

Schedules       makes each change when its owner asks, for a program that also waits for other events
ScheduleDriver makes them in its own thread
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

from testbed.net.kernel import shaping
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Netlink
from testbed.net.kernel.queue_plan import Shaping
from testbed.net.lab_plan import ShapedDevice
from testbed.profiles.timeline import timeline
from testbed.records import FaultRecord

_PRIORITY = 40
"""SCHED_FIFO priority: above all programs, below the kernel's packet thread and the relay."""


class _Track:
    """One device, its timeline, and its current values: at first the pipe's constant ones."""

    def __init__(self, shaped: ShapedDevice, namespace: Namespace) -> None:
        self.shaped, self.namespace = shaped, namespace
        self.timeline = timeline(shaped.pipe)
        self.held: Shaping | None = shaped.plan()
        self.last = self.held
        self.rate_due_ns = 0
        """When the last rate is due: packets keep their order, so after a delay has fallen a rate waits for earlier
        ones."""
        self.moments: list[tuple[int, int]] = []
        """When a change was due, except of a rate, and when the kernel had confirmed it, since the start."""

    def first_since(self, at_ns: int) -> int | None:
        """Return when the first change since then had been made."""
        return next((done_ns for due_ns, done_ns in self.moments if due_ns >= at_ns), None)


class Schedules:
    """Timelines of varying links. It never waits: its owner calls `follow` when the next change is due."""

    def __init__(self, devices: Sequence[ShapedDevice], namespaces: Mapping[str, Namespace]) -> None:
        """SpecError, immediately, where netem cannot implement a pipe at some time."""
        self._tracks = [_Track(shaped, namespaces[shaped.namespace]) for shaped in devices if shaped.pipe.varies]
        self._start_ns = 0
        self._due: list[tuple[int, int, int]] = []
        """A heap of (time, track, the moment of the timeline whose rate is due; -1: its other values)."""
        with ExitStack() as stack:
            spaces = {track.namespace for track in self._tracks}
            self._netlinks = {namespace: stack.enter_context(Netlink(namespace)) for namespace in spaces}
            self._sockets = stack.pop_all()

    @property
    def next_due_ns(self) -> int | None:
        """Time of the next change, in nanoseconds of CLOCK_MONOTONIC; None: never."""
        return self._due[0][0] if self._due else None

    def play(self, start_ns: int) -> None:
        """Start schedules and traces at this time of CLOCK_MONOTONIC, possibly in the future."""
        self._start_ns = start_ns
        for track in self._tracks:
            track.rate_due_ns = 0
            track.moments.clear()
        self._due = [(start_ns, number, -1) for number in range(len(self._tracks))]

    def stop(self) -> None:
        """Make no more changes. The devices keep their current values."""
        self._due.clear()

    def hold(self) -> None:
        """Return every pipe to its constant values. Errors as for `shaping.change_shaping`."""
        self.stop()
        for track in self._tracks:
            self._set(track, track.shaped.plan())

    def follow(self) -> None:
        """Make the next change. Errors as for `shaping.change_shaping`."""
        when_ns, number, moment_ns = heapq.heappop(self._due)
        track = self._tracks[number]
        if moment_ns >= 0:
            self._set(track, track.last._replace(children=track.shaped.plan(track.timeline.at(moment_ns)).children))
            return
        elapsed_ns = max(when_ns, time.monotonic_ns()) - self._start_ns
        if (next_ns := track.timeline.next_after(elapsed_ns)) is not None:
            heapq.heappush(self._due, (self._start_ns + next_ns, number, -1))
        track.rate_due_ns = max(track.rate_due_ns, when_ns + track.last.netem.latency_ns)
        heapq.heappush(self._due, (track.rate_due_ns, number, elapsed_ns))
        self._set(track, track.last._replace(netem=track.shaped.plan(track.timeline.at(elapsed_ns)).netem))
        track.moments.append((elapsed_ns, time.monotonic_ns() - self._start_ns))

    def faults(self) -> tuple[FaultRecord, ...]:
        """Return the links' faults, and when they began and ended."""
        return tuple(
            FaultRecord(
                link=track.shaped.link,
                direction=track.shaped.direction,
                fault=fault,
                began_ns=track.first_since(fault.at_ns),
                ended_ns=track.first_since(fault.end_ns),
            )
            for track in self._tracks
            for fault in track.timeline.faults
        )

    def close(self) -> None:
        """Close the sockets. The devices keep their current values."""
        self._sockets.close()

    def _set(self, track: _Track, wanted: Shaping) -> None:
        if wanted == track.held:
            return
        before, track.held = track.held, None  # unknown if the change fails half-way
        netlink, shaped = self._netlinks[track.namespace], track.shaped
        shaping.change_shaping(netlink, shaped.device, before, wanted, link=shaped.label)
        track.held = track.last = wanted


class ScheduleDriver:
    """Follows schedules until it is closed. Its thread sleeps except for changes, which take less than a millisecond.

    A step that becomes due during another change follows right after it.
    """

    def __init__(self, devices: Sequence[ShapedDevice], namespaces: Mapping[str, Namespace]) -> None:
        """Start to wait for orders. Raises SpecError like `Schedules`."""
        self._schedules = Schedules(devices, namespaces)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.fault: str | None = None
        """Reason why schedules are no longer followed, or None."""
        self._thread = threading.Thread(target=self._run, name="netem schedules", daemon=True)
        self._thread.start()

    def play(self, start_ns: int) -> None:
        """Start schedules and traces at this time of CLOCK_MONOTONIC, possibly in the future. Returns at once."""
        self._orders.put(partial(self._schedules.play, start_ns))

    def faults(self) -> tuple[FaultRecord, ...]:
        """Return the links' faults, and when they began and ended. After `hold`."""
        return self._schedules.faults()

    def hold(self) -> None:
        """Return every pipe to its constant values.

        Returns when the kernel has applied them; errors as for `shaping.change_shaping`.
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
        """End the thread. The devices keep their current values."""
        self._orders.put(None)
        self._thread.join()
        self._schedules.close()

    def _run(self) -> None:
        # Not permitted without root; changes are then delayed by other programs.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_FIFO, os.sched_param(_PRIORITY))
        while (order := self._next_order()) is not None:
            try:
                order()
            except Exception as error:
                self._schedules.stop()
                self.fault = str(error) or repr(error)

    def _next_order(self) -> Callable[[], None] | None:
        """Wait for an order of the owner (None: the end), or until a step is due."""
        due_ns = self._schedules.next_due_ns
        wait_s = None if due_ns is None else max(0, due_ns - time.monotonic_ns()) / 1e9
        try:
            return self._orders.get(timeout=wait_s)
        except queue.Empty:
            return self._schedules.follow

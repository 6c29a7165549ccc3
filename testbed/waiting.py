"""Waits for sockets and points in time: one epoll, and a timer that is exact to the nanosecond."""

from __future__ import annotations

import ctypes
import os
import select
import time
from typing import Final

from testbed.closing import Closing

READABLE: Final = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
WRITABLE: Final = select.EPOLLOUT
DUE: Final = -1
"""Stands for a descriptor when the awaited time is reached."""
_CLOCK_MONOTONIC, _TFD_TIMER_ABSTIME = 1, 1
_TFD_NONBLOCK, _TFD_CLOEXEC = 0o4000, 0o2000000
_libc = ctypes.CDLL(None, use_errno=True)


class Waiter(Closing):
    """The player's clock, timer and socket events; a context manager. Uses timerfd through ctypes, because Python 3.11
    does not offer it, and epoll's own timeout is in milliseconds.
    """

    def __init__(self, origin_ns: int) -> None:
        """Times are relative to `origin_ns` of CLOCK_MONOTONIC."""
        self._origin_ns = origin_ns
        self._epoll = select.epoll()
        self._timer = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._epoll.register(self._timer, select.EPOLLIN)
        self._watched: set[int] = set()
        self._armed_ns: int | None = None
        self._setting = (ctypes.c_int64 * 4)()  # struct itimerspec: interval, then when; seconds and nanoseconds
        self._setting_at = ctypes.byref(self._setting)

    def now(self) -> int:
        """Return nanoseconds since the origin."""
        return time.monotonic_ns() - self._origin_ns

    def watch(self, descriptor: int, events: int) -> None:
        """Wake up for these events of a descriptor from now on."""
        if descriptor in self._watched:
            self._epoll.modify(descriptor, events)
        else:
            self._epoll.register(descriptor, events)
            self._watched.add(descriptor)

    def wait(self, due_ns: int | None) -> list[tuple[int, int]]:
        """Wait until `due_ns`, or for descriptors. Returns the descriptors with their events, and `DUE` when due."""
        if due_ns != self._armed_ns:
            self._arm(due_ns)
        events = self._epoll.poll()
        for place, (descriptor, _) in enumerate(events):
            if descriptor == self._timer:
                self._armed_ns = -1  # the next wait rearms it, which also makes it unreadable
                events[place] = (DUE, 0)
                break
        return events

    def stand_still(self, grid_ns: int) -> None:
        """Advance the kernel's clock to a multiple of `grid_ns` while this clock stops; nothing else may be active."""
        now_ns = time.monotonic_ns()
        until_ns = (now_ns // grid_ns + 1) * grid_ns
        self._arm(until_ns - self._origin_ns)
        events = self._epoll.poll()
        assert [descriptor for descriptor, _ in events] == [self._timer], "the lab was not silent"
        self._origin_ns += until_ns - now_ns
        self._armed_ns = -1

    def _arm(self, due_ns: int | None) -> None:
        # A time in the past makes it readable at once; 0 would disarm it.
        when_ns = 0 if due_ns is None else max(1, due_ns + self._origin_ns)
        self._setting[2], self._setting[3] = divmod(when_ns, 1_000_000_000)
        if _libc.timerfd_settime(self._timer, _TFD_TIMER_ABSTIME, self._setting_at, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        self._armed_ns = due_ns

    def close(self) -> None:
        """Close both."""
        self._epoll.close()
        os.close(self._timer)

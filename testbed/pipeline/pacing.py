"""When what a place does begins and ends: as long as this machine takes, or as long as the emulated device does.

Paced work is real maths, and then nothing until it is due. Due times come from a line of the emulated device's time,
not from when a process woke up, so that lateness is made up for by the next action and does not add up. What the line
does know is when frames arrived: they crossed the real link. They leave on time as well: it is the connection's send
thread that keeps a frame back until it is due, with a higher priority than the maths of any place. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from testbed.jobs.actions import Action, Decode, Work
from testbed.jobs.recorder import PacedWork

PRIORITY = 2
"""Of SCHED_RR, for the threads of a paced stage that send and receive; its maths has one less. All of it comes after
the relay (SCHED_FIFO, 50), and before whatever else the machine does."""
_PR_SET_TIMERSLACK = 29
_GRID_NS = 1_000_000_000
_READS = 1000
"""More than a wake-up makes of the virtual clock."""


def wait_until(moment_ns: int) -> int:
    """Return at that moment of CLOCK_MONOTONIC or a little later, with what the clock then says."""
    while (left_ns := moment_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns * 1e-9)  # an absolute clock_nanosleep, which a signal does not cut short
    return time.monotonic_ns()


def wait_for_the_grid() -> int:
    """Return at a moment of the virtual clock that does not depend on what happened before: shortly after a full
    second, the same nanosecond each time.

    A sleep ends as many nanoseconds late as the kernel reads the clock when it wakes up, which differs; and a read
    moves that clock by one.
    """
    second_ns = (time.monotonic_ns() // _GRID_NS + 1) * _GRID_NS
    now_ns = wait_until(second_ns)
    while now_ns < second_ns + _READS:
        now_ns = time.monotonic_ns()
    return now_ns


def prefer(pid: int, prompt: bool) -> None:
    """Have a process, and what it forks from now on, run with the priority of what sends and receives; or as usual.

    Where this is not permitted nothing happens: a paced stage's log says what it was granted, its overruns what that
    costs.
    """
    policy, priority = (os.SCHED_RR, PRIORITY) if prompt else (os.SCHED_OTHER, 0)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.sched_setscheduler(pid, policy, os.sched_param(priority))


def be_prompt() -> None:
    """Have exact sleeps, for the calling thread and those that it starts from now on."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # ns; 0 would mean the default, 50 us


def step_back() -> str:
    """Let the calling thread compute from now on: the threads that it has started go first. Returns the scheduling that
    it has.
    """
    if os.sched_getscheduler(0) != os.SCHED_RR:
        return "SCHED_OTHER (it was granted no real-time priority)"
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY - 1))  # down is always allowed, and up no more
    return f"SCHED_RR, priority {PRIORITY - 1}, and {PRIORITY} for what sends and receives"


class LabClock:
    """The lab's clock: CLOCK_MONOTONIC."""

    def now(self) -> int:
        """Return its nanoseconds."""
        return time.monotonic_ns()

    def wait_until(self, moment_ns: int) -> int:
        """Return at that moment or a little later, with what the clock then says."""
        return wait_until(moment_ns)


Takes = Callable[[Action], int | None]
"""How long Work, Encode and Decode take on the emulated device, in the lab's nanoseconds; None: as long as they take
here, dilated."""


class CodecTimes(NamedTuple):
    """How long a codec works on a message, in nanoseconds."""

    encode_ns: int
    decode_ns: int


Coding = tuple[tuple[CodecTimes, ...], ...]
"""Of data parallel training, by fragment that is exchanged: of the message of each worker and of a star's server; in a
ring that reduces, of each part of a message."""


class Line:
    """The time of one lane.

    Where nothing is paced it is this machine's. Else it is the emulated device's: what it does begins where the last
    ended, or when its input has come. Encoding and decoding that cost what they cost here are dilated as well: they are
    this machine's own work, and shall seem as long as they really were when times are divided by the dilation.

    Work whose maths ends later than due is an overrun. What it made is sent late, but the line goes on from where it
    was due. Records bear the line's times, but never earlier ones than were recorded before, which only an overrun
    makes the later of the two.
    """

    def __init__(self, takes: Takes | None, dilation: int = 1, clock: LabClock | None = None) -> None:
        """`takes`: None, where nothing is paced."""
        self._takes, self._dilation, self._clock = takes, dilation, clock or LabClock()
        self._in_action = False
        self.at_ns = self.recorded_ns = self._clock.now()

    @property
    def free_ns(self) -> int:
        """When what was made so far may leave at the earliest; 0: at once."""
        return 0 if self._takes is None else self.at_ns

    def begin(self, in_action: bool) -> None:
        """Begin an action of the records, or what belongs to none; an action begins when the line is there: maths done
        ahead of time would take the processor from another place's.
        """
        self._in_action = in_action
        if in_action:
            self.wait()
        self.came(self.at_ns)

    def wait(self) -> None:
        """Return when the line is there."""
        if self._takes is not None:
            self._clock.wait_until(self.at_ns)

    def came(self, moment_ns: int) -> None:
        """Go on when something has come."""
        self.at_ns = max(self.at_ns, moment_ns) if self._takes is not None else self._clock.now()
        self.recorded_ns = max(self.recorded_ns, self.at_ns)

    def met(self, line_ns: int) -> None:
        """Go on from where all places are."""
        self.at_ns = line_ns if self._takes is not None else self._clock.now()
        self.recorded_ns = max(self.recorded_ns, self.at_ns)

    def now(self) -> int:
        """Return when something begins here."""
        return self._clock.now()

    def spent(self, action: Action, began_ns: int) -> PacedWork | None:
        """Note that something that began then is done; returns what the records say of paced work."""
        ended_ns = self._clock.now()
        if self._takes is None:
            self.at_ns = self.recorded_ns = ended_ns
            return None
        stated_ns = self._takes(action)
        took_ns = (ended_ns - began_ns) * self._dilation if stated_ns is None else stated_ns
        self.at_ns += took_ns
        if isinstance(action, Decode):
            self.recorded_ns += took_ns
        elif self._in_action:
            self.recorded_ns = max(self.recorded_ns, ended_ns)
        self.recorded_ns = max(self.recorded_ns, self.at_ns)
        held = self._in_action and isinstance(action, Work) and took_ns
        return PacedWork(began_ns, ended_ns, self.at_ns) if held else None

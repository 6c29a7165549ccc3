"""Start and end times of a place's actions: in this machine's time, or in an emulated device's.

Paced work is real maths followed by idling until it is due. Due times come from a line of the emulated device's time,
not from wake-ups, so the next action absorbs lateness and it does not accumulate. The line does follow the arrival
times of frames, which crossed the real link. Frames also leave on time: the connection's send thread holds a frame
until it is due, at a higher priority than the maths of any place. No torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from testbed.faults import NodeFault, goes_on_ns, worked_ns
from testbed.jobs.actions import Action, Decode, Work
from testbed.jobs.recorder import PacedWork

PRIORITY = 2
"""SCHED_RR priority of the send and receive threads of a paced stage; its maths has one less. Both rank below the relay
(SCHED_FIFO, 50) and above everything else on the machine."""
_GRID_NS = 1_000_000_000
_READS = 1000
"""Exceeds the number of clock reads in any wake-up."""


def wait_until(moment_ns: int) -> int:
    """Wait until that time of CLOCK_MONOTONIC or slightly later; returns the clock's time."""
    while (left_ns := moment_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns * 1e-9)  # an absolute clock_nanosleep, not cut short by signals
    return time.monotonic_ns()


def wait_for_the_grid() -> int:
    """Wait for a time of the virtual clock that is independent of history: shortly after a full second, always at the
    same nanosecond.

    A read moves that clock by one nanosecond, so a sleep ends late by the number of clock reads on wake-up, which
    varies.
    """
    second_ns = (time.monotonic_ns() // _GRID_NS + 1) * _GRID_NS
    now_ns = wait_until(second_ns)
    while now_ns < second_ns + _READS:
        now_ns = time.monotonic_ns()
    return now_ns


def set_priority(pid: int, prompt: bool) -> None:
    """Run a process, and what it forks from now on, at the real-time priority of the senders and receivers if `prompt`;
    at the normal priority otherwise.

    Does nothing where this is not permitted: a paced stage logs the priority it was granted, and counts its overruns.
    """
    policy, priority = (os.SCHED_RR, PRIORITY) if prompt else (os.SCHED_OTHER, 0)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.sched_setscheduler(pid, policy, os.sched_param(priority))


def lower_priority() -> str:
    """Lower the calling thread, which computes from now on, to one priority below the threads that it started.

    Returns its scheduling policy, for the log.
    """
    if os.sched_getscheduler(0) != os.SCHED_RR:
        return "SCHED_OTHER (no real-time priority was granted)"
    # Lowering is always permitted, raising it again is not.
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY - 1))
    return f"SCHED_RR, priority {PRIORITY - 1}, and {PRIORITY} for its sending and receiving threads"


class LabClock:
    """The lab's clock: CLOCK_MONOTONIC."""

    def now(self) -> int:
        """Return the time in nanoseconds."""
        return time.monotonic_ns()

    def wait_until(self, moment_ns: int) -> int:
        """Wait until that time or slightly later; returns the clock's time."""
        return wait_until(moment_ns)


Takes = Callable[[Action], int | None]
"""Duration of a Work, Encode or Decode on the emulated device, in the lab's nanoseconds; None: its duration here,
dilated."""


class CodecTimes(NamedTuple):
    """Durations of a codec per message, in nanoseconds."""

    encode_ns: int
    decode_ns: int


Coding = tuple[tuple[CodecTimes, ...], ...]
"""Codec durations of data parallel training, by exchanged fragment: for the message of each worker and of a star's
server; in a ring all-reduce, for each part of a message."""


class Line:
    """The time of one lane.

    Without pacing it is this machine's time. Otherwise it is the emulated device's: an action starts where the last one
    ended, or when its input has arrived. Encoding and decoding charged at their cost here are dilated too, so that
    dividing times by the dilation yields their real duration on this machine.

    Work whose maths ends later than due is an overrun. Its output is sent late, but the line continues from the due
    time. Records hold the line's times, never earlier than a time recorded before, which matters only after an overrun.
    """

    def __init__(
        self,
        takes: Takes | None,
        dilation: int = 1,
        clock: LabClock | None = None,
        *,
        faults: Sequence[NodeFault] = (),
        faults_from_ns: int = 0,
    ) -> None:
        """`takes`: None without pacing. `faults`: those of the node, by time; their times are from `faults_from_ns`."""
        self._takes, self._dilation, self._clock = takes, dilation, clock or LabClock()
        self._faults, self._faults_from_ns = faults, faults_from_ns
        self._in_action = False
        self.at_ns = self.recorded_ns = self._clock.now()

    @property
    def free_ns(self) -> int:
        """The earliest time at which finished output may leave; 0: at once."""
        return 0 if self._takes is None else self.at_ns

    def begin(self, in_action: bool) -> None:
        """Begin an action of the records, or work outside actions. An action waits for the line: maths done early would
        take the processor from another place.
        """
        self._in_action = in_action
        if in_action:
            self.wait()
        self.came(self.at_ns)

    def wait(self) -> None:
        """Wait until the line's time."""
        if self._takes is not None:
            self._clock.wait_until(self.at_ns)

    def came(self, moment_ns: int) -> None:
        """Advance to the arrival of a message."""
        self.at_ns = self._after_stop(max(self.at_ns, moment_ns)) if self._takes is not None else self._clock.now()
        self.recorded_ns = max(self.recorded_ns, self.at_ns)

    def met(self, line_ns: int) -> None:
        """Advance to the time at which all places stand."""
        self.at_ns = self._after_stop(line_ns) if self._takes is not None else self._clock.now()
        self.recorded_ns = max(self.recorded_ns, self.at_ns)

    def _after_stop(self, at_ns: int) -> int:
        """Return that time, or when the node goes on that is stopped then."""
        return goes_on_ns(self._faults, at_ns - self._faults_from_ns) + self._faults_from_ns

    def now(self) -> int:
        """Return the start time of an action."""
        return self._clock.now()

    def spent(self, action: Action, began_ns: int) -> PacedWork | None:
        """Note that an action that started at `began_ns` is done; returns the record of paced work."""
        ended_ns = self._clock.now()
        if self._takes is None:
            self.at_ns = self.recorded_ns = ended_ns
            return None
        stated_ns = self._takes(action)
        took_ns = (ended_ns - began_ns) * self._dilation if stated_ns is None else stated_ns
        since_ns = self.at_ns - self._faults_from_ns
        took_ns = worked_ns(self._faults, since_ns, took_ns) - since_ns
        self.at_ns += took_ns
        if isinstance(action, Decode):
            self.recorded_ns += took_ns
        elif self._in_action:
            self.recorded_ns = max(self.recorded_ns, ended_ns)
        self.recorded_ns = max(self.recorded_ns, self.at_ns)
        held = self._in_action and isinstance(action, Work) and took_ns
        return PacedWork(began_ns, ended_ns, self.at_ns) if held else None

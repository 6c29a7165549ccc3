"""When a stage's actions begin and end: as long as this machine takes (`Stopwatch`), or as long as the emulated device
does (`Pacer`).

A paced action is real maths, and then nothing until it is due. Due times come from a line of the emulated device's
time, not from when a process woke up, so that lateness is made up for by the next action and does not add up. What the
line does know is when frames arrived: they crossed the real link. They leave on time as well: it is the connection's
send thread that keeps a frame back until it is due, with a higher priority than the maths of any stage. No torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import Protocol

from testbed.records import ActionKind, ActionRecord
from testbed.spec import Measured, Paced

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


class Clock(Protocol):
    """The lab's clock."""

    def now(self) -> int:
        """Return nanoseconds of CLOCK_MONOTONIC."""
        ...

    def wait_until(self, moment_ns: int) -> int:
        """Return at that moment or a little later, with what the clock then says."""
        ...


class SystemClock:
    """CLOCK_MONOTONIC itself."""

    def now(self) -> int:
        return time.monotonic_ns()

    def wait_until(self, moment_ns: int) -> int:
        return wait_until(moment_ns)


class Stopwatch:
    """Takes the times of a stage's steps and actions as they are.

    A step or evaluation is `start`, then its actions, then `end`, `synchronised`, `leave`. An action is `ask`,
    `received` where its input crossed a link, `begin`, `done`, `encoded` and `queued` where its output will cross one,
    `record`.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._kind: ActionKind = "F"
        self._microbatch = 0
        self._asked_ns = self._input_ns = self._decoded_ns = self._computed_ns = self._encoded_ns = 0

    def start(self) -> int:
        """Begin a step or evaluation. Returns when it began."""
        return self._clock.now()

    def ask(self, kind: ActionKind, microbatch: int) -> None:
        """Begin an action, by waiting for its input. `microbatch` is its number in the record."""
        self._kind, self._microbatch = kind, microbatch
        self._asked_ns = self._input_ns = self._decoded_ns = self._clock.now()

    def received(self, arrived_ns: int, input_ns: int, decoded_ns: int) -> None:
        """Note when the input's last byte was there, when the stage had it, and when it was a tensor again."""
        self._input_ns, self._decoded_ns = input_ns, decoded_ns

    def begin(self) -> None:
        """Begin the maths."""

    def done(self) -> None:
        """Note that the maths is done."""
        self._computed_ns = self._encoded_ns = self._clock.now()

    def encoded(self) -> int:
        """Note that the output is a payload. Returns when it may be sent at the earliest."""
        return 0

    def queued(self, encoded_ns: int) -> None:
        """Note when the payload was handed over and free to go."""
        self._encoded_ns = encoded_ns

    def record(self) -> ActionRecord:
        """Return the action's times."""
        return ActionRecord(
            kind=self._kind,
            microbatch=self._microbatch,
            asked_ns=self._asked_ns,
            input_ns=self._input_ns,
            decoded_ns=self._decoded_ns,
            computed_ns=self._computed_ns,
            encoded_ns=self._encoded_ns,
        )

    def end(self) -> tuple[int, int]:
        """End the last action. Returns when it ended, and the moment that the other stages build on."""
        now = self._clock.now()
        return now, now

    def synchronised(self, line_ns: int) -> int:
        """Note that all stages have done their last action, the last of them at `line_ns`. Returns when this stage
        knew.
        """
        return self._clock.now()

    def leave(self, update: bool) -> int:
        """End the step, or (`update` is false) the evaluation. Returns when it ended."""
        return self._clock.now()


class Pacer(Stopwatch):
    """Holds actions to the emulated device's durations.

    An action is due at `max(line, arrival) + decode + duration`, and its output encoded that much later; there the line
    goes on. All of it is multiplied by the dilation, decoding and encoding too: the codec is this machine's own work,
    and shall seem as long as it really was when times are divided by the dilation. An action whose maths ends later
    than due is an overrun. It sends late, but its line goes on from where it was due. At the end of a step the line of
    all stages is the latest of them plus the duration of the update; the real update takes place while the next actions
    still have time.

    Records bear the emulated device's times, on the lab's clock: from the line, but never from before the end of what
    was recorded before, which only an overrun makes the later of the two.
    """

    def __init__(self, compute: Paced, stage: int, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self._dilation = compute.dilation
        forward, backward = ((ns * (stage + 1))[stage] for ns in (compute.forward_ns, compute.backward_ns))
        self._durations_ns: dict[ActionKind, int] = {"F": forward * compute.dilation, "B": backward * compute.dilation}
        self._update_ns = compute.update_ns * compute.dilation
        self._line_ns = self._recorded_ns = self._clock.now()
        self._arrived_ns = self._due_ns = self._began_ns = self._maths_ns = 0

    def start(self) -> int:
        return self._recorded_ns

    def ask(self, kind: ActionKind, microbatch: int) -> None:
        self._clock.wait_until(self._line_ns)  # maths done ahead of time would take the processor from another stage's
        super().ask(kind, microbatch)
        self._arrived_ns = self._line_ns

    def received(self, arrived_ns: int, input_ns: int, decoded_ns: int) -> None:
        super().received(arrived_ns, input_ns, decoded_ns)
        self._arrived_ns = arrived_ns

    def begin(self) -> None:
        decode_ns = (self._decoded_ns - self._input_ns) * self._dilation
        self._asked_ns = max(self._line_ns, self._recorded_ns)
        self._input_ns = max(self._asked_ns, self._arrived_ns)
        self._decoded_ns = self._input_ns + decode_ns
        self._due_ns = max(self._line_ns, self._arrived_ns) + decode_ns + self._durations_ns[self._kind]
        self._began_ns = self._clock.now()

    def done(self) -> None:
        self._maths_ns = self._clock.now()
        self._computed_ns = self._encoded_ns = max(self._maths_ns, self._due_ns)
        self._line_ns = self._due_ns

    def encoded(self) -> int:
        self._line_ns += (self._clock.now() - self._maths_ns) * self._dilation
        return self._line_ns

    def record(self) -> ActionRecord:
        # An action that began late because of an overrun before it may have made up for more than its decoding took.
        self._decoded_ns = min(self._decoded_ns, self._computed_ns)
        self._input_ns = min(self._input_ns, self._decoded_ns)
        record = super().record()
        self._recorded_ns = record.encoded_ns
        times = {"began_ns": self._began_ns, "maths_ns": self._maths_ns, "due_ns": self._due_ns}
        return record.model_copy(update=times)

    def end(self) -> tuple[int, int]:
        return self._recorded_ns, self._line_ns

    def synchronised(self, line_ns: int) -> int:
        self._line_ns = line_ns
        self._recorded_ns = max(line_ns, self._recorded_ns)
        return self._recorded_ns

    def leave(self, update: bool) -> int:
        if update:
            self._line_ns += self._update_ns
        self._recorded_ns = max(self._line_ns, self._recorded_ns)
        return self._recorded_ns


def stopwatch_for(compute: Measured | Paced, stage: int) -> Stopwatch:
    """Return what takes a stage's times."""
    return Pacer(compute, stage) if isinstance(compute, Paced) else Stopwatch()

"""Hold each action to the duration that it has on the device being emulated, while the real maths is done.

Time is kept on a virtual line of its own: an action begins when its input is at hand or when the one before it ended there,
whichever is later, and ends after its duration. The process sleeps until that moment. An action that the machine could not
finish in its slot is an overrun: the line does not move for it, so the next action begins where it would have begun, and a delay
of a millisecond is made up for instead of adding up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import Literal

Kind = Literal["F", "B"]
_PR_SET_TIMERSLACK = 29
_PRIORITY = 1


def become_prompt() -> str:
    """Ask for exact timers and the lowest real-time priority; the scheduling class that was granted."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    with contextlib.suppress(PermissionError):  # what was granted is recorded; overruns show what it costs
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    return "SCHED_RR" if os.sched_getscheduler(0) == os.SCHED_RR else "SCHED_OTHER"


class Pacer:
    """The virtual line of one stage."""

    def __init__(self, forward_ns: int, backward_ns: int) -> None:
        """How long one micro-batch takes on the emulated device, forward and backward."""
        self._durations: dict[Kind, int] = {"F": forward_ns, "B": backward_ns}
        self._free_ns = 0
        self._began_ns = 0

    def begin(self, at_hand_ns: int) -> None:
        """An action begins; its input was at hand at `at_hand_ns`, perhaps while the one before it was still at work."""
        self._began_ns = max(self._free_ns, at_hand_ns)

    def hold(self, kind: Kind) -> int:
        """The maths of the action is done: wait until its slot ends. Nanoseconds by which it overran, 0 if it did not."""
        self._free_ns = end = self._began_ns + self._durations[kind]
        now = time.monotonic_ns()
        if now >= end:
            return now - end
        while now < end:
            time.sleep((end - now) * 1e-9)
            now = time.monotonic_ns()
        return 0

    def spent(self, duration_ns: int) -> None:
        """Something that is not emulated, such as encoding, took so long after the action."""
        self._free_ns += duration_ns

    def resume(self, now_ns: int) -> None:
        """The line goes on from here: after an optimiser step or an evaluation, which take what they take."""
        self._free_ns = max(self._free_ns, now_ns)

"""The relay process: reads its ports as one JSON line, becomes real-time, reports that, forwards packets until its
input ends.

Started by `testbed.net.relay.client.Relay`. It imports little, to start fast and to be small when locked in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from typing import Any

from testbed.net.relay.control import Control
from testbed.process import Parent

PRIORITY = 50
_MCL_CURRENT_AND_FUTURE = 3
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_POLICIES = {getattr(os, name): name for name in ("SCHED_OTHER", "SCHED_FIFO", "SCHED_RR", "SCHED_BATCH")}
_libc = ctypes.CDLL(None, use_errno=True)


def become_real_time() -> dict[str, Any]:
    """Request a real-time priority, locked memory and exact timers; returns the settings granted by the kernel.

    A refusal is not an error: the certificate measures its cost.
    """
    with contextlib.suppress(PermissionError):  # the granted settings are read back below
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    locked = _libc.mlockall(_MCL_CURRENT_AND_FUTURE) == 0
    _libc.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
    policy = os.sched_getscheduler(0)
    return {
        "scheduling": _POLICIES.get(policy, str(policy)),
        "priority": os.sched_getparam(0).sched_priority,
        "memory_locked": locked,
        "timer_slack_ns": _libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0),
    }


def main() -> None:
    """Run one relay, until the end of its input."""
    parent = Parent()
    control = Control(parent)
    gc.disable()  # the loop makes no cycles, and a collection would cause lateness
    gc.freeze()
    parent.answer({**become_real_time(), **control.settings()})
    control.engine.run()


if __name__ == "__main__":
    main()

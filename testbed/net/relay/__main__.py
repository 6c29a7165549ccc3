"""The relay process: takes its ports as one JSON line, becomes real-time, says so, carries packets until its input ends.

Started by `testbed.net.relay.Relay`. Imports little, so that it starts fast and is small when locked into memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
from typing import Any

from testbed.net.relay.engine import Engine, EnginePort
from testbed.net.relay.pipe import Shaper, Unshaped
from testbed.process import die_with_parent

PRIORITY = 50
_MCL_CURRENT_AND_FUTURE = 3
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30
_POLICIES = {os.SCHED_OTHER: "SCHED_OTHER", os.SCHED_FIFO: "SCHED_FIFO", os.SCHED_RR: "SCHED_RR", os.SCHED_BATCH: "SCHED_BATCH"}
_libc = ctypes.CDLL(None, use_errno=True)


def become_real_time() -> dict[str, Any]:
    """Ask for a real-time priority, locked memory and exact timers; the result is what the kernel says it granted.

    A refusal is not an error here: the certificate measures what it costs.
    """
    with contextlib.suppress(PermissionError):  # what was granted is read back below and written into the result
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


def _pipe(asked: dict[str, Any] | None, overhead_bytes: int, stream: int) -> Shaper | Unshaped:
    return Unshaped() if asked is None else Shaper(**asked, overhead_bytes=overhead_bytes, stream=stream)


def _say(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def main() -> None:
    """One relay, from its first line of input to the end of its input."""
    with open(0, "rb", buffering=0, closefd=False) as requests:  # unbuffered: what follows the line is for the loop
        asked = json.loads(requests.readline())
    die_with_parent(asked["parent"])
    ports = [
        EnginePort(
            port["name"],
            port["address"],
            port["fd"],
            _pipe(port["up"], port["overhead_bytes"], 2 * index),
            _pipe(port["down"], port["overhead_bytes"], 2 * index + 1),
        )
        for index, port in enumerate(asked["ports"])
    ]

    def control() -> bool:
        request = os.read(0, 1)  # every request is one byte; nothing at all is the end
        if request:
            _say(engine.counters())
        return bool(request)

    engine = Engine(ports, 0, control)
    gc.disable()  # the loop makes no cycles, and a collection would be felt as lateness
    gc.freeze()
    settings = become_real_time()
    pipes = {port.name: {"up": port.up.settings(), "down": port.down.settings()} for port in ports}
    _say({**settings, "ports": pipes})
    engine.run()


if __name__ == "__main__":
    main()

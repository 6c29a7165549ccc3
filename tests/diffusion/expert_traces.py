"""Traces of sampling by experts, with durations as a test wants them."""

from __future__ import annotations

from typing import Any

from testbed.diffusion.dit import TOP
from testbed.diffusion.experts import ExpertProgram
from testbed.diffusion.programs import Costs, trace_of
from testbed.jobs.sampling import Compute
from testbed.trace.format import Trace


def expert_trace(
    program: ExpertProgram, own_ns: int, experts_ns: int, frame_bytes: dict[Any, int], *, requests: int = 1
) -> Trace:
    """Return the trace of requests, one per step, like `programs.trace_of`.

    Per layer and step, `own_ns` is the time of attention, router and shared expert for a worker's images; `experts_ns`
    that of its experts for all images, half if only one slot is sent. `frame_bytes`: size of each `Crossing`.
    """

    def work_ns(action: Compute) -> int:
        if action.task == "experts":
            return round(experts_ns * len(program.slots(action.layer, action.step)) / TOP)
        return own_ns if action.task == "own" else 0

    return trace_of(program.actions(), Costs(work_ns, frame_bytes.__getitem__), requests=requests)

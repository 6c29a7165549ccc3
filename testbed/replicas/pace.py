"""When the emulated device of a worker is done with what. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from testbed.pipeline.pacing import wait_until
from testbed.records import ActionKind, ActionRecord
from testbed.spec import DataParallelSpec, Paced, PipelineSpec

_Result = TypeVar("_Result")


class WorkerTimes(NamedTuple):
    """How long a worker takes, in the lab's nanoseconds."""

    local_ns: int
    """For a local step; with an update of its own where workers send what local steps changed."""
    update_ns: int
    """To apply an aggregate."""


def worker_times(compute: Paced, data: DataParallelSpec, pipeline: PipelineSpec, worker: int) -> WorkerTimes:
    """Return the durations of one worker."""
    forward_ns, backward_ns = ((ns * data.workers)[worker] for ns in (compute.forward_ns, compute.backward_ns))
    parts = data.parts[worker] * pipeline.microbatches * pipeline.accumulation
    local_ns = parts * (forward_ns + backward_ns) + (compute.update_ns if data.outer is not None else 0)
    return WorkerTimes(local_ns * compute.dilation, compute.update_ns * compute.dilation)


class Line:
    """The emulated device's time: what it does begins where the last ended, or when its input has come.

    It goes on from where work was due, not from when a process woke up, so that lateness does not add up.
    """

    def __init__(self) -> None:
        self.at_ns = time.monotonic_ns()

    def work(
        self, kind: ActionKind, step: int, duration_ns: int, maths: Callable[[], _Result], arrived_ns: int = 0
    ) -> tuple[_Result, ActionRecord]:
        """Do the maths, and return when the device would have, with what came of it. What is to take no time is not
        held to it: no overrun is noted.
        """
        asked_ns = self.at_ns
        input_ns = max(asked_ns, arrived_ns)
        began_ns = time.monotonic_ns()
        result = maths()
        maths_ns = time.monotonic_ns()
        due_ns = self.at_ns = input_ns + duration_ns
        wait_until(due_ns)
        computed_ns = max(maths_ns, due_ns)
        paced = {"began_ns": began_ns, "maths_ns": maths_ns, "due_ns": due_ns} if duration_ns else {}
        return result, ActionRecord(
            kind=kind,
            microbatch=step,
            asked_ns=asked_ns,
            input_ns=input_ns,
            decoded_ns=input_ns,
            computed_ns=computed_ns,
            encoded_ns=computed_ns,
            **paced,
        )

"""When the emulated device of a worker is done with what. No torch."""

from __future__ import annotations

from typing import NamedTuple

from testbed.spec import DataParallelSpec, Paced, PipelineSpec


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

"""A data parallel recipe's initial decision, and durations of work and codecs on an emulated device. No torch."""

from __future__ import annotations

from typing import NamedTuple

from testbed.codecs.catalogue.placement import parse_placement
from testbed.jobs.actions import Action, Decode, Encode, Key
from testbed.jobs.decision import Decision
from testbed.nodes.fragments import in_turn
from testbed.runtime.pacing import CodecTimes, Coding
from testbed.spec import DataParallelSpec, Paced, PipelineSpec, Recipe


class WorkerTimes(NamedTuple):
    """Durations of a worker's work, in the lab's nanoseconds."""

    local_ns: int
    """Duration of a local step, including its own update where workers send the change made by local steps."""
    update_ns: int
    """Duration of applying an aggregate."""


def worker_times(compute: Paced, data: DataParallelSpec, pipeline: PipelineSpec, worker: int) -> WorkerTimes:
    """Return the durations of one worker."""
    forward_ns, backward_ns = ((ns * data.workers)[worker] for ns in (compute.forward_ns, compute.backward_ns))
    parts = data.parts[worker] * pipeline.microbatches * pipeline.accumulation
    local_ns = parts * (forward_ns + backward_ns) + (compute.update_ns if data.outer is not None else 0)
    return WorkerTimes(local_ns * compute.dilation, compute.update_ns * compute.dilation)


def coding_ns(data: DataParallelSpec, coding: Coding, action: Action) -> int:
    """Return the duration of encoding a message, or of decoding messages."""

    def times(key: Key) -> CodecTimes:
        return in_turn(coding, key.step)[key.part if data.exchange == "all-reduce" else key.origin]

    if isinstance(action, Encode):
        return times(action.key).encode_ns
    assert isinstance(action, Decode)
    return sum(times(message.key).decode_ns for message in action.messages)


def as_stated(recipe: Recipe) -> Decision:
    """Return a recipe's initial decision."""
    data = recipe.data
    assert data is not None
    placement, workers = parse_placement(recipe.codec), range(data.workers)
    return Decision(
        effective_from=0,
        staleness=tuple(map(data.staleness_of, workers)),
        local_steps=tuple(map(data.local_steps_of, workers)),
        codecs=tuple(placement.at(worker, "backward").text for worker in workers),
    )

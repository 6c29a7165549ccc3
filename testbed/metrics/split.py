"""Where the time of a step went, averaged over the stages.

compute  forward, backward, clipping and update
codec    encode and decode
wire     waiting for an input while its frame was between the sender's first byte and our last
wait     the rest: the input's sender was not ready, the other stages had not reached the end of the step (the gradient norm and
         its exchange included), and the little between two actions: hand-over between threads, writing of the records
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from testbed.metrics.spans import Activity, spans
from testbed.metrics.steps import Step
from testbed.records import StepRecord

_COMPUTE, _CODEC, _WIRE = range(3)
_PARTS: dict[Activity, int] = {
    "forward": _COMPUTE,
    "backward": _COMPUTE,
    "update": _COMPUTE,
    "encode": _CODEC,
    "decode": _CODEC,
    "wire": _WIRE,
}


class Shares(NamedTuple):
    """Parts of a step's time, 0..1, adding up to 1."""

    compute: float
    codec: float
    wire: float
    wait: float


def _intervals(record: StepRecord) -> Iterator[tuple[int, int, int]]:
    """(from, to, part) in nanoseconds; what no interval covers is wait."""
    for span in spans(record):
        if (part := _PARTS.get(span.activity)) is not None:
            yield span.begin_ns, span.end_ns, part


def split_shares(steps: Sequence[Step], chosen: Sequence[Step]) -> Shares | None:
    """How the time of the chosen steps divides, all their time and all stages taken together; None when they took no time.

    `steps` are all aligned steps: a stage that is ahead is already in the next one when the step ends.
    """
    windows = [(step.begin_ns, step.end_ns) for step in chosen]
    total = sum(end - begin for begin, end in windows)
    if total <= 0:
        return None
    stages = len(chosen[0].records)
    spent = np.zeros(3)
    for stage in range(stages):
        found = [item for step in steps for item in _intervals(step.records[stage])]
        if not found:
            continue
        begins, ends, parts = np.array(found, dtype=np.int64).T
        for begin, end in windows:
            overlap = np.clip(np.minimum(ends, end) - np.maximum(begins, begin), 0, None)
            spent += np.bincount(parts, weights=overlap, minlength=3)
    compute, codec, wire = (float(part) / (total * stages) for part in spent)
    return Shares(compute, codec, wire, 1.0 - compute - codec - wire)

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

from testbed.metrics.steps import Step
from testbed.records import StepRecord

_COMPUTE, _CODEC, _WIRE = range(3)


class Shares(NamedTuple):
    """Parts of a step's time, 0..1, adding up to 1."""

    compute: float
    codec: float
    wire: float
    wait: float


def _intervals(record: StepRecord) -> Iterator[tuple[int, int, int]]:
    """(from, to, part) in nanoseconds; what no interval covers is wait."""
    flights = {(got.direction, got.microbatch): (got.first_byte_ns, got.last_byte_ns) for got in record.received}
    for action in record.actions:
        flight = flights.get(("forward" if action.kind == "F" else "backward", action.microbatch))
        if flight is not None:
            yield max(action.asked_ns, flight[0]), min(action.input_ns, flight[1]), _WIRE
        yield action.input_ns, action.decoded_ns, _CODEC
        yield action.decoded_ns, action.computed_ns, _COMPUTE
        yield action.computed_ns, action.encoded_ns, _CODEC
    if record.synchronised_ns is not None:
        yield record.synchronised_ns, record.end_ns, _COMPUTE


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

"""Timelines of stages in a recorded step, and derived figures: frames in flight, shares of the time, overruns.

A step's time is divided into four parts, averaged over the stages.

compute  forward, backward, clipping and update
codec    encode and decode
wire     waiting for an input in flight, from the sender's first byte to the receiver's last
wait     the rest: the input's sender was not ready, other stages had not reached the end of the step (including the
         exchange of the gradient norm), and overhead between actions: hand-over between threads, writing records
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from testbed.message_key import Direction
from testbed.metrics.steps import PipelineStep
from testbed.records import ActionKind, ActionRecord, ReceivedRecord, SentRecord, StepRecord

Activity = Literal["wait", "wire", "decode", "forward", "backward", "local", "encode", "synchronise", "update"]
"""wait: for an input that had not been sent yet; wire: for an input in flight; synchronise: until the gradient norm of
all stages is known; update: clipping and the optimiser. In data parallel training, local: a local step, forward and
backward; update: an aggregate is applied or computed."""
_COMPUTES: Final[dict[ActionKind, Activity]] = {"F": "forward", "B": "backward", "L": "local", "A": "update"}


class ActivitySpan(NamedTuple):
    """A span of one stage's time."""

    activity: Activity
    begin_ns: int
    end_ns: int
    microbatch: int | None = None
    """None at the end of a step, common to all micro-batches."""


class Flight(NamedTuple):
    """A frame between two stages."""

    sender: int
    receiver: int
    sent: SentRecord
    received: ReceivedRecord | None
    """None if the receiver has no record of it, because the run was interrupted."""

    @property
    def direction(self) -> Direction:
        return self.sent.direction

    @property
    def end_ns(self) -> int:
        """Time of receipt, or, if unknown, the time at which the sender's kernel accepted it."""
        return self.sent.last_byte_ns if self.received is None else self.received.last_byte_ns


def spans(record: StepRecord) -> Iterator[ActivitySpan]:
    """Yield one stage's spans in a step, in order, without empty ones."""
    arrivals = {(got.direction, got.microbatch): got for got in record.received}
    for action in record.actions:
        direction: Direction = "forward" if action.kind == "F" else "backward"
        begin, ready = action.asked_ns, action.input_ns
        arrival = arrivals.get((direction, action.microbatch))
        first, last = (ready, ready) if arrival is None else (arrival.first_byte_ns, arrival.last_byte_ns)
        sent, there = min(max(begin, first), ready), max(begin, min(ready, last))
        times: tuple[tuple[Activity, int, int], ...] = (
            ("wait", begin, sent),
            ("wire", sent, there),
            ("wait", max(sent, there), ready),
            ("decode", ready, action.decoded_ns),
            (_COMPUTES[action.kind], action.decoded_ns, action.computed_ns),
            ("encode", action.computed_ns, action.encoded_ns),
        )
        yield from (
            ActivitySpan(activity, start, end, action.microbatch) for activity, start, end in times if end > start
        )
    if record.optimiser_start_ns is not None and record.synchronised_ns is not None:
        if record.synchronised_ns > record.optimiser_start_ns:
            yield ActivitySpan("synchronise", record.optimiser_start_ns, record.synchronised_ns)
        if record.end_ns > record.synchronised_ns:
            yield ActivitySpan("update", record.synchronised_ns, record.end_ns)


def flights(records: Sequence[StepRecord]) -> Iterator[Flight]:
    """Yield every frame of a step, sender by sender in the order of sending.

    `records`: one per stage, first stage first.
    """
    arrivals = [{(got.direction, got.microbatch): got for got in record.received} for record in records]
    for sender, record in enumerate(records):
        for sent in record.sent:
            if sent.peer is not None:  # the receiver's record may belong to another step
                yield Flight(sender, sent.peer, sent, None)
                continue
            receiver = sender + 1 if sent.direction == "forward" else sender - 1
            yield Flight(sender, receiver, sent, arrivals[receiver].get((sent.direction, sent.microbatch)))


_COMPUTE, _CODEC, _WIRE = range(3)
_PARTS: dict[Activity, int] = {
    "forward": _COMPUTE,
    "backward": _COMPUTE,
    "local": _COMPUTE,
    "update": _COMPUTE,
    "encode": _CODEC,
    "decode": _CODEC,
    "wire": _WIRE,
}


class Shares(NamedTuple):
    """The parts of a step's time, as shares that add up to 1."""

    compute: float
    codec: float
    wire: float
    wait: float


def split_shares(steps: Sequence[PipelineStep], chosen: Sequence[PipelineStep]) -> Shares | None:
    """Divide the total time of the chosen steps over all stages; None if it is 0.

    `steps` are all aligned steps, because a stage that is ahead is already in the next one when the step ends.
    """
    windows = [(step.begin_ns, step.end_ns) for step in chosen]
    total = sum(end - begin for begin, end in windows)
    if total <= 0:
        return None
    stages = len(chosen[0].records)
    spent = np.zeros(3)
    for stage in range(stages):
        timed = (span for step in steps for span in spans(step.records[stage]) if span.activity in _PARTS)
        intervals = [(span.begin_ns, span.end_ns, _PARTS[span.activity]) for span in timed]  # the rest is wait
        begins, ends, parts = np.array(intervals, dtype=np.int64).reshape(-1, 3).T
        for begin, end in windows:
            overlap = np.clip(np.minimum(ends, end) - np.maximum(begins, begin), 0, None)
            spent += np.bincount(parts, weights=overlap, minlength=3)
    compute, codec, wire = (float(part) / (total * stages) for part in spent)
    return Shares(compute, codec, wire, 1.0 - compute - codec - wire)


def overran(action: ActionRecord) -> bool | None:
    """Return whether an action's maths ended after its due time; None if it is not paced."""
    return None if action.maths_ns is None or action.due_ns is None else action.maths_ns > action.due_ns


def overrun_share(steps: Sequence[PipelineStep]) -> float | None:
    """Return the share of overrun actions in `steps`; None if no action is paced."""
    late = [was_late for action in _actions(steps) if (was_late := overran(action)) is not None]
    return sum(late) / len(late) if late else None


def busy_cores(steps: Sequence[PipelineStep]) -> float | None:
    """Return the average number of cores that the maths of all stages' actions kept busy; None if no action is paced.

    Computed as the sum of wall-clock times of maths over the duration of `steps`; decoding, encoding and the optimiser
    are not counted.
    """
    busy_ns = [
        action.maths_ns - action.began_ns
        for action in _actions(steps)
        if action.maths_ns is not None and action.began_ns is not None
    ]
    whole_ns = sum(step.end_ns - step.begin_ns for step in steps)
    return sum(busy_ns) / whole_ns if busy_ns and whole_ns > 0 else None


def _actions(steps: Sequence[PipelineStep]) -> list[ActionRecord]:
    return [action for step in steps for record in step.records for action in record.actions]

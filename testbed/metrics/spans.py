"""What each stage did when, and which frame was under way between which stages: the timeline of a recorded step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from testbed.message_key import Direction
from testbed.records import ReceivedRecord, SentRecord, StepRecord

Activity = Literal["wait", "wire", "decode", "forward", "backward", "encode", "synchronise", "update"]
"""wait: for an input that had not been sent yet; wire: for an input on its way. synchronise: until all stages' gradient norm is
known; update: clipping and the optimiser."""


class Span(NamedTuple):
    """A stretch of one stage's time."""

    activity: Activity
    begin_ns: int
    end_ns: int
    microbatch: int | None = None
    """None at the end of a step, which all micro-batches share."""


class Flight(NamedTuple):
    """A frame between two stages."""

    sender: int
    receiver: int
    sent: SentRecord
    received: ReceivedRecord | None
    """None where the receiver has no record of it: a run that was cut off."""

    @property
    def direction(self) -> Direction:
        return self.sent.direction

    @property
    def end_ns(self) -> int:
        """When the receiver had it; where that is not known, when the sender's kernel had it."""
        return self.sent.last_byte_ns if self.received is None else self.received.last_byte_ns


def spans(record: StepRecord) -> Iterator[Span]:
    """What one stage did in a step, in order; stretches that took no time are left out."""
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
            (direction, action.decoded_ns, action.computed_ns),
            ("encode", action.computed_ns, action.encoded_ns),
        )
        yield from (Span(activity, start, end, action.microbatch) for activity, start, end in times if end > start)
    if record.optimiser_start_ns is not None and record.synchronised_ns is not None:
        if record.synchronised_ns > record.optimiser_start_ns:
            yield Span("synchronise", record.optimiser_start_ns, record.synchronised_ns)
        if record.end_ns > record.synchronised_ns:
            yield Span("update", record.synchronised_ns, record.end_ns)


def flights(records: Sequence[StepRecord]) -> Iterator[Flight]:
    """Every frame of one step, sender by sender in the order of sending. `records`: one of each stage, first stage first."""
    arrivals = [{(got.direction, got.microbatch): got for got in record.received} for record in records]
    for sender, record in enumerate(records):
        for sent in record.sent:
            receiver = sender + 1 if sent.direction == "forward" else sender - 1
            yield Flight(sender, receiver, sent, arrivals[receiver].get((sent.direction, sent.microbatch)))

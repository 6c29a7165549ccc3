from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from testbed.metrics.spans import flights, spans, split_shares
from testbed.metrics.steps import align, measured
from testbed.records import ActionRecord, ReceivedRecord, StepRecord
from tests.synthetic import Pipeline, pipe, profile

LINK = profile("home", pipe(80_000_000, 10_000_000), pipe(80_000_000, 10_000_000))


def recorded() -> list[list[StepRecord]]:
    pipeline = Pipeline(LINK, jitter=0.3)
    for number in range(4):
        pipeline.run(number, warmup=number == 0)
    return pipeline.records


def test_spans_fill_a_stage_from_its_first_action_to_its_end() -> None:
    for records in recorded():
        for record in records:
            found = list(spans(record))
            assert all(one.begin_ns < one.end_ns for one in found)
            assert all(before.end_ns <= after.begin_ns for before, after in pairwise(found))
            assert found[0].begin_ns == record.actions[0].asked_ns
            assert found[-1].end_ns == record.end_ns
            covered = sum(one.end_ns - one.begin_ns for one in found)
            assert covered == record.end_ns - record.actions[0].asked_ns


def test_spans_are_the_parts_of_a_step() -> None:
    steps = align(recorded())
    chosen = measured(steps)
    shares = split_shares(steps, chosen)
    total = sum(step.end_ns - step.begin_ns for step in chosen) * len(chosen[0].records)
    codec = sum(
        span.end_ns - span.begin_ns
        for step in chosen
        for record in step.records
        for span in spans(record)
        if span.activity in ("encode", "decode")
    )
    assert abs(codec / total - shares.codec) < 1e-9


def test_every_frame_is_one_flight() -> None:
    for step in align(recorded()):
        found = list(flights(step.records))
        assert len(found) == sum(len(record.sent) for record in step.records)
        for flight in found:
            assert abs(flight.sender - flight.receiver) == 1
            assert flight.received in step.records[flight.receiver].received
            assert flight.sent.first_byte_ns < flight.end_ns == flight.received.last_byte_ns


@given(st.lists(st.integers(0, 50), min_size=7, max_size=7))
def test_any_arrival_leaves_spans_in_order(steps: list[int]) -> None:
    """It holds whenever the frame was sent and arrived: before the action asked for it, or while it waited."""
    times = [sum(steps[: i + 1]) for i in range(7)]
    first, last, asked, ready, decoded, computed, encoded = (times[i] for i in (0, 2, 1, 3, 4, 5, 6))
    action = ActionRecord(
        kind="F",
        microbatch=0,
        asked_ns=asked,
        input_ns=ready,
        decoded_ns=decoded,
        computed_ns=computed,
        encoded_ns=encoded,
    )
    got = ReceivedRecord(direction="forward", microbatch=0, payload_bytes=1, first_byte_ns=first, last_byte_ns=last)
    record = StepRecord(
        step=0, phase="evaluation", warmup=False, start_ns=0, end_ns=encoded, optimiser_start_ns=None,
        synchronised_ns=None, loss=None, gradient_norm=None, tokens=1,
        actions=(action,), sent=(), received=(got,), counters=None, sockets=(),
    )  # fmt: skip
    found = list(spans(record))
    assert sum(one.end_ns - one.begin_ns for one in found) == encoded - asked
    assert all(before.end_ns == after.begin_ns for before, after in pairwise(found))
    wire = sum(one.end_ns - one.begin_ns for one in found if one.activity == "wire")
    assert wire == max(0, min(ready, last) - max(asked, first))

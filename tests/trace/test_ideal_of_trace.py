"""Links as formulas: what they say of traces, against closed forms."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.metrics.links import InboundWire, Pipes
from testbed.metrics.wires import wire_bytes
from testbed.profiles import load_profile
from testbed.trace.check import check_trace
from testbed.trace.format import Trace
from testbed.trace.simulate import ideal_step_ns, simulate
from testbed.trace.synthetic import pipeline_trace
from tests.trace.made_traces import messages, traces

LINK = load_profile("link(80Mbit, 10ms)")
SIZES = {"stages": 4, "microbatches": 6, "message_bytes": 100_000, "forward_ns": 4_000_000, "backward_ns": 9_000_000}


def pipeline(**changes: object) -> Trace:
    return pipeline_trace(**{**SIZES, "steps": 3, **changes})  # type: ignore[arg-type]


def on_the_wire_ns(size: int) -> int:
    return ceil(wire_bytes(size, LINK) * 8e9 / 80_000_000)


@given(trace=traces())
def test_no_operation_is_earlier_over_links_than_without(trace: Trace) -> None:
    pipes = Pipes("star", (LINK,), len(trace.nodes))
    for without, over in zip(simulate(trace), simulate(trace, links=pipes), strict=True):
        assert all(a <= b for a, b in zip(without.end_ns, over.end_ns, strict=True))


@given(sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
def test_an_inbound_wire_is_busy_for_bits_and_delay(sizes: list[int]) -> None:
    lanes = simulate(messages(*sizes), links=InboundWire(80_000_000, 10_000_000))
    assert lanes[1].end_ns[-1] == pytest.approx(sum(sizes) * 100 + 10_000_000 * len(sizes), abs=len(sizes))


def test_directions_share_an_inbound_wire_and_not_a_pipe() -> None:
    """A middle stage receives as many gradients as activations: with enough in flight one wire takes twice as long."""
    trace = pipeline(microbatches=40, message_bytes=10_000_000, in_flight=6)
    full, inbound = Pipes("line", (LINK,), 4), InboundWire(80_000_000, 0)
    assert 1.6 < ideal_step_ns(trace, inbound) / ideal_step_ns(trace, full) < 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_bound_by_its_links_takes_what_the_closed_form_says(schedule: str) -> None:
    """GPipe fills the pipeline once forward and once backward with messages that take longer than computing."""
    trace = pipeline(message_bytes=1_000_000, schedule=schedule)
    wire_ns, ideal_ns = on_the_wire_ns(1_000_000), ideal_step_ns(trace, Pipes("line", (LINK,), 4))
    # Messages cross 3 boundaries; the last stage begins when it has the first.
    least = 2 * (6 + 3 - 1) * wire_ns
    if schedule == "gpipe":
        compute_and_delay = 4 * (4_000_000 + 9_000_000) + 6 * 10_000_000
        assert ideal_ns == pytest.approx(least + compute_and_delay, rel=0.01)
    else:
        assert ideal_ns < least


def test_a_blocking_stage_computes_nothing_while_its_message_is_on_the_way() -> None:
    links = Pipes("line", (LINK,), 4)
    trace = pipeline(blocking=True, schedule="gpipe", encode_ns=1000, decode_ns=500)
    check_trace(trace, "it")
    blocking = ideal_step_ns(trace, links)
    overlapped = ideal_step_ns(pipeline(schedule="gpipe"), Pipes("line", (LINK,), 4))
    message_ns = on_the_wire_ns(100_000) + 10_000_000
    assert blocking > overlapped
    # The first stage alone: it waits for each message that it sends.
    assert blocking > 6 * (4_000_000 + message_ns)
    assert ideal_step_ns(trace, None) == pytest.approx(ideal_step_ns(pipeline(schedule="gpipe"), None), rel=0.01)

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from testbed.errors import ResultsError
from testbed.metrics import align
from testbed.metrics.ideal import ideal_step_s
from testbed.metrics.wires import HEADER_BYTES, Wires, wire_bytes
from testbed.profiles import Change, LinkProfile, Schedule
from tests.synthetic import Pipeline, pipe, profile

UNSHAPED = profile("unshaped")
CLOSE_S = 0.001
"""Packets of 1500 bytes at the slowest rate below take 0.6 ms; a fluid may be early or late by about one of them."""

rates = st.integers(20_000_000, 400_000_000)
delays = st.integers(0, 30_000_000)
links = st.builds(lambda u, d, a, b: profile("x", pipe(u, a), pipe(d, b)), rates, rates, delays, delays)
shapes = st.fixed_dictionaries(
    {
        "stages": st.integers(1, 4),
        "microbatches": st.integers(1, 5),
        "forward_ns": st.integers(0, 5_000_000),
        "backward_ns": st.integers(0, 9_000_000),
        "codec_ns": st.integers(0, 500_000),
        "payload_bytes": st.integers(1, 60_000),
    }
)


def wires(pipeline: Pipeline, link: LinkProfile | None = None) -> Wires:
    what = pipeline.cell if link is None else pipeline.cell.model_copy(update={"profiles": (link,)})
    return Wires(what, pipeline.played_at_ns)


def ideal_of(pipeline: Pipeline, link: LinkProfile | None = None) -> float:
    """Return the ideal duration of the step after the first, on the pipeline's link or another one."""
    if not pipeline.records[0]:
        pipeline.run(0).run(1)
    step = align(pipeline.records)[1]
    return ideal_step_s(wires(pipeline, link), step.records, step.free_ns)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, link=links, jitter=st.floats(0.05, 1), seed=st.integers(0, 9))
def test_ideal_is_never_above_what_was_measured(
    shape: dict[str, int], link: LinkProfile, jitter: float, seed: int
) -> None:
    pipeline = Pipeline(link, **{**shape, "stages": min(2, shape["stages"])}, jitter=jitter, seed=seed)
    ideal = ideal_of(pipeline)
    assert 0 < ideal <= align(pipeline.records)[1].seconds + 2 * CLOSE_S * shape["microbatches"]


@settings(max_examples=60, deadline=None)
@given(shape=shapes, up=st.integers(20_000_000, 100_000_000), delay=delays)
def test_middle_stages_share_their_links_as_packets_do(shape: dict[str, int], up: int, delay: int) -> None:
    """The link is like cable: its downlink takes what two neighbours can send, so only the uplink orders frames."""
    pipeline = Pipeline(profile("x", pipe(up, delay), pipe(4 * up, delay)), **{**shape, "stages": 4})
    ideal = ideal_of(pipeline)
    measured = align(pipeline.records)[1].seconds
    assert ideal == pytest.approx(measured, abs=2 * CLOSE_S * (shape["microbatches"] + 4))


@settings(max_examples=60, deadline=None)
@given(shape=shapes, link=links, faster=st.floats(1, 5), nearer=st.floats(0, 1))
def test_a_better_link_is_never_slower(shape: dict[str, int], link: LinkProfile, faster: float, nearer: float) -> None:
    better = profile(
        "better",
        pipe(round(link.up.rate_bps * faster), round(link.up.delay_ns * nearer)),
        pipe(round(link.down.rate_bps * faster), round(link.down.delay_ns * nearer)),
    )
    pipeline = Pipeline(link, **{**shape, "stages": min(2, shape["stages"])})
    slow = ideal_of(pipeline)
    assert ideal_of(pipeline, UNSHAPED) <= ideal_of(pipeline, better) + 1e-9 <= slow + 2e-9


def test_one_message_each_way_over_links_of_their_own() -> None:
    slow, fast = (
        profile("slow", pipe(10_000_000, 7_000_000), pipe(30_000_000, 2_000_000)),
        profile("fast", layer="ethernet"),
    )
    fast = fast.model_copy(update={"down": pipe(300_000_000, 5_000_000)})
    pipeline = Pipeline(
        (slow, fast), stages=2, microbatches=1, codec_ns=0, forward_ns=0, backward_ns=0, update_ns=0
    ).run(0)
    frame = pipeline.records[0][0].sent[0].frame_bytes
    last = wire_bytes(frame % 1448, fast)  # the packet that is not full
    there = wire_bytes(frame, slow) * 8 / 10e6 + last * 8 / 300e6 + 0.012  # slow's uplink, then fast's downlink
    back = wire_bytes(frame, slow) * 8 / 30e6 + 0.002  # fast's uplink is unshaped, then slow's downlink
    assert ideal_step_s(wires(pipeline), [one[0] for one in pipeline.records]) == pytest.approx(
        there + back + 2e-4, abs=1e-6
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(shape=shapes, first=links, second=links, third=links)
def test_a_line_has_one_pipe_each_way_between_neighbours(
    shape: dict[str, int], first: LinkProfile, second: LinkProfile, third: LinkProfile
) -> None:
    """No two senders share a pipe, so packets and bits agree, except for the 50 us between two steps, and where a
    message that follows another fills up its last packet, which saves its header.
    """
    pipeline = Pipeline((first, second, third), **{**shape, "stages": 4}, topology="line")
    ideal, measured = ideal_of(pipeline), align(pipeline.records)[1].seconds
    saved_s = 3 * 2 * shape["microbatches"] * HEADER_BYTES * 8 / 20e6
    assert measured - saved_s - 60e-6 <= ideal <= measured + 60e-6


@settings(max_examples=60, deadline=None)
@given(shape=shapes, first=links, second=links)
def test_fluid_and_packets_agree_over_a_star_where_one_neighbour_sends(
    shape: dict[str, int], first: LinkProfile, second: LinkProfile
) -> None:
    pipeline = Pipeline((first, second), **{**shape, "stages": 2})
    assert ideal_of(pipeline) == pytest.approx(
        align(pipeline.records)[1].seconds, abs=CLOSE_S * 2 * shape["microbatches"]
    )


def schedule(*steps: tuple[int, int, int], repeat_ms: int | None = None) -> Schedule:
    """Make a schedule of (at ms, Mbit/s, delay ms)."""
    changes = [
        Change(at_ns=at * 1_000_000, rate_bps=rate * 1_000_000, delay_ns=delay * 1_000_000, jitter_ns=0, loss=None)
        for at, rate, delay in steps
    ]
    return Schedule(changes=tuple(changes), repeat_ns=None if repeat_ms is None else repeat_ms * 1_000_000)


def _varying(rate: int, then: int, delay: int, change: int, first: int, length: int) -> LinkProfile:
    steps = (first, rate, delay), (first + length, then, delay + change)
    return profile(
        "varying",
        pipe(50_000_000, 1_000_000, schedule(*steps, repeat_ms=first + 2 * length)),
        pipe(200_000_000, 2_000_000),
    )


rate_mbps, stretch_ms = st.integers(20, 400), st.integers(1, 60)
varying_rate = st.builds(_varying, rate_mbps, rate_mbps, st.integers(0, 30), st.just(0), st.integers(1, 40), stretch_ms)
varying_delay = st.builds(
    _varying, rate_mbps, rate_mbps, st.integers(0, 30), st.integers(0, 20), st.integers(1, 40), stretch_ms
)


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    link=varying_rate | varying_delay,
    topology=st.sampled_from(["star", "line"]),
    before_ms=st.integers(0, 200),
)
@example(  # a packet goes 1 ms before the schedule's first delay, 13 ms, replaces the link's own, 1 ms
    shape={"microbatches": 2, "forward_ns": 0, "backward_ns": 0, "codec_ns": 120_325, "payload_bytes": 3_991},
    link=_varying(20, 20, 13, 0, 15, 2),
    topology="star",
    before_ms=0,
)
def test_a_varying_link_is_followed_from_the_moment_it_was_played(
    shape: dict[str, int], link: LinkProfile, topology: str, before_ms: int
) -> None:
    """Packets keep the rate and delay that they begin with, bits change at once: about a packet's time each step.

    What is sent within that time of a change of the delay may have the other delay, once each way.
    """
    shape = {**shape, "stages": 2}
    played = 1_000_000_000 - before_ms * 1_000_000
    pipeline = Pipeline(link, **shape, topology=topology, played_at_ns=played)
    ideal = ideal_of(pipeline)
    delays = [link.up.delay_ns, *(change.delay_ns or 0 for change in link.up.schedule.changes)]
    close_s = 2 * CLOSE_S * (shape["microbatches"] + 4) + 2 * (max(delays) - min(delays)) / 1e9
    assert ideal == pytest.approx(align(pipeline.records)[1].seconds, abs=close_s)


def test_ethernet_counts_fourteen_bytes_a_packet_more() -> None:
    assert wire_bytes(2 * 1448, profile(layer="ethernet")) == wire_bytes(2 * 1448, UNSHAPED) + 28 == 2 * 1514


@pytest.mark.parametrize(
    ("field", "left", "said"),
    [
        ("sent", slice(1), "stage 0: the records have no forward message 1"),
        ("actions", slice(None, None, -1), "never arrives"),
    ],
)
def test_a_frame_that_is_missing_or_an_impossible_order_is_named(field: str, left: slice, said: str) -> None:
    pipeline = Pipeline(UNSHAPED, stages=2).run(0)
    first, second = (records[0] for records in pipeline.records)
    with pytest.raises(ResultsError, match=said):
        ideal_step_s(wires(pipeline), [first.model_copy(update={field: getattr(first, field)[left]}), second])

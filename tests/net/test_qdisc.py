"""The netem plan: how a pipe becomes the kernel's numbers, and that bytes and plan say the same."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import ShapingError, SpecError
from testbed.net.kernel import netem
from testbed.net.kernel.netem_plan import U32_MAX, Gemodel, NetemPlan, SlotPlan, plan_netem, share_u32
from testbed.profiles import Bernoulli, Change, GilbertElliott, Pipe, Schedule
from testbed.profiles.timeline import timeline
from tests import synthetic
from tests.drawn_links import pipes

_MTU = st.integers(576, 9000)
_LAYER = st.sampled_from(["ip", "ethernet"])
PIPE = synthetic.pipe(80_000_000, 10_000_000, buffer_bytes=1_000_000)


def changed(**update: object) -> Pipe:
    """PIPE with other numbers, checked as if read from a file."""
    return Pipe.model_validate({**dict(PIPE), **update})


@given(pipes(netem=True), _MTU, _LAYER)
def test_bytes_say_what_the_plan_says(pipe: Pipe, mtu: int, layer: str) -> None:
    for step in (None, *timeline(pipe).steps):
        plan = plan_netem(pipe, mtu=mtu, layer=layer, step=step)
        assert netem.unpack_options(netem.pack_options(plan)) == plan


@given(pipes(netem=True), _MTU, _LAYER)
def test_a_change_leaves_out_only_what_would_begin_afresh(pipe: Pipe, mtu: int, layer: str) -> None:
    plan = plan_netem(pipe, mtu=mtu, layer=layer)
    assert netem.unpack_options(netem.pack_options(plan, afresh=False)) == plan._replace(seed=None, slot=None)


@given(pipes(netem=True), _MTU, _LAYER)
def test_the_limit_holds_what_the_pipe_holds_at_any_time_to_the_nearest_packet(
    pipe: Pipe, mtu: int, layer: str
) -> None:
    packet = mtu + (14 if layer == "ethernet" else 0)
    wait_ns = pipe.slot.wait_max_ns if pipe.slot else 0
    own = [(pipe.rate_bps, pipe.delay_ns, pipe.jitter_ns)]
    steps = timeline(pipe).steps
    times = own + [(s.rate_bps, s.delay_ns, s.jitter_ns) for s in steps]
    held_bytes = max(rate * (delay + jitter + wait_ns) for rate, delay, jitter in times) / 8e9 + pipe.buffer_bytes
    limits = {plan_netem(pipe, mtu=mtu, layer=layer, step=step).limit_packets for step in (None, *steps)}
    assert len(limits) == 1
    limit = limits.pop()
    # To the nearest packet; one is being sent.
    assert abs((limit - 1) * packet - held_bytes) <= packet / 2 + 1 + 1e-12 * held_bytes


@given(pipes(netem=True), _MTU)
def test_a_netem_packet_lasts_as_long_as_the_pipe_says(pipe: Pipe, mtu: int) -> None:
    for layer, ethernet in (("ip", 0), ("ethernet", 14)):
        plan = plan_netem(pipe, mtu=mtu, layer=layer)
        frame = mtu + 14  # what netem sees on a veth device
        assert (frame + plan.packet_overhead) * pipe.rate_bps == 8 * plan.rate_bytes * (mtu + ethernet)


@given(pipes(netem=True))
def test_every_share_is_the_pipes_to_the_kernels_last_bit(pipe: Pipe) -> None:
    plan = plan_netem(pipe, mtu=1500, layer="ip")
    shares = [(plan.reorder_u32, pipe.reorder), (plan.duplicate_u32, pipe.duplicate)]
    if isinstance(pipe.loss, GilbertElliott):
        assert plan.gemodel is not None
        assert plan.loss_u32 == 0
        p, r, h, k1 = plan.gemodel
        shares += [(p, pipe.loss.enter_bad), (r, pipe.loss.leave_bad), (k1, pipe.loss.lost_in_good)]
        shares.append((U32_MAX - h, pipe.loss.lost_in_bad))  # tc and the kernel disagree on which of the two is stated
    else:
        assert plan.gemodel is None
        shares.append((plan.loss_u32, pipe.mean_loss))
    for held, asked in shares:
        assert held / U32_MAX == pytest.approx(asked, abs=1 / U32_MAX)
        assert bool(held) == bool(asked)


@given(pipes(netem=True))
def test_a_seed_is_planned_where_something_is_drawn_at_some_time(pipe: Pipe) -> None:
    steps = timeline(pipe).steps
    drawn = pipe.reorder or pipe.duplicate or pipe.loss or pipe.jitter_ns or any(s.loss or s.jitter_ns for s in steps)
    assert plan_netem(pipe, mtu=1500, layer="ip").seed == (pipe.seed if drawn else None)


def test_a_step_takes_the_place_of_what_varies_and_of_nothing_else() -> None:
    loss = Bernoulli(probability=0.5)
    change = Change(at_ns=5, rate_bps=8_000, delay_ns=3, jitter_ns=2, loss=loss)
    pipe = changed(schedule=Schedule(changes=(change,), repeat_ns=None), reorder=0.25, duplicate=0.5)
    before, after = (plan_netem(pipe, mtu=1500, layer="ip", step=step) for step in timeline(pipe).steps)
    assert before == plan_netem(pipe, mtu=1500, layer="ip")
    assert after == before._replace(rate_bytes=1000, latency_ns=3, jitter_ns=2, loss_u32=share_u32(0.5))


def _later(**update: object) -> Schedule:
    numbers = {"rate_bps": 8_000, "delay_ns": 4 * 10**9, "jitter_ns": 0, "loss": None} | update
    return Schedule(changes=(Change.model_validate({"at_ns": 10**9, **numbers}),), repeat_ns=None)


@pytest.mark.parametrize(
    ("pipe", "message"),
    [
        (changed(rate_bps=8_001), r"8001 bit/s is not a whole number of bytes.*multiple of 8"),
        (changed(schedule=_later(rate_bps=8_002)), r"8002 bit/s is not a whole number of bytes"),
        (changed(jitter_ns=5, jitter_reorders=True), r"keeps the order.*'by-jitter'.*--engine relay"),
        (
            changed(delay_ns=3 * 10**9, jitter_ns=2**31),
            r"jitter 2147483648 ns exceeds netem's maximum.*--engine relay",
        ),
        (changed(schedule=_later(jitter_ns=2**31)), r"jitter 2147483648 ns exceeds"),
    ],
    ids=["rate", "later-rate", "by-jitter", "jitter", "later-jitter"],
)
def test_what_netem_cannot_do_is_refused_before_anything_starts(pipe: Pipe, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan_netem(pipe, mtu=1500, layer="ip")


PLAN = NetemPlan(
    rate_bytes=10_000_000,
    packet_overhead=-14,
    latency_ns=10_000_000,
    jitter_ns=1_000_000,
    limit_packets=700,
    loss_u32=5,
    gemodel=Gemodel(1, 2, 3, 4),
    reorder_u32=6,
    duplicate_u32=7,
    corrupt_u32=9,
    slot=SlotPlan(1, 2, 3, 4),
    seed=8,
)


def _attribute(kind: int, content: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(content), kind) + content


@pytest.mark.parametrize(
    ("kind", "content", "name"),
    [
        (1, struct.pack("=3I", 0, 1, 0), "correlation"),
        (3, struct.pack("=2I", 6, 1), "correlation"),
        (4, struct.pack("=2I", 1, 5), "correlation"),
        (5, _attribute(1, struct.pack("=5I", 1, 2, 3, 4, 5)), "other than Gilbert-Elliott"),
        (6, struct.pack("=IiIi", 1, 0, 48, 5), "cells"),
        (7, struct.pack("=I", 1), "ecn"),
        (12, struct.pack("=qqiiqq", 1, 2, 3, 4, 5, 0), "slot table"),
        (3, struct.pack("=2I", 0, 0), "gap 1"),
    ],
)
def test_an_effect_that_nobody_asked_for_is_refused(kind: int, content: bytes, name: str) -> None:
    with pytest.raises(ShapingError, match=name):
        netem.unpack_options(netem.pack_options(PLAN) + _attribute(kind, content))


@pytest.mark.parametrize("kind", [1, 3, 4, 6, 7, 8, 10, 11, 12, 14])
def test_an_attribute_of_another_size_is_refused(kind: int) -> None:
    with pytest.raises(ShapingError, match=r"attribute has 44 bytes, expected \d+"):
        netem.unpack_options(netem.pack_options(PLAN) + _attribute(kind, bytes(44)))


def test_a_delay_that_is_stated_in_ticks_only_is_refused() -> None:
    with pytest.raises(ShapingError, match="only in ticks"):
        netem.unpack_options(struct.pack("=6I", 156_250, 700, 0, 0, 0, 0))


_ATTRIBUTES = st.lists(st.tuples(st.integers(0, 16), st.binary(max_size=40)), max_size=6)


def _joined(attributes: list[tuple[int, bytes]]) -> bytes:
    return b"".join(_attribute(kind, content) + bytes(-len(content) % 4) for kind, content in attributes)


@given(st.binary(min_size=24, max_size=24), _ATTRIBUTES, st.binary(max_size=9))
def test_any_bytes_are_a_plan_or_a_shaping_error(
    fixed: bytes, attributes: list[tuple[int, bytes]], rest: bytes
) -> None:
    with contextlib.suppress(ShapingError):
        assert isinstance(netem.unpack_options(fixed + _joined(attributes) + rest), NetemPlan)


@given(_ATTRIBUTES, st.binary(max_size=9))
def test_any_bytes_are_counters_or_a_shaping_error(attributes: list[tuple[int, bytes]], rest: bytes) -> None:
    with contextlib.suppress(ShapingError):
        netem.unpack_statistics(_joined(attributes) + rest)


def test_unpacking_stops_at_an_attribute_that_claims_too_much() -> None:
    with pytest.raises(ShapingError, match="claims"):
        netem.unpack_options(netem.pack_options(PLAN) + struct.pack("=HH", 400, 6))


def test_counters_are_of_ip_packets() -> None:
    basic = _attribute(1, struct.pack("=QI4x", 10 * 1514, 10))
    queue = _attribute(3, struct.pack("=5I", 3, 3 * 114, 4, 5, 6))
    found = netem.unpack_statistics(basic + queue)
    assert (found.packets, found.bytes, found.dropped_buffer, found.backlog_bytes) == (10, 15_000, 4, 300)
    assert found.dropped_loss is None
    many = 2**32 + 10  # the first attribute's number of packets has 32 bits
    wide = netem.unpack_statistics(
        _attribute(1, struct.pack("=QI4x", many * 1514, 10)) + queue + _attribute(8, struct.pack("=Q", many))
    )
    assert (wide.packets, wide.bytes) == (many, many * 1500)

"""The netem plan: how a pipe becomes the kernel's numbers, and that bytes and plan say the same."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import spec
from testbed.errors import ShapingError, SpecError
from testbed.net import qdisc
from testbed.net.qdisc import NetemPlan
from testbed.spec import Pipe

_MTU = st.integers(576, 9000)
_LAYER = st.sampled_from(["ip", "ethernet"])


@st.composite
def pipes(draw: st.DrawFn) -> Pipe:
    return Pipe(
        rate_bps=8 * draw(st.integers(1_000, 12_500_000_000)),
        delay_ns=draw(st.integers(0, 10_000_000_000)),
        buffer_bytes=draw(st.integers(9000, 10**9)),
        loss=draw(st.floats(0, 0.999)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@given(pipes(), _MTU, _LAYER)
def test_bytes_say_what_the_plan_says(pipe: Pipe, mtu: int, layer: str) -> None:
    plan = qdisc.plan(pipe, mtu=mtu, layer=layer)
    assert qdisc.unpack(qdisc.pack(plan)) == plan


@given(pipes(), _MTU, _LAYER)
def test_the_limit_holds_what_the_pipe_holds_and_not_a_packet_more(pipe: Pipe, mtu: int, layer: str) -> None:
    plan = qdisc.plan(pipe, mtu=mtu, layer=layer)
    packet = mtu + (14 if layer == "ethernet" else 0)
    held_bytes = pipe.rate_bps * pipe.delay_ns / 8e9 + pipe.buffer_bytes
    assert held_bytes <= (plan.limit_packets - 1) * packet + 1e-3
    assert (plan.limit_packets - 3) * packet < held_bytes + 1e-3  # three roundings up: in flight, waiting, being sent


@given(pipes(), _MTU)
def test_a_netem_packet_lasts_as_long_as_the_pipe_says(pipe: Pipe, mtu: int) -> None:
    for layer, ethernet in (("ip", 0), ("ethernet", 14)):
        plan = qdisc.plan(pipe, mtu=mtu, layer=layer)
        frame = mtu + 14  # what netem sees on a veth device
        assert (frame + plan.packet_overhead) * pipe.rate_bps == 8 * plan.rate_bytes * (mtu + ethernet)


@given(pipes())
def test_a_seed_is_planned_exactly_where_something_is_drawn(pipe: Pipe) -> None:
    plan = qdisc.plan(pipe, mtu=1500, layer="ip")
    assert (plan.seed == pipe.seed) if plan.loss_u32 else (plan.seed is None)
    assert plan.loss_u32 / (2**32 - 1) == pytest.approx(pipe.loss, abs=2**-32)


def test_a_rate_that_the_kernel_cannot_hold_is_refused() -> None:
    pipe = Pipe(rate_bps=8_001, delay_ns=0, buffer_bytes=10_000, loss=0, seed=0)
    with pytest.raises(SpecError, match="whole number of bytes"):
        qdisc.plan(pipe, mtu=1500, layer="ip")


def test_every_shipped_profile_can_be_planned() -> None:
    for name in spec.profile_files():
        profile = spec.load_profile(name)
        for pipe in (profile.up, profile.down):
            if pipe is not None:
                assert qdisc.plan(pipe, mtu=profile.mtu, layer=profile.layer).limit_packets > 1


PLAN = NetemPlan(rate_bytes=10_000_000, packet_overhead=-14, latency_ns=10_000_000, limit_packets=700, loss_u32=5, seed=7)


def _with_attribute(kind: int, content: bytes) -> bytes:
    return qdisc.pack(PLAN) + struct.pack("=HH", 4 + len(content), kind) + content


@pytest.mark.parametrize(
    ("kind", "name"),
    [(1, "correlation"), (3, "reorder"), (4, "corrupt"), (5, "loss model"), (7, "ecn"), (11, "jitter"), (12, "slot")],
)
def test_an_effect_that_nobody_asked_for_is_refused(kind: int, name: str) -> None:
    with pytest.raises(ShapingError, match=name):
        qdisc.unpack(_with_attribute(kind, struct.pack("=Q", 1)))


@pytest.mark.parametrize(("field", "name"), [(3, "gap"), (4, "duplicate"), (5, "jitter")])
def test_an_effect_in_the_fixed_part_is_refused(field: int, name: str) -> None:
    options = bytearray(qdisc.pack(PLAN))
    struct.pack_into("=I", options, 4 * field, 1)
    with pytest.raises(ShapingError, match=name):
        qdisc.unpack(bytes(options))


_ATTRIBUTES = st.lists(st.tuples(st.integers(0, 16), st.binary(max_size=24)), max_size=6)


@given(st.binary(min_size=24, max_size=24), _ATTRIBUTES, st.binary(max_size=9))
def test_any_bytes_are_a_plan_or_a_shaping_error(fixed: bytes, attributes: list[tuple[int, bytes]], rest: bytes) -> None:
    packed = [struct.pack("=HH", 4 + len(content), kind) + content + bytes(-len(content) % 4) for kind, content in attributes]
    with contextlib.suppress(ShapingError):
        assert isinstance(qdisc.unpack(fixed + b"".join(packed) + rest), NetemPlan)


def test_unpacking_stops_at_an_attribute_that_claims_too_much() -> None:
    with pytest.raises(ShapingError, match="claims"):
        qdisc.unpack(qdisc.pack(PLAN) + struct.pack("=HH", 400, 6))

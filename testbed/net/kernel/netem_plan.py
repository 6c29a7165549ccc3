"""Plan the parameters of sch_netem for a pipe, or for one step of a varying pipe, in the kernel's own units.

Pure. netem.py encodes a plan as netlink bytes, sends it to the kernel, reads it back and compares.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

from testbed.errors import SpecError
from testbed.profiles import Bernoulli, GilbertElliott, Pipe
from testbed.profiles.timeline import TimelineStep, constant_step, timeline

ETHERNET_HEADER_BYTES = 14
"""Bytes that a veth device, and therefore netem on it, counts in addition to each IP packet."""

U32_MAX = 2**32 - 1
"""The kernel's unit for shares: it compares with a draw of 32 bits."""
_JITTER_MAX_NS = 2**31 - 1  # the kernel silently truncates beyond this


class Gemodel(NamedTuple):
    """netem's Gilbert-Elliott model. A packet's loss is drawn in the model's current state."""

    p: int
    """Transition from good to bad."""
    r: int
    """Transition from bad to good."""
    h: int
    """Share that *arrives* in the bad state. (tc takes 1-h, and inverts it, too.)"""
    k1: int
    """1-k: share lost in the good state."""


class SlotPlan(NamedTuple):
    """netem's delivery in bursts: see `profiles.Slot`."""

    min_ns: int
    max_ns: int
    max_packets: int
    max_bytes: int


class NetemPlan(NamedTuple):
    """One direction of a link in sch_netem's own units, so that plans compare exactly.

    Shares (`*_u32` and those of `gemodel`) are in units of 1 / (2**32 - 1).
    """

    rate_bytes: int
    """Bytes per second."""
    packet_overhead: int
    """Added to each packet's length for timing: -14 excludes the Ethernet header."""
    latency_ns: int
    jitter_ns: int
    """Largest deviation from the latency: uniform, no distribution table.

    With a rate netem keeps the packets' order.
    """
    limit_packets: int
    """Maximum packets in netem: on the delay line, waiting for the wire, and the one being sent."""
    loss_u32: int
    """Share of packets lost, drawn independently."""
    gemodel: Gemodel | None
    """Model of burst losses, in place of `loss_u32`."""
    reorder_u32: int
    """Share of packets that overtake the queue, drawn for each packet (gap 1)."""
    duplicate_u32: int
    corrupt_u32: int
    slot: SlotPlan | None
    seed: int | None
    """The seed of all these draws.

    None in a plan means that there are no draws; as read back, that this kernel does not support seeds.
    """

    def describe(self) -> dict[str, Any]:
        """Return the plan for a result file."""
        nested = {"gemodel": self.gemodel and self.gemodel._asdict(), "slot": self.slot and self.slot._asdict()}
        return {"kind": "netem", **self._asdict(), **nested, "loss": self.loss_u32 / U32_MAX}


def plan_netem(
    pipe: Pipe, *, mtu: int, layer: Literal["ip", "ethernet"], step: TimelineStep | None = None
) -> NetemPlan:
    """Plan sch_netem's parameters for a pipe, or for one `step` of it in place of its constant values.

        start = max(now + jitter, free); free = start + bytes * 8 / rate; due = free + delay

    netem times packets by exactly this formula, but bounds its queue by packets, not bytes. `limit_packets` is
    therefore the pipe's capacity in packets of the MTU's size: in flight and in the buffer, to the nearest packet, and
    one being sent. Smaller packets see a shorter queue in bytes than `buffer_bytes`. A varying pipe always uses its
    largest number in flight, because a step to a shorter delay would otherwise drop packets in flight; in other steps
    the difference is additional buffer. Faults count from their begin on, so nothing differs before.

    SpecError for anything that netem cannot do at some time of the pipe: a rate that is not whole bytes per second,
    packets reordered by jitter, a jitter beyond 2.1 s.
    """
    now = step or constant_step(pipe)
    extent = _extent(pipe, now.begun)
    packet_bytes = mtu if layer == "ip" else mtu + ETHERNET_HEADER_BYTES
    half_packets = (extent.in_flight_bits + 8 * pipe.buffer_bytes) // (4 * packet_bytes)
    return NetemPlan(
        rate_bytes=now.rate_bps // 8,
        packet_overhead=-ETHERNET_HEADER_BYTES if layer == "ip" else 0,
        latency_ns=now.delay_ns,
        jitter_ns=now.jitter_ns,
        limit_packets=(half_packets + 1) // 2 + 1,
        loss_u32=share_u32(now.loss.probability) if isinstance(now.loss, Bernoulli) else 0,
        gemodel=_gemodel(now.loss) if isinstance(now.loss, GilbertElliott) else None,
        reorder_u32=share_u32(now.reorder),
        duplicate_u32=share_u32(now.duplicate),
        corrupt_u32=share_u32(now.corrupt),
        slot=SlotPlan(pipe.slot.wait_ns, pipe.slot.wait_max_ns, pipe.slot.packets, pipe.slot.max_bytes)
        if pipe.slot
        else None,
        seed=pipe.seed if extent.draws else None,
    )


def share_u32(share: float) -> int:
    """Convert a share to the kernel's unit. A non-zero share stays non-zero."""
    return max(1, round(share * U32_MAX)) if share else 0


def _gemodel(loss: GilbertElliott) -> Gemodel:
    return Gemodel(
        p=share_u32(loss.enter_bad),
        r=share_u32(loss.leave_bad),
        h=U32_MAX - share_u32(loss.lost_in_bad),
        k1=share_u32(loss.lost_in_good),
    )


@functools.cache
def fastest_bps(pipe: Pipe) -> int:
    """Return the highest rate of a pipe over time."""
    return max(step.rate_bps for step in (constant_step(pipe), *timeline(pipe).steps))


class _Extent(NamedTuple):
    """Extremes of a pipe over time."""

    in_flight_bits: int
    """Maximum bits in flight: sent, delayed by jitter or held by a slot, and not yet arrived."""
    draws: bool
    """Whether there is ever a draw that depends on the seed.

    (Slots do not count, because the kernel draws them from another source.)
    """


@functools.lru_cache(maxsize=512)
def _extent(pipe: Pipe, begun: int) -> _Extent:
    """Return the extremes with the first `begun` faults; draws count all, because a seed is set once."""
    if pipe.jitter_reorders:
        raise SpecError(
            "netem with a rate keeps the order of packets under jitter; for reorder 'by-jitter' use --engine relay"
        )
    steps: tuple[TimelineStep, ...] = (constant_step(pipe), *timeline(pipe).steps)
    faults = pipe.faults or ()
    for rate_bps in [step.rate_bps for step in steps] + [fault.rate_bps or 0 for fault in faults]:
        if rate_bps % 8:
            raise SpecError(
                f"rate {rate_bps} bit/s is not a whole number of bytes per second, the kernel's unit; "
                "choose a multiple of 8"
            )
    for step in steps:
        if step.jitter_ns > _JITTER_MAX_NS:
            raise SpecError(
                f"jitter {step.jitter_ns} ns exceeds netem's maximum of {_JITTER_MAX_NS} ns; use --engine relay"
            )
    slot_ns = pipe.slot.wait_max_ns if pipe.slot else 0
    longest_ns = max((fault.delay_ns or 0 for fault in faults[:begun]), default=0)
    return _Extent(
        in_flight_bits=max(
            -(-s.rate_bps * (max(s.delay_ns, longest_ns) + s.jitter_ns + slot_ns) // 1_000_000_000) for s in steps
        ),
        draws=bool(pipe.reorder or pipe.duplicate or any(s.loss or s.jitter_ns for s in steps))
        or any(fault.effects.keys() - {"rate_bps", "delay_ns"} for fault in faults),
    )

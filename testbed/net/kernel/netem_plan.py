"""Plan what sch_netem is asked for: a pipe, or one step of a pipe that varies, in the kernel's own units.

Pure. netem.py writes a plan as netlink bytes, sends it to the kernel, reads back what it holds and compares.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

from testbed.errors import SpecError
from testbed.profiles import Bernoulli, GilbertElliott, Pipe
from testbed.profiles.timeline import TimelineStep, timeline

ETHERNET_HEADER_BYTES = 14
"""What a veth device, and so netem on it, counts on top of each IP packet."""

U32_MAX = 2**32 - 1
"""The kernel's 1 for a share: it draws 32 bits and compares."""
_JITTER_MAX_NS = 2**31 - 1  # the kernel cuts it there without a word


class Gemodel(NamedTuple):
    """netem's Gilbert-Elliott model. A packet is drawn in the state in which it finds the model."""

    p: int
    """From good to bad."""
    r: int
    """From bad to good."""
    h: int
    """Share that *arrives* in the bad state. (tc is given 1-h, and turns it round as well.)"""
    k1: int
    """1-k: share that is lost in the good state."""


class SlotPlan(NamedTuple):
    """When netem delivers, where it delivers in bursts: see `profiles.Slot`."""

    min_ns: int
    max_ns: int
    max_packets: int
    max_bytes: int


class NetemPlan(NamedTuple):
    """One direction of a link as sch_netem holds it, in the kernel's own units, so that equal means equal.

    Shares (`*_u32` and those of `gemodel`) are in units of 1 / (2**32 - 1).
    """

    rate_bytes: int
    """Bytes per second."""
    packet_overhead: int
    """Added to each packet's length before it is timed: -14 leaves the Ethernet header out."""
    latency_ns: int
    jitter_ns: int
    """Largest deviation from the latency: uniform, no distribution table.

    With a rate netem keeps the packets' order.
    """
    limit_packets: int
    """Packets that netem holds at most: on the delay line, waiting for the wire, and the one being sent."""
    loss_u32: int
    """Packets lost, each drawn by itself."""
    gemodel: Gemodel | None
    """Packets lost in bursts, in place of `loss_u32`."""
    reorder_u32: int
    """Packets that leave at once, before all that wait. Each packet is drawn (gap 1)."""
    duplicate_u32: int
    slot: SlotPlan | None
    seed: int | None
    """The seed of all these draws.

    In a plan None means that nothing is ever drawn; as read back, that this kernel knows none.
    """

    def describe(self) -> dict[str, Any]:
        """Return the plan for a result file."""
        nested = {"gemodel": self.gemodel and self.gemodel._asdict(), "slot": self.slot and self.slot._asdict()}
        return {"kind": "netem", **self._asdict(), **nested, "loss": self.loss_u32 / U32_MAX}


def plan_netem(
    pipe: Pipe, *, mtu: int, layer: Literal["ip", "ethernet"], step: TimelineStep | None = None
) -> NetemPlan:
    """Plan how sch_netem carries out a pipe, or one `step` of it in place of its own rate, delay, jitter and loss.

        start = max(now + jitter, free); free = start + bytes * 8 / rate; due = free + delay

    netem times packets by exactly this formula, but bounds its queue by packets, not bytes. `limit_packets` is
    therefore what the pipe holds when every packet is as large as the MTU: in flight and in the buffer, to the nearest
    packet, and one being sent. Smaller packets find a shorter queue in bytes than `buffer_bytes`. Where the pipe
    varies, the largest number in flight counts at all times, or a step to a shorter delay would drop packets under way;
    in the other steps the difference is buffer.

    SpecError for what netem cannot do at some time of the pipe: a rate that is not whole bytes per second, packets
    reordered by jitter, a jitter beyond 2.1 s.
    """
    extent = _extent(pipe)
    now = step or _own(pipe)
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
        reorder_u32=share_u32(pipe.reorder),
        duplicate_u32=share_u32(pipe.duplicate),
        slot=SlotPlan(pipe.slot.wait_ns, pipe.slot.wait_max_ns, pipe.slot.packets, pipe.slot.max_bytes)
        if pipe.slot
        else None,
        seed=pipe.seed if extent.draws else None,
    )


def share_u32(share: float) -> int:
    """Convert a share to the kernel's unit. One that is not 0 stays so."""
    return max(1, round(share * U32_MAX)) if share else 0


def _gemodel(loss: GilbertElliott) -> Gemodel:
    return Gemodel(
        p=share_u32(loss.enter_bad),
        r=share_u32(loss.leave_bad),
        h=U32_MAX - share_u32(loss.lost_in_bad),
        k1=share_u32(loss.lost_in_good),
    )


def _own(pipe: Pipe) -> TimelineStep:
    return TimelineStep(0, pipe.rate_bps, pipe.delay_ns, pipe.jitter_ns, pipe.loss)


class _Extent(NamedTuple):
    """A pipe over all of its time."""

    in_flight_bits: int
    """The most that is ever under way: sent, late by jitter or held back by a slot, and not yet arrived."""
    draws: bool
    """Whether anything is ever left to chance that a seed decides.

    (Slots are not: the kernel draws them from elsewhere.)
    """


@functools.lru_cache(maxsize=512)
def _extent(pipe: Pipe) -> _Extent:
    if pipe.jitter_reorders:
        raise SpecError(
            "netem with a rate keeps the order of packets under jitter; for reorder 'by-jitter' use --engine relay"
        )
    steps: tuple[TimelineStep, ...] = (_own(pipe), *timeline(pipe).steps)
    for step in steps:
        if step.rate_bps % 8:
            raise SpecError(
                f"rate {step.rate_bps} bit/s is not a whole number of bytes per second, the kernel's unit; "
                "choose a multiple of 8"
            )
        if step.jitter_ns > _JITTER_MAX_NS:
            raise SpecError(
                f"jitter {step.jitter_ns} ns is more than netem's largest, {_JITTER_MAX_NS} ns; use --engine relay"
            )
    slot_ns = pipe.slot.wait_max_ns if pipe.slot else 0
    return _Extent(
        in_flight_bits=max(-(-s.rate_bps * (s.delay_ns + s.jitter_ns + slot_ns) // 1_000_000_000) for s in steps),
        draws=bool(pipe.reorder or pipe.duplicate or any(s.loss or s.jitter_ns for s in steps)),
    )

"""Plan the qdiscs of one direction of a link: netem alone, or netem, then a rate and a queue behind it.

netem gives a packet its time when it enters. That is exact while the rate is constant; when the rate changes, waiting
packets would keep the old one. A pipe that varies or has a queue discipline is therefore a chain:

    netem   delay, jitter, loss, order, copies; no rate
    htb     the rate, from the start of a packet (a bucket of 0 bytes), and under it bfifo, fq_codel or red
    cake    or instead of htb: its own rate and queue

    start = max(now + delay, free); free = start + bytes * 8 / rate; due = start + full packet * 8 / highest rate

A constant pipe whose rate collapses by a fault is netem alone until then, and afterwards the chain behind it:

    netem   its constant rate, and all else
    htb     the rate, from one delay after the fault's begin on

so the queue is behind the delay, which no constant rate shows, and a small packet arrives as late as a full one. Pure;
shaping.py applies plans. Units and layouts are those of linux/pkt_sched.h.
"""

from __future__ import annotations

import math
import struct
from typing import Any, Final, Literal, NamedTuple

from testbed.net.kernel.messages import attribute
from testbed.net.kernel.netem_plan import ETHERNET_HEADER_BYTES, U32_MAX, NetemPlan, fastest_bps, plan_netem
from testbed.profiles import Pipe
from testbed.profiles.timeline import TimelineStep

INSTANT: Final = 1 << 62
"""netem's rate in bytes per second at which no packet takes a nanosecond. (Any rate makes netem keep the order.)"""
_ROOMY_PACKETS: Final = 1 << 20
"""Limit of a netem in which packets are only delayed."""
RED_PACKET_BYTES, RED_SHARE = 1000, 0.02
"""Mean packet and largest drop probability of red: tc's defaults."""
_CODEL_SHIFT = 10

_RATE = struct.Struct("=BBHhHI")  # cell log, link layer, overhead, cell align, smallest packet, bytes/s
_HTB_CLASS = struct.Struct("=5I")  # buffer, ceil's buffer (ticks), quantum, level, priority
_HTB_QDISC = struct.Struct("=5I")  # version, rate2quantum, default class, debug, packets without a class
_SIZES = struct.Struct("=BBhiIIII")  # cell log, size log, cell align, overhead, link layer, smallest, MTU, table size
_RED = struct.Struct("=IIIBBBB")  # limit, min, max (bytes), logarithms of weight, probability and cell, flags
_ETHERNET = 1


class ChildPlan(NamedTuple):
    """A qdisc behind netem, in the kernel's bytes."""

    kind: str
    stated: tuple[tuple[str, Any], ...]
    """For a result file."""
    options: bytes
    """TCA_OPTIONS to set."""
    held: tuple[tuple[int, bytes], ...]
    """Attributes of TCA_OPTIONS that the kernel must report; number 0 stands for options without attributes."""
    of_class: bytes = b""
    """TCA_OPTIONS of htb's only class; reported as set."""


class Shaping(NamedTuple):
    """One direction of a link."""

    netem: NetemPlan
    children: tuple[ChildPlan, ...] = ()
    """From the one next to netem on."""
    sizes: bytes = b""
    """TCA_STAB of netem, the only qdisc that may have one: what all of them count of a packet, if not its frame."""

    def describe(self) -> dict[str, Any]:
        """Return the plan for a result file."""
        behind = {
            "counts_ethernet": not self.sizes,
            "behind": [{"kind": child.kind, **dict(child.stated)} for child in self.children],
        }
        return self.netem.describe() | (behind if self.children else {})


def plan_shaping(
    pipe: Pipe, *, mtu: int, layer: Literal["ip", "ethernet"], step: TimelineStep | None = None
) -> Shaping:
    """Plan a pipe, or one `step` of it in place of its own rate, delay, jitter and loss. Errors as for `plan_netem`."""
    plan = plan_netem(pipe, mtu=mtu, layer=layer, step=step)
    chained = pipe.scheduled or pipe.queue is not None
    collapses = [fault.rate_bps is not None for fault in pipe.faults or ()]
    if not chained and not any(collapses):
        return Shaping(plan)
    frame_bytes = mtu + ETHERNET_HEADER_BYTES
    packet_bytes = frame_bytes + plan.packet_overhead
    late_ns = -(-packet_bytes * 8_000_000_000 // fastest_bps(pipe))
    delayed = plan
    if chained:
        delayed = plan._replace(rate_bytes=INSTANT, latency_ns=plan.latency_ns + late_ns, limit_packets=_ROOMY_PACKETS)
    rate, limit_bytes = plan.rate_bytes, pipe.buffer_bytes
    if pipe.queue == "cake":
        return Shaping(delayed, (_cake(rate, 0 if layer == "ip" else ETHERNET_HEADER_BYTES),))
    match pipe.queue:
        case "fq_codel":
            leaf = _fq_codel(frame_bytes)
        case "red":
            leaf = _red(limit_bytes, rate)
        case _:
            packed = struct.pack("=I", limit_bytes)
            leaf = ChildPlan("bfifo", (("limit_bytes", limit_bytes),), packed, ((0, packed),))
    sizes = b""
    if plan.packet_overhead:
        sizes = attribute(1, _SIZES.pack(0, 0, 0, plan.packet_overhead, _ETHERNET, 0, 0, 0))
        delayed = delayed._replace(packet_overhead=0)
    if not chained:
        delayed = delayed._replace(rate_bytes=pipe.rate_bps // 8)
        if not any(collapses[: step.begun if step else 0]):
            return Shaping(delayed, sizes=sizes)
    return Shaping(delayed, (_htb(rate, frame_bytes), leaf), sizes)


def _htb(rate_bytes: int, quantum_bytes: int) -> ChildPlan:
    speed = _RATE.pack(0, _ETHERNET, 0, 0, 0, min(rate_bytes, U32_MAX))
    of_class = attribute(1, speed * 2 + _HTB_CLASS.pack(0, 0, quantum_bytes, 0, 0))
    if rate_bytes > U32_MAX:
        of_class += attribute(6, struct.pack("=Q", rate_bytes)) + attribute(7, struct.pack("=Q", rate_bytes))
    settings = (10, 1, 0)
    return ChildPlan(
        "htb",
        (("rate_bytes", rate_bytes),),
        attribute(2, _HTB_QDISC.pack(3, *settings, 0)),
        ((2, struct.pack("=4I", 0x30011, *settings)),),  # the kernel's version, and not its count of packets
        of_class=of_class,
    )


def _cake(rate_bytes: int, overhead_bytes: int) -> ChildPlan:
    """Without priorities, fair between hosts and between the flows of each (triple isolation), for a round trip of
    100 ms: cake's defaults for one priority.
    """
    stated = (("rate_bytes", rate_bytes), ("diffserv", "besteffort"), ("flows", "triple-isolate"), ("rtt_us", 100_000))
    whole = struct.Struct("=I").pack
    fields = (
        (2, struct.pack("=Q", rate_bytes)),
        (3, whole(3)),
        (5, whole(7)),
        (6, struct.pack("=i", overhead_bytes)),
        (7, whole(100_000)),
        (17, whole(0)),
    )
    options = b"".join(attribute(kind, content) for kind, content in fields)
    return ChildPlan("cake", (*stated, ("packet_overhead", overhead_bytes)), options, fields)


def _fq_codel(quantum_bytes: int) -> ChildPlan:
    """RFC 8290's parameters and Linux's defaults, without ECN."""
    stated = {"target_us": 5000, "limit_packets": 10_240, "interval_us": 100_000, "ecn": 0, "flows": 1024}
    stated |= {"quantum_bytes": quantum_bytes}
    fields = [*zip((1, 2, 3, 4, 5, 6), stated.values(), strict=True), (8, 64), (9, 32 << 20)]
    held = tuple((kind, _codel_us(value) if kind in (1, 3) else value) for kind, value in fields)

    def packed(pairs: Any) -> tuple[tuple[int, bytes], ...]:
        return tuple((kind, struct.pack("=I", value)) for kind, value in pairs)

    options = b"".join(attribute(kind, content) for kind, content in packed(fields))
    return ChildPlan("fq_codel", tuple(stated.items()), options, packed(held))


def _codel_us(time_us: int) -> int:
    """Return a time as the kernel reports it: it keeps units of 1,024 ns."""
    return ((time_us * 1000 >> _CODEL_SHIFT) << _CODEL_SHIFT) // 1000


def _red(limit_bytes: int, rate_bytes: int) -> ChildPlan:
    """Floyd and Jacobson's gateway (ToN 1993), with thresholds at 1/24 and 1/8 of the buffer, as tc's manual advises.

    Weight, probability and idle time as tc computes them (iproute2, tc_red.c).
    """
    largest = max(3 * RED_PACKET_BYTES, limit_bytes // 8)
    least = largest // 3
    burst = (2 * least + largest) // (3 * RED_PACKET_BYTES) + 1
    needed = burst + 1 - least / RED_PACKET_BYTES
    weight_log = next(log for log in range(1, 32) if needed <= (1 - (1 - 2**-log) ** burst) * 2**log)
    share_log = next(log for log in range(32) if RED_SHARE / (largest - least) * 2**log > 1)
    decay = -math.log(1 - 2**-weight_log) / (RED_PACKET_BYTES * 1e9 / rate_bytes / 64)  # per tick of 64 ns
    cell_log = next(log for log in range(32) if 31 / decay / 2**log < 512)
    table = bytes(min(31, int((cell << cell_log) * decay)) for cell in range(255)) + b"\x1f"
    parameters = _RED.pack(limit_bytes, least, largest, weight_log, share_log, cell_log, 0)
    ceiling = struct.pack("=I", int(RED_SHARE * 2**32))
    options = attribute(1, parameters) + attribute(2, table) + attribute(3, ceiling)
    stated = (("limit_bytes", limit_bytes), ("min_bytes", least), ("max_bytes", largest), ("probability", RED_SHARE))
    return ChildPlan("red", stated, options, ((1, parameters), (3, ceiling)))

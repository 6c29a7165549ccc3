"""What sch_netem is asked for. Pure: a pipe becomes a plan, a plan becomes netlink bytes, bytes become a plan again.

netem.py sends these bytes to the kernel, reads back what it holds and compares. The layout is that of linux/pkt_sched.h.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

from testbed.errors import ShapingError, SpecError
from testbed.spec import Pipe

ETHERNET_HEADER_BYTES = 14
"""What a veth device, and so netem on it, counts on top of each IP packet."""

_LOSS_SCALE = 2**32 - 1  # the kernel draws 32 bits and drops at or below the number given
_RATE32_MAX = 2**32 - 1

_QOPT = struct.Struct("=6I")  # latency (ticks), limit, loss, gap, duplicate, jitter (ticks)
_ATTRIBUTE = struct.Struct("=HH")  # length with this header, type
_CORRELATION, _REORDER, _CORRUPT, _LOSS_MODEL, _RATE, _ECN, _RATE64 = 1, 3, 4, 5, 6, 7, 8
_PAD, _LATENCY64, _JITTER64, _SLOT, _SEED = 9, 10, 11, 12, 14
_NAMES = {
    _CORRELATION: "correlation",
    _REORDER: "reorder",
    _CORRUPT: "corrupt",
    _LOSS_MODEL: "loss model",
    _ECN: "ecn",
    _JITTER64: "jitter",
    _SLOT: "slot",
}
_RATE_FIELDS = struct.Struct("=IiIi")  # bytes/s, packet overhead, cell size, cell overhead


class NetemPlan(NamedTuple):
    """One direction of a link as sch_netem holds it, in the kernel's own units, so that equal means equal."""

    rate_bytes: int
    """Bytes per second."""
    packet_overhead: int
    """Added to each packet's length before it is timed: -14 leaves the Ethernet header out."""
    latency_ns: int
    limit_packets: int
    """Packets that netem holds at most: on the delay line, waiting for the wire, and the one being sent."""
    loss_u32: int
    """Probability that a packet is lost, in units of 1 / (2**32 - 1)."""
    seed: int | None
    """Of the loss draws. None without loss: nothing is drawn, and kernels before 6.6 know no seed."""

    def describe(self) -> dict[str, object]:
        """The plan for a result file."""
        return {"kind": "netem", **self._asdict(), "loss": self.loss_u32 / _LOSS_SCALE}


def plan(pipe: Pipe, *, mtu: int, layer: Literal["ip", "ethernet"]) -> NetemPlan:
    """How sch_netem carries out `start = max(now, free); free = start + bytes * 8 / rate; due = free + delay`.

    netem times packets by exactly this formula, but bounds its queue by packets, not bytes. `limit_packets` is therefore what
    the pipe holds when every packet is as large as the MTU: packets in flight, packets in the buffer, and one being sent.
    Smaller packets find a shorter queue in bytes than `buffer_bytes`. SpecError for a rate that is not whole bytes per second.
    """
    if pipe.rate_bps % 8:
        raise SpecError(
            f"rate {pipe.rate_bps} bit/s is not a whole number of bytes per second, the kernel's unit; choose a multiple of 8"
        )
    packet_bytes = mtu if layer == "ip" else mtu + ETHERNET_HEADER_BYTES
    in_flight = -(-pipe.rate_bps * pipe.delay_ns // (8_000_000_000 * packet_bytes))
    waiting = -(-pipe.buffer_bytes // packet_bytes)
    loss_u32 = round(pipe.loss * _LOSS_SCALE)
    return NetemPlan(
        rate_bytes=pipe.rate_bps // 8,
        packet_overhead=-ETHERNET_HEADER_BYTES if layer == "ip" else 0,
        latency_ns=pipe.delay_ns,
        limit_packets=in_flight + waiting + 1,
        loss_u32=loss_u32,
        seed=pipe.seed if loss_u32 else None,
    )


def pack(wanted: NetemPlan) -> bytes:
    """TCA_OPTIONS for a plan. Every attribute is written, also the zeros: the kernel keeps what a change leaves out."""
    attributes = [
        (_CORRELATION, bytes(12)),
        (_REORDER, bytes(8)),
        (_CORRUPT, bytes(8)),
        (_RATE, _RATE_FIELDS.pack(min(wanted.rate_bytes, _RATE32_MAX), wanted.packet_overhead, 0, 0)),
        (_RATE64, struct.pack("=Q", wanted.rate_bytes)),
        (_LATENCY64, struct.pack("=q", wanted.latency_ns)),
        (_JITTER64, bytes(8)),
    ]
    if wanted.seed is not None:
        attributes.append((_SEED, struct.pack("=Q", wanted.seed)))
    return _QOPT.pack(0, wanted.limit_packets, wanted.loss_u32, 0, 0, 0) + b"".join(_attribute(*a) for a in attributes)


def unpack(options: bytes) -> NetemPlan:
    """The plan behind TCA_OPTIONS as the kernel dumps them.

    ShapingError where they hold an effect that no plan asks for (jitter, duplicates, reordering, bursts of loss, slots), or
    are not netem options at all. The seed is None without loss, as in a plan.
    """
    if len(options) < _QOPT.size:
        raise ShapingError(
            f"netem options of {len(options)} bytes are shorter than {_QOPT.size}; is this kernel's netem another one?"
        )
    ticks, limit, loss_u32, gap, duplicate, jitter = _QOPT.unpack_from(options)
    found = dict(_attributes(options))
    extra = [name for kind, name in _NAMES.items() if any(found.get(kind, b""))]
    extra += [name for name, value in (("gap", gap), ("duplicate", duplicate), ("jitter", jitter)) if value]
    if extra:
        raise ShapingError(f"netem does more than was asked: {', '.join(sorted(set(extra)))}")
    rate_fields = found.get(_RATE, bytes(_RATE_FIELDS.size))
    if len(rate_fields) != _RATE_FIELDS.size:
        raise ShapingError(f"netem's rate attribute has {len(rate_fields)} bytes, expected {_RATE_FIELDS.size}")
    rate32, overhead, cell_size, cell_overhead = _RATE_FIELDS.unpack(rate_fields)
    if cell_size or cell_overhead:
        raise ShapingError(f"netem cuts packets into cells of {cell_size} bytes, which was not asked for")
    if _LATENCY64 not in found and ticks:
        raise ShapingError(
            "this kernel's netem states its delay only in ticks (Linux before 4.15), which is too coarse to compare"
        )
    return NetemPlan(
        rate_bytes=_integer(found.get(_RATE64)) or rate32,
        packet_overhead=overhead,
        latency_ns=_integer(found.get(_LATENCY64)) or 0,
        limit_packets=limit,
        loss_u32=loss_u32,
        seed=_integer(found.get(_SEED)) if loss_u32 else None,
    )


def _integer(content: bytes | None) -> int | None:
    return None if content is None else int.from_bytes(content, sys.byteorder)


def _attribute(kind: int, content: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(content), kind) + content + bytes(-len(content) % 4)


def _attributes(options: bytes) -> Iterator[tuple[int, bytes]]:
    at = _QOPT.size
    while at + _ATTRIBUTE.size <= len(options):
        length, kind = _ATTRIBUTE.unpack_from(options, at)
        if not _ATTRIBUTE.size <= length <= len(options) - at:
            raise ShapingError(f"netem attribute {kind} at byte {at} claims {length} bytes of {len(options) - at}")
        yield kind & 0x3FFF, options[at + _ATTRIBUTE.size : at + length]  # without the nested and byte-order flags
        at += length + -length % 4

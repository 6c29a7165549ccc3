"""A netem plan as netlink bytes (TCA_OPTIONS) and back, and a qdisc's statistics (TCA_STATS2). Pure.

The layout is that of linux/pkt_sched.h and linux/gen_stats.h, the meaning that of the kernel's sch_netem.c.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from testbed.errors import ShapingError
from testbed.net.kernel.qdisc import ETHERNET_HEADER_BYTES, U32_MAX, Gemodel, NetemPlan, SlotPlan
from testbed.records import LinkCounters

_QOPT = struct.Struct("=6I")  # latency (ticks), limit, loss, gap, duplicate, jitter (ticks)
_ATTRIBUTE = struct.Struct("=HH")  # length with this header, type
_TYPE_MASK = 0x3FFF  # without the nested and byte-order flags

_CORRELATION, _REORDER, _CORRUPT, _LOSS, _RATE, _ECN, _RATE64 = 1, 3, 4, 5, 6, 7, 8
_LATENCY64, _JITTER64, _SLOT, _SEED = 10, 11, 12, 14
_GEMODEL = 2  # inside _LOSS; 1 would be the model of four states
_NAMES = {
    _CORRELATION: "correlation",
    _REORDER: "reorder",
    _CORRUPT: "corrupt",
    _LOSS: "loss model",
    _RATE: "rate",
    _ECN: "ecn",
    _RATE64: "64-bit rate",
    _LATENCY64: "64-bit latency",
    _JITTER64: "64-bit jitter",
    _SLOT: "slot",
    _SEED: "seed",
}
_FIELDS = {
    _CORRELATION: struct.Struct("=3I"),  # of delay, loss, duplicates
    _REORDER: struct.Struct("=2I"),  # probability, correlation
    _CORRUPT: struct.Struct("=2I"),
    _RATE: struct.Struct("=IiIi"),  # bytes/s, packet overhead, cell size, cell overhead
    _ECN: struct.Struct("=I"),
    _RATE64: struct.Struct("=Q"),
    _LATENCY64: struct.Struct("=q"),
    _JITTER64: struct.Struct("=q"),
    _SLOT: struct.Struct("=qqiiqq"),  # shortest, longest, packets, bytes; a distribution's delay and jitter
    _SEED: struct.Struct("=Q"),
}
_GEMODEL_FIELDS = struct.Struct("=4I")

_STATS_BASIC, _STATS_QUEUE, _STATS_PACKETS64 = 1, 3, 8
_BASIC = struct.Struct("=QI")  # bytes, packets
_QUEUE = struct.Struct("=5I")  # packets held, bytes held, drops, requeues, overlimits


def pack(wanted: NetemPlan, *, afresh: bool = True) -> bytes:
    """TCA_OPTIONS for a plan. Every attribute is written, also the zeros: the kernel keeps what a change leaves out.

    Without `afresh` the two that are left out begin anew whenever they are stated: the seed, whose draws would repeat with each
    step of a schedule, and the slots. (The Gilbert-Elliott model cannot be left out; a change puts it into its good state.)
    """
    slot = wanted.slot or SlotPlan(0, 0, 0, 0)
    stated = [
        (_CORRELATION, (0, 0, 0)),
        (_REORDER, (wanted.reorder_u32, 0)),
        (_CORRUPT, (0, 0)),
        (_RATE, (min(wanted.rate_bytes, U32_MAX), wanted.packet_overhead, 0, 0)),
        (_ECN, (0,)),
        (_RATE64, (wanted.rate_bytes,)),
        (_LATENCY64, (wanted.latency_ns,)),
        (_JITTER64, (wanted.jitter_ns,)),
    ]
    if afresh:
        stated.append((_SLOT, (*slot, 0, 0)))
        if wanted.seed is not None:
            stated.append((_SEED, (wanted.seed,)))
    attributes = [_attribute(kind, _FIELDS[kind].pack(*values)) for kind, values in stated]
    if wanted.gemodel is not None:
        attributes.append(_attribute(_LOSS, _attribute(_GEMODEL, _GEMODEL_FIELDS.pack(*wanted.gemodel))))
    # Gap 1: every packet is drawn. (A larger one lets that many pass between two that may be reordered.)
    fixed = (0, wanted.limit_packets, wanted.loss_u32, 1 if wanted.reorder_u32 else 0, wanted.duplicate_u32, 0)
    return _QOPT.pack(*fixed) + b"".join(attributes)


def unpack(options: bytes) -> NetemPlan:
    """The plan behind TCA_OPTIONS as the kernel dumps them.

    ShapingError where they hold an effect that no plan asks for (correlation, corruption, marks, cells, the four-state loss
    model, another gap, slots from a table), or are not netem options at all.
    """
    if len(options) < _QOPT.size:
        raise ShapingError(
            f"netem options of {len(options)} bytes are shorter than {_QOPT.size}; is this kernel's netem another one?"
        )
    latency_ticks, limit, loss_u32, gap, duplicate_u32, jitter_ticks = _QOPT.unpack_from(options)
    found = dict(_attributes(options, _QOPT.size))
    if (latency_ticks and _LATENCY64 not in found) or (jitter_ticks and _JITTER64 not in found):
        raise ShapingError(
            "this kernel's netem states its delay only in ticks (Linux before 4.15), which is too coarse to compare"
        )
    reorder_u32, reorder_correlation = _values(found, _REORDER)
    rate32, overhead, *cells = _values(found, _RATE)
    *slot, slot_table_delay, slot_table_jitter = _values(found, _SLOT)
    extra = {
        "correlation": (*_values(found, _CORRELATION), reorder_correlation),
        "corrupt": _values(found, _CORRUPT),
        "ecn": _values(found, _ECN),
        "cells": cells,
        "slot table": (slot_table_delay, slot_table_jitter),
        f"gap {gap}": (gap != (1 if reorder_u32 else 0),),
    }
    if names := [name for name, values in extra.items() if any(values)]:
        raise ShapingError(f"netem does something that was not asked for: {', '.join(names)}")
    return NetemPlan(
        rate_bytes=max(rate32, *_values(found, _RATE64)),
        packet_overhead=overhead,
        latency_ns=_values(found, _LATENCY64)[0],
        jitter_ns=_values(found, _JITTER64)[0],
        limit_packets=limit,
        loss_u32=loss_u32,
        gemodel=_gemodel(found.get(_LOSS)),
        reorder_u32=reorder_u32,
        duplicate_u32=duplicate_u32,
        slot=SlotPlan(*slot) if any(slot) else None,
        seed=_values(found, _SEED)[0] if _SEED in found else None,
    )


def counters(statistics: bytes) -> LinkCounters:
    """TCA_STATS2 of a qdisc on a device with Ethernet headers, which are taken off. ShapingError when there are none."""
    found = dict(_attributes(statistics, 0))
    basic, queue, packets64 = (found.get(kind, b"") for kind in (_STATS_BASIC, _STATS_QUEUE, _STATS_PACKETS64))
    if len(basic) < _BASIC.size or len(queue) < _QUEUE.size:
        raise ShapingError(f"a qdisc's statistics of {len(statistics)} bytes lack what it carried or what it holds")
    frame_bytes, packets = _BASIC.unpack_from(basic)
    held, held_bytes, drops, _, _ = _QUEUE.unpack_from(queue)
    if len(packets64) == 8:
        packets = int(struct.unpack("=Q", packets64)[0])
    return LinkCounters(
        packets=packets,
        bytes=frame_bytes - packets * ETHERNET_HEADER_BYTES,
        dropped_buffer=drops,
        dropped_loss=None,  # netem counts both kinds of drops as one
        backlog_bytes=max(0, held_bytes - held * ETHERNET_HEADER_BYTES),
    )


def _gemodel(loss: bytes | None) -> Gemodel | None:
    if loss is None:
        return None
    models = dict(_attributes(loss, 0))
    if set(models) != {_GEMODEL} or len(models[_GEMODEL]) != _GEMODEL_FIELDS.size:
        raise ShapingError("netem does something that was not asked for: a loss model that is not Gilbert-Elliott")
    return Gemodel(*_GEMODEL_FIELDS.unpack(models[_GEMODEL]))


def _values(found: dict[int, bytes], kind: int) -> tuple[int, ...]:
    """An attribute's fields; zeros where the kernel has no such attribute, which it leaves out where it is not in force."""
    fields = _FIELDS[kind]
    content = found.get(kind, bytes(fields.size))
    if len(content) != fields.size:
        raise ShapingError(f"netem's {_NAMES[kind]} attribute has {len(content)} bytes, expected {fields.size}")
    return fields.unpack(content)


def _attribute(kind: int, content: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(content), kind) + content + bytes(-len(content) % 4)


def _attributes(content: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    while at + _ATTRIBUTE.size <= len(content):
        length, kind = _ATTRIBUTE.unpack_from(content, at)
        if not _ATTRIBUTE.size <= length <= len(content) - at:
            raise ShapingError(f"netlink attribute {kind} at byte {at} claims {length} bytes of {len(content) - at}")
        yield kind & _TYPE_MASK, content[at + _ATTRIBUTE.size : at + length]
        at += length + -length % 4

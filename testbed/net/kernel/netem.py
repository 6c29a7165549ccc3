"""Shape one direction of a link on a device: encode a plan as netlink bytes (pure), send it, read it back and compare.

netem_plan.py makes the plan. linux/pkt_sched.h (TCA_OPTIONS) and linux/gen_stats.h (TCA_STATS2) define the layout of
the bytes, the kernel's sch_netem.c their meaning.
"""

from __future__ import annotations

import struct

from testbed.errors import CapabilityError, LabError, ShapingError
from testbed.net.kernel.messages import attribute, attributes
from testbed.net.kernel.netem_plan import ETHERNET_HEADER_BYTES, U32_MAX, Gemodel, NetemPlan, SlotPlan
from testbed.net.kernel.netlink import Netlink
from testbed.net.kernel.rtnetlink import Qdisc
from testbed.records import LinkCounters

KIND = "netem"
REMEDY = "use --engine relay, or run it in the guest kernel: python -m testbed vm -- COMMAND"

_QOPT = struct.Struct("=6I")  # latency (ticks), limit, loss, gap, duplicate, jitter (ticks)

_CORRELATION, _REORDER, _CORRUPT, _LOSS, _RATE, _ECN, _RATE64 = 1, 3, 4, 5, 6, 7, 8
_LATENCY64, _JITTER64, _SLOT, _SEED = 10, 11, 12, 14
_GEMODEL = 2  # inside _LOSS; 1 would be the model of four states
_FIELDS = {
    _CORRELATION: ("correlation", struct.Struct("=3I")),  # of delay, loss, duplicates
    _REORDER: ("reorder", struct.Struct("=2I")),  # probability, correlation
    _CORRUPT: ("corrupt", struct.Struct("=2I")),
    _RATE: ("rate", struct.Struct("=IiIi")),  # bytes/s, packet overhead, cell size, cell overhead
    _ECN: ("ecn", struct.Struct("=I")),
    _RATE64: ("64-bit rate", struct.Struct("=Q")),
    _LATENCY64: ("64-bit latency", struct.Struct("=q")),
    _JITTER64: ("64-bit jitter", struct.Struct("=q")),
    _SLOT: ("slot", struct.Struct("=qqiiqq")),  # shortest, longest, packets, bytes; a distribution's delay and jitter
    _SEED: ("seed", struct.Struct("=Q")),
}
_GEMODEL_FIELDS = struct.Struct("=4I")

_STATS_BASIC, _STATS_QUEUE, _STATS_PACKETS64 = 1, 3, 8
_BASIC = struct.Struct("=QI")  # bytes, packets
_QUEUE = struct.Struct("=5I")  # packets held, bytes held, drops, requeues, overlimits


def pack_options(plan: NetemPlan, *, afresh: bool = True) -> bytes:
    """Encode TCA_OPTIONS for a plan, with every attribute, even zeros, because a change keeps omitted attributes.

    Without `afresh` two attributes that restart whenever they are set are omitted: the seed, whose draws would repeat
    at each step of a schedule, and the slots. (The Gilbert-Elliott model cannot be omitted; a change resets it to its
    good state.)
    """
    slot = plan.slot or SlotPlan(0, 0, 0, 0)
    stated = [
        (_CORRELATION, (0, 0, 0)),
        (_REORDER, (plan.reorder_u32, 0)),
        (_CORRUPT, (plan.corrupt_u32, 0)),
        (_RATE, (min(plan.rate_bytes, U32_MAX), plan.packet_overhead, 0, 0)),
        (_ECN, (0,)),
        (_RATE64, (plan.rate_bytes,)),
        (_LATENCY64, (plan.latency_ns,)),
        (_JITTER64, (plan.jitter_ns,)),
    ]
    if afresh:
        stated.append((_SLOT, (*slot, 0, 0)))
        if plan.seed is not None:
            stated.append((_SEED, (plan.seed,)))
    packed = [attribute(kind, _FIELDS[kind][1].pack(*values)) for kind, values in stated]
    if plan.gemodel is not None:
        packed.append(attribute(_LOSS, attribute(_GEMODEL, _GEMODEL_FIELDS.pack(*plan.gemodel))))
    # Gap 1 makes a draw for every packet. (A larger gap exempts the packets in between.)
    fixed = (0, plan.limit_packets, plan.loss_u32, 1 if plan.reorder_u32 else 0, plan.duplicate_u32, 0)
    return _QOPT.pack(*fixed) + b"".join(packed)


def unpack_options(options: bytes) -> NetemPlan:
    """Decode a plan from TCA_OPTIONS as the kernel dumps them.

    ShapingError for effects that no plan uses (correlation, marks, cells, the four-state loss model,
    another gap, slots from a table), or for bytes that are not netem options.
    """
    if len(options) < _QOPT.size:
        raise ShapingError(
            f"cannot read netem options: {len(options)} bytes, expected {_QOPT.size}; this kernel's netem may differ"
        )
    latency_ticks, limit, loss_u32, gap, duplicate_u32, jitter_ticks = _QOPT.unpack_from(options)
    held = _attributes(options, _QOPT.size)
    if (latency_ticks and _LATENCY64 not in held) or (jitter_ticks and _JITTER64 not in held):
        raise ShapingError(
            "this kernel's netem reports its delay only in ticks (Linux before 4.15), too coarse to compare"
        )
    reorder_u32, reorder_correlation = _values(held, _REORDER)
    corrupt_u32, corrupt_correlation = _values(held, _CORRUPT)
    rate32, overhead, *cells = _values(held, _RATE)
    *slot, slot_table_delay, slot_table_jitter = _values(held, _SLOT)
    extra = {
        "correlation": (*_values(held, _CORRELATION), reorder_correlation, corrupt_correlation),
        "ecn": _values(held, _ECN),
        "cells": cells,
        "slot table": (slot_table_delay, slot_table_jitter),
        f"gap {gap}": (gap != (1 if reorder_u32 else 0),),
    }
    if names := [name for name, values in extra.items() if any(values)]:
        raise ShapingError(f"netem has effects that were not requested: {', '.join(names)}")
    return NetemPlan(
        rate_bytes=max(rate32, *_values(held, _RATE64)),
        packet_overhead=overhead,
        latency_ns=_values(held, _LATENCY64)[0],
        jitter_ns=_values(held, _JITTER64)[0],
        limit_packets=limit,
        loss_u32=loss_u32,
        gemodel=_gemodel(held.get(_LOSS)),
        reorder_u32=reorder_u32,
        duplicate_u32=duplicate_u32,
        corrupt_u32=corrupt_u32,
        slot=SlotPlan(*slot) if any(slot) else None,
        seed=_values(held, _SEED)[0] if _SEED in held else None,
    )


def unpack_statistics(statistics: bytes) -> LinkCounters:
    """Read TCA_STATS2 of a qdisc on a device with Ethernet headers, whose bytes are subtracted.

    ShapingError without statistics.
    """
    held = _attributes(statistics)
    basic, queue, packets64 = (held.get(kind, b"") for kind in (_STATS_BASIC, _STATS_QUEUE, _STATS_PACKETS64))
    if len(basic) < _BASIC.size or len(queue) < _QUEUE.size:
        raise ShapingError(f"a qdisc's statistics ({len(statistics)} bytes) lack its traffic or its queue")
    frame_bytes, packets = _BASIC.unpack_from(basic)
    waiting, waiting_bytes, drops, _, _ = _QUEUE.unpack_from(queue)
    if len(packets64) == 8:
        packets = int(struct.unpack("=Q", packets64)[0])
    return LinkCounters(
        packets=packets,
        bytes=frame_bytes - packets * ETHERNET_HEADER_BYTES,
        dropped_buffer=drops,
        dropped_loss=None,  # netem counts both kinds of drops as one
        backlog_bytes=max(0, waiting_bytes - waiting * ETHERNET_HEADER_BYTES),
    )


def _attributes(content: bytes, at: int = 0) -> dict[int, bytes]:
    try:
        return attributes(content, at)
    except LabError as error:
        raise ShapingError(str(error)) from None


def _gemodel(loss: bytes | None) -> Gemodel | None:
    if loss is None:
        return None
    models = _attributes(loss)
    if set(models) != {_GEMODEL} or len(models[_GEMODEL]) != _GEMODEL_FIELDS.size:
        raise ShapingError("netem has effects that were not requested: a loss model other than Gilbert-Elliott")
    return Gemodel(*_GEMODEL_FIELDS.unpack(models[_GEMODEL]))


def _values(held: dict[int, bytes], kind: int) -> tuple[int, ...]:
    """Read an attribute's fields; zeros where the kernel omits the attribute because it is inactive."""
    name, fields = _FIELDS[kind]
    content = held.get(kind, bytes(fields.size))
    if len(content) != fields.size:
        raise ShapingError(f"netem's {name} attribute has {len(content)} bytes, expected {fields.size}")
    return fields.unpack(content)


def apply_plan(netlink: Netlink, device: str, plan: NetemPlan, *, link: str, sizes: bytes = b"") -> NetemPlan:
    """Shape the egress of `device`, and return the plan read back from the kernel, which equals `plan`. `sizes`:
    TCA_STAB.

    All draws restart. ShapingError names the link, the requested and the actual plan; CapabilityError when this
    kernel's sch_netem is missing or too old for the plan.
    """
    try:
        netlink.set_root_qdisc(device, KIND, pack_options(plan), sizes=sizes)
    except CapabilityError as error:
        raise CapabilityError(f"{link}: {error}; {REMEDY}") from None
    return check_plan(netlink, device, plan, link=link)


def change_plan(netlink: Netlink, device: str, plan: NetemPlan, *, link: str, sizes: bytes = b"") -> NetemPlan:
    """Change the shaping of a device from now on. Queued packets keep their order and due times.

    A lower rate therefore takes effect after the backlog. Loss draws continue their sequence, unless the seed changes;
    a Gilbert-Elliott model restarts in its good state. Errors as for `apply_plan`; ShapingError also for a device
    without netem.
    """
    # Read first: the kernel would replace another kind of qdisc by a new, empty netem.
    held = _read_plan(netlink, device, plan, link)
    afresh = (held.seed, held.slot) != (plan.seed, plan.slot)
    try:
        netlink.change_root_qdisc(device, KIND, pack_options(plan, afresh=afresh), sizes=sizes)
    except LabError as error:
        raise LabError(f"{link}: {error}") from None
    return check_plan(netlink, device, plan, link=link)


def check_plan(netlink: Netlink, device: str, plan: NetemPlan, *, link: str) -> NetemPlan:
    """Read back the shaping of `device` and compare it with `plan`. Errors as for `apply_plan`."""
    held = _read_plan(netlink, device, plan, link)
    if plan.seed is not None and held.seed is None:
        raise CapabilityError(f"{link}: this kernel's netem does not accept a seed (Linux before 6.6); {REMEDY}")
    if held != plan:
        raise ShapingError(f"{link}: requested {plan} on {device}, the kernel has {held}")
    return held


def _netem_on(netlink: Netlink, device: str, link: str) -> Qdisc:
    held = netlink.root_qdiscs().get(device)
    if held is None or held.kind != KIND:
        raise ShapingError(
            f"{link}: requested netem on {device}, the kernel has {held.kind if held else 'no qdisc there'}"
        )
    return held


def _read_plan(netlink: Netlink, device: str, wanted: NetemPlan, link: str) -> NetemPlan:
    """Return the plan on a device, without a seed that the kernel chose itself."""
    options = _netem_on(netlink, device, link).options
    try:
        held = unpack_options(options)
    except ShapingError as error:
        raise ShapingError(f"{link}: {device}: {error}") from None
    return held if wanted.seed is not None else held._replace(seed=None)

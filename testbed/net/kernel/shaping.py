"""Shape one direction of a link on a device: apply a plan, read every qdisc back, compare, and count."""

from __future__ import annotations

from testbed.errors import CapabilityError, LabError, ShapingError
from testbed.net.kernel import netem
from testbed.net.kernel.messages import attributes
from testbed.net.kernel.netem_plan import ETHERNET_HEADER_BYTES
from testbed.net.kernel.netlink import Netlink
from testbed.net.kernel.queue_plan import ChildPlan, Shaping
from testbed.records import LinkCounters

REMEDY = netem.REMEDY


def apply_shaping(netlink: Netlink, device: str, plan: Shaping, *, link: str) -> Shaping:
    """Shape the egress of `device`, and return what the kernel reports, which equals `plan`. Errors as for
    `netem.apply_plan`.
    """
    netem.apply_plan(netlink, device, plan.netem, link=link, sizes=plan.sizes)
    try:
        for level, child in enumerate(plan.children):
            netlink.add_qdisc(device, level, child.kind, child.options, of_class=child.of_class)
    except CapabilityError as error:
        raise CapabilityError(f"{link}: {error}; {REMEDY}") from None
    return check_shaping(netlink, device, plan, link=link)


def change_shaping(netlink: Netlink, device: str, before: Shaping | None, plan: Shaping, *, link: str) -> Shaping:
    """Change to another plan of a pipe, from `before` (None: unknown); what waits behind netem leaves at the new rate.
    Errors as for `netem.change_plan`.
    """
    held = plan.children if before is None else before.children
    if before is None or plan.netem != before.netem:
        netem.change_plan(netlink, device, plan.netem, link=link, sizes=plan.sizes)
    try:
        if len(held) > len(plan.children):
            netlink.remove_qdisc(device, len(plan.children), held[len(plan.children)].kind)
        for level, child in enumerate(plan.children):
            if level >= len(held):
                netlink.add_qdisc(device, level, child.kind, child.options, of_class=child.of_class)
            # fq_codel's settings never change, and it does not accept them again.
            elif child.kind != "fq_codel" if before is None else child != before.children[level]:
                netlink.change_qdisc(device, level, child.kind, child.options, of_class=child.of_class)
    except LabError as error:
        raise LabError(f"{link}: {error}") from None
    return check_shaping(netlink, device, plan, link=link)


def check_shaping(netlink: Netlink, device: str, plan: Shaping, *, link: str) -> Shaping:
    """Read back the shaping of `device` and compare it with `plan`. Errors as for `netem.check_plan`."""
    netem.check_plan(netlink, device, plan.netem, link=link)
    root, *behind = netlink.qdisc_chain(device)
    if root.sizes != plan.sizes:
        raise ShapingError(f"{link}: requested another size table of netem on {device}: the kernel has {root.sizes!r}")
    if (kinds := [qdisc.kind for qdisc in behind]) != (asked := [child.kind for child in plan.children]):
        raise ShapingError(f"{link}: requested {asked} behind netem on {device}, the kernel has {kinds}")
    for child, qdisc in zip(plan.children, behind, strict=True):
        held = attributes(qdisc.options) if child.held[0][0] else {0: qdisc.options}
        for kind, content in child.held:
            _compare(child, f"attribute {kind}", content, held.get(kind, b"")[: len(content)], f"{link}: {device}")
        if child.of_class:
            _compare(child, "class", child.of_class, netlink.class_options(device), f"{link}: {device}")
    return plan


def _compare(child: ChildPlan, what: str, asked: bytes, held: bytes, where: str) -> None:
    if asked != held:
        raise ShapingError(
            f"{where}: requested {child.kind} {dict(child.stated)}, the kernel has another {what}: "
            f"{held.hex() or 'none'} instead of {asked.hex() or 'none'}"
        )


def read_counters(netlink: Netlink, device: str) -> LinkCounters:
    """Read the packets that a shaped device carried, dropped and holds, as IP packets. With a queue behind netem, those
    that netem delays are not held. ShapingError without netem.
    """
    chain = netlink.qdisc_chain(device)
    if not chain or chain[0].kind != netem.KIND:
        kind = chain[0].kind if chain else "no qdisc there"
        raise ShapingError(f"{netlink.namespace.name}: requested netem on {device}, the kernel has {kind}")
    whole = netem.unpack_statistics(chain[0].statistics)
    if chain[0].sizes:  # which counts no Ethernet headers
        whole = whole.model_copy(update={"bytes": whole.bytes + ETHERNET_HEADER_BYTES * whole.packets})
    if len(chain) == 1:
        return whole
    held = netem.unpack_statistics(chain[-1].statistics).backlog_bytes
    return whole.model_copy(update={"backlog_bytes": held})

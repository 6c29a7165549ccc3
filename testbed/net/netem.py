"""Put one direction of a link profile on a device. qdisc.py decides what; this sends it, reads it back and compares."""

from __future__ import annotations

from testbed.errors import CapabilityError, ShapingError
from testbed.net import qdisc
from testbed.net.netlink import Netlink
from testbed.net.qdisc import NetemPlan

KIND = "netem"
REMEDY = "use --engine relay, or run it in the guest kernel: python -m testbed vm -- COMMAND"


def apply(netlink: Netlink, device: str, wanted: NetemPlan, *, link: str) -> NetemPlan:
    """Shape what leaves `device`, and return what the kernel then says it has, which equals `wanted`.

    ShapingError names the link, the plan asked for and the plan found; CapabilityError when this kernel has no sch_netem, or
    one that is too old for the plan.
    """
    try:
        netlink.set_root_qdisc(device, KIND, qdisc.pack(wanted))
    except CapabilityError as error:
        raise CapabilityError(f"{link}: {error}; {REMEDY}") from None
    return check(netlink, device, wanted, link=link)


def check(netlink: Netlink, device: str, wanted: NetemPlan, *, link: str) -> NetemPlan:
    """Read back what shapes `device` and compare it with `wanted`. Errors as in `apply`."""
    held = netlink.root_qdiscs().get(device)
    if held is None or held.kind != KIND:
        raise ShapingError(f"{link}: asked for netem on {device}, the kernel has {held.kind if held else 'no qdisc there'}")
    try:
        found = qdisc.unpack(held.options)
    except ShapingError as error:
        raise ShapingError(f"{link}: {device}: {error}") from None
    if wanted.seed is not None and found.seed is None:
        raise CapabilityError(f"{link}: this kernel's netem takes no seed for its losses (Linux before 6.6); {REMEDY}")
    if found != wanted:
        raise ShapingError(f"{link}: asked for {wanted} on {device}, the kernel has {found}")
    return found

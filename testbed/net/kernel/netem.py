"""Put one direction of a link on a device. qdisc.py decides what, tca.py writes it; this sends it, reads it back and compares."""

from __future__ import annotations

from testbed.errors import CapabilityError, LabError, ShapingError
from testbed.net.kernel import tca
from testbed.net.kernel.netlink import Netlink, Qdisc
from testbed.net.kernel.qdisc import NetemPlan
from testbed.records import LinkCounters

KIND = "netem"
REMEDY = "use --engine relay, or run it in the guest kernel: python -m testbed vm -- COMMAND"


def apply(netlink: Netlink, device: str, wanted: NetemPlan, *, link: str) -> NetemPlan:
    """Shape what leaves `device`, and return what the kernel then says it has, which equals `wanted`. All draws begin afresh.

    ShapingError names the link, the plan asked for and the plan found; CapabilityError when this kernel has no sch_netem, or
    one that is too old for the plan.
    """
    try:
        netlink.set_root_qdisc(device, KIND, tca.pack(wanted))
    except CapabilityError as error:
        raise CapabilityError(f"{link}: {error}; {REMEDY}") from None
    return check(netlink, device, wanted, link=link)


def change(netlink: Netlink, device: str, wanted: NetemPlan, *, link: str) -> NetemPlan:
    """Shape a device otherwise from now on. What waits in it keeps its place, and leaves when it was due before.

    A lower rate is therefore felt only after the backlog. The draws of losses go on where they were, unless the seed is another
    one; a Gilbert-Elliott model begins in its good state. Errors as in `apply`; ShapingError also where the device has no netem.
    """
    held = _found(
        netlink, device, wanted, link
    )  # first: the kernel would put a new, empty netem in place of another kind
    afresh = (held.seed, held.slot) != (wanted.seed, wanted.slot)
    try:
        netlink.change_root_qdisc(device, KIND, tca.pack(wanted, afresh=afresh))
    except LabError as error:
        raise LabError(f"{link}: {error}") from None
    return check(netlink, device, wanted, link=link)


def check(netlink: Netlink, device: str, wanted: NetemPlan, *, link: str) -> NetemPlan:
    """Read back what shapes `device` and compare it with `wanted`. Errors as in `apply`."""
    found = _found(netlink, device, wanted, link)
    if wanted.seed is not None and found.seed is None:
        raise CapabilityError(f"{link}: this kernel's netem takes no seed for its draws (Linux before 6.6); {REMEDY}")
    if found != wanted:
        raise ShapingError(f"{link}: asked for {wanted} on {device}, the kernel has {found}")
    return found


def counters(netlink: Netlink, device: str) -> LinkCounters:
    """What netem on `device` carried, dropped and holds, in IP packets. ShapingError where there is no netem."""
    return tca.counters(_held(netlink, device, netlink.namespace.name).statistics)


def _held(netlink: Netlink, device: str, link: str) -> Qdisc:
    held = netlink.root_qdiscs().get(device)
    if held is None or held.kind != KIND:
        raise ShapingError(
            f"{link}: asked for netem on {device}, the kernel has {held.kind if held else 'no qdisc there'}"
        )
    return held


def _found(netlink: Netlink, device: str, wanted: NetemPlan, link: str) -> NetemPlan:
    """The plan on a device; without the seed that the kernel chose by itself, where none was asked for."""
    held = _held(netlink, device, link)
    try:
        found = tca.unpack(held.options)
    except ShapingError as error:
        raise ShapingError(f"{link}: {device}: {error}") from None
    return found if wanted.seed is not None else found._replace(seed=None)

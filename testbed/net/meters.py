"""Count the traffic of every link of a lab, under any engine: counters of the relay, a qdisc, or a device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from testbed.counters import DeviceRow, DeviceTable
from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.errors import LabError
from testbed.net.kernel import shaping
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Netlink
from testbed.net.lab_plan import LabPlan, Link, Meter
from testbed.net.relay.client import Relay
from testbed.records import LinkCounters

Counters = dict[str, dict[LinkDirection, LinkCounters]]
"""Counters of each link, by name."""


class Meters:
    """Reads the counters of all links, up to ten times a second: its sockets and files stay open until `close`."""

    def __init__(self, plan: LabPlan, namespaces: Mapping[str, Namespace], relay: Relay | None) -> None:
        self._plan, self._relay = plan, relay
        self._netlinks: dict[str, Netlink] = {}
        self._tables: dict[str, DeviceTable] = {}
        with ExitStack() as stack:
            for meter in (meter for link in plan.links for meter in link.meters.values()):
                where = meter.where
                if meter.kind == "qdisc" and where not in self._netlinks:
                    self._netlinks[where] = stack.enter_context(Netlink(namespaces[where]))
                if meter.kind in ("sent", "received") and where not in self._tables:
                    with namespaces[where].entered():
                        self._tables[where] = stack.enter_context(DeviceTable())
            self._stack = stack.pop_all()

    def read(self) -> Counters:
        """Read every link, in both directions. LabError when the relay has died."""
        ports = self._relay.counters() if self._relay else {}
        tables = {where: table.read() for where, table in self._tables.items()}
        return {
            link.name: {way: self._count(link.meters[way], ports, tables, link) for way in LINK_DIRECTIONS}
            for link in self._plan.links
        }

    def _count(
        self, meter: Meter, ports: Mapping[str, Any], tables: Mapping[str, Mapping[str, DeviceRow]], link: Link
    ) -> LinkCounters:
        if meter.kind == "port":
            return port_counters(ports[meter.where][meter.what], link.profile.overhead_bytes)
        if meter.kind == "qdisc":
            return shaping.read_counters(self._netlinks[meter.where], meter.what)
        if (row := tables[meter.where].get(meter.what)) is None:
            raise LabError(
                f"{link.name}: cannot read the counters of {meter.what} in {meter.where}: the device no longer exists"
            )
        size, packets, dropped = row[:3] if meter.kind == "received" else row[3:]
        return LinkCounters(
            packets=packets,
            bytes=size - self._plan.overhead_bytes * packets,
            dropped_buffer=dropped,
            dropped_loss=0,
            backlog_bytes=0,
        )

    def close(self) -> None:
        """Close sockets and files."""
        self._stack.close()


def port_counters(counts: Mapping[str, int], overhead_bytes: int) -> LinkCounters:
    """Convert a relay direction's counts, taken on acceptance of a packet, to those of a qdisc, taken on departure.

    Packets that still wait for the wire are subtracted, at the mean size. `overhead_bytes` are added to each.
    """
    accepted, packets = counts["bytes_out"], counts["packets_out"]
    on_the_wire = accepted + packets * overhead_bytes
    waiting = counts["backlog_bytes"] / on_the_wire if on_the_wire else 0.0
    return LinkCounters(
        packets=packets - round(packets * waiting),
        bytes=accepted - round(accepted * waiting),
        dropped_buffer=counts["dropped_buffer"],
        dropped_loss=counts["dropped_loss"],
        backlog_bytes=round(accepted * waiting),
    )

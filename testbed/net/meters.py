"""Count what every link of a lab carries, under any engine: the relay's counters, a qdisc's, or a device's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.errors import LabError
from testbed.net.elements import Link, Meter, Plan
from testbed.net.kernel import netem
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Netlink
from testbed.net.relay import Relay
from testbed.records import LinkCounters

Counters = dict[str, dict[LinkDirection, LinkCounters]]


class Meters:
    """Readings of all links, ten a second if need be: the sockets and files that they take stay open until `close`."""

    def __init__(self, plan: Plan, namespaces: Mapping[str, Namespace], relay: Relay | None) -> None:
        self._plan, self._relay = plan, relay
        self._netlinks: dict[str, Netlink] = {}
        self._tables: dict[str, int] = {}
        with ExitStack() as stack:
            for link in plan.links:
                for meter in link.meters.values():
                    space = namespaces.get(meter.place)
                    if meter.kind == "qdisc" and space and meter.place not in self._netlinks:
                        self._netlinks[meter.place] = stack.enter_context(Netlink(space))
                    if meter.kind in ("sent", "received") and space and meter.place not in self._tables:
                        with space.entered():
                            table = os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC)
                        stack.callback(os.close, table)
                        self._tables[meter.place] = table
            self._stack = stack.pop_all()

    def read(self) -> Counters:
        """Every link, both ways. LabError when the relay has died."""
        ports = self._relay.counters() if self._relay else {}
        tables = {place: _device_table(table) for place, table in self._tables.items()}
        return {
            link.name: {way: self._count(link.meters[way], ports, tables, link) for way in LINK_DIRECTIONS}
            for link in self._plan.links
        }

    def _count(
        self, meter: Meter, ports: Mapping[str, Any], tables: Mapping[str, Mapping[str, tuple[int, ...]]], link: Link
    ) -> LinkCounters:
        if meter.kind == "port":
            return port_counters(ports[meter.place][meter.what], link.profile.overhead_bytes)
        if meter.kind == "qdisc":
            return netem.counters(self._netlinks[meter.place], meter.what)
        if (row := tables[meter.place].get(meter.what)) is None:
            raise LabError(
                f"{link.name}: cannot read the counters of {meter.what} in {meter.place}: there is no such device any more"
            )
        at = 0 if meter.kind == "received" else 8
        overhead = self._plan.overhead_bytes * row[at + 1]
        return LinkCounters(
            packets=row[at + 1], bytes=row[at] - overhead, dropped_buffer=row[at + 3], dropped_loss=0, backlog_bytes=0
        )

    def close(self) -> None:
        """Let go of the sockets and files."""
        self._stack.close()


def port_counters(found: Mapping[str, int], overhead_bytes: int) -> LinkCounters:
    """Of a relay's direction, which counts a packet when it accepts it, whereas a qdisc does so when it lets it go.

    So what still waits for the wire is taken off, in packets of the mean size. `overhead_bytes` are counted on top of each.
    """
    accepted, packets = found["bytes_out"], found["packets_out"]
    on_the_wire = accepted + packets * overhead_bytes
    waiting = found["backlog_bytes"] / on_the_wire if on_the_wire else 0.0
    return LinkCounters(
        packets=packets - round(packets * waiting),
        bytes=accepted - round(accepted * waiting),
        dropped_buffer=found["dropped_buffer"],
        dropped_loss=found["dropped_loss"],
        backlog_bytes=round(accepted * waiting),
    )


def _device_table(table: int) -> dict[str, tuple[int, ...]]:
    """/proc/net/dev by device: 8 numbers received, 8 numbers sent; bytes, packets, errors, dropped first."""
    at, parts = 0, []
    while part := os.pread(table, 65536, at):
        parts.append(part)
        at += len(part)
    rows = (line.partition(b":") for line in b"".join(parts).split(b"\n")[2:])
    return {name.strip().decode(): tuple(map(int, fields.split())) for name, _, fields in rows if fields}

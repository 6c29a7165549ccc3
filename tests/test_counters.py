"""Counters of the access link: the table is read right, and bytes are those of IP packets, counted from the start."""

from __future__ import annotations

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.counters import DeviceCounters, parse_device_table
from testbed.errors import LabError
from testbed.net.kernel import sysctl
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Netlink
from testbed.net.kernel.rtnetlink import STATE_UP

HEADER = (
    b"Inter-|   Receive    |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes packets\n"
)
NAMES = st.text("abcdefghijklmnop0123456789-.", min_size=1, max_size=15)
COUNTS = st.lists(st.integers(0, 2**64 - 1), min_size=16, max_size=16)


@given(st.dictionaries(NAMES, COUNTS, min_size=1, max_size=5))
def test_the_table_is_read_by_its_columns(devices: dict[str, list[int]]) -> None:
    table = HEADER + b"".join(f"{name:>6}: {' '.join(map(str, counts))}\n".encode() for name, counts in devices.items())
    rows = parse_device_table(table)
    assert set(rows) == set(devices)
    for name, counts in devices.items():
        row = rows[name]
        assert (row.received_bytes, row.received_packets, row.received_dropped) == (counts[0], counts[1], counts[3])
        assert (row.sent_bytes, row.sent_packets, row.sent_dropped) == (counts[8], counts[9], counts[11])


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(LabError, match="wan7"):
        DeviceCounters(("lo", "wan7"), 0)


@pytest.mark.root
def test_bytes_are_those_of_ip_packets_from_the_start() -> None:
    macs = ("02:77:00:00:00:00", "02:77:00:00:00:01")
    ethernet = bytes.fromhex("".join(macs[::-1]).replace(":", "")) + b"\x08\0"
    with Namespace("a") as namespace, Netlink(namespace) as netlink, namespace.entered():
        sysctl.switch_ipv6_off()  # its own packets would count
        netlink.add_veth("x", macs[0], 1500, namespace, "y", macs[1])
        for device in ("x", "y"):
            netlink.set_up(device)
        while netlink.devices()["x"].state != STATE_UP:  # until it knows that the other end is up, it drops packets
            time.sleep(0.001)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as cable:
            cable.bind(("x", 0))
            cable.send(ethernet + bytes(500))  # before the start: not counted
            with DeviceCounters(("x", "lo"), len(ethernet)) as sent, DeviceCounters(("y",), len(ethernet)) as received:
                before = sent.read()
                sizes = [28, 29, 700, 1472]
                for size in sizes:
                    cable.send(ethernet + bytes(size))
                after, arrived = sent.read(), received.read()
    assert (after.sent_bytes, after.sent_packets) == (sum(sizes), len(sizes))
    assert (arrived.received_bytes, arrived.received_packets) == (sum(sizes), len(sizes))
    assert before.sent_bytes == 0

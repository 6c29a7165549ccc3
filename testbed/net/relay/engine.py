"""The loop that carries packets: read from one device, through the source's up pipe and the destination's down pipe, write.

A packet enters the down pipe at the instant that it was due out of the up pipe, not when the loop came to it, so lateness
does not add up over the two. The loop therefore need not wake in between: it moves packets from pipe to pipe when it is
awake anyway, and at the latest when one could be due at its destination.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from select import select
from socket import inet_aton
from time import monotonic_ns, process_time
from typing import Any, NamedTuple

from testbed.net.relay.pipe import DROPPED, Shaper, Unshaped, counters

_BATCH = 64
# Sleeping has a price: to wake takes tens of microseconds in a guest of a hypervisor, and as much CPU time.
_SPIN_NS = 30_000  # a wait as short as that is cheaper spent awake
_LONG_SLEEP_NS = 1_000_000  # from such a sleep (a lone packet, where lateness would be seen) wake ...
_EARLY_NS = 60_000  # ... so much early
_PACKET_BYTES = 16_384  # more than any MTU that a profile may have


class EnginePort(NamedTuple):
    """A device and the two directions of its link; `up` leads away from it."""

    name: str
    address: str
    fd: int
    up: Shaper | Unshaped
    down: Shaper | Unshaped


class Engine:
    """All ports of one relay process."""

    def __init__(self, ports: Sequence[EnginePort], control_fd: int, control: Callable[[], bool]) -> None:
        """`control` is called when `control_fd` can be read; the loop ends when it returns False."""
        self._ports, self._control_fd, self._control = tuple(ports), control_fd, control
        self._by_address = {inet_aton(port.address): port for port in ports}
        self._lateness = [0] * 64
        self._lateness_max_ns = 0
        self._undeliverable = 0  # not IPv4, or for an address that no port has
        self._refused = 0  # the destination's device is down or out of memory

    def counters(self) -> dict[str, dict[str, Any]]:
        """Per port its two directions; under `process` the loop itself.

        `lateness` counts delivered packets: its element k those that left less than 2**k us, and no less than half that,
        after they were due (element 0: less than 1 us).
        """
        now = monotonic_ns()
        found: dict[str, dict[str, Any]] = {
            port.name: {"up": counters(port.up, now), "down": counters(port.down, now)} for port in self._ports
        }
        found["process"] = {
            "lateness": self._lateness[:],
            "lateness_max_ns": self._lateness_max_ns,
            "undeliverable_packets": self._undeliverable,
            "refused_packets": self._refused,
            "cpu_s": process_time(),
        }
        return found

    def run(self) -> None:
        """Carry packets until `control` says that it is over. OSError when a device is gone."""
        # One long function, local names: this is the one place where a call per packet would be felt.
        clock, read, write = monotonic_ns, os.read, os.write
        lateness = self._lateness
        by_fd = {port.fd: port for port in self._ports}
        by_address = self._by_address
        readers = [*by_fd, self._control_fd]
        # Between the pipes: (out of the up pipe at, number, destination, packet). After both: (due, number, descriptor, packet).
        transit: list[tuple[int, int, EnginePort, bytes]] = []
        departures: list[tuple[int, int, int, bytes]] = []
        shortest_down = min((port.down.delay_ns for port in self._ports if isinstance(port.down, Shaper)), default=0)
        number = 0
        while True:
            now = clock()
            while transit and transit[0][0] <= now:
                due, order, target, packet = heappop(transit)
                due = target.down.admit(due, len(packet))
                if due != DROPPED:
                    heappush(departures, (due, order, target.fd, packet))
            while departures and departures[0][0] <= now:
                due, _, fd, packet = heappop(departures)
                late = clock() - due
                try:
                    write(fd, packet)
                except OSError as error:
                    if error.errno not in (errno.EIO, errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM):
                        raise
                    self._refused += 1
                lateness[(late // 1000).bit_length()] += 1
                if late > self._lateness_max_ns:
                    self._lateness_max_ns = late
            timeout: float | None = None
            if departures or transit:
                wake = departures[0][0] if departures else transit[0][0] + shortest_down
                if transit and transit[0][0] + shortest_down < wake:
                    wake = transit[0][0] + shortest_down
                left = wake - clock()
                if left > _LONG_SLEEP_NS:
                    left -= _EARLY_NS
                timeout = left * 1e-9 if left > _SPIN_NS else 0.0
            for fd in select(readers, (), (), timeout)[0]:
                source = by_fd.get(fd)
                if source is None:
                    if not self._control():
                        return
                    continue
                admit = source.up.admit
                for _ in range(_BATCH):
                    try:
                        packet = read(fd, _PACKET_BYTES)
                    except BlockingIOError:
                        break
                    found = by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                    if found is None:
                        self._undeliverable += 1
                        continue
                    due = admit(clock(), len(packet))
                    if due == DROPPED:
                        continue
                    number += 1
                    if isinstance(found.down, Shaper):
                        heappush(transit, (due, number, found, packet))
                    else:
                        found.down.admit(due, len(packet))
                        heappush(departures, (due, number, found.fd, packet))

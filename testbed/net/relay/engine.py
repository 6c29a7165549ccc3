"""The packet loop: read from one device, pass the source's up pipe and the destination's down pipe, write.

A port may be behind another one: its packets then pass that one's pipes too, unless the destination is behind it as
well. A packet enters a pipe at its due time from the one before, not when the loop handles it, so lateness does not
accumulate. The loop therefore need not wake in between: it moves packets between pipes whenever it is awake, and at the
latest when one could be due at its destination.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from select import select
from socket import inet_aton
from time import monotonic_ns, process_time
from typing import Any

from testbed.net.relay.pipe import NEVER, RelayPipe, Unshaped
from testbed.net.relay.queues import RelayQueues

_BATCH = 64
# A wake-up takes tens of microseconds in a virtual machine, and as much CPU time.
_SPIN_NS = 30_000  # spin for waits as short as this
_EARLY_NS = 60_000  # where lateness matters, wake this early, and spin for the rest
_PACKET_BYTES = 16_384  # exceeds any MTU of a profile
_BUSY = (errno.EIO, errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)


_Hops = tuple[RelayPipe, int, bool, "_Hops | None", int]
"""A pipe on a packet's way, the queue of packets that leave there, whether they wait to enter what follows, what
follows, and the destination's device."""


class EnginePort:
    """A device and the two directions of its link; `up` leads away from it."""

    def __init__(
        self, name: str, address: str, fd: int, up: RelayPipe, down: RelayPipe, behind: str | None = None
    ) -> None:
        """`behind`: the port whose pipes its packets pass, too."""
        self.name, self.address, self.fd, self.up, self.down, self.behind = name, address, fd, up, down, behind
        self.ways: dict[bytes, _Hops] = {}
        """The way of this port's packets by destination, as far as known."""
        self.queue_up = self.queue_down = 0
        """Queues of packets from this port's up pipe, and from its down pipe.

        Numbers assigned by the engine.
        """


class Engine:
    """All ports of one relay process."""

    def __init__(self, ports: Sequence[EnginePort], control_fd: int, control: Callable[[], bool]) -> None:
        """`control` is called when `control_fd` is readable; the loop ends when it returns False."""
        self.ports = tuple(ports)
        for number, port in enumerate(self.ports):
            port.queue_up, port.queue_down = 2 * number, 2 * number + 1
        self._control_fd, self._control = control_fd, control
        self.look_again()
        self._by_name = {port.name: port for port in ports}
        self._by_address = {inet_aton(port.address): port for port in ports}
        self._lateness = [0] * 64
        self._lateness_max_ns = 0
        self._undeliverable = 0  # not IPv4, or to an unknown address
        self._refused = 0  # the destination's device is down or out of memory

    def look_again(self) -> None:
        """Update after a port's direction has been replaced."""
        self._least_down_ns = min((port.down.least_delay_ns for port in self.ports), default=0)
        if any(port.behind for port in self.ports):
            self._least_down_ns = 0
        for port in self.ports:
            port.ways.clear()

    def _above(self, port: EnginePort) -> list[EnginePort]:
        """Return the port and all that it is behind, the nearest first."""
        above = [port]
        while (behind := above[-1].behind) is not None:
            above.append(self._by_name[behind])
        return above

    def _way(self, source: EnginePort, address: bytes) -> _Hops | None:
        """Return the pipes on the way to a destination; None where no port has the address."""
        if (destination := self._by_address.get(address)) is None:
            return None
        above, below = self._above(source), self._above(destination)
        both = set(above) & set(below) - ({source} if destination is source else set())
        hops = [(port.up, port.queue_up) for port in above if port not in both]
        hops += [(port.down, port.queue_down) for port in reversed(below) if port not in both]
        shaped = [place for place, (pipe, _) in enumerate(hops) if not isinstance(pipe, Unshaped)] or [0]
        last = shaped[-1]  # determines when packets leave, and so their queue
        way: _Hops | None = None
        for place, (pipe, _) in reversed(list(enumerate(hops))):
            way = (pipe, hops[last][1], place in shaped and place < last, way, destination.fd)
        assert way is not None
        source.ways[address] = way
        return way

    def process_counters(self) -> dict[str, Any]:
        """Return the loop's own counters.

        `lateness` counts delivered packets: element k has those that left less than 2**k us, and at least half of that,
        after their due time (element 0: less than 1 us). See queues.py for due times.
        """
        return {
            "lateness": self._lateness[:],
            "lateness_max_ns": self._lateness_max_ns,
            "undeliverable_packets": self._undeliverable,
            "refused_packets": self._refused,
            "cpu_s": process_time(),
        }

    def run(self) -> None:
        """Forward packets until `control` ends the loop. OSError when a device is gone."""
        # One long function with local names, because this is the only place where a call per packet matters.
        clock, read, write = monotonic_ns, os.read, os.write
        lateness = self._lateness
        ports = {port.fd: port for port in self.ports}
        readers = [*ports, self._control_fd]
        queues = RelayQueues(2 * len(self.ports))
        push, plan, packets = queues.push, queues.plan, queues.packets
        first_ns, wake_ns, held_ns, left_ns = queues.first_ns, queues.wake_ns, queues.held_ns, queues.left_ns
        # Between two pipes: (out of the first at, number, the second and what follows, packet).
        transit: list[tuple[int, int, _Hops, bytes]] = []
        numbers = count()

        def forward(now: int, order: int, way: _Hops, packet: bytes) -> None:
            pipe, queue, waits, following, to = way
            for out in pipe.offer(now, len(packet)):
                if following is None:
                    push(queue, (out, order, to, packet))
                elif waits:
                    heappush(transit, (out, next(numbers), following, packet))
                else:
                    forward(out, order, following, packet)

        ready: Sequence[int] = ()
        answering = False
        while True:
            for fd in ready:
                source = ports.get(fd)
                if source is None:
                    if not self._control():
                        return
                    continue
                ways = source.ways
                for _ in range(_BATCH):
                    try:
                        packet = read(fd, _PACKET_BYTES)
                    except BlockingIOError:
                        break
                    address = packet[16:20] if packet[0] >> 4 == 4 else b""
                    way = ways.get(address) or self._way(source, address)
                    if way is None:
                        self._undeliverable += 1
                        continue
                    forward(clock(), next(numbers), way, packet)
            now = clock()
            while transit and transit[0][0] <= now:
                forward(*heappop(transit))
            written: dict[int, None] = {}
            for index, first in enumerate(first_ns):
                if first > now:
                    continue
                queue, planned = packets[index], wake_ns[index]
                while queue and queue[0][0] <= now:
                    due, _, fd, packet = queue.popleft()
                    late = clock() - (due if due > planned else planned)
                    try:
                        write(fd, packet)
                    except OSError as error:
                        if error.errno not in _BUSY:
                            raise
                        self._refused += 1
                    written[fd] = None
                    if late > 0:
                        lateness[(late // 1000).bit_length()] += 1
                        if late > self._lateness_max_ns:
                            self._lateness_max_ns = late
                    else:  # awake early
                        lateness[0] += 1
                left_ns[index] = due
                plan(index)
            # The kernel responds within write: an acknowledgement, or data that it permits, is already available.
            answering = bool(written) and not answering
            if answering:
                ready = tuple(written)
                continue
            timeout: float | None = None
            wake = min(wake_ns, default=NEVER)
            if transit:
                wake = min(wake, transit[0][0] + self._least_down_ns)
            if wake < NEVER:
                left = wake - clock()
                if wake not in held_ns:
                    left -= _EARLY_NS
                timeout = left * 1e-9 if left > _SPIN_NS else 0.0
            ready = select(readers, (), (), timeout)[0]

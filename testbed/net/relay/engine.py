"""The loop that carries packets: read from one device, through the source's up pipe and the destination's down pipe,
write.

A packet enters the down pipe at the instant that it was due out of the up pipe, not when the loop came to it, so
lateness does not add up over the two. The loop therefore need not wake in between: it moves packets from pipe to pipe
when it is awake anyway, and at the latest when one could be due at its destination.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from select import select
from socket import inet_aton
from time import monotonic_ns, process_time
from typing import Any

from testbed.net.relay.pipe import NEVER, RelayPipe, Unshaped
from testbed.net.relay.queues import RelayQueues

_BATCH = 64
# Sleeping has a price: to wake takes tens of microseconds in a guest of a hypervisor, and as much CPU time.
_SPIN_NS = 30_000  # a wait as short as that is cheaper spent awake
_EARLY_NS = 60_000  # where lateness would be seen, wake this much early, and spend the rest awake
_PACKET_BYTES = 16_384  # more than any MTU that a profile may have
_BUSY = (errno.EIO, errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM)


class EnginePort:
    """A device and the two directions of its link; `up` leads away from it."""

    def __init__(self, name: str, address: str, fd: int, up: RelayPipe, down: RelayPipe) -> None:
        self.name, self.address, self.fd, self.up, self.down = name, address, fd, up, down
        self.queue_up = self.queue_down = 0
        """Where packets wait that this port's up pipe let go last, and those of its down pipe.

        Numbered by the engine.
        """


class Engine:
    """All ports of one relay process."""

    def __init__(self, ports: Sequence[EnginePort], control_fd: int, control: Callable[[], bool]) -> None:
        """`control` is called when `control_fd` can be read; the loop ends when it returns False."""
        self.ports = tuple(ports)
        for number, port in enumerate(self.ports):
            port.queue_up, port.queue_down = 2 * number, 2 * number + 1
        self._control_fd, self._control = control_fd, control
        self.look_again()
        self._by_address = {inet_aton(port.address): port for port in ports}
        self._lateness = [0] * 64
        self._lateness_max_ns = 0
        self._undeliverable = 0  # not IPv4, or for an address that no port has
        self._refused = 0  # the destination's device is down or out of memory

    def look_again(self) -> None:
        """Take note that a direction of a port has been replaced."""
        self._least_down_ns = min((port.down.least_delay_ns for port in self.ports), default=0)

    def process_counters(self) -> dict[str, Any]:
        """Count what the loop itself did.

        `lateness` counts delivered packets: its element k those that left less than 2**k us, and no less than half
        that, after they were to leave (element 0: less than 1 us). See queues.py for when that is.
        """
        return {
            "lateness": self._lateness[:],
            "lateness_max_ns": self._lateness_max_ns,
            "undeliverable_packets": self._undeliverable,
            "refused_packets": self._refused,
            "cpu_s": process_time(),
        }

    def run(self) -> None:
        """Carry packets until `control` says that it is over. OSError when a device is gone."""
        # One long function, local names: this is the one place where a call per packet would be felt.
        clock, read, write = monotonic_ns, os.read, os.write
        lateness = self._lateness
        ports = {port.fd: port for port in self.ports}
        by_address = self._by_address
        readers = [*ports, self._control_fd]
        queues = RelayQueues(2 * len(self.ports))
        push, plan, packets = queues.push, queues.plan, queues.packets
        first_ns, wake_ns, held_ns, left_ns = queues.first_ns, queues.wake_ns, queues.held_ns, queues.left_ns
        # Between the pipes: (out of the up pipe at, number, destination, packet).
        transit: list[tuple[int, int, EnginePort, bytes]] = []
        number = 0
        ready: Sequence[int] = ()
        answering = False
        while True:
            for fd in ready:
                source = ports.get(fd)
                if source is None:
                    if not self._control():
                        return
                    continue
                up = source.up
                offer = up.offer
                straight = isinstance(up, Unshaped)
                for _ in range(_BATCH):
                    try:
                        packet = read(fd, _PACKET_BYTES)
                    except BlockingIOError:
                        break
                    destination = by_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                    if destination is None:
                        self._undeliverable += 1
                        continue
                    length = len(packet)
                    for out in offer(clock(), length):
                        number += 1
                        down = destination.down
                        if isinstance(down, Unshaped):
                            down.offer(out, length)
                            push(source.queue_up, (out, number, destination.fd, packet))
                        elif straight:
                            for due in down.offer(out, length):
                                push(destination.queue_down, (due, number, destination.fd, packet))
                        else:
                            heappush(transit, (out, number, destination, packet))
            now = clock()
            while transit and transit[0][0] <= now:
                out, order, destination, packet = heappop(transit)
                for due in destination.down.offer(out, len(packet)):
                    push(destination.queue_down, (due, order, destination.fd, packet))
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
                    else:  # awake before it had to be
                        lateness[0] += 1
                left_ns[index] = due
                plan(index)
            # The kernel answers inside write: an acknowledgement, or what it allows to be sent, is there already.
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

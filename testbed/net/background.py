"""Background flows: what other machines send over a lab's links while it is played (`profiles.background`).

Background   opens the flows' sockets in the lab, hands them to the program, and collects what they carried
main         the program, `python -m testbed.net.background`: one loop for all flows, without capabilities

A flow runs between a link's home, a machine behind the same access link, and the link's far end. It starts within the
first tenth of a second, and what it draws depends on its seed alone. On the virtual clock everything repeats.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import socket
import struct
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from testbed.closing import Closing
from testbed.errors import LabError, ShapingError
from testbed.net.kernel import sysctl
from testbed.net.kernel.namespace import Namespace
from testbed.net.lab_plan import Link, with_own_seed
from testbed.process import Child, Parent, drop_capabilities, set_timer_slack
from testbed.profiles.background import WEB_BYTES, WEB_SHAPE, BackgroundFlow
from testbed.records import BackgroundRecord
from testbed.waiting import DUE, READABLE, WRITABLE, Waiter

_FIRST_PORT: Final = 41000
_ALL_START_NS: Final = 100_000_000
_CHUNK: Final = bytes(1 << 16)
_DATAGRAM_BYTES: Final = 1200
"""Largest UDP payload: fits the packets of any path, as in WebRTC."""
_ABORT: Final = struct.pack("ii", 1, 0)
"""SO_LINGER: what a closed socket has not sent is discarded."""


class Background(Closing):
    """The background flows of a lab; a context manager that ends them. Main thread only."""

    def __init__(self, links: Sequence[Link], namespaces: Mapping[str, Namespace]) -> None:
        """Open all sockets and start the program, which waits for `play`.

        LabError when it does not start; CapabilityError for a congestion control that this kernel lacks.
        """
        self._flows: list[tuple[str, str]] = []
        tables: list[dict[str, Any]] = []
        with ExitStack() as stack:
            for number, link in enumerate(links):
                for flow in (each for each in link.profile.background or () for _ in range(each.flows)):
                    pipe = link.profile.pipe(flow.way)
                    assert pipe is not None  # a profile's rule
                    sockets = _opened(link, flow, _FIRST_PORT + len(tables), namespaces, stack)
                    seed = f"{with_own_seed(pipe, number, flow.way).seed} {len(tables)}"
                    tables.append({**flow.model_dump(), "seed": seed, "fds": [sock.fileno() for sock in sockets]})
                    self._flows.append((link.name, flow.model_copy(update={"flows": 1}).text))
            descriptors = [descriptor for table in tables for descriptor in table["fds"]]
            attempt = "start the background flows"
            self._process = Child(
                "testbed.net.background", {"flows": tables}, attempt=attempt, failure=LabError, fds=descriptors
            )
        self._process.answer()

    def play(self, start_ns: int) -> None:
        """Start the flows at this time of CLOCK_MONOTONIC. LabError when the program has died."""
        self._process.ask({"start_ns": start_ns}, "start the background flows")

    def carried(self) -> tuple[BackgroundRecord, ...]:
        """Return what each flow has carried so far. LabError when the program has died."""
        counts = self._process.ask({}, "read what the background flows carried")
        return tuple(
            BackgroundRecord(link=link, flow=flow, carried_bytes=size, lasted_ns=lasted_ns)
            for (link, flow), (size, lasted_ns) in zip(self._flows, counts, strict=True)
        )

    def close(self) -> None:
        """End the flows at once: what they have not sent is discarded; packets on their way arrive."""
        self._process.close()


def _opened(
    link: Link, flow: BackgroundFlow, port: int, namespaces: Mapping[str, Namespace], stack: ExitStack
) -> list[socket.socket]:
    """Open a flow's sockets at home and at the far end; the latter listens, and a UDP sender is connected."""
    assert link.home is not None
    algorithm, sockets = flow.congestion_control, []
    for end in (link.home, link.far):
        with namespaces[end.namespace].entered():
            kind = socket.SOCK_DGRAM if algorithm is None else socket.SOCK_STREAM
            sockets.append(sock := stack.enter_context(socket.socket(socket.AF_INET, kind)))
        sock.bind((end.address, port))
        sock.setblocking(False)
        if algorithm is not None:
            sysctl.require_congestion_control(algorithm)
            # Here, because it may need a capability; an accepted socket inherits it.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())
            held = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
            if held != algorithm:
                raise ShapingError(f"{link.name}, background {flow.text}: asked for {algorithm}, the kernel has {held}")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    if algorithm is None:
        sender, receiver = sockets if flow.way == "up" else reversed(sockets)
        sender.connect(receiver.getsockname())
    else:
        sock.listen(1)
    return sockets


# ------------------------------------------------------------------ in the program
_Wish = tuple[int | None, dict[int, int]]
"""What a flow waits for: a time, and events of descriptors."""
_Traffic = Generator[_Wish, int, None]
"""A flow's course: it yields wishes, and receives the descriptor that is ready, or DUE."""


class _Flow:
    """One flow."""

    due_ns: int | None = None
    begun_ns: int | None = None
    carried_bytes = 0

    def __init__(self, table: Mapping[str, Any], waiter: Waiter) -> None:
        self._table, self._waiter, self._draw = table, waiter, random.Random(table["seed"])
        self._sockets = [socket.socket(fileno=descriptor) for descriptor in table["fds"]]
        self.watched: dict[int, int] = {}

    def start(self, start_ns: int) -> None:
        """Begin shortly after this time."""
        self.begun_ns = start_ns + self._draw.randrange(_ALL_START_NS)
        self._traffic = self._connection() if self._table["congestion_control"] else self._call(self.begun_ns)
        self._wait(*next(self._traffic))

    def go_on(self, ready: int) -> None:
        """Continue, now that this descriptor is ready, or the time has come."""
        self._wait(*self._traffic.send(ready))

    def _wait(self, due_ns: int | None, wanted: dict[int, int]) -> None:
        if wanted != self.watched:
            for descriptor in {**self.watched, **wanted}:
                self._waiter.watch(descriptor, wanted.get(descriptor, 0))
        self.due_ns, self.watched = due_ns, wanted

    def _ends(self, near: socket.socket, far: socket.socket) -> tuple[socket.socket, socket.socket]:
        return (near, far) if self._table["way"] == "up" else (far, near)

    def _connection(self) -> _Traffic:
        """Send for ever over TCP; or an object, and after its arrival a pause, and so on."""
        near, listener = self._sockets
        yield self.begun_ns, {}
        near.connect_ex(listener.getsockname())
        yield None, {listener.fileno(): READABLE}
        far, _ = listener.accept()
        far.setblocking(False)
        sender, receiver = self._ends(near, far)
        receiving, pause_ns = {receiver.fileno(): READABLE}, self._table["pause_ns"]
        sending = {sender.fileno(): WRITABLE, **receiving}
        while True:
            left = math.inf if pause_ns is None else self._object_bytes()
            end = self.carried_bytes + left
            while self.carried_bytes < end:
                if (yield None, sending if left else receiving) == receiver.fileno():
                    self.carried_bytes += len(receiver.recv(1 << 18))
                else:
                    left -= sender.send(_CHUNK[: int(min(left, len(_CHUNK)))])
            yield time.monotonic_ns() + round(self._draw.expovariate(1 / pause_ns)), {}

    def _object_bytes(self) -> int:
        """Draw a size from the bounded Pareto distribution."""
        least, most = WEB_BYTES
        left = 1 - self._draw.random() * (1 - (least / most) ** WEB_SHAPE)
        return round(least * math.pow(left, -1 / WEB_SHAPE))

    def _call(self, due_ns: int) -> _Traffic:
        """Send at a constant rate over UDP: every `pause_ns`, the bytes of that time in as few packets as possible."""
        sender, receiver = self._ends(*self._sockets)
        size = self._table["rate_bps"] * self._table["pause_ns"] // 8_000_000_000
        packets = max(1, -(-size // _DATAGRAM_BYTES))
        while True:
            while (yield due_ns, {receiver.fileno(): READABLE}) != DUE:
                with contextlib.suppress(BlockingIOError):  # a wrong checksum is found only now
                    self.carried_bytes += len(receiver.recv(1 << 16))
            for number in range(packets):
                sender.send(_CHUNK[: size * (number + 1) // packets - size * number // packets])
            due_ns += self._table["pause_ns"]


def main() -> None:
    """Run the flows of one lab, until the end of the input."""
    drop_capabilities()
    set_timer_slack()
    parent, waiter = Parent(), Waiter(0)
    flows = [_Flow(table, waiter) for table in parent.request["flows"]]
    waiter.watch(parent.requests_fd, READABLE)
    parent.answer({})
    while True:
        dues = [flow.due_ns for flow in flows if flow.due_ns is not None]
        for ready, _ in waiter.wait(min(dues, default=None)):
            now_ns = waiter.now()
            if ready == parent.requests_fd:
                if not (request := os.read(ready, 1 << 16)):
                    return
                if "start_ns" in (asked := json.loads(request)):
                    for flow in flows:
                        flow.start(asked["start_ns"])
                lasted = [max(0, now_ns - (now_ns if flow.begun_ns is None else flow.begun_ns)) for flow in flows]
                parent.answer([(flow.carried_bytes, ns) for flow, ns in zip(flows, lasted, strict=True)])
            for flow in flows:
                due = ready == DUE and flow.due_ns is not None and flow.due_ns <= now_ns
                if due or ready in flow.watched:
                    flow.go_on(ready)


if __name__ == "__main__":
    main()
